"""What ``gossipdp doctor`` looks at on one machine: software, cores, memory, network, speed.

Of most things one function asks the machine, and one, which the tests give facts to, judges.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import ipaddress
import itertools
import os
import re
import resource
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.cli.doctor_findings import Check, Finding, Verdict
from gossipdp.errors import GossipError

if TYPE_CHECKING:
    from gossipdp.cli.doctor_link import LinkSpeed
    from gossipdp.links.tcp import SharedMemory

PYTHONS = ((3, 11), (3, 13))
"""The first and the last version of CPython that gossipdp is tested with."""

LEAST_TORCH = (2, 13)
LEAST_MEMORY_BYTES = 1 << 30
"""Less than this hardly holds one worker: its torch alone takes about 0.3 GB."""

LEAST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 64, 1024
PROBE_BYTES = 1 << 20
ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Kept for documentation (RFC 5737, RFC 3849), so on no network: where default routes lead."""

SLOW_MEMORY = 2e9
"""Bytes per second that a copy reads and writes: less, and exchanges are felt by training."""

SLOW_LOOPBACK, SLOW_ROUND_TRIP_S = 0.3e9, 2e-3
"""On one machine; slower means that the cores are busy with other things."""

SLOW_LINK, FAR_ROUND_TRIP_S = 12.5e6, 20e-3
"""Between machines: 100 Mbit/s, and 20 ms there and back."""

NUM_PARAMETERS, NUM_RUNS = 4_000_000, 3
LOCAL_ROUND_S = 0.15
"""How long a round of the links within this machine takes: they are fast."""


