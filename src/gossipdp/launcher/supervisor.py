"""``Supervisor``: the workers of one run on this machine, watched one by one.

torchrun ends all workers when one dies. Here the others go on, and the dead one may be started
again. The caller says how to start a process (:mod:`.local`). Everything happens in the calling
thread, in :meth:`Supervisor.step`.

A worker is a process, or a replica of several, which live and end together. The processes of a
replica meet at a store of their own. Each life of the replica makes a new one, because no process
group survives the death of a member. Processes of one shard in different replicas meet as the
workers of a run do. So each process reports the addresses of its own shard's network, and a replica
that is started again joins one network for each of its processes.

A new replica that joins a run (``gossipdp run --join``) does the same; its user gives an address in
each network. Its rank must be the same in all networks. So its first process asks for one in its
own network, as any joining worker does, and passes it to the others.
"""

import abc
import dataclasses
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import final

import msgspec

from gossipdp.launcher.environment import UNKNOWN_RANK, replica_variables
from gossipdp.launcher.faults import FaultInjector, Target
from gossipdp.launcher.launch_plan import JoinInfo, LaunchPlan
from gossipdp.launcher.reports import Report, ReportChannel
from gossipdp.launcher.store import HostedStore
from gossipdp.rules import grace_s

# The longest time that one step waits for something to happen.
POLL_S = 0.1
# If a worker fails before the run has begun, the others are ended after this time. So workers that
# fail for the same reason have the time to say so.
GRACE_S = 0.25
# The time from the signal that ends a worker to SIGKILL, and from there until we give it up: a
# process that hangs in the kernel cannot be killed.
PATIENCE_S, UNKILLABLE_S = 1.5, 10.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 10.0


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a worker's process; ``reason`` is empty if it ended well.

    ``reason`` completes "worker 3 ..." and "workers 3, 4 ..." alike.
    """

    reason: str = ""
    details: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that ended with an error of its own, not one that we ended.

    ``rank`` is -1, -2, ... for the first, second, ... joining worker that has no rank yet.
    ``before``: how its earlier lives ended.
    ``process_id``: of its process, or a replica's first one; 0 if none was started.
    ``is_injected``: it was killed by our :class:`FaultInjector`.
    """

    rank: int
    ending: Ending
    before: tuple[Ending, ...] = ()
    process_id: int = 0
    is_injected: bool = False


class WorkerProcess(abc.ABC):
    """A worker, whose process leads its own group, so that what it started ends with it."""

    pid: int

    def __init__(self) -> None:
        self.reports = ReportChannel()

    @abc.abstractmethod
    def waits_for(self) -> Sequence[object]:
        """Return descriptors and the like; when something happens, one becomes readable."""

    @abc.abstractmethod
    def poll(self) -> Ending | None:
        """Take in what has arrived, and return how it ended; None while it runs. Never block."""

    def take_reports(self) -> list[Report]:
        """Return its reports since the last call. Never block."""
        return self.reports.take()

    def close(self) -> None:
        """Let go of a process that has ended."""
        self.reports.close()

    def send(self, number: int) -> None:
        """Send the process a signal; valid until :meth:`poll` has returned its ending."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Send SIGKILL to everything in its process group, even after its own end."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill a process that runs, and what it started."""
        self.kill_group()
        self.send(signal.SIGKILL)  # it may not yet have made its group


StartProcess = Callable[[Mapping[str, str]], WorkerProcess]


