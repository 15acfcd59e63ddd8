"""``gossipdp doctor``: what each finding says of given facts, and what is shown and written."""

from __future__ import annotations

import io
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

import gossipdp
from gossipdp.cli import doctor, doctor_link, doctor_machine, doctor_network, doctor_software
from gossipdp.cli import doctor_speed as speed
from gossipdp.cli.doctor_findings import Finding, examine
from gossipdp.cli.doctor_link import LinkSpeed
from gossipdp.cli.doctor_network import Interface
from gossipdp.cli.main import main
from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.runtime.tcp_sockets import listen

UNLIMITED = resource.RLIM_INFINITY
LOOPBACK, ETHERNET = Interface("lo", ("127.0.0.1", "::1")), Interface("eth0", ("10.0.0.7",), 1000)
FAST = LinkSpeed(50e-6, 3e9, 3e9, 2e9)

software, machine, network = doctor_software, doctor_machine, doctor_network

# What looks, its facts, the verdict, and what must be told (in what was found or in the advice).
CASES: list[tuple[Callable[..., Finding], tuple[object, ...], str, str]] = [
    (software.judge_system, ("linux", "Linux-6.1"), "ok", "Linux-6.1"),
    (software.judge_system, ("darwin", "macOS-15"), "warn", "train on Linux"),
    (software.judge_system, ("win32", "Windows-11"), "fail", "WSL"),
    (software.judge_python, ((3, 11, 2), "python3"), "ok", "3.11.2 (python3)"),
    (software.judge_python, ((3, 14, 0), "python3"), "warn", "take Python 3.11 to 3.13"),
    (software.judge_python, ((3, 10, 1), "python3"), "fail", "install Python 3.11 to 3.13"),
    (software.judge_torch, ("2.13.0+cpu",), "ok", "2.13.0+cpu"),
    (software.judge_torch, ("3.0.1",), "ok", "3.0.1"),
    (software.judge_torch, ("2.16.0.dev20260101",), "warn", "pre-release"),
    (software.judge_torch, ("2.14.0a0+git1",), "warn", "pre-release"),
    (software.judge_torch, ("2.9.1",), "fail", "pip install --upgrade 'torch>=2.13'"),
    (software.judge_torch, (None,), "fail", "pip install 'torch>=2.13'"),
    (software.judge_kernels, ("numba", "0.60.0", 0.7), "ok", "numba 0.60.0, ready in 0.7 s"),
    (software.judge_kernels, ("torch", None, None), "warn", "pip install 'gossipdp[fast]'"),
    (software.judge_kernels, ("torch", "0.60.0", None), "warn", "unset GOSSIPDP_KERNELS"),
    (software.judge_kernels, ("numba", "0.60.0", None, "bad numpy"), "warn", "bad numpy"),
    (software.judge_tls, ("OpenSSL 3", True, None, False), "ok", "OpenSSL 3, TLS 1.3"),
    (software.judge_tls, ("OpenSSL 3", True, None, True), "ok", "authority fit"),
    (software.judge_tls, ("OpenSSL 1.0", False, None, False), "warn", "without TLS 1.3"),
    (software.judge_tls, ("OpenSSL 3", True, "no tls_ca", False), "fail", "no tls_ca"),
    (machine.judge_cores, (8, None, 0.5), "ok", "8, load 0.5"),
    (machine.judge_cores, (8, 2.5, 0.5), "warn", "at most 2 workers with OMP_NUM_THREADS=1"),
    (machine.judge_cores, (8, None, 9.0), "warn", "others use the cores too"),
    (machine.judge_memory, (16 << 30, None), "ok", "17.2 GB free"),
    (machine.judge_memory, (16 << 30, 2 << 30), "ok", "2.1 GB free within the limit"),
    (machine.judge_memory, (16 << 30, 1 << 28), "warn", "0.3 GB free within the limit"),
    (machine.judge_memory, (None, None), "warn", "not known"),
    (machine.judge_open_files, (65536, 65536), "ok", "65,536"),
    (machine.judge_open_files, (UNLIMITED, UNLIMITED), "ok", "no limit"),
    (machine.judge_open_files, (256, 4096), "warn", "ulimit -n 4096"),
    (machine.judge_open_files, (512, 512), "warn", "raise the hard limit, 512, to 1024"),
    (machine.judge_open_files, (16, UNLIMITED), "fail", "ulimit -n 1024"),
    (machine.judge_clock, ("tsc", 60e-9), "ok", "tsc, 60 ns"),
    (machine.judge_clock, ("hpet", 3e-6), "warn", "choose another clocksource"),
    (machine.judge_shared_memory, (None,), "ok", "read in place"),
    (machine.judge_shared_memory, ("mmap: denied",), "warn", "use TCP instead"),
    (machine.judge_loader_memory, (1 << 30,), "ok", "1.07 GB"),
    (machine.judge_loader_memory, (64 << 20,), "warn", "--shm-size=1g"),
    (machine.judge_loader_memory, (None,), "warn", "no /dev/shm"),
    (
        network.judge_interfaces,
        ([LOOPBACK, ETHERNET], "10.0.0.7"),
        "ok",
        "lo 127.0.0.1 ::1; eth0 10.0.0.7, 1,000 Mbit/s",
    ),
    (network.judge_interfaces, ([LOOPBACK], None), "warn", "workers of this machine alone"),
    (network.judge_interfaces, ([ETHERNET], "10.0.0.7"), "fail", "ip link set lo up"),
    (network.judge_address, ("127.0.0.1", "", False, "10.0.0.7", 1), "ok", "10.0.0.7:29400"),
    (network.judge_address, ("127.0.0.1", "", False, "fd00::7", 1), "ok", "[fd00::7]:29400"),
    (network.judge_address, ("10.0.0.7", "", True, "10.0.0.7", 2), "ok", "listen on 10.0.0.7"),
    (network.judge_address, ("127.0.0.1", "", True, "10.0.0.7", 2), "warn", "set GOSSIPDP_HOST to"),
    (network.judge_address, (None, "no such name", True, None, 1), "fail", "no such name"),
    (network.judge_ports, ({}, 3, True, 0, ""), "ok", "all 3 addresses; port any free one"),
    (network.judge_ports, ({}, 3, True, 5000, ""), "ok", "port from 5000 on"),
    (network.judge_ports, ({"::1": "denied"}, 3, True, 0, ""), "warn", "::1: denied"),
    (network.judge_ports, ({}, 3, True, 22, "port 22 is in use"), "fail", "port 22 is in use"),
    (network.judge_ports, ({}, 3, False, 0, ""), "fail", "sandbox or firewall"),
    (speed.judge_memory_speed, (1e10, 5.0, "numba", 4_000_000), "ok", "10.0 GB/s"),
    (speed.judge_memory_speed, (1e9, 50.0, "torch", 4_000_000), "warn", "bench update"),
    (speed.judge_local, ("local link", FAST), "ok", "2.00 GB/s each way at once"),
    (speed.judge_local, ("local link", LinkSpeed(5e-5, 1e9, 1e9, 1e8)), "warn", "bench exchange"),
    (speed.judge_local, ("local link", LinkSpeed(5e-3, 1e9, 1e9, 1e9)), "warn", "5 ms"),
    (speed.judge_link, (LinkSpeed(2e-4, 1e8, 1e8, 1e8),), "ok", "--link-mbps 800 --latency-ms 0.1"),
    (speed.judge_link, (LinkSpeed(2e-4, 1e6, 1e6, 1e6),), "warn", "1 MB/s each way"),
    (speed.judge_link, (LinkSpeed(5e-2, 1e9, 1e9, 1e9),), "warn", "round trip 50 ms"),
]


