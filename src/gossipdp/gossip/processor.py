"""The processor time that training leaves idle, for ``comm_rate="auto"``."""

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

LOOK_EVERY_S = 1.0
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class Idle(NamedTuple):
    """The idle cores of this machine, at most one, and the idle share of the thread's time."""

    core: float
    thread: float


class _Seen(NamedTuple):
    at_s: float
    thread_busy_s: float
    idle_ticks: int
    all_ticks: int
    quota_used_s: float


@final
class Quota:
    """The cores that the control groups of this process let it use, as a container's limit does.

    Attributes:
        cores: those of the tightest group, of whose processes all count; inf without a limit.
    """

    def __init__(self) -> None:
        self.cores = math.inf
        self._usage: tuple[Path, float] | None = None
        for cores, usage in _limits():
            if cores < self.cores:
                self.cores, self._usage = cores, usage

    def used_s(self) -> float:
        """Return the processor time used so far; of this process alone if the group's is hidden.

        Without a limit it does not matter: 0.
        """
        if self.cores == math.inf:
            return 0.0
        if self._usage is None:
            return time.process_time()
        path, unit_s = self._usage
        fields = path.read_text("ascii").split()  # a number, or names and numbers
        return int(fields[fields.index("usage_usec") + 1 if len(fields) > 1 else 0]) * unit_s


def _limits() -> Iterator[tuple[float, tuple[Path, float] | None]]:
    """Yield the limit of each group above this process, and where its usage is told."""
    try:
        lines = OWN_GROUPS.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds and "cpu" not in kinds.split(","):
            continue
        top = GROUPS / kinds
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            try:
                yield _first_version(each) if kinds else _second_version(each)
            except (OSError, ValueError):  # it sets no limit
                pass
            if each == top:
                break


def _first_version(group: Path) -> tuple[float, tuple[Path, float] | None]:
    quota_us = int((group / "cpu.cfs_quota_us").read_text("ascii"))
    period_us = int((group / "cpu.cfs_period_us").read_text("ascii"))
    usage = group / "cpuacct.usage"  # of another group where the two are mounted apart
    return (
        quota_us / period_us if quota_us > 0 else math.inf,
        (usage, 1e-9) if usage.exists() else None,
    )


def _second_version(group: Path) -> tuple[float, tuple[Path, float] | None]:
    quota_us, period_us = (group / "cpu.max").read_text("ascii").split()
    cores = math.inf if quota_us == "max" else int(quota_us) / int(period_us)
    return cores, (group / "cpu.stat", 1e-6)


@final
class IdleWatch:
    """A watch on the idle time of the machine and of the training thread, which makes this object.

    A thread that waits for a core counts as busy: it has none to give away. Only the cores that
    this process may use count, and of those no more than its control groups allow.

    Args:
        has_helpers: True if other threads do the training thread's work while it waits, as the one
            does that launches the backward pass on a GPU: all of this process but the thread that
            looks counts as the training thread then, as long as it runs.
    """

    def __init__(self, *, has_helpers: bool = False) -> None:
        self._has_helpers = has_helpers
        self._of_thread = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._of_machine = Path("/proc/stat")
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._quota = Quota()
        self._seen: _Seen | None = None

    def look(self, now_s: float) -> Idle | None:
        """Return what was idle since the last look.

        None at the first look, less than a second after the last one, and if the thread has ended.
        """
        before = self._seen
        if before is not None and now_s < before.at_s + LOOK_EVERY_S:
            return None
        try:
            self._seen = seen = _Seen(now_s, self._busy_s(), *self._ticks(), self._quota.used_s())
        except OSError:  # the thread has ended
            return None
        if before is None:
            return None
        thread = 1 - (seen.thread_busy_s - before.thread_busy_s) / (now_s - before.at_s)
        ticks = seen.all_ticks - before.all_ticks
        idle_ticks = seen.idle_ticks - before.idle_ticks
        cores = len(self._cores) * idle_ticks / ticks if ticks > 0 else thread
        used = (seen.quota_used_s - before.quota_used_s) / (now_s - before.at_s)
        return Idle(min(1.0, cores, max(0.0, self._quota.cores - used)), thread)

    def _busy_s(self) -> float:
        if self._has_helpers:
            return time.process_time() - time.thread_time()
        try:
            ran_ns, waited_ns, _ = map(int, self._of_thread.read_text("ascii").split())
        except (FileNotFoundError, ValueError):
            ran_ns = waited_ns = 0
        # A kernel without these statistics reports zeros.
        return (ran_ns + waited_ns) / 1e9 if ran_ns else time.clock_gettime(self._clock)

    def _ticks(self) -> tuple[int, int]:
        """Return the idle ticks of our cores so far, and all ticks; zeros if they are not known."""
        idle_ticks = all_ticks = 0
        try:
            for line in self._of_machine.read_text("ascii").splitlines():
                core, *ticks = line.split()
                if core in self._cores:
                    # user, nice, system, idle, iowait, irq, softirq, steal
                    ran = [int(each) for each in ticks[:8]]
                    idle_ticks, all_ticks = idle_ticks + ran[3] + ran[4], all_ticks + sum(ran)
        except (OSError, ValueError, IndexError):
            return 0, 0
        return idle_ticks, all_ticks
