"""The worker processes of one run, watched one by one.

WorkerProcess (the seam) ← ForkedWorker (launcher), ScriptWorker (supervisor)
Crew: who failed, whether the others go on, and how all of them end
"""

import abc
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from gossipdp.runtime.restarts import Restarts

# From the first failure of a run that has not begun to the end of the others: long enough for
# the workers that failed for the same reason to say so.
GRACE_S = 0.25
# From the signal that ends a worker to SIGKILL.
PATIENCE_S = 1.5


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker's process ended.

    ``reason`` completes "worker 3 ..." and "workers 3, 4 ..." alike.
    """

    failed: bool
    reason: str = ""
    details: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that ended with an error of its own, not one that was ended.

    ``restart_in_s`` is how soon it is started again, None for never.
    """

    rank: int
    ending: Ending
    restart_in_s: float | None = None


class WorkerProcess(abc.ABC):
    """A process that leads its own process group, so that what it started ends with it."""

    rank: int
    pid: int

    @abc.abstractmethod
    def ending(self) -> Ending | None:
        """How it ended; None while it runs. Never blocks."""

    @final
    def send(self, number: int) -> None:
        """Send the process a signal, while :meth:`ending` has not yet said that it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @final
    def kill_group(self) -> None:
        """Send SIGKILL to everything in its process group, also after it has ended itself."""
        # On macOS a group of zombies answers EPERM.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @final
    def kill(self) -> None:
        """Send SIGKILL to it, which may not yet have made its group, and to what it started."""
        self.kill_group()
        self.send(signal.SIGKILL)


def exit_reason(code: int) -> str:
    """An exit code in words; a negative one is minus the signal that killed the process.

    Example:
        >>> exit_reason(-9)
        'died of signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"died of signal {-code} ({name})"


def shown_rank(rank: int) -> str:
    """A rank for people; negative ones stand for workers that have none yet.

    Example:
        >>> shown_rank(3), shown_rank(-1), shown_rank(-2)
        ('3', '+0', '+1')
    """
    return str(rank) if rank >= 0 else f"+{-1 - rank}"


def describe(failures: Sequence[Failure]) -> str:
    """All failures, in the order in which they happened; identical ones once, with their ranks."""
    ranks: dict[Ending, list[int]] = {}
    for failure in failures:
        ranks.setdefault(failure.ending, []).append(failure.rank)
    paragraphs = []
    for ending, who in ranks.items():
        noun = "worker" if len(who) == 1 else "workers"
        line = f"{noun} {', '.join(map(shown_rank, sorted(who)))} {ending.reason}"
        paragraphs.append(f"{line}:\n{ending.details.rstrip()}" if ending.details else line)
    return "\n\n".join(paragraphs)