@pytest.mark.parametrize(
    ("judge", "facts", "verdict", "told"),
    CASES,
    ids=[f"{judge.__name__}-{verdict}-{told}" for judge, _, verdict, told in CASES],
)
def test_a_finding_follows_from_its_facts(
    judge: Callable[..., Finding], facts: tuple[object, ...], verdict: str, told: str
) -> None:
    finding = judge(*facts)
    assert finding.verdict == verdict
    assert told in f"{finding.found}\n{finding.advice}"
    assert finding.advice or verdict == "ok"
    assert "\n" not in finding.advice
    json.dumps(finding.figures)


def test_extras_are_told_from_the_metadata() -> None:
    requirements = [
        "torch>=2.13",
        "numba>=0.60; extra == 'fast'",
        'tensorboard>=2.16; python_version < "3.14" and extra == "tensorboard"',
        "lightning>=2; extra == 'lightning'",
        "pytest>=8; extra == 'dev'",
        "gossipdp[fast]; extra == 'dev'",
    ]
    finding = software.judge_extras(requirements, lambda name: name in ("numba", "tensorboard"))
    assert finding.figures == {"installed": ["fast", "tensorboard"], "missing": ["lightning"]}
    assert finding.found == "fast, tensorboard; not installed: lightning"
    assert software.judge_extras(requirements, lambda name: True).advice == ""


