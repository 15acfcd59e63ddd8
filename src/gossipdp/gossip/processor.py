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
    """A look at the idle time of the machine, and of the training thread, which makes this object.

    A thread that waits for a core counts as busy: it has none to give away. Linux reports how long
    it waited. Elsewhere only the thread's processor time is known; then the machine counts as
    idle for the same share of the time as the thread.
    """

    def __init__(self) -> None:
        self._of_thread = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._of_machine = Path("/proc/stat")
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._num_cores = os.cpu_count() or 1
        self._seen: _Seen | None = None

    def look(self, now_s: float) -> Idle | None:
        """Return what was idle since the last look; None if that was less than a second ago."""
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
        return Idle(min(1.0, self._num_cores * idle_ticks / ticks) if ticks > 0 else thread, thread)

    def _busy_s(self) -> float:
        try:
            ran_ns, waited_ns, _ = self._of_thread.read_text("ascii").split()
            return (int(ran_ns) + int(waited_ns)) / 1e9
        except (FileNotFoundError, ValueError):
            return time.clock_gettime(self._clock)

    def _ticks(self) -> tuple[int, int]:
        """Return the idle ticks of all cores so far, and all ticks; zeros if they are not known."""
        try:
            line = self._of_machine.read_text("ascii").partition("\n")[0]
            user, nice, system, idle, iowait, *others = map(int, line.split()[1:9])
        except (OSError, ValueError):
            return 0, 0
        return idle + iowait, user + nice + system + idle + iowait + sum(others)