def start_worker(
    join_infos: Sequence[JoinInfo], start_process: StartProcess, own: Mapping[str, str]
) -> WorkerProcess:
    """Start a worker: a process, or a replica of one process for each of several shards.

    Args:
        join_infos: of the run, by shard.
        start_process: starts one process with these variables.
        own: variables of the worker, as for a worker of one process.
    """
    if len(join_infos) == 1:
        return start_process(own)
    store = HostedStore()
    num_shards, processes = len(join_infos), list[WorkerProcess]()
    with ExitStack() as started:
        started.callback(store.close)
        for shard, join_info in enumerate(join_infos):
            variables = replica_variables(own, shard, num_shards, (store.host, store.port))
            if own.get("GOSSIPDP_JOIN"):
                rank, num_restarts = own.get("RANK", UNKNOWN_RANK), own["GOSSIPDP_RESTARTS"]
                variables |= join_info.join_variables(int(rank), int(num_restarts))
            process = start_process(variables)
            started.callback(process.close)
            started.callback(process.kill_group)
            processes.append(process)
        store.open_in_background("", num_shards)  # the processes import torch meanwhile
        started.pop_all()
    return ReplicaProcess(processes, join_infos, store)


@final
class ReplicaProcess(WorkerProcess):
    """The processes of one replica, by shard; when one of them fails, the others are killed.

    They could not go on: FSDP's collectives wait for all of them. After SIGTERM has been passed on,
    all end by themselves, and the end of one kills no other: that one may still be writing its
    checkpoint. If this takes too long, the supervisor kills all.
    """

    def __init__(
        self, processes: Sequence[WorkerProcess], join_infos: Sequence[JoinInfo], store: HostedStore
    ) -> None:
        self.pid = processes[0].pid
        self._running = dict(enumerate(processes))
        self.processes, self._join_infos, self._store = processes, join_infos, store
        self._failure: Ending | None = None
        self._is_ending = False
        self._begun: set[int] = set()

    def waits_for(self) -> list[object]:
        return [thing for each in self._running.values() for thing in each.waits_for()]

    def take_reports(self) -> list[Report]:
        """Return the first process's reports, some of the others', and a begin once all began."""
        passed_on = []
        for shard, process in enumerate(self.processes):
            for report in process.take_reports():
                if report.begins:
                    self._begun.add(shard)
                if shard == 0:  # the supervisor takes note of its network
                    passed_on.append(msgspec.structs.replace(report, begins=None))
                else:
                    self._join_infos[shard].take(report)
                    of_all = Report(
                        says=report.says, saves=report.saves or None, unsaved=report.unsaved
                    )
                    passed_on += [of_all] if of_all != Report() else []
        if len(self._begun) == len(self.processes):
            self._begun.clear()
            passed_on.append(Report(begins=True))
        return passed_on

    def poll(self) -> Ending | None:
        for shard, process in list(self._running.items()):
            ending = process.poll()
            if ending is None:
                continue
            del self._running[shard]
            if ending.reason and self._failure is None:
                reason = f"lost its process {shard}, which {ending.reason}"
                self._failure = dataclasses.replace(ending, reason=reason)
                for other in () if self._is_ending else self._running.values():
                    other.kill()
        return None if self._running else self._failure or Ending()

    def send(self, number: int) -> None:
        self._is_ending |= number in (signal.SIGINT, signal.SIGTERM)
        for process in self._running.values():
            process.send(number)

    def kill_group(self) -> None:
        for process in self.processes:
            process.kill_group()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self._store.close()


def exit_reason(code: int) -> str:
    """Return an exit code in words, none for 0; a negative code is minus the signal."""
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    names = {each.value: each.name for each in signal.Signals}
    return f"died of signal {-code} ({names.get(-code, 'unknown')})"


def shown_rank(rank: int) -> str:
    """Return a rank for people; a negative one stands for a worker that has none yet."""
    return str(rank) if rank >= 0 else f"+{-1 - rank}"


def describe(failures: Sequence[Failure]) -> str:
    """Describe all failures in their order; identical ones once, with their ranks.

    The first life of a worker comes first: the later failures may be its consequences.
    """
    ranks: dict[tuple[Ending, ...], list[int]] = {}
    for failure in failures:
        ranks.setdefault((*failure.before, failure.ending), []).append(failure.rank)
    paragraphs = []
    for endings, who in ranks.items():
        noun = "worker" if len(who) == 1 else "workers"
        lives = "; started again, it ".join(each.reason for each in endings)
        line = f"{noun} {', '.join(map(shown_rank, sorted(who)))} {lives}"
        details = next((each.details.rstrip() for each in endings if each.details), "")
        paragraphs.append(f"{line}:\n{details}" if details else line)
    return "\n\n".join(paragraphs)


