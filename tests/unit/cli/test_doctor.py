"""``gossipdp doctor``: what each finding says of given facts, and what is shown and written."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import gossipdp
from gossipdp.cli import doctor
from gossipdp.cli.doctor import Finding, examine
from gossipdp.cli.main import main

# What looks, its facts, the verdict, and what must be told (in what was found or in the advice).
CASES: list[tuple[Callable[..., Finding], tuple[object, ...], str, str]] = [
    (doctor.judge_python, ((3, 11, 2), "linux", "2.13.0"), "ok", "3.11.2 on linux, torch 2.13.0"),
    (doctor.judge_python, ((3, 14, 0), "linux", "2.13.0"), "warn", "take Python 3.13"),
    (doctor.judge_python, ((3, 12, 1), "darwin", "2.13.0"), "warn", "train on Linux"),
    (doctor.judge_python, ((3, 12, 1), "win32", "2.13.0"), "fail", "WSL"),
    (doctor.judge_cores, (8, None, 0.5), "ok", "8, load 0.5"),
    (doctor.judge_cores, (8, 2.5, 0.5), "warn", "at most 2 workers with OMP_NUM_THREADS=1"),
    (doctor.judge_cores, (8, None, 9.0), "warn", "others use the cores too"),
    (doctor.judge_address, ("here", "127.0.0.1", False, "10.0.0.7", 1), "ok", "10.0.0.7:29400"),
    (doctor.judge_address, ("here", "127.0.0.1", False, "fd00::7", 1), "ok", "[fd00::7]:29400"),
    (doctor.judge_address, ("here", "10.0.0.7", True, "10.0.0.7", 2), "ok", "listen on here"),
    (doctor.judge_address, ("here", "127.0.0.1", True, "1.2.3.4", 2), "warn", "set GOSSIPDP_HOST"),
    (doctor.judge_gpu, (["NVIDIA H200", "NVIDIA H200"],), "warn", "2 x NVIDIA H200"),
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


def test_limits_of_containers_are_read(tmp_path: Path) -> None:
    assert doctor.cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert doctor.cgroup_cores(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert doctor.cgroup_cores(tmp_path) == 1.5


def test_shared_memory_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._look_at_shared_memory().verdict == "ok"

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    finding = doctor._look_at_shared_memory()
    assert finding.verdict == "warn"
    assert "Operation not permitted" in finding.found


def test_where_a_worker_would_listen_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOSSIPDP_HOST", "GOSSIPDP_PORT", "MASTER_ADDR", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert "workers listen on 127.0.0.1, any free port" in doctor._look_at_address().found
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("GOSSIPDP_PORT", port)
        assert doctor._look_at_address().verdict == "fail"
    assert f"127.0.0.1, ports from {port} on" in doctor._look_at_address().found
    monkeypatch.setenv("GOSSIPDP_PORT", "many")
    assert "GOSSIPDP_PORT is 'many'" in doctor._look_at_address().found
    monkeypatch.delenv("GOSSIPDP_PORT")
    monkeypatch.setenv("GOSSIPDP_HOST", "203.0.113.1")
    assert "203.0.113.1" in doctor._look_at_address().found
    assert doctor._look_at_address().verdict == "fail"


def test_a_machine_that_has_ipv6_alone_is_reached_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(routes: dict[str, str]) -> None:
        def routed_address(host: str) -> str:
            if host not in routes:
                raise OSError(101, "Network is unreachable")
            return routes[host]

        monkeypatch.setattr("gossipdp.launcher.environment.routed_address", routed_address)

    only({"192.0.2.1": "10.0.0.7", "2001:db8::1": "fd00::7"})
    assert doctor.outward_address() == "10.0.0.7"
    only({"2001:db8::1": "fd00::7"})
    assert doctor.outward_address() == "fd00::7"
    only({})
    assert doctor.outward_address() is None


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
    monkeypatch.setattr(doctor, "machine_checks", fake_checks(fine, other))
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


def test_what_is_not_here_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.judge_gpu([]) is None
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.delenv(f"GOSSIPDP_TLS_{name}", raising=False)
    assert doctor._look_at_tls() is None


def test_a_choice_of_kernels_that_slows_exchanges_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen, verdict in (("torch", "warn"), ("magic", "fail"), ("numba", "ok")):
        monkeypatch.setenv("GOSSIPDP_KERNELS", chosen)
        assert doctor._look_at_kernels().verdict == verdict


def test_tls_files_that_do_not_fit_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CERT", "KEY", "CA"):
        (tmp_path / name).write_text("no certificate")
        monkeypatch.setenv(f"GOSSIPDP_TLS_{name}", str(tmp_path / name))
    assert doctor._look_at_tls().verdict == "fail"