def test_what_cannot_be_looked_at_is_a_failure_and_keeps_none_from_its_turn() -> None:
    def break_off() -> Finding:
        raise OSError("no such device")

    begun: list[str] = []
    fine = Finding("b", "ok", "")
    found = examine([("a", break_off), ("b", lambda: fine)], begun.append)
    assert begun == ["a", "b"]
    assert found[1] is fine
    assert (found[0].name, found[0].verdict) == ("a", "fail")
    assert "OSError: no such device" in found[0].found


def test_limits_of_containers_are_read_of_both_versions(tmp_path: Path) -> None:
    assert machine.cgroup_cores(tmp_path) is None
    assert machine.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cgroup_cores(tmp_path) is None
    assert machine.cgroup_free_bytes(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.cgroup_cores(tmp_path) == 1.5
    assert machine.cgroup_free_bytes(tmp_path) == 2000
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 600\nactive_file 100\n")
    assert machine.cgroup_free_bytes(tmp_path) == 2600
    first = tmp_path / "first"
    (first / "cpu").mkdir(parents=True)
    (first / "memory").mkdir()
    (first / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (first / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert machine.cgroup_cores(first) is None
    (first / "cpu" / "cpu.cfs_quota_us").write_text("200000")
    (first / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    (first / "memory" / "memory.usage_in_bytes").write_text("5000")
    assert machine.cgroup_cores(first) == 2.0
    assert machine.cgroup_free_bytes(first) is None
    (first / "memory" / "memory.limit_in_bytes").write_text("9000")
    (first / "memory" / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 4500\n")
    assert machine.cgroup_free_bytes(first) == 8500


def test_shared_memory_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._look_at_shared_memory().verdict == "ok"

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = machine._look_at_shared_memory()
    assert finding.verdict == "warn"
    assert "Operation not permitted" in finding.found


def test_this_machine_s_interfaces_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOSSIPDP_HOST", "GOSSIPDP_PORT", "MASTER_ADDR", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert any("127.0.0.1" in each.addresses for each in network.interfaces())
    assert network.routed_address("127.0.0.1") == "127.0.0.1"
    assert "workers listen on 127.0.0.1" in network._look_at_address().found
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("GOSSIPDP_PORT", str(taken.getsockname()[1]))
        assert network._look_at_ports().verdict == "fail"
    monkeypatch.setenv("GOSSIPDP_PORT", "many")
    assert "GOSSIPDP_PORT is 'many'" in network._look_at_ports().found
    monkeypatch.setenv("GOSSIPDP_HOST", "203.0.113.1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "listen on 203.0.113.1" in network._look_at_address().found


def test_elsewhere_than_on_linux_interfaces_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [name for name, _ in network.checks()] == ["interfaces", "address", "ports"]
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(network, "interfaces", None)
    assert [name for name, _ in network.checks()] == ["address", "ports"]
    monkeypatch.delenv("GOSSIPDP_PORT", raising=False)
    assert "listening works on all 1 addresses" in network._look_at_ports().found


def test_a_machine_that_has_ipv6_alone_is_reached_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(routes: dict[str, str]) -> None:
        monkeypatch.setattr(network, "routed_address", routes.get)

    only({"192.0.2.1": "10.0.0.7", "2001:db8::1": "fd00::7"})
    assert network.outward_address() == "10.0.0.7"
    only({"2001:db8::1": "fd00::7"})
    assert network.outward_address() == "fd00::7"
    only({})
    assert network.outward_address() is None


def fake_checks(*findings: Finding) -> Callable[[], list[tuple[str, Callable[[], Finding]]]]:
    return lambda: [(each.name, lambda each=each: each) for each in findings]  # type: ignore[misc]


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_fails(
    verdict: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fine = Finding("torch", "ok", "2.13.0", figures={"version": "2.13.0"})
    other = Finding("ports", verdict, "some", "do that")  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "_local_checks", fake_checks(fine, other))
    path = tmp_path / "found.json"
    assert main(["doctor", "--json", str(path)]) == status
    written = json.loads(path.read_text())
    assert written["ok"] is (status == 0)
    assert written["version"] == gossipdp.__version__
    assert [each["verdict"] for each in written["findings"]] == ["ok", verdict]
    assert written["findings"][0]["figures"] == {"version": "2.13.0"}
    shown = capsys.readouterr().out
    assert "→ do that" in shown
    assert "\x1b" not in shown  # no terminal here


def test_the_table_reads_in_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(
        doctor.table_of([Finding("shared memory", "warn", "words " * 40, "advice " * 30)])
    )
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) > 5
    assert all(len(line) <= 80 for line in lines)
    # What is told hangs beside the name.
    assert len({len(line) - len(line.lstrip()) for line in lines[1:]}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "10.0.0.1:5"], "--listen waits and HOST:PORT asks"),
        (["--port", "5"], "--host and --port say where to listen"),
        (["--listen", "--port", "70000"], "--port is 70000"),
        (["--listen", "--json", "x"], "give --json on the other machine"),
        (["--json", "nowhere/x"], "the directory to write it to does not exist"),
        (["--json", "/"], "--json / cannot be written"),
        (["--secret-file", "x"], "--secret-file is for a link between two machines"),
        (["10.0.0.1"], "the address is '10.0.0.1'; write HOST:PORT"),
        (["10.0.0.1:1,10.0.0.2:1"], "give one HOST:PORT"),
        (["10.0.0.1:1"], "the other end knows a secret"),
        (["--listen", "--host", "203.0.113.1"], "cannot listen on 203.0.113.1"),
    ],
)
def test_a_mistake_in_the_call_is_one_line(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOSSIPDP_SECRET", raising=False)
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Where a ``gossipdp doctor --listen`` serves whose secret is b"secret"."""
    listener, goes_on = listen("127.0.0.1", 0), [True]
    found = listener.getsockname()[:2]
    thread = threading.Thread(
        target=doctor_link.serve,
        args=(listener, "127.0.0.1", b"secret"),
        kwargs={"goes_on": lambda: goes_on[0]},
    )
    thread.start()
    yield found
    goes_on.clear()
    goes_on.append(False)
    thread.join()


def test_a_link_is_measured_twice_over(address: tuple[str, int]) -> None:
    for _ in range(2):
        found = doctor_link.measure(address, "127.0.0.1", b"secret", lasts_s=0.001, num_rounds=1)
        assert 0 < found.round_trip_s < 1
        assert min(found.there, found.back, found.both) > 1e6


def test_a_wrong_secret_and_nobody_there_are_told(address: tuple[str, int]) -> None:
    with pytest.raises(RefusedError, match="the secrets differ"):
        doctor_link.measure(address, "127.0.0.1", b"another")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()
    with pytest.raises(RendezvousError, match="nobody listens there; run gossipdp doctor"):
        doctor_link.measure(free, "127.0.0.1", b"secret")


def test_the_command_measures_and_says_what_it_could_not(
    address: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{address[0]}:{address[1]}"
    monkeypatch.setenv("GOSSIPDP_SECRET", "secret")
    real = doctor_link.measure
    monkeypatch.setattr(
        doctor_link,
        "measure",
        lambda *args, **options: real(*args, **options, lasts_s=0.001, num_rounds=1),
    )
    assert main(["doctor", where]) == 0
    assert "gossipdp plan --workers N" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("GOSSIPDP_SECRET", "another")
    assert main(["doctor", where]) == 1
    assert "the secrets differ" in " ".join(capsys.readouterr().out.split())


def test_a_request_beyond_all_bounds_ends_the_link(address: tuple[str, int]) -> None:
    client = doctor_link._Client()
    identity = doctor_link._identity(doctor_link.CLIENT, "127.0.0.1")
    transport = doctor_link.TcpTransport(
        client, identity, b"secret", listen("127.0.0.1", 0), shared_memory="off"
    )
    try:
        for wish in (b"not json", b'{"give": 5000}', b'{"take": -1}'):
            transport.dial(doctor_link.SERVER, *address)
            while client.link is None:
                transport.poll(0.05)
            client.link.send_control(wish)
            while client.link is not None:
                transport.poll(0.05)
    finally:
        transport.close()


def test_listening_shows_what_to_run_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def serve(listener: socket.socket, host: str, secret: bytes, **options: object) -> None:
        seen.append((host, secret))
        listener.close()

    seen: list[tuple[str, bytes]] = []
    monkeypatch.delenv("GOSSIPDP_SECRET", raising=False)
    monkeypatch.setattr(doctor_link, "serve", serve)
    assert main(["doctor", "--listen", "--host", "127.0.0.1"]) == 0
    ((host, secret),) = seen
    assert host == "127.0.0.1"
    shown = capsys.readouterr().out
    assert f"GOSSIPDP_SECRET={secret.decode()} gossipdp doctor 127.0.0.1:" in shown


def test_a_gpu_is_told_of() -> None:
    assert software.judge_gpu([], None).verdict == "ok"
    found = software.judge_gpu(["NVIDIA H200", "NVIDIA H200"], "12.8")
    assert "2 x NVIDIA H200" in found.found