@dataclasses.dataclass
class _Lives:
    """One worker over all its lives; ``due`` is when the next life starts.

    ``takes_part``: the present life has begun. ``trains``: it has made a gradient step.
    ``missed_end``: the run became complete without this worker.
    ``saves``: it takes a last checkpoint when it is ended, as it said last at ``saves_s``.
    """

    rank: int
    takes_part: bool = False
    trains: bool = False
    consolidated: bool = False
    missed_end: bool = False
    saves: bool = False
    saves_s: float = 0.0
    num_restarts: int = 0
    due: float | None = None
    failure: Failure | None = None
    endings: tuple[Ending, ...] = ()


class Supervisor:
    """The workers of a plan on this machine, and the consequences of each one's end.

    If a worker fails before all of them train, the others are ended: they would wait for it in
    vain. After that the others go on. A worker that we end is no failure. While restarts are left,
    a worker that fails after all have begun to train is started again, and joins the others by the
    addresses that they report; its k-th restart comes min(0.1·2^(k−1), 10) seconds after its death.

    When no worker is left to join, all are started again, as one restart, if all are of this host
    and go on from checkpoints by themselves. Otherwise the run is over.

    If another worker here ends well, a kill by our own faults is no failure. In all else it has the
    consequences of any other death.

    Once a worker holds the average at the end of the run, no worker is started again. If one was
    started again and does not take part yet, it is ended. If restarts were left for it, that is no
    failure: the run is complete without it.

    Args:
        plan: the run they belong to.
        start_process: starts a process with these variables.
        max_restarts: how many restarts, of all workers together.
        faults: kills, stops and slows the workers.
        on_failure: called once for each failure; the others go on if all have :attr:`begun`.
        on_sentence: called with sentences for the user, once with each that workers have.
        clock: seconds, monotonic.

    Attributes:
        running: the workers that run, by local rank.
        workers: the last life of each.
        failures: of the workers that were not started again.
        begun: whether all workers here have begun to train, as last seen.
        is_complete: whether a worker holds the average at the end of the run.
        saved: (step, directory) of the last checkpoints, by rank, of workers that were ended.
        unsaved: the reasons why last checkpoints could not be saved, by rank.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        start_process: StartProcess,
        *,
        max_restarts: int = 0,
        faults: FaultInjector | None = None,
        on_failure: Callable[[Failure], None] = lambda failure: None,
        on_sentence: Callable[[str], None] = lambda sentence: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._start_process, self._clock = plan, start_process, clock
        self._num_restarts_left = max_restarts
        self._on_failure, self._on_sentence = on_failure, on_sentence
        self._faults = faults
        self._sentences: set[str] = set()
        self.running: dict[int, WorkerProcess] = {}
        self.workers: dict[int, WorkerProcess] = {}
        self.failures: list[Failure] = []
        self._some_ended_well = False
        self.begun = self.is_complete = False
        self.saved: dict[int, tuple[int, str]] = {}
        self._checkpoints: dict[str, bool] = {}  # whether all would go on from there, by directory
        self._starts_over = False
        self.unsaved: dict[int, str] = {}
        self._grace_s = grace_s()
        self._join_info = plan.join_infos[0]  # for single processes, or each replica's first one
        first = plan.first_rank
        self._lives = [
            _Lives(-1 - local_rank if first is None else first + local_rank)
            for local_rank in range(plan.num_local)
        ]
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._is_killing = False

    @property
    def ending(self) -> bool:
        """Return whether the workers are being ended."""
        return self._kill_at is not None

    @property
    def may_restart(self) -> bool:
        """Return whether a worker is due again, or may be; and then has a run to go on with."""
        has_others = len(self._lives) > 1 or self._plan.others_elsewhere or self._may_resume
        is_over = self.ending or self.is_complete
        return bool(self._dues or self._num_restarts_left) and has_others and not is_over

    @property
    def ranks(self) -> list[int]:
        """Return the ranks of the workers that run."""
        return [self._lives[local_rank].rank for local_rank in self.running]

    @property
    def _dues(self) -> list[float]:
        return [lives.due for lives in self._lives if lives.due is not None]

    @property
    def _may_resume(self) -> bool:
        """Return whether all workers would go on from checkpoints if none were left."""
        resumes = bool(self._checkpoints) and all(self._checkpoints.values())
        return resumes and self._plan.hosted is not None and not self._others_count

    @property
    def _others_count(self) -> bool:
        """Return whether the run has, or had, a result without the workers that failed here."""
        return self._plan.others_elsewhere or self._some_ended_well or self.is_complete

    @property
    def loss(self) -> str:
        """Return a sentence on what was lost if the run began and all its workers failed, or ""."""
        has_begun = self.begun or self._plan.num_meetings > 0
        if not self.failures or not has_begun or self._others_count:
            return ""
        name = "worker-*/step-*.safetensors"
        files = [path for each in self._checkpoints for path in Path(each).rglob(name)]
        if not files:
            return "no worker is left, and no checkpoint was saved: all that they trained is lost"
        newest = max(files, key=lambda path: path.stat().st_mtime)
        return (
            f"no worker is left: all that they trained after {newest} is lost; start the run again "
            'with resume="auto" to go on from there'
        )

    @property
    def all_train(self) -> bool:
        """Return whether the last life of each worker has made a gradient step."""
        return all(lives.trains for lives in self._lives)

    def run(self, on_step: Callable[[], None] = lambda: None) -> int | None:
        """Start all workers, call ``on_step`` all the while, and return when all have ended.

        At SIGINT and SIGTERM the workers get it too: those that save do so, and no worker shows a
        traceback. A second signal kills them. If ``on_step`` raises, the workers are ended and the
        error is raised.

        Returns:
            The signal that ended the run, None if none did.
        """
        with signals_noted() as caught:
            heeded = 0
            try:
                for local_rank in range(self._plan.num_local):
                    self._start(local_rank, self._plan.worker_variables(local_rank))
                self._plan.open()  # the workers import torch meanwhile
                while self.step():
                    for number in caught[heeded:]:
                        heeded += 1
                        self.end(number)
                    on_step()
            finally:
                if self.running and not self.ending:
                    self.end()
                while self.step(0.02):
                    if len(caught) > heeded:
                        self.kill()
                self.close()
        return caught[0] if caught else None

    def step(self, timeout_s: float = POLL_S) -> bool:
        """Wait for something to happen, at most ``timeout_s``, and act on it.

        Returns:
            Whether a worker runs or is to run.
        """
        if self._dues:
            timeout_s = min(timeout_s, max(0.0, min(self._dues) - self._clock()))
        if self._faults is not None:
            timeout_s = min(timeout_s, self._faults.wait_s())
        things = [thing for worker in self.running.values() for thing in worker.waits_for()]
        try:
            multiprocessing.connection.wait(things, timeout_s)  # type: ignore[arg-type]
        except OSError:
            # poll(2) takes no more descriptors than the process may have, and that limit may have
            # been lowered. Without the wait we only react later: all processes are looked at below.
            time.sleep(min(timeout_s, POLL_S))
        self._take_reports()
        now = self._clock()
        for local_rank, worker in list(self.running.items()):
            ending = worker.poll()
            if ending is not None:
                self._ended(local_rank, ending, now)
        if self.is_complete and not self.ending:
            self._end_latecomers()
        if self._faults is not None and not self.ending:
            self._faults.step(
                [
                    Target(lives.rank, self.running.get(local_rank), lives.trains)
                    for local_rank, lives in enumerate(self._lives)
                ]
            )
        if not self.ending:
            self._restart(now)
        if self._end_at is not None and now >= self._end_at and not self.ending:
            self.end()
        if self._kill_at is not None and now >= self._kill_due_at(self._kill_at):
            self.kill()
            if now >= self._kill_at + UNKILLABLE_S:
                self.running.clear()
        return bool(self.running or self._dues)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send all workers SIGTERM, and SIGKILL if they outlive it by PATIENCE_S.

        If a worker takes a last checkpoint, they have GOSSIPDP_GRACE_S more, counted again whenever
        it reports that it still does. Such a worker gets ``number``. A second call sends SIGKILL at
        once. Afterwards no worker is started again.
        """
        if self.ending:
            self.kill()
            return
        self._kill_at = self._clock() + PATIENCE_S
        if self._faults is not None:
            self._faults.release()  # a stopped worker would not see the signal
        self._give_up_waiting()
        for local_rank, worker in self.running.items():  # those without our handlers by SIGTERM
            worker.send(number if self._lives[local_rank].saves else signal.SIGTERM)

    def close(self) -> None:
        """Let go of all workers, which have ended, and judge the kills of our faults."""
        if self._faults is not None:
            self._faults.close()
        self._take_reports()  # the last ones before their ends
        if self._some_ended_well:
            self.failures = [failure for failure in self.failures if not failure.is_injected]
        for worker in self.workers.values():
            worker.close()
        self._plan.close()

    def _kill_due_at(self, kill_at: float) -> float:
        """Return when all are killed: later, if a worker said lately that it saves or has saved."""
        lives = [] if self._is_killing else [self._lives[each] for each in self.running]
        heard = [(max(kill_at, each.saves_s + PATIENCE_S), each.saves) for each in lives]
        return max((at + saves * self._grace_s for at, saves in heard), default=kill_at)

    def kill(self) -> None:
        """Send all workers, and what they started, SIGKILL."""
        if not self._is_killing:  # a later call does not lengthen the wait for their ends
            self._is_killing, self._kill_at = True, self._clock()
        self._give_up_waiting()
        for worker in self.running.values():
            worker.kill()

    def _start(self, local_rank: int, variables: Mapping[str, str]) -> None:
        worker = start_worker(self._plan.join_infos, self._start_process, variables)
        self.workers[local_rank] = self.running[local_rank] = worker
        lives = self._lives[local_rank]
        lives.takes_part = lives.trains = lives.consolidated = lives.saves = False

    def _take_reports(self) -> None:
        """Note the workers' reports: who trains, where all are, the rank of a joiner, and so on."""
        for local_rank, worker in self.workers.items():
            lives = self._lives[local_rank]
            for report in worker.take_reports():
                lives.takes_part |= bool(report.begins)
                lives.trains |= bool(report.trains)
                lives.consolidated |= bool(report.consolidated)
                self.is_complete |= lives.consolidated
                if report.saves is not None:
                    lives.saves, lives.saves_s = report.saves, self._clock()
                if report.saved is not None:
                    self.saved[lives.rank] = report.saved
                if report.checkpoints is not None:
                    self._checkpoints.update([report.checkpoints])
                if report.unsaved is not None:
                    self.unsaved[lives.rank] = report.unsaved
                if report.rank is not None:
                    lives.rank = report.rank
                if report.says is not None and report.says not in self._sentences:
                    self._sentences.add(report.says)
                    self._on_sentence(report.says)
                self._join_info.take(report)
        self.begun |= all(lives.takes_part for lives in self._lives)

    def _ended(self, local_rank: int, ending: Ending, now: float) -> None:
        worker = self.running.pop(local_rank)
        is_injected = self._faults is not None and self._faults.ended(local_rank, ending.reason)
        self._some_ended_well |= not ending.reason
        if self.ending or ending.reason:
            worker.kill_group()  # what it started and left behind, such as loader processes
        if not self.ending and not self._starts_over and ending.reason:
            failure = Failure(0, ending, process_id=worker.pid, is_injected=is_injected)
            self._fail(local_rank, failure, now)

    def _fail(self, local_rank: int, failure: Failure, now: float) -> None:
        """Handle the failure of a life of this worker, or of its start; its rank follows here."""
        self._take_reports()
        lives = self._lives[local_rank]
        may_restart = self._num_restarts_left > 0 and (self.begun or self._plan.num_meetings > 0)
        if lives.missed_end:
            return
        if self.is_complete and not lives.consolidated and may_restart:
            self._miss_end(lives, failure.ending.reason)
            return
        failure = dataclasses.replace(failure, rank=lives.rank, before=lives.endings)
        lives.endings += (failure.ending,)
        if may_restart and not self.is_complete:
            self._num_restarts_left -= 1
            # 2**7 · 0.1 exceeds the cap; a larger power would only overflow one day.
            delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(lives.num_restarts, 7))
            lives.num_restarts += 1
            lives.due, lives.failure = now + delay_s, failure
        else:
            self.failures.append(failure)
        self._on_failure(failure)
        if not self.begun and not self._dues and self._end_at is None:
            self._end_at = now + GRACE_S

    def _restart(self, now: float) -> None:
        """Start the workers that are due; without a worker to join, start all or give them up."""
        nobody_trains = not any(self._lives[each].takes_part for each in self.running)
        is_lost = nobody_trains and not self._plan.others_elsewhere
        if self._may_resume and (self._dues or (self.begun and self.running)):
            self._starts_over |= is_lost or not self.begun
        elif is_lost:
            if not self.running:  # else one that joins may have all it needs to go on
                self._give_up_waiting()
            return
        if self._starts_over:
            for worker in self.running.values():  # they wait in vain
                worker.kill()
            if not self.running and now >= max(self._dues, default=now):
                self._resume(now)
            return
        for local_rank, lives in enumerate(self._lives):
            if lives.due is None or lives.due > now:
                continue
            own = self._plan.worker_variables(local_rank)
            if lives.rank >= 0:
                own["RANK"] = str(lives.rank)
            own |= self._join_info.join_variables(lives.rank, lives.num_restarts)
            left = f"restarts left: {self._num_restarts_left}"
            self._on_sentence(f"worker {shown_rank(lives.rank)} is started again ({left})")
            self._start_again(local_rank, own, now)

    def _start_again(self, local_rank: int, variables: Mapping[str, str], now: float) -> None:
        self._lives[local_rank].due = self._lives[local_rank].failure = None
        self.workers[local_rank].close()
        try:
            self._start(local_rank, variables)
        except Exception as error:  # no process or descriptor left: the others are healthy
            reason = f"could not be started ({type(error).__name__}: {error})"
            self._fail(local_rank, Failure(0, Ending(reason)), now)

    def _resume(self, now: float) -> None:
        self.begun = self._starts_over = self._some_ended_well = False
        self._end_at = None
        self.failures.clear()
        self._num_restarts_left += max(0, len(self._dues) - 1)  # together they are one restart
        self._plan.meet_again()
        left = f"restarts left: {self._num_restarts_left}"
        self._on_sentence(f"no worker is left: all are started again ({left})")
        for local_rank in range(len(self._lives)):
            self._start_again(local_rank, self._plan.worker_variables(local_rank), now)
        self._plan.open()

    def _end_latecomers(self) -> None:
        """End the workers that were started again and find the run complete; start no other."""
        for local_rank, lives in enumerate(self._lives):
            worker = self.running.get(local_rank)
            is_late = worker is not None and lives.num_restarts > 0 and not lives.takes_part
            if (lives.due is None and not is_late) or lives.missed_end:
                continue
            failure, lives.due, lives.failure = lives.failure, None, None
            self._miss_end(lives, failure.ending.reason if failure else "")
            if worker is not None:
                worker.send(signal.SIGTERM)

    def _miss_end(self, lives: _Lives, reason: str) -> None:
        lives.missed_end = True
        ended = f"worker {shown_rank(lives.rank)} {reason or 'is ended'}"
        self._on_sentence(f"{ended}: the run is complete without it")

    def _give_up_waiting(self) -> None:
        for lives in self._lives:
            if lives.failure is not None:
                self.failures.append(lives.failure)
            lives.due = lives.failure = None


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM instead of acting on them; handlers of the user's own stay."""
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