class Crew:
    """Watches workers; decides whether a failure ends the run, and who is started again.

    A failure before all workers have begun ends the others, who would wait for it in vain; after
    that the others go on. What ends because it was told to is no failure. While restarts are left,
    a worker that fails after that is started again, and joins the others. When none of them is left
    to join, all start anew together, as under torchrun; but not once a worker has ended well, since
    then the run is over.

    Args:
        has_begun: whether all workers have met and train; asked only after a failure.
        on_failure: called once for each failure, with whether the others go on.
        restarts: the budget; by default nobody is started again.
        start_again: starts the worker of a rank; the flag says that all do, to meet anew. What it
            raises counts as a life that failed.
        others_elsewhere: workers of this run may live where this crew does not see them, so that
            there may always be one to join.
        clock: seconds, monotonic.

    Attributes:
        running: the workers that run, by rank.
        failures: of those who were not started again after it.
    """

    def __init__(
        self,
        has_begun: Callable[[], bool],
        *,
        on_failure: Callable[[Failure, bool], None] = lambda failure, others_go_on: None,
        restarts: Restarts | None = None,
        start_again: Callable[[int, bool], WorkerProcess] | None = None,
        others_elsewhere: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running: dict[int, WorkerProcess] = {}
        self.failures: list[Failure] = []
        self._has_begun = has_begun
        self._on_failure = on_failure
        self._restarts = restarts or Restarts(0)
        self._start_again = start_again
        self._others_elsewhere = others_elsewhere
        self._clock = clock
        self._num_workers = 0
        self._waiting: dict[int, tuple[float, Failure]] = {}
        self._begun = False
        self._one_ended_well = False
        self._end_at: float | None = None
        self._kill_at: float | None = None

    @property
    def ending(self) -> bool:
        """Whether the workers have been told to end."""
        return self._kill_at is not None

    @property
    def begun(self) -> bool:
        """Whether all have begun, as far as anyone had to ask."""
        return self._begun

    def add(self, worker: WorkerProcess) -> None:
        """Watch a worker that was just started, for the first time."""
        self._num_workers += 1
        self._watch_over(worker)

    def watch(self) -> bool:
        """Note who ended and act on it; whether anyone runs or is to run. Never blocks."""
        now = self._clock()
        for worker in list(self.running.values()):
            ending = worker.ending()
            if ending is not None:
                self._ended(worker, ending, now)
        if not self.ending:
            self._restart(now)
        if self._end_at is not None and now >= self._end_at and not self.ending:
            self.end(signal.SIGTERM)  # quieter than SIGINT: no traceback beside the failure's
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
        return bool(self.running or self._waiting)

    def end(self, number: int = signal.SIGINT) -> None:
        """Send all workers a signal, and SIGKILL if they outlive it by PATIENCE_S.

        Called again, SIGKILL follows at once. Nobody is started again after it.
        """
        if self.ending:
            self.kill()
            return
        self._kill_at = self._clock() + PATIENCE_S
        self._give_up_waiting()
        for worker in self.running.values():
            worker.send(number)

    def kill(self) -> None:
        """Send all workers, and what they started, SIGKILL."""
        self._kill_at = self._clock()
        self._give_up_waiting()
        for worker in self.running.values():
            worker.kill()

    def next_restart_in_s(self) -> float | None:
        """Seconds until someone is due to be started again; None if nobody is."""
        if not self._waiting:
            return None
        return max(0.0, min(due for due, _ in self._waiting.values()) - self._clock())

    def _watch_over(self, worker: WorkerProcess) -> None:
        self.running[worker.rank] = worker
        self._restarts.started(worker.rank, self._clock())

    def _ended(self, worker: WorkerProcess, ending: Ending, now: float) -> None:
        del self.running[worker.rank]
        if self.ending or ending.failed:
            # What it started and left behind, such as loader processes.
            worker.kill_group()
        if self.ending:
            return
        if not ending.failed:
            self._one_ended_well = True
            return
        self._fail(worker.rank, ending, now)

    def _fail(self, rank: int, ending: Ending, now: float) -> None:
        """A life of this worker failed, or could not begin."""
        self._begun = self._begun or self._has_begun()
        due = None
        if self._begun and self._start_again is not None:
            due = self._restarts.due_after_death(rank, now)
        failure = Failure(rank, ending, None if due is None else due - now)
        if due is None:
            self.failures.append(failure)
        else:
            self._waiting[rank] = (due, failure)
        self._on_failure(failure, self._begun)
        if not self._begun and self._end_at is None:
            self._end_at = now + GRACE_S

    def _restart(self, now: float) -> None:
        """Start those who are due, or all anew, or see that it is of no use any more."""
        due = sorted(rank for rank, (at, _) in self._waiting.items() if at <= now)
        anew = not self.running and not self._others_elsewhere
        if anew and self._waiting:
            if self._one_ended_well or len(self._waiting) < self._num_workers:
                self._give_up_waiting()
                return
            if due:
                due = sorted(self._waiting)
                self._begun = False
        for rank in due:
            del self._waiting[rank]
            assert self._start_again is not None
            try:
                worker = self._start_again(rank, anew)
            except Exception as error:  # no process or descriptor left: the others are healthy
                self._restarts.started(rank, now)
                reason = f"could not be started ({type(error).__name__}: {error})"
                self._fail(rank, Ending(True, reason), now)
            else:
                self._watch_over(worker)

    def _give_up_waiting(self) -> None:
        self.failures += [
            dataclasses.replace(failure, restart_in_s=None) for _, failure in self._waiting.values()
        ]
        self._waiting.clear()
