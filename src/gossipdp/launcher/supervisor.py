"""``Supervisor``: the workers of one run on this machine, watched one by one.

torchrun ends all workers when one dies. Here the others go on, and the dead one may be started
again. Everything happens in the calling thread, in :meth:`Supervisor.step`.
"""

import dataclasses
import math
import multiprocessing.connection
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gossipdp.launcher.faults import FaultInjector, FaultPlan
from gossipdp.launcher.launch_plan import LaunchPlan
from gossipdp.launcher.processes import Ending, StartProcess, SupervisedWorker
from gossipdp.launcher.reports import Report
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
# The time that workers have to end after another has, before a sentence says which have not.
SAY_WAITS_AFTER_S = 10.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """A worker that ended with an error of its own, not one that we ended.

    ``rank``: see :class:`SupervisedWorker`. ``endings``: of all its lives; the last one is this
    failure. ``process_id``: of its process, or a replica's first one; 0 if none was started.
    ``is_injected``: it was killed by our :class:`FaultInjector`.
    """

    rank: int
    endings: tuple[Ending, ...]
    process_id: int = 0
    is_injected: bool = False

    @property
    def ending(self) -> Ending:
        return self.endings[-1]


def shown_rank(rank: int) -> str:
    """Return a rank for people; a negative one stands for a worker that has none yet."""
    return str(rank) if rank >= 0 else f"+{-1 - rank}"


def describe(failures: Sequence[Failure]) -> str:
    """Describe all failures in their order; identical ones once, with their ranks.

    The first life of a worker comes first: the later failures may be its consequences.
    """
    ranks: dict[tuple[Ending, ...], list[int]] = {}
    for failure in failures:
        ranks.setdefault(failure.endings, []).append(failure.rank)
    paragraphs = []
    for endings, who in ranks.items():
        noun = "worker" if len(who) == 1 else "workers"
        lives = "; started again, it ".join(each.reason for each in endings)
        line = f"{noun} {', '.join(map(shown_rank, sorted(who)))} {lives}"
        details = next((each.details.rstrip() for each in endings if each.details), "")
        paragraphs.append(f"{line}:\n{details}" if details else line)
    return "\n\n".join(paragraphs)


