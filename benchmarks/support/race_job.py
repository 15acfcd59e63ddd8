"""``Job``: the workers of a row that brings no supervisor, started again as a cluster would."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from gossipdp import WorkerFailedError
from gossipdp.launcher.faults import FaultInjector, Process, Target
from gossipdp.launcher.supervisor import Ending

RESTART_DELAY_S = 0.1
"""From a death to the next start, as for the first restart of ``gossipdp run``."""
POLL_S = 0.05
MAX_EARLY_DEATHS = 3
"""A job that dies so often by itself, without a step in between, is given up."""


class RestartedProcess(Process, Protocol):
    """A process as :class:`Job` needs it; :class:`ScriptWorker` is one."""

    def poll(self) -> Ending | None:
        """Return how it ended; None while it runs."""

    def kill(self) -> None:
        """Kill it, and what it started."""

    def close(self) -> None:
        """Let go of a process that has ended."""


class Job:
    """The workers of a row that brings no supervisor, as a cluster would supervise them.

    Args:
        num_workers: how many.
        start: starts the worker of a rank; the second argument counts the starts of the job, or of
            this worker if it is started again alone.
        trains: returns whether the process of a rank has made a step.
        faults: kills, stops and slows the workers.
        whole: a death ends all workers, and all start again; otherwise the dead one does.
        clock: seconds.

    Raises:
        WorkerFailedError: by :meth:`step`: workers die by themselves before they train.
    """

    def __init__(
        self,
        num_workers: int,
        start: Callable[[int, int], RestartedProcess],
        trains: Callable[[int], bool],
        faults: FaultInjector,
        *,
        whole: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._trains, self._faults = start, trains, faults
        self._whole, self._clock = whole, clock
        self._due: dict[int, float] = dict.fromkeys(range(num_workers), -math.inf)
        self._starts = [0] * num_workers
        self._early_deaths = 0
        self._is_ending = False
        self.running: dict[int, RestartedProcess] = {}
        self.ended_well: set[int] = set()

    @property
    def all_train(self) -> bool:
        """Return whether every worker runs and has made a step."""
        ranks = range(len(self._starts))
        return all(rank in self.running and self._trains(rank) for rank in ranks)

    def wait_s(self) -> float:
        """Return the seconds until something is due."""
        return min(POLL_S, self._faults.wait_s())

    def step(self) -> bool:
        """Act on what has happened; return whether a worker runs or is to run."""
        for rank, process in list(self.running.items()):
            ending = process.poll()
            if ending is not None:
                self._ended(rank, ending)
        now = self._clock()
        for rank in [rank for rank, due_s in self._due.items() if now >= due_s]:
            if self.running.keys() & self._due.keys():
                break  # those of the job before are not all gone
            del self._due[rank]
            self.running[rank] = self._start(rank, self._starts[rank])
            self._starts[rank] += 1
        self._faults.step(
            [
                Target(rank, process, process is not None and self._trains(rank))
                for rank in range(len(self._starts))
                for process in [self.running.get(rank)]
            ]
        )
        return bool(self.running or self._due)

    def end(self) -> None:
        """Kill all workers, and start no more."""
        self._is_ending = True
        self._faults.release()
        self._due.clear()
        for process in self.running.values():
            process.kill()

    def _ended(self, rank: int, ending: Ending) -> None:
        process = self.running.pop(rank)
        process.close()
        is_injected = self._faults.ended(rank, ending.reason)
        if not ending.reason:
            self.ended_well.add(rank)
            return
        if rank in self._due or self.ended_well or self._is_ending:
            return  # the job was being ended for another's death, or is at its end
        if any(self._trains(each) for each in range(len(self._starts))):
            self._early_deaths = 0
        elif not is_injected:
            self._early_deaths += 1
            if self._early_deaths == MAX_EARLY_DEATHS:
                raise WorkerFailedError(f"worker {rank} {ending.reason} before it trained")
        due_s = self._clock() + RESTART_DELAY_S
        ranks = range(len(self._starts)) if self._whole else [rank]
        self._due.update(dict.fromkeys(ranks, due_s))
        if self._whole:
            for other in self.running.values():
                other.kill()