def checks() -> list[Check]:
    """All checks, in the order in which they are shown."""
    software: list[Check] = [
        ("Python", lambda: judge_python(sys.version_info[:3], sys.platform)),
        ("torch", lambda: judge_torch(_torch_version())),
    ]
    if sys.platform == "win32":  # the others ask the kernel what Windows does not know
        return software
    return [
        *software,
        ("kernels", _look_at_kernels),
        ("TLS", _look_at_tls),
        ("GPU", _look_at_gpu),
        ("cores", _look_at_cores),
        ("memory", _look_at_memory),
        ("open files", lambda: judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        ("shared memory", _look_at_shared_memory),
        ("address", _look_at_address),
        ("ports", _look_at_ports),
        ("memory speed", _look_at_memory_speed),
        ("local link", lambda: judge_local("local link", _measure_here("off"))),
        ("shared link", lambda: judge_local("shared link", _measure_here("auto"))),
    ]


# Software.


def judge_python(version: tuple[int, ...], platform: str) -> Finding:
    """The interpreter and the system; ``platform`` is ``sys.platform``."""
    shown = ".".join(map(str, version))
    found, figures = f"{shown} on {platform}", {"version": shown, "platform": platform}
    first, last = (".".join(map(str, bound)) for bound in PYTHONS)
    if platform == "win32":
        advice = "train under Linux or WSL; here only gossipdp plan and simulate are meant to work"
        return Finding("Python", "fail", found, advice, figures)
    if version[:2] < PYTHONS[0]:
        return Finding("Python", "fail", found, f"install Python {first} to {last}", figures)
    if version[:2] > PYTHONS[1]:
        advice = f"take Python {first} to {last}: this one was not tested"
        return Finding("Python", "warn", found, advice, figures)
    if platform != "linux":
        advice = "train on Linux: nothing else was tested"
        return Finding("Python", "warn", found, advice, figures)
    return Finding("Python", "ok", found, figures=figures)


def judge_torch(version: str | None) -> Finding:
    """The version of torch; None: it is not installed."""
    least = ".".join(map(str, LEAST_TORCH))
    if version is None:
        return Finding("torch", "fail", "not installed", f"pip install 'torch>={least}'")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < LEAST_TORCH:
        advice = f"pip install --upgrade 'torch>={least}'"
        return Finding("torch", "fail", version, advice, {"version": version})
    return Finding("torch", "ok", version, figures={"version": version})


def _torch_version() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


def _look_at_kernels() -> Finding:
    """What computes the exchanges of large models, compiled or loaded as training would."""
    import torch

    from gossipdp.dynamics.update import LEAST_COMPILED_VALUES, choose_kernels, compile_loops

    version = importlib.metadata.version("numba")
    figures: dict[str, object] = {"numba": version}
    try:
        chosen = choose_kernels(LEAST_COMPILED_VALUES)
    except ValueError as error:
        return Finding("kernels", "fail", str(error), "unset GOSSIPDP_KERNELS")
    figures["chosen"] = chosen
    if chosen != "numba":
        found = f"{chosen}, with numba {version} at hand"
        return Finding("kernels", "warn", found, "unset GOSSIPDP_KERNELS", figures)
    started_s = time.perf_counter()
    try:
        compile_loops(torch.float32, torch.float32)
    except ImportError as error:
        found = f"numba {version} cannot be imported: {error}"
        advice = "pip install --force-reinstall numba, or set GOSSIPDP_KERNELS=torch"
        return Finding("kernels", "fail", found, advice, figures)
    figures["ready_s"] = ready_s = time.perf_counter() - started_s
    found = f"compiled by numba {version}, ready in {ready_s:.1f} s"
    return Finding("kernels", "ok", found, figures=figures)


def _look_at_tls() -> Finding:
    from gossipdp.launcher.environment import tls_from
    from gossipdp.links.tls import Tls

    library, figures = ssl.OPENSSL_VERSION, {"library": ssl.OPENSSL_VERSION}
    try:
        files = tls_from(os.environ)
        if files is not None:
            Tls(files)
    except ValueError as error:
        return Finding("TLS", "fail", str(error), "mend or unset the GOSSIPDP_TLS_ variables")
    if not ssl.HAS_TLSv1_3:
        advice = "only TLS on links needs it: take a Python built with OpenSSL 1.1.1 or later"
        return Finding("TLS", "warn", f"{library}, without TLS 1.3", advice, figures)
    tried = "; your certificate and key fit" if files is not None else ""
    return Finding("TLS", "ok", f"{library}, TLS 1.3{tried}", figures=figures)


def _look_at_gpu() -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return judge_gpu([torch.cuda.get_device_name(index) for index in range(count)])


def judge_gpu(devices: Iterable[str]) -> Finding:
    """The GPUs that torch sees."""
    from gossipdp.dynamics.device import ON, SWITCH

    names = list(devices)
    if not names:
        return Finding("GPU", "ok", "none: training is on the CPU", figures={"devices": names})
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    advice = (
        "keep the parameters on the CPU: exchanges of those on a GPU have never run on a card, "
        f"and {SWITCH}={ON} alone allows them"
    )
    return Finding("GPU", "warn", found, advice, {"devices": names})


# Cores and memory.


def _look_at_cores() -> Finding:
    from gossipdp.launcher.local import available_cores

    return judge_cores(len(available_cores()), cgroup_cores(), os.getloadavg()[0])


def judge_cores(num_cores: int, cgroup: float | None, load: float) -> Finding:
    """How much computing there is.

    Args:
        num_cores: that this process may run on.
        cgroup: cores' worth of time that the container may use; None for no limit.
        load: runnable processes, averaged over a minute.
    """
    figures = {"cores": num_cores, "cgroup_cores": cgroup, "load": load}
    found = f"{num_cores}, load {load:.1f}"
    if cgroup is not None and cgroup < num_cores:
        threads = max(1, int(cgroup))
        found += f"; the container may use {cgroup:.3g} of them"
        advice = (
            f"start at most {threads} workers with OMP_NUM_THREADS=1, or set it so that "
            f"workers x threads is at most {threads}: more are stopped again and again"
        )
        return Finding("cores", "warn", found, advice, figures)
    if load > num_cores:
        advice = "wait, or start fewer workers: others use the cores too"
        return Finding("cores", "warn", found, advice, figures)
    return Finding("cores", "ok", found, figures=figures)


def _look_at_memory() -> Finding:
    import psutil

    return judge_memory(psutil.virtual_memory().available, cgroup_free_bytes())


def judge_memory(available: int, cgroup_free: int | None) -> Finding:
    """Memory, in bytes: free on the machine, and left of the container's limit, if it has one."""
    free = available if cgroup_free is None else min(available, cgroup_free)
    figures = {"available_bytes": available, "cgroup_free_bytes": cgroup_free}
    limit = " within the limit of the container" if free < available else ""
    found = f"{free / 1e9:.1f} GB free{limit}"
    if free < LEAST_MEMORY_BYTES:
        return Finding("memory", "warn", found, "free memory: a worker takes about 1 GB", figures)
    return Finding("memory", "ok", found, figures=figures)


def judge_open_files(soft: int, hard: int) -> Finding:
    """The limit on descriptors of one process; a link takes one, a loader process some."""
    unlimited = resource.RLIM_INFINITY
    figures = {"soft": soft, "hard": hard}
    found = "no limit" if soft == unlimited else f"{soft:,} a process"
    if soft == unlimited or soft >= ENOUGH_DESCRIPTORS:
        return Finding("open files", "ok", found, figures=figures)
    if hard != unlimited and hard < ENOUGH_DESCRIPTORS:
        advice = (
            f"raise the hard limit, {hard:,}, to {ENOUGH_DESCRIPTORS} at least (nofile in "
            f"/etc/security/limits.conf, docker run --ulimit nofile={ENOUGH_DESCRIPTORS})"
        )
    else:
        advice = f"ulimit -n {ENOUGH_DESCRIPTORS} in the shell that starts workers"
    verdict: Verdict = "fail" if soft < LEAST_DESCRIPTORS else "warn"
    return Finding("open files", verdict, found, advice, figures)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the control group of a container may use; None for no limit."""
    quota, _, period = (_text(root / "cpu.max") or "").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of the memory of a container's control group; None for no limit.

    Files that were read lately count as used there, but make room when programs need it.
    """
    most, used = _text(root / "memory.max") or "", _text(root / "memory.current") or ""
    if not (most.isdigit() and used.isdigit()):
        return None
    cached = re.search(r"^inactive_file (\d+)$", _text(root / "memory.stat") or "", re.M)
    return max(0, int(most) - max(0, int(used) - int(cached[1] if cached else 0)))


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _look_at_shared_memory() -> Finding:
    """Do what two workers do: make memory, pass its descriptor, map it and read it in place."""
    from gossipdp.links.shared_memory import SharedSegment, map_peers_segment

    try:
        own = SharedSegment(PROBE_BYTES, 1)
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with here, there:
            socket.send_fds(here, [b"?"], [own.descriptor])
            _, descriptors, _, _ = socket.recv_fds(there, 1, 1)
        try:
            view = map_peers_segment(descriptors[0], PROBE_BYTES)
        finally:
            os.close(descriptors[0])
        own.memory[-4:] = b"read"
        if bytes(view[-4:]) != b"read":
            raise OSError("what one process wrote, the other does not see")
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no memfd_create
        advice = (
            "workers of this host use TCP instead, about 3 times slower; it needs Linux 5.1 "
            "and a container that allows memfd_create"
        )
        return Finding("shared memory", "warn", str(error), advice, {"works": False})
    found = "memfd, sealed, passed and read in place"
    return Finding("shared memory", "ok", found, figures={"works": True})


# Network.


def routed_address(target: str) -> str | None:
    """The address of this machine from which ``target`` is reached; None: no route leads there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; picks the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def outward_address() -> str | None:
    """The address from which other machines are reached, IPv4 before IPv6; None: there is none."""
    return next((own for target in ANYWHERE if (own := routed_address(target))), None)


def _look_at_address() -> Finding:
    from gossipdp.launcher.environment import Environment

    nodes = os.environ.get("SLURM_JOB_NUM_NODES") or "1"
    num_nodes = int(nodes) if nodes.isdigit() else 1
    store_host = os.environ.get("MASTER_ADDR") or None
    host = os.environ.get("GOSSIPDP_HOST") or None
    try:
        chosen = Environment(store_host=store_host, host=host).choose_host()
    except GossipError as error:
        advice = "correct GOSSIPDP_HOST, or MASTER_ADDR"
        return Finding("address", "fail", str(error), advice)
    return judge_address(chosen, bool(store_host or host), outward_address(), num_nodes)


def judge_address(chosen: str, is_given: bool, outward: str | None, num_nodes: int) -> Finding:
    """The address on which a worker started here, with this environment, would listen.

    Args:
        chosen: it.
        is_given: GOSSIPDP_HOST or MASTER_ADDR has to do with it.
        outward: the address from which other machines are reached.
        num_nodes: machines that the run has, as far as the environment says.
    """
    from gossipdp.launcher.environment import show_address

    figures = {"chosen": chosen, "outward": outward}
    if num_nodes > 1 and ipaddress.ip_address(chosen).is_loopback:
        advice = f"set GOSSIPDP_HOST to {outward or 'an address that the others reach'}"
        found = f"{chosen}, which the other {num_nodes - 1} machines do not reach"
        return Finding("address", "warn", found, advice, figures)
    found, advice = f"workers listen on {chosen}", ""
    if not is_given:
        found += " (the default: one machine)"
        if outward is not None:
            advice = (
                f"for several machines: --nnodes and --rendezvous {show_address(outward, 29400)} "
                "on all, if this is the first"
            )
    return Finding("address", "ok", found, advice, figures)


def _look_at_ports() -> Finding:
    """Whether workers can listen, and reach each other over loopback."""
    from gossipdp.links.sockets import listen

    name = "ports"
    try:
        with listen("127.0.0.1", 0) as listener:
            socket.create_connection(listener.getsockname(), 2.0).close()
    except (OSError, GossipError) as error:
        advice = "let this user make TCP sockets on 127.0.0.1 (sandbox or firewall?)"
        return Finding(name, "fail", f"no connection over loopback: {error}", advice)
    given = os.environ.get("GOSSIPDP_PORT") or "0"
    advice = "choose another GOSSIPDP_PORT, or unset it for any free port"
    if not (given.isascii() and given.isdigit() and int(given) < 65536):
        found = f"GOSSIPDP_PORT is {given!r}; it must be a port from 1 to 65535"
        return Finding(name, "fail", found, advice)
    if int(given) == 0:
        advice = "behind a firewall fix them: GOSSIPDP_PORT, one for each worker"
        return Finding(name, "ok", "workers listen on any free port", advice)
    try:
        listen(os.environ.get("GOSSIPDP_HOST") or "127.0.0.1", int(given)).close()
    except GossipError as error:
        return Finding(name, "fail", str(error), advice)
    return Finding(name, "ok", f"workers listen on ports from {given} on")


# Speed.


def _look_at_memory_speed() -> Finding:
    """How fast one core copies memory, and computes an exchange."""
    import torch

    from gossipdp.dynamics.chunks import Role, Segment, State

    source, peers, mine = torch.rand(3, NUM_PARAMETERS)
    segment = Segment(torch.rand(NUM_PARAMETERS), Role.TRAINED)
    state = State([segment])
    state.compile()
    places = list(zip(segment.split(mine), segment.split(peers), strict=True))
    thetas = itertools.count()

    def exchange() -> None:
        theta = 0.3 * next(thetas)
        for (chunk, snapshot), (_, theirs) in places:
            chunk.snapshot_and_exchange(theta, snapshot, theirs, 1.3)

    exchange()  # the first one touches all memory
    copy_s = min(_seconds(lambda: mine.copy_(source)) for _ in range(NUM_RUNS))
    update_ms = 1e3 * min(_seconds(exchange) for _ in range(NUM_RUNS))
    copy = 8 * NUM_PARAMETERS / copy_s
    figures = {
        "copy_gb_per_s": copy / 1e9,
        "update_ms": update_ms,
        "parameters": NUM_PARAMETERS,
    }
    found = (
        f"copies {copy / 1e9:.1f} GB/s; an exchange of {NUM_PARAMETERS / 1e6:g}M parameters "
        f"computes {update_ms:.1f} ms ({state.kernels})"
    )
    if copy < SLOW_MEMORY:
        advice = "see who else uses the machine, and measure again"
        return Finding("memory speed", "warn", found, advice, figures)
    return Finding("memory speed", "ok", found, figures=figures)


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def _measure_here(shared_memory: SharedMemory) -> LinkSpeed:
    from gossipdp.cli.doctor_link import measure_here

    return measure_here(secrets.token_bytes(16), shared_memory, LOCAL_ROUND_S)


def judge_local(name: str, speed: LinkSpeed) -> Finding:
    """A link between two processes of this machine."""
    found, figures = show(speed), figures_of(speed)
    if speed.both < SLOW_LOOPBACK or speed.round_trip_s > SLOW_ROUND_TRIP_S:
        advice = "see who else uses the cores, and measure again"
        return Finding(name, "warn", found, advice, figures)
    return Finding(name, "ok", found, figures=figures)


def judge_link(speed: LinkSpeed) -> Finding:
    """A link to another machine."""
    mbits = max(1, round(speed.both * 8e-6))
    latency_ms = max(0.01, speed.round_trip_s * 500)
    advice = (
        f"what it allows: gossipdp plan --workers N --parameters 25M --step-ms 100 "
        f"--link-mbps {mbits} --latency-ms {latency_ms:.2g}"
    )
    slow = speed.both < SLOW_LINK or speed.round_trip_s > FAR_ROUND_TRIP_S
    return Finding("link", "warn" if slow else "ok", show(speed), advice, figures_of(speed))


def show(speed: LinkSpeed) -> str:
    """A measured link in words."""
    round_trip = speed.round_trip_s
    took = f"{round_trip * 1e3:.3g} ms" if round_trip >= 1e-3 else f"{round_trip * 1e6:.0f} µs"
    there, back, both = (
        f"{each / 1e9:.2f} GB/s" if each >= 1e9 else f"{each / 1e6:.3g} MB/s"
        for each in (speed.there, speed.back, speed.both)
    )
    return f"{there} there, {back} back, {both} each way at once; round trip {took}"


def figures_of(speed: LinkSpeed) -> dict[str, float]:
    """A measured link for ``--json``."""
    return {
        "round_trip_us": speed.round_trip_s * 1e6,
        "there_mb_per_s": speed.there / 1e6,
        "back_mb_per_s": speed.back / 1e6,
        "both_mb_per_s": speed.both / 1e6,
    }
