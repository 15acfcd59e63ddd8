"""``Supervisor``: the worker processes of one run on this machine, watched one by one.

torchrun ends all workers when one dies; here the others go on, and the dead one may be started
again. How a worker is started is the caller's: a script (:mod:`.scripts`) or a function
(:mod:`.local`). Everything happens in the calling thread, in :meth:`Supervisor.step`.

    Supervisor → WorkerProcess (ScriptWorker, ForkedWorker): its end, its reports, its signals
               → Restarts: how often and how soon
               → Team: what a worker is told about the run
"""

import abc
import dataclasses
import logging
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import final

from gossipdp.launcher.environment import identity_variables, join_variables
from gossipdp.launcher.reports import ReportChannel
from gossipdp.launcher.team import NOTICE_S, Team

logger = logging.getLogger("gossipdp")

# The longest time that one step waits for something to happen.
POLL_S = 0.1
# From the first failure of a run that has not begun to the end of the others: long enough for
# the workers that failed for the same reason to say so.
GRACE_S = 0.25
# From the signal that ends a worker to SIGKILL, and from there to giving it up: a process that
# hangs in the kernel cannot be killed.
PATIENCE_S, UNKILLABLE_S = 1.5, 10.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 10.0
# A worker that lived this long did not die of what killed it before.
LONG_LIFE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a worker's process ended; ``reason`` is empty where it ended well.

    ``reason`` completes "worker 3 ..." and "workers 3, 4 ..." alike.
    """

    reason: str = ""
    details: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return bool(self.reason)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that ended with an error of its own, not one that was ended.

    ``rank`` is -1, -2, ... for the first, second, ... joining worker that has no rank yet.
    ``restart_in_s`` is how soon it is started again, None for never.
    """

    rank: int
    ending: Ending
    restart_in_s: float | None = None


