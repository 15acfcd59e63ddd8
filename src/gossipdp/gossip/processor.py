"""The processor time that training leaves idle, for ``comm_rate="auto"``."""

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple, final

LOOK_EVERY_S = 1.0


class Idle(NamedTuple):
    """The idle cores of this machine, at most one, and the idle share of the thread's time."""

    core: float
    thread: float


class _Seen(NamedTuple):
    at_s: float
    thread_busy_s: float
    idle_ticks: int
    all_ticks: int


@final
class IdleWatch:
    """A watch on the idle time of the machine and of the training thread, which makes this object.

    A thread that waits for a core counts as busy: it has none to give away. Only the cores that
    this process may use count.

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
        self._seen: _Seen | None = None

    def look(self, now_s: float) -> Idle | None:
        """Return what was idle since the last look.

        None at the first look, less than a second after the last one, and if the thread has ended.
        """
        before = self._seen
        if before is not None and now_s < before.at_s + LOOK_EVERY_S:
            return None
        try:
            self._seen = seen = _Seen(now_s, self._busy_s(), *self._ticks())
        except OSError:  # the thread has ended
            return None
        if before is None:
            return None
        thread = 1 - (seen.thread_busy_s - before.thread_busy_s) / (now_s - before.at_s)
        ticks = seen.all_ticks - before.all_ticks
        idle_ticks = seen.idle_ticks - before.idle_ticks
        return Idle(
            min(1.0, len(self._cores) * idle_ticks / ticks) if ticks > 0 else thread, thread
        )

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
