"""What ``gossipdp doctor`` says of the machine: cores, memory, descriptors, clock, shared memory.

Of each thing one function asks the machine, and one, which the tests give facts to, judges.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

from gossipdp.cli.doctor_findings import Check, Finding
from gossipdp.runtime.clock import since_boot_s
from gossipdp.runtime.launcher import available_cores

GIB = 1 << 30
LEAST_MEMORY_BYTES = 1 * GIB
"""Less than this hardly holds one worker: its torch alone takes about 0.3 GB."""

LEAST_DESCRIPTORS, ENOUGH_DESCRIPTORS = 64, 1024
LEAST_LOADER_BYTES = 128 << 20
"""Of /dev/shm, through which the loader processes of torch pass batches; Docker gives 64 MB."""

SLOW_CLOCK_S = 2e-6
"""A worker reads the clock some times for each message."""

PROBE_BYTES = 1 << 20


def checks() -> list[Check]:
    """All checks of this file, in the order in which they are shown."""
    return [
        ("cores", lambda: judge_cores(len(available_cores()), cgroup_cores(), os.getloadavg()[0])),
        ("memory", lambda: judge_memory(available_bytes(), cgroup_free_bytes())),
        ("open files", lambda: judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))),
        ("clock", lambda: judge_clock(_clock_source(), _clock_call_s())),
        ("shared memory", _look_at_shared_memory),
        ("loader memory", lambda: judge_loader_memory(_free_bytes(Path("/dev/shm")))),
    ]


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
        return Finding(
            "cores",
            "warn",
            f"{found}; the container may use {cgroup:.3g} of them",
            f"start at most {threads} workers with OMP_NUM_THREADS=1, or set it so that "
            f"workers x threads is at most {threads}: more are stopped again and again",
            figures,
        )
    if load > num_cores:
        advice = "wait, or start fewer workers: others use the cores too"
        return Finding("cores", "warn", found, advice, figures)
    return Finding("cores", "ok", found, figures=figures)


def judge_memory(available: int | None, cgroup_free: int | None) -> Finding:
    """Memory, in bytes: free on the machine, and left of the container's limit; None: not known."""
    known = [value for value in (available, cgroup_free) if value is not None]
    if not known:
        advice = "see that there is 1 GB for each worker, and 5 times the parameters"
        return Finding("memory", "warn", "not known on this system", advice)
    free, figures = min(known), {"available_bytes": available, "cgroup_free_bytes": cgroup_free}
    limited = free == cgroup_free and free != available
    found = f"{free / 1e9:.1f} GB free{' within the limit of the container' if limited else ''}"
    if free < LEAST_MEMORY_BYTES:
        return Finding("memory", "warn", found, "free memory: a worker takes about 1 GB", figures)
    return Finding("memory", "ok", found, figures=figures)


def judge_open_files(soft: int, hard: int) -> Finding:
    """The limit on descriptors of one process; a link takes one, a loader process some."""
    unlimited = resource.RLIM_INFINITY
    figures = {"soft": soft, "hard": hard}
    found = "no limit" if soft == unlimited else f"{soft:,} a process"
    reachable = ENOUGH_DESCRIPTORS if hard == unlimited else max(hard, soft)
    advice = f"ulimit -n {min(reachable, 65536)} in the shell that starts workers"
    if hard != unlimited and hard < ENOUGH_DESCRIPTORS:
        advice = (
            f"raise the hard limit, {hard:,}, to {ENOUGH_DESCRIPTORS} at least (nofile in "
            f"/etc/security/limits.conf, docker run --ulimit nofile={ENOUGH_DESCRIPTORS})"
        )
    if soft != unlimited and soft < LEAST_DESCRIPTORS:
        return Finding("open files", "fail", found, advice, figures)
    if soft != unlimited and soft < ENOUGH_DESCRIPTORS:
        return Finding("open files", "warn", found, advice, figures)
    return Finding("open files", "ok", found, figures=figures)


def judge_clock(source: str | None, call_s: float) -> Finding:
    """The clock by which workers judge silence: the kernel's source, and what a look costs."""
    figures = {"source": source, "call_ns": call_s * 1e9}
    found = f"{source or 'source not known'}, {call_s * 1e9:.0f} ns to read"
    if call_s > SLOW_CLOCK_S:
        advice = "choose another clocksource (tsc, kvm-clock): this one costs CPU time"
        return Finding("clock", "warn", found, advice, figures)
    return Finding("clock", "ok", found, figures=figures)


def judge_shared_memory(error: str | None) -> Finding:
    """Whether two workers of this host could read each other's memory; ``error`` says why not."""
    figures = {"works": error is None}
    if error is None:
        return Finding(
            "shared memory", "ok", "memfd, sealed, passed and read in place", figures=figures
        )
    return Finding(
        "shared memory",
        "warn",
        error,
        "workers of this host use TCP instead, about 3 times slower; it needs Linux 5.1 "
        "and a container that allows memfd_create",
        figures,
    )


def judge_loader_memory(free: int | None) -> Finding:
    """What is free in /dev/shm, in bytes; None: there is no such folder."""
    advice = (
        "give the container more (docker run --shm-size=1g), or use DataLoader(num_workers=0): "
        "gossipdp itself needs none"
    )
    if free is None:
        return Finding("loader memory", "warn", "there is no /dev/shm", advice)
    found, figures = f"{free / 1e9:.2f} GB free in /dev/shm", {"free_bytes": free}
    if free < LEAST_LOADER_BYTES:
        return Finding("loader memory", "warn", found, advice, figures)
    return Finding("loader memory", "ok", found, figures=figures)


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores' worth of time that the control group of a container may use; None for no limit."""
    words = (_text(root / "cpu.max") or "").split()
    if not words:  # version 1
        words = [
            _text(root / "cpu" / "cpu.cfs_quota_us") or "",
            _text(root / "cpu" / "cpu.cfs_period_us") or "",
        ]
    try:
        quota, period = int(words[0]), int(words[1])
    except (ValueError, IndexError):  # "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of the memory of a container's control group; None for no limit.

    Files that were read lately count as used there, but make room when programs need it.
    """
    for folder, limit, usage, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (
            root / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            most, used = int(_text(folder / limit) or ""), int(_text(folder / usage) or "")
        except ValueError:
            continue
        used = max(0, used - _cgroup_statistic(folder / "memory.stat", cache))
        return max(0, most - used) if most - used < 1 << 60 else None
    return None


def _cgroup_statistic(path: Path, name: str) -> int:
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return 0


def available_bytes(path: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that programs can have without anything being swapped out."""
    for line in (_text(path) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _look_at_shared_memory() -> Finding:
    try:
        _share()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: no memfd_create
        return judge_shared_memory(str(error))
    return judge_shared_memory(None)


def _share() -> None:
    """Do what two workers do: make memory, pass its descriptor, map it and read it in place."""
    from gossipdp.runtime.shared_memory import SharedSegment, map_peers_segment

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


def _clock_source() -> str | None:
    folder = Path("/sys/devices/system/clocksource/clocksource0")
    return _text(folder / "current_clocksource")


def _clock_call_s(num_calls: int = 10_000) -> float:
    started_s = time.perf_counter()
    for _ in range(num_calls):
        since_boot_s()
    return (time.perf_counter() - started_s) / num_calls


def _free_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