class Supervisor:
    """The workers of a plan on this machine, and the consequences of each one's end.

    If a worker fails before all of them train, the others are ended: they would wait for it in
    vain. After that the others go on. A worker that we end is no failure. While restarts are left,
    a worker that fails after all have begun to train is started again, and joins the others by the
    addresses that they report, 0.1·2^k s later, at most 10 s, after k lives without a step.

    When no worker is left to join, all are started again, as one restart, if all are of this host
    and go on from checkpoints by themselves. Otherwise the run is over.

    If another worker here ends well, a kill by our own faults is no failure. In all else it has the
    consequences of any other death.

    Once a worker holds the average at the end of the run, no worker is started again. If one was
    started again and does not take part yet, it is ended. If restarts were left for it, that is no
    failure: the run is complete without it.

    Args:
        max_restarts: how many restarts, of all workers together.
        on_failure: called once for each failure; the others go on if all have :attr:`begun`.
        on_sentence: called with sentences for the user, once with each that workers have.

    Attributes:
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
        self._faults = faults or FaultInjector(FaultPlan(), plan.num_local)
        self._sentences: set[str] = set()
        first = plan.first_rank
        self.workers = [
            SupervisedWorker(local_rank, -1 - local_rank if first is None else first + local_rank)
            for local_rank in range(plan.num_local)
        ]
        self.failures: list[Failure] = []
        self._some_ended_well = False
        self.begun = self.is_complete = False
        self.saved: dict[int, tuple[int, str]] = {}
        self.unsaved: dict[int, str] = {}
        self._checkpoints: dict[str, bool] = {}  # whether all would go on from there, by directory
        self._due: dict[SupervisedWorker, tuple[float, Failure]] = {}  # when the next life starts
        self._starts_over = False
        self._looked_at_s = -math.inf  # when the due lives were last considered
        self._caught: list[int] = []  # signals, of which so many are heeded
        self._num_heeded = 0
        self._grace_s = grace_s()
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._ended_at = math.inf
        self._say_waits_at = 0.0  # not due before something sets it; infinity once it was said
        self._is_killing = False

    @property
    def running(self) -> list[SupervisedWorker]:
        return [worker for worker in self.workers if worker.runs]

    @property
    def ending(self) -> bool:
        return self._kill_at is not None

    @property
    def may_restart(self) -> bool:
        """Return whether a worker is due again, or may be; and then has a run to go on with."""
        has_others = len(self.workers) > 1 or self._plan.others_elsewhere or self._may_resume
        is_over = self.ending or self.is_complete
        return bool(self._due or self._num_restarts_left) and has_others and not is_over

    @property
    def all_train(self) -> bool:
        """Return whether the last life of each worker has made a gradient step."""
        return all(worker.trains for worker in self.workers)

    @property
    def loss(self) -> str:
        """Return a sentence on what was lost if the run began and all its workers failed, or ""."""
        if not self.failures or not self._has_begun or self._others_count:
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
    def _has_begun(self) -> bool:
        return self.begun or self._plan.num_meetings > 0

    @property
    def _may_resume(self) -> bool:
        """Return whether all workers would go on from checkpoints if none were left."""
        resumes = bool(self._checkpoints) and all(self._checkpoints.values())
        return resumes and self._plan.hosted is not None and not self._others_count

    @property
    def _others_count(self) -> bool:
        """Return whether the run has, or had, a result without the workers that failed here."""
        return self._plan.others_elsewhere or self._some_ended_well or self.is_complete

    def run(self, on_step: Callable[[], None] = lambda: None) -> int | None:
        """Start all workers, and return once all have ended: the signal that ended the run, if any.

        At SIGINT and SIGTERM the workers get it too, and SIGTERM at SIGHUP: those that save do so,
        and no worker shows a traceback. A second SIGINT kills them; others come twice where a shell
        or a launcher signals its group too. ``on_step`` is called all the while; if it raises, the
        workers are ended and the error is raised.
        """
        with signals_noted() as self._caught:
            try:
                self.start()
                while self.step():
                    on_step()
            finally:
                if (self.running or self._due) and not self.ending:
                    self.end()
                while self.step(0.02):
                    pass
                self.close()
        return self._caught[0] if self._caught else None

    def start(self) -> None:
        for worker in self.workers:
            worker.start(self._plan, self._start_process, rejoins=False)
        self._plan.open()  # the workers import torch meanwhile

    def step(self, timeout_s: float = POLL_S) -> bool:
        """Wait at most ``timeout_s`` for an event and act; return whether a worker runs or will."""
        dues = [due_at for due_at, _ in self._due.values() if due_at > self._looked_at_s]
        waits_s = [due_at - self._clock() for due_at in dues]  # others are held back
        timeout_s = max(0.0, min(timeout_s, self._faults.wait_s(), *waits_s))
        things = [thing for worker in self.running for thing in worker.waits_for()]
        try:
            multiprocessing.connection.wait(things, timeout_s)  # type: ignore[arg-type]
        except OSError:
            # poll(2) takes no more descriptors than the process may have, and that limit may have
            # been lowered. Without the wait we only react later: all processes are looked at below.
            time.sleep(min(timeout_s, POLL_S))
        self._take_reports()
        for number in self._caught[self._num_heeded :]:  # the workers may have got it too
            self._num_heeded += 1
            if number == signal.SIGINT or not self.ending:
                self.end(signal.SIGTERM if number == signal.SIGHUP else number)
        now = self._looked_at_s = self._clock()
        for worker in self.running:
            ending = worker.poll()
            if ending is not None:
                self._ended(worker, ending, now)
        if not self.ending:
            if self.is_complete:
                self._end_latecomers()
                if len(self.running) < len(self.workers):
                    self._say_waits_at = self._say_waits_at or now + SAY_WAITS_AFTER_S
                    text = "the run is complete; waiting for {} to end, unless Ctrl+C ends it"
                    self._say_waits(now, text)
            self._faults.step(self.workers)
            self._restart(now)
        if self._end_at is not None and now >= self._end_at and not self.ending:
            self.end()
        if self._kill_at is not None:
            due_at = self._kill_due_at(self._kill_at)
            if now >= due_at:
                self.kill()
                if now >= self._kill_at + UNKILLABLE_S:
                    for worker in self.running:
                        worker.close()
            else:
                most_s, them = math.ceil(due_at - now), "them" if self.running[1:] else "it"
                text = f"waiting at most {most_s} s for {{}} to end; Ctrl+C kills {them}"
                self._say_waits(now, text)
        return bool(self.running or self._due)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send all workers SIGTERM, and SIGKILL if they outlive it by PATIENCE_S.

        If a worker takes a last checkpoint, they have GOSSIPDP_GRACE_S more, counted again whenever
        it reports that it still does, and only PATIENCE_S once all have saved. Such a worker gets
        ``number``. Else, once all have begun, a script may save by itself: they have PATIENCE_S
        less than GOSSIPDP_GRACE_S, because clusters kill the launcher itself after 30 s. A second
        call sends SIGKILL at once. Afterwards no worker is started again.
        """
        if self.ending:
            self.kill()
            return
        saves = any(worker.saves for worker in self.running)
        own_s = self.begun * max(0.0, self._grace_s - 2 * PATIENCE_S)
        self._ended_at = self._clock()
        self._kill_at = self._ended_at + PATIENCE_S + (self._grace_s if saves else own_s)
        self._faults.release()  # a stopped worker would not see the signal
        self._give_up_waiting()
        for worker in self.running:  # those without our handlers by SIGTERM
            worker.send(number if worker.saves else signal.SIGTERM)
        if self.begun and saves and not self.is_complete:
            self._say_waits_at = math.inf
            text = "the workers are to end their step and save; Ctrl+C now kills them unsaved"
            self._on_sentence(text)
        else:
            self._say_waits_at = self._ended_at + PATIENCE_S

    def kill(self) -> None:
        """Send all workers, and what they started, SIGKILL."""
        if not self._is_killing:  # a later call does not lengthen the wait for their ends
            self._is_killing, self._kill_at = True, self._clock()
        self._give_up_waiting()
        for worker in self.running:
            worker.kill()

    def close(self) -> None:
        """Let go of all workers, which have ended, and judge the kills of our faults."""
        self._faults.close()
        self._take_reports()  # the last ones before their ends
        if self._some_ended_well:
            self.failures = [failure for failure in self.failures if not failure.is_injected]
        for worker in self.workers:
            worker.close()
        self._plan.close()

    def _kill_due_at(self, kill_at: float) -> float:
        """Return when all are killed: a report since the end that one saves, or has, counts."""
        due_at = list[float]()
        for worker in [] if self._is_killing else self.running:
            heard = worker.saves_s + PATIENCE_S + worker.saves * self._grace_s
            # Of a replica only the first process says that it has saved.
            is_alone = len(worker.processes) == 1
            has_saved = is_alone and not worker.saves and worker.saves_s > self._ended_at
            due_at.append(heard if has_saved else max(kill_at, heard))
        return max(due_at, default=kill_at)

    def _take_reports(self) -> None:
        """Note the workers' reports: who trains, where all are, the rank of a joiner, and so on."""
        for worker in self.workers:
            for shard, process in enumerate(worker.processes):
                for report in process.reports.take():
                    self._take_report(worker, shard, report)
        self.begun |= all(worker.takes_part for worker in self.workers)

    def _take_report(self, worker: SupervisedWorker, shard: int, report: Report) -> None:
        self._plan.join_infos[shard].take(report)
        if report.begins:
            worker.begun.add(shard)
        if report.saves or (report.saves is not None and shard == 0):
            worker.saves, worker.saves_s = report.saves, self._clock()
        if report.unsaved is not None:
            self.unsaved[worker.rank] = report.unsaved
        if report.says is not None and report.says not in self._sentences:
            self._sentences.add(report.says)
            self._on_sentence(report.says)
        if shard > 0:  # in all else the first process speaks for its replica
            return
        worker.trains |= bool(report.trains)
        worker.consolidated |= bool(report.consolidated)
        self.is_complete |= worker.consolidated
        if report.saved is not None:
            self.saved[worker.rank] = report.saved
        if report.checkpoints is not None:
            self._checkpoints.update([report.checkpoints])
        if report.rank is not None:
            worker.rank = report.rank

    def _ended(self, worker: SupervisedWorker, ending: Ending, now: float) -> None:
        self._take_reports()  # its last ones
        is_injected = self._faults.ended(worker.rank, ending.reason)
        self._some_ended_well |= not ending.reason and worker.takes_part
        if self.ending or ending.reason:
            worker.kill_group()
        if not self.ending and not self._starts_over and ending.reason:
            self._fail(worker, ending, now, worker.processes[0].pid, is_injected=is_injected)

    def _fail(
        self,
        worker: SupervisedWorker,
        ending: Ending,
        now: float,
        process_id: int = 0,
        *,
        is_injected: bool = False,
    ) -> None:
        """Handle the failure of a life of this worker, or of its start."""
        may_restart = self._num_restarts_left > 0 and self._has_begun
        if worker.missed_end:
            return
        if self.is_complete and not worker.consolidated and may_restart:
            self._miss_end(worker, ending.reason)
            return
        doubled_s = 0.0 if worker.trains else 2 * worker.delay_s
        worker.delay_s = min(MAX_DELAY_S, max(FIRST_DELAY_S, doubled_s))
        worker.endings += (ending,)
        failure = Failure(worker.rank, worker.endings, process_id, is_injected)
        if may_restart and not self.is_complete:
            self._num_restarts_left -= 1
            self._due[worker] = now + worker.delay_s, failure
        else:
            self.failures.append(failure)
        self._on_failure(failure)
        if not self.begun and not self._due and self._end_at is None:
            self._end_at = now + GRACE_S

    def _restart(self, now: float) -> None:
        """Start the workers that are due; without a worker to join, start all or give them up."""
        is_lost = not any(each.takes_part for each in self.running)
        is_lost &= not self._plan.others_elsewhere
        if self._may_resume and self._due:
            self._starts_over |= is_lost or not self.begun
        elif is_lost:
            if not self.running:  # else one that joins may have all it needs to go on
                self._give_up_waiting()
            return
        if self._starts_over:
            for worker in self.running:  # they wait in vain
                worker.kill()
            if not self.running and all(now >= due_at for due_at, _ in self._due.values()):
                self._resume(now)
            return
        for worker, (due_at, _) in list(self._due.items()):
            if now >= due_at:
                left = f"restarts left: {self._num_restarts_left}"
                self._on_sentence(f"worker {shown_rank(worker.rank)} is started again ({left})")
                self._start_again(worker, now, rejoins=True)

    def _resume(self, now: float) -> None:
        self.begun = self._starts_over = self._some_ended_well = False
        self._end_at = None
        self.failures.clear()
        self._num_restarts_left += max(0, len(self._due) - 1)  # together they are one restart
        self._plan.meet_again()
        left = f"restarts left: {self._num_restarts_left}"
        self._on_sentence(f"no worker is left: all are started again ({left})")
        for worker in self.workers:
            self._start_again(worker, now, rejoins=False)
        self._plan.open()

    def _start_again(self, worker: SupervisedWorker, now: float, *, rejoins: bool) -> None:
        self._due.pop(worker, None)
        try:
            worker.start(self._plan, self._start_process, rejoins=rejoins)
        except Exception as error:  # no process or descriptor left: the others are healthy
            reason = f"could not be started ({type(error).__name__}: {error})"
            self._fail(worker, Ending(reason), now)

    def _end_latecomers(self) -> None:
        """End the workers that were started again and find the run complete; start no other."""
        for worker, (_, failure) in self._due.items():
            self._miss_end(worker, failure.ending.reason)
        self._due.clear()
        for worker in self.running:
            if worker.endings and not worker.takes_part and not worker.missed_end:
                self._miss_end(worker, "is ended")
                worker.send(signal.SIGTERM)

    def _miss_end(self, worker: SupervisedWorker, reason: str) -> None:
        worker.missed_end = True
        self._on_sentence(
            f"worker {shown_rank(worker.rank)} {reason}: the run is complete without it"
        )

    def _say_waits(self, now: float, text: str) -> None:
        """Say once, if it is due, for which workers this waits; they stand for the braces."""
        if now >= self._say_waits_at and self.running:
            self._say_waits_at = math.inf
            who = " and ".join(f"worker {shown_rank(worker.rank)}" for worker in self.running)
            self._on_sentence(text.format(who))

    def _give_up_waiting(self) -> None:
        self.failures += [failure for _, failure in self._due.values()]
        self._due.clear()


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP, and do nothing; handlers of the user's own stay."""
    caught: list[int] = []
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.default_int_handler):
                previous[number] = before
                signal.signal(number, lambda received, frame: caught.append(received))
    try:
        yield caught
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
