"""The worker processes of one run, watched one by one.

WorkerProcess (the seam) ← ForkedWorker (launcher), ScriptWorker (supervisor)
Crew: who failed, whether the others go on, and how all of them end
"""

import abc
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import final

# From the first failure of a run that has not begun to the end of the others: long enough for
# the workers that failed for the same reason to say so.
GRACE_S = 0.25
# From the signal that ends a worker to SIGKILL.
PATIENCE_S = 1.5


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker's process ended: ``reason`` completes "worker 3 ..."."""

    failed: bool
    reason: str = ""
    details: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that ended with an error of its own, not one that was ended."""

    rank: int
    ending: Ending


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


def exit_reason(code: int) -> str:
    """An exit code in words; a negative one is minus the signal that killed the process.

    Example:
        >>> exit_reason(-9)
        'was killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def describe(failures: Sequence[Failure]) -> str:
    """All failures, in the order in which they happened; identical ones once, with their ranks."""
    ranks: dict[Ending, list[int]] = {}
    for failure in failures:
        ranks.setdefault(failure.ending, []).append(failure.rank)
    paragraphs = []
    for ending, who in ranks.items():
        noun = "worker" if len(who) == 1 else "workers"
        line = f"{noun} {', '.join(map(str, sorted(who)))} {ending.reason}"
        paragraphs.append(f"{line}:\n{ending.details.rstrip()}" if ending.details else line)
    return "\n\n".join(paragraphs)


class Crew:
    """Watches workers; decides whether a failure ends the run.

    A failure before all workers have begun ends the others, who would wait for it in vain; after
    that the others go on. What ends because it was told to is no failure.

    Args:
        workers: started already.
        has_begun: whether all workers have met and train; asked only after a failure.
        on_failure: called once for each failure, with whether the others go on.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        workers: Iterable[WorkerProcess],
        has_begun: Callable[[], bool],
        *,
        on_failure: Callable[[Failure, bool], None] = lambda failure, others_go_on: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.running = {worker.rank: worker for worker in workers}
        self.failures: list[Failure] = []
        self._has_begun = has_begun
        self._on_failure = on_failure
        self._clock = clock
        self._begun = False
        self._end_at: float | None = None
        self._kill_at: float | None = None

    @property
    def ending(self) -> bool:
        """Whether the workers have been told to end."""
        return self._kill_at is not None

    def watch(self) -> bool:
        """Note who ended and act on it; whether anyone is still running. Never blocks."""
        now = self._clock()
        for worker in list(self.running.values()):
            ending = worker.ending()
            if ending is not None:
                self._ended(worker, ending, now)
        if self._end_at is not None and now >= self._end_at and not self.ending:
            self.end(signal.SIGTERM)  # quieter than SIGINT: no traceback beside the failure's
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
        return bool(self.running)

    def end(self, number: int = signal.SIGINT) -> None:
        """Send all workers a signal, and SIGKILL if they outlive it by PATIENCE_S.

        Called again, SIGKILL follows at once.
        """
        if self.ending:
            self.kill()
            return
        self._kill_at = self._clock() + PATIENCE_S
        for worker in self.running.values():
            worker.send(number)

    def kill(self) -> None:
        """Send all workers, and what they started, SIGKILL."""
        self._kill_at = self._clock()
        for worker in self.running.values():
            worker.kill_group()
            worker.send(signal.SIGKILL)  # one that has not yet made its group

    def _ended(self, worker: WorkerProcess, ending: Ending, now: float) -> None:
        del self.running[worker.rank]
        if self.ending or ending.failed:
            # What it started and left behind, such as loader processes.
            worker.kill_group()
        if self.ending or not ending.failed:
            return
        self._begun = self._begun or self._has_begun()
        failure = Failure(worker.rank, ending)
        self.failures.append(failure)
        self._on_failure(failure, self._begun)
        if not self._begun and self._end_at is None:
            self._end_at = now + GRACE_S
