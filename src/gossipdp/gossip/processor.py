"""The processor time that training leaves idle, for ``comm_rate="auto"``."""

import math
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple, final

from gossipdp.launcher.cores import limit

LOOK_EVERY_S = 1.0


class Idle(NamedTuple):
    """The idle share of about a second.

    Attributes:
        core: the idle cores of this machine, at most one.
        thread: the idle share of the training thread's time.
        ran: the share of the time it wanted for which the limit of its container let it run.
    """

    core: float
    thread: float
    ran: float = 1.0


@final
class IdleWatch:
    """A watch on the idle time of the machine and of the training thread, which makes this object.

    A thread that waits for a core counts as busy: it has none to give away. Only the cores that
    this process may use count, and of those no more than its control groups allow. Nothing is idle
    in a period in which they made it wait.

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
        self._most_cores, self._group = limit()
        self._seen: tuple[float, ...] = ()  # all that look() compares, the time first

    def look(self, now_s: float) -> Idle | None:
        """Return what was idle since the last look.

        None at the first look, less than a second after the last one, and if the thread has ended.
        """
        before = self._seen
        if before and now_s < before[0] + LOOK_EVERY_S:
            return None
        try:
            self._seen = (now_s, *self._times_s(), *self._ticks(), *self._used())
        except OSError:  # the thread has ended
            return None
        if not before:
            return None
        lasted_s, ran_s, busy_s, idle_ticks, ticks, used_s, periods, throttled_periods = (
            now - then for now, then in zip(self._seen, before, strict=True)
        )
        thread = 1 - busy_s / lasted_s
        cores = len(self._cores) * idle_ticks / ticks if ticks > 0 else thread
        cores = min(1.0, cores, max(0.0, self._most_cores - used_s / lasted_s))
        throttled = throttled_periods / max(1, periods)
        ran = ran_s / busy_s if busy_s > 0 else 1.0
        return Idle((1 - throttled) * cores, thread, 1 - throttled * (1 - ran))

    def _times_s(self) -> tuple[float, float]:
        """Return for how long the training thread has run, and has run or waited for a core."""
        if self._has_helpers:
            ran_s = time.process_time() - time.thread_time()
            return ran_s, ran_s
        try:
            ran_ns, waited_ns, _ = map(int, self._of_thread.read_text("ascii").split())
        except (FileNotFoundError, ValueError):
            ran_ns = waited_ns = 0
        if ran_ns:
            return ran_ns / 1e9, (ran_ns + waited_ns) / 1e9
        ran_s = time.clock_gettime(self._clock)  # a kernel without these statistics reports zeros
        return ran_s, ran_s

    def _used(self) -> tuple[float, int, int]:
        """Return what the group has used so far in seconds, and its periods: all, and throttled.

        In the first version the time is that of this process alone; without a limit none matters.
        """
        if self._most_cores == math.inf:
            return 0.0, 0, 0
        lines = (self._group / "cpu.stat").read_text("ascii").splitlines()
        stat = {name: int(number) for name, number in map(str.split, lines)}
        used_s = stat["usage_usec"] / 1e6 if "usage_usec" in stat else time.process_time()
        return used_s, stat.get("nr_periods", 0), stat.get("nr_throttled", 0)

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