class WorkerProcess(abc.ABC):
    """A process that leads its own process group, so that what it started ends with it."""

    def __init__(self) -> None:
        self.reports = ReportChannel()

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """Of the process."""

    @abc.abstractmethod
    def waits_for(self) -> Sequence[object]:
        """Descriptors and the like, one of which is readable when something happened."""

    @abc.abstractmethod
    def take_in(self) -> None:
        """Take what has arrived from it. Never blocks."""

    @abc.abstractmethod
    def ending(self) -> Ending | None:
        """How it ended; None while it runs. Never blocks."""

    def show_rank(self, rank: int) -> None:  # noqa: B027 (only some show it)
        """Name it by this rank from now on."""

    def close(self) -> None:
        """Let go of a process that has ended."""
        self.reports.close()

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
    """An exit code in words, none for 0; a negative one is minus the signal that killed it.

    Example:
        >>> exit_reason(-9)
        'died of signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    names = {each.value: each.name for each in signal.Signals}
    return f"died of signal {-code} ({names.get(-code, 'unknown')})"


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


class Restarts:
    """The budget of one run, and each worker's back-off.

    The k-th restart in a row of a worker whose lives were all short comes min(0.1·2^(k−1), 10)
    seconds after its death. The budget is for all workers together, as torchrun's
    ``--max-restarts`` is for the whole job.

    Raises:
        ValueError: ``max_restarts`` is negative.

    Example:
        >>> restarts = Restarts(2)
        >>> restarts.started(3, 0.0)
        >>> restarts.due_after_death(3, 5.0)
        5.1
        >>> restarts.count(3), restarts.num_left
        (1, 1)
    """

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise ValueError(f"--max-restarts is {max_restarts}; it must be 0 or more")
        self.num_left = max_restarts
        self._counts: dict[int, int] = {}
        self._in_a_row: dict[int, int] = {}
        self._started_at: dict[int, float] = {}

    def count(self, worker: int) -> int:
        """How many times this worker has been, or is about to be, started again."""
        return self._counts.get(worker, 0)

    def started(self, worker: int, now: float) -> None:
        """A life of this worker begins."""
        self._started_at[worker] = now

    def due_after_death(self, worker: int, now: float) -> float | None:
        """When to start it again, for which one restart is taken; None if none is left."""
        if self.num_left == 0:
            return None
        self.num_left -= 1
        self._counts[worker] = self.count(worker) + 1
        lived_s = now - self._started_at.get(worker, now)
        in_a_row = 0 if lived_s >= LONG_LIFE_S else self._in_a_row.get(worker, 0)
        self._in_a_row[worker] = in_a_row + 1
        # 2**7 · 0.1 exceeds the cap; a larger power would only overflow one day.
        return now + min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(in_a_row, 7))


class Supervisor:
    """Starts the workers of ``team`` on this machine and decides what each one's end means.

    A failure before all of them train ends the others, who would wait for it in vain; after that
    the others go on. A worker that is ended by us is no failure. While restarts are left, a worker
    that fails after that is started again, and joins the others by the addresses that they report.
    When none of them is left to join, all start anew together, as under torchrun; but not once a
    worker has ended well, since then the run is over.

    Args:
        team: the run they belong to.
        start: starts the worker of a local rank with these variables.
        max_restarts: how many restarts, of all workers together.
        on_failure: called once for each failure, with whether the others go on.
        on_addresses: called with the workers' addresses, (host, port) by rank, when they change.
        clock: seconds, monotonic.

    Attributes:
        running: the workers that run, by local rank.
        workers: the last life of each.
        failures: of those who were not started again after it.
        addresses: of the live workers, as they told.
        begun: whether all workers here train, as far as anyone had to ask.

    Raises:
        ValueError: fewer than no restarts.
    """

    def __init__(
        self,
        team: Team,
        start: Callable[[int, Mapping[str, str]], WorkerProcess],
        *,
        max_restarts: int = 0,
        on_failure: Callable[[Failure, bool], None] = lambda failure, others_go_on: None,
        on_addresses: Callable[[Mapping[int, tuple[str, int]]], None] = lambda addresses: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._restarts = Restarts(max_restarts)
        self._team, self._start_worker, self._clock = team, start, clock
        self._on_failure, self._on_addresses = on_failure, on_addresses
        self.running: dict[int, WorkerProcess] = {}
        self.workers: dict[int, WorkerProcess] = {}
        self.failures: list[Failure] = []
        self.addresses: dict[int, tuple[str, int]] = {}
        self.begun = False
        self._identity = (team.run_id, team.secret)
        self._reported_begin: set[int] = set()
        self._given_ranks: dict[int, int] = {}
        self._waiting: dict[int, tuple[float, Failure]] = {}  # the next life is due then
        self._one_ended_well = False
        self._end_at: float | None = None
        self._kill_at: float | None = None

    @property
    def ending(self) -> bool:
        """Whether the workers have been told to end."""
        return self._kill_at is not None

    def run(self, on_step: Callable[[], None] = lambda: None) -> int | None:
        """Start all workers, and return when all have ended; ``on_step`` is called all the while.

        SIGINT and SIGTERM are passed on to the workers; a second one kills them. If ``on_step``
        raises, the workers are ended and the error is raised.

        Returns:
            The signal that ended the run, None if none did.
        """
        with signals_noted() as caught:
            heeded = 0
            try:
                for local_rank in range(self._team.num_local):
                    self._start(local_rank, self._team.variables(local_rank))
                self._team.open()  # the workers import torch meanwhile
                while self.step():
                    for number in caught[heeded:]:
                        heeded += 1
                        self.end(number)
                    on_step()
            finally:
                if self.running and not self.ending:
                    self.end(signal.SIGTERM)
                while self.step(0.02):
                    if len(caught) > heeded:
                        self.kill()
                for worker in self.workers.values():
                    worker.close()
                self._wait_until_others_are_told(lambda: len(caught) > heeded)
                self._team.close()
        return caught[0] if caught else None

    def _wait_until_others_are_told(self, is_interrupted: Callable[[], bool]) -> None:
        """At most NOTICE_S, and not longer than the user wants."""
        if not self._team.others_told(1.0):
            logger.warning(
                "telling the other hosts that the run has ended before it began; until they have "
                "heard it, at most %.0f s",
                NOTICE_S,
            )
        while not self._team.others_told(0.1) and not is_interrupted():
            pass

    def step(self, timeout_s: float = POLL_S) -> bool:
        """Wait for something to happen, at most so long, and act on it.

        Returns:
            Whether anyone runs or is to run.
        """
        if self._waiting:
            due = min(at for at, _ in self._waiting.values())
            timeout_s = min(timeout_s, max(0.0, due - self._clock()))
        things = [thing for worker in self.running.values() for thing in worker.waits_for()]
        try:
            multiprocessing.connection.wait(things, timeout_s)  # type: ignore[arg-type]
        except OSError:
            # poll(2) takes no more descriptors than the process may have, and somebody may have
            # lowered that number. The wait only makes us quick: all are looked at in any case.
            time.sleep(min(timeout_s, FIRST_DELAY_S))
        for worker in self.running.values():
            worker.take_in()
        self._take_reports()
        now = self._clock()
        for local_rank, worker in list(self.running.items()):
            ending = worker.ending()
            if ending is not None:
                self._ended(local_rank, ending, now)
        if not self.ending:
            self._restart(now)
        if self._end_at is not None and now >= self._end_at and not self.ending:
            self.end(signal.SIGTERM)  # quieter than SIGINT: no traceback beside the failure's
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
            if now >= self._kill_at + UNKILLABLE_S:
                self.running.clear()
        return bool(self.running or self._waiting)

    def end(self, number: int) -> None:
        """Send all workers a signal, and SIGKILL if they outlive it by PATIENCE_S.

        Called again, SIGKILL follows at once. Nobody is started again after it.
        """
        # Under another launcher that one ends the others.
        if not self._team.told and not self.begun and not self._all_here_train():
            self._team.tell_failed("it was interrupted there")
        if self.ending:
            self.kill()
            return
        self._kill_at = self._clock() + PATIENCE_S
        self._give_up_waiting()
        for worker in self.running.values():
            worker.send(number)

    def kill(self) -> None:
        """Send all workers, and what they started, SIGKILL."""
        self._kill_at = min(self._clock(), self._kill_at or self._clock())
        self._give_up_waiting()
        for worker in self.running.values():
            worker.kill_group()
            worker.send(signal.SIGKILL)  # it may not yet have made its group

    def _start(self, local_rank: int, variables: Mapping[str, str]) -> None:
        worker = self._start_worker(local_rank, variables)
        self.workers[local_rank] = self.running[local_rank] = worker
        self._restarts.started(local_rank, self._clock())

    def _rank(self, local_rank: int) -> int:
        own = self._team.rank(local_rank)
        return self._given_ranks.get(local_rank, -1 - local_rank) if own is None else own

    def _take_reports(self) -> None:
        """Note what the workers say: who trains, where all are, which rank a joiner was given."""
        for local_rank, worker in self.workers.items():
            for report in worker.reports.take():
                if report.begins:
                    self._reported_begin.add(local_rank)
                if report.rank is not None:
                    self._given_ranks[local_rank] = report.rank
                    worker.show_rank(report.rank)
                if report.run_id is not None:
                    self._identity = (report.run_id, report.secret or self._identity[1])
                if report.addresses is not None:
                    for rank, address in report.addresses.items():
                        self.addresses.pop(rank, None)  # the latest come last
                        self.addresses[rank] = address
                    self._on_addresses(self.addresses)

    def _all_here_train(self) -> bool:
        self._take_reports()
        return len(self._reported_begin) == self._team.num_local

    def _ended(self, local_rank: int, ending: Ending, now: float) -> None:
        worker = self.running.pop(local_rank)
        if self.ending or ending.failed:
            worker.kill_group()  # what it started and left behind, such as loader processes
        if self.ending:
            return
        if not ending.failed:
            self._one_ended_well = True
            return
        self._fail(local_rank, ending, now)

    def _fail(self, local_rank: int, ending: Ending, now: float) -> None:
        """A life of this worker failed, or could not begin."""
        self.begun = self.begun or self._all_here_train()
        due = self._restarts.due_after_death(local_rank, now) if self.begun else None
        rank = self._rank(local_rank)
        failure = Failure(rank, ending, None if due is None else due - now)
        if due is None:
            self.failures.append(failure)
        else:
            self._waiting[local_rank] = (due, failure)
        self._on_failure(failure, self.begun)
        if not self.begun and self._end_at is None:
            self._end_at = now + GRACE_S
            self._team.tell_failed(f"worker {shown_rank(rank)} {ending.reason}")

    def _restart(self, now: float) -> None:
        """Start those who are due, or all anew, or see that it is of no use any more."""
        due = sorted(worker for worker, (at, _) in self._waiting.items() if at <= now)
        anew = not self.running and not self._team.others_elsewhere
        if anew and self._waiting:
            if self._one_ended_well or len(self._waiting) < self._team.num_local:
                self._give_up_waiting()
                return
            if due:
                due = sorted(self._waiting)
                self.begun = False
                self._reported_begin.clear()
                self.addresses.clear()
                self._team.begin_anew()
        for local_rank in due:
            del self._waiting[local_rank]
            self.workers[local_rank].close()
            try:
                self._start(local_rank, self._next_life(local_rank, anew=anew))
            except Exception as error:  # no process or descriptor left: the others are healthy
                self._restarts.started(local_rank, now)
                reason = f"could not be started ({type(error).__name__}: {error})"
                self._fail(local_rank, Ending(reason), now)

    def _next_life(self, local_rank: int, *, anew: bool) -> dict[str, str]:
        """The variables of a worker that is started again."""
        own, count = self._team.variables(local_rank), self._restarts.count(local_rank)
        if anew:
            return {**own, "GOSSIPDP_RESTARTS": str(count)}
        rank = self._rank(local_rank)
        if rank >= 0:
            own["RANK"] = str(rank)
        others = [self.addresses[each] for each in reversed(self.addresses) if each != rank]
        return {
            **own,
            **identity_variables(*self._identity),
            **join_variables(others or self._team.join, count),
        }

    def _give_up_waiting(self) -> None:
        self.failures += [
            dataclasses.replace(failure, restart_in_s=None) for _, failure in self._waiting.values()
        ]
        self._waiting.clear()


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted instead of acted on; handlers of the user's own stay."""
    caught: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = before
                signal.signal(number, lambda received, frame: caught.append(received))
    try:
        yield caught
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
