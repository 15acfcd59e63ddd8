"""The live view of ``gossipdp demo``, and the faults that it does to its workers.

Both follow the logs that the workers write. Times of faults count from the first gradient step of
the run.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gossipdp.cli.top import draw, summary
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.board import JobStatus, JobWorker, facts_of, mark_slow, mean_of_known
from gossipdp.observe.log import (
    BeganRecord,
    ConsolidatingRecord,
    CountsRecord,
    EndRecord,
    NoticeRecord,
    Record,
    RunLog,
    RunLogTail,
    StartRecord,
    worker_file,
)

if TYPE_CHECKING:
    from gossipdp.launcher.supervisor import Failure

# All workers that can notice a fault have noticed it after this time.
KILL_NOTICED_S, STOP_NOTICED_S = 1.0, 6.0
# A killed worker is back after this time, and a run goes on so long after its last fault.
BACK_S = 8.0
AFTER_S = 4.0
REDRAW_EVERY_S, LINE_EVERY_S = 0.1, 5.0


# Faults that are asked for.


@dataclass(frozen=True)
class Fault:
    """One fault; a worker that is stopped goes on after ``for_s``."""

    rank: int
    kind: Literal["kill", "stop"]
    at_s: float
    for_s: float = 0.0

    def __str__(self) -> str:
        if self.kind == "kill":
            return f"kill worker {self.rank} at {self.at_s:g} s"
        return f"stop worker {self.rank} at {self.at_s:g} s for {self.for_s:g} s"


def parse_faults(kill: str | None, stop: str | None, *, num_workers: int) -> tuple[Fault, ...]:
    """Return the faults of ``--kill`` and ``--stop``, in order of time.

    Raises:
        ValueError: it cannot be read, a rank does not exist or is named twice, or all are named.

    Example:
        >>> print(*parse_faults("3@9s,0@5", "2@4s:8s", num_workers=4), sep="; ")
        stop worker 2 at 4 s for 8 s; kill worker 0 at 5 s; kill worker 3 at 9 s
    """
    time = r"(\d+(?:\.\d+)?)s?"
    faults = []
    for rank, at_s in _read("--kill", kill, rf"(\d+)@{time}", "RANK@TIME, such as 0@5s,3@9s"):
        faults.append(Fault(int(rank), "kill", float(at_s)))
    shape = "RANK@TIME:DURATION, such as 2@4s:8s, several with commas between them"
    for rank, at_s, for_s in _read("--stop", stop, rf"(\d+)@{time}:{time}", shape):
        faults.append(Fault(int(rank), "stop", float(at_s), float(for_s)))
        if not float(for_s):
            raise ValueError(f"--stop {stop}: stop a worker for longer than 0 s")
    ranks = [fault.rank for fault in faults]
    for fault in faults:
        _check_rank(f"--{fault.kind}", fault.rank, num_workers)
        if ranks.count(fault.rank) > 1:
            raise ValueError(
                f"--kill and --stop name worker {fault.rank} twice; one fault befalls a worker at "
                "most"
            )
    if len(ranks) == num_workers:
        raise ValueError(
            f"--kill and --stop name all {num_workers} workers; spare at least one, so that "
            "somebody goes on"
        )
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.rank)))


def parse_slow_worker(text: str | None, num_workers: int) -> tuple[int, float] | None:
    """Return ``"2:4"`` as (2, 4.0).

    >>> parse_slow_worker("2:4", num_workers=4)
    (2, 4.0)
    """
    shape = "RANK:FACTOR, such as 2:4"
    for rank, factor in _read("--slow-worker", text, r"(\d+):(\d+(?:\.\d*)?)", shape):
        _check_rank(f"--slow-worker {text}", int(rank), num_workers)
        if float(factor) < 1:
            raise ValueError(f"--slow-worker {text}: the factor must be at least 1, to slow it")
        return int(rank), float(factor)
    return None


def _read(option: str, text: str | None, pattern: str, shape: str) -> list[tuple[str, ...]]:
    """Return the pattern's groups for each word between commas."""
    words = [] if text is None else text.split(",")
    matches = [re.fullmatch(pattern, word.strip()) for word in words]
    if not all(matches):
        raise ValueError(f"{option} is {text!r}; write {shape}")
    return [match.groups() for match in matches if match]


def _check_rank(option: str, rank: int, num_workers: int) -> None:
    if rank >= num_workers:
        raise ValueError(
            f"{option}: there is no rank {rank} among {num_workers} workers; choose 0 to "
            f"{num_workers - 1}"
        )


def least_duration_s(faults: Sequence[Fault], *, restart: bool) -> float:
    """Return how long a run must train so that all faults happen, are noticed and pass."""
    after = [
        fault.at_s + fault.for_s + (BACK_S if restart and fault.kind == "kill" else AFTER_S)
        for fault in faults
    ]
    noticed = [fault.at_s + STOP_NOTICED_S + 1 for fault in faults if fault.kind == "stop"]
    return max(after + noticed, default=0.0)


# The workers, live.


@dataclass
class WorkerProgress:
    """The latest of one worker.

    Attributes:
        state: by its own log, or by another's while the worker is lost or silent.
        began_s: of its first process's first gradient step, by ``since_boot_s``.
        counts: its latest record.
        loss: the latest that it logged.
    """

    state: str = "starting"
    process_id: int | None = None
    began_s: float | None = None
    num_lives: int = 0
    counts: CountsRecord = field(default_factory=lambda: CountsRecord(0.0))
    loss: float | None = None
    ended: bool = False

    def take(self, record: Record) -> None:
        """Bring up to date."""
        if isinstance(record, CountsRecord):
            if self.state == "starting":
                self.state = "training"
            self.counts = record
            self.loss = self.loss if math.isnan(record.loss) else record.loss
        elif isinstance(record, BeganRecord):
            self.process_id = record.process_id
            self.num_lives += 1
            self.state = "training"
            if self.began_s is None:
                self.began_s = record.at_s
        elif isinstance(record, ConsolidatingRecord):
            self.state = "averaging"
        elif isinstance(record, EndRecord):
            self.ended = True
            self.state = "left"

    def noticed(self, what: str) -> None:
        """Take a notice of another worker about this one."""
        if self.ended:
            return
        if what == "lost":
            self.state = "lost"
        elif what == "silent" and self.state == "training":
            self.state = "silent"
        elif what in ("answered", "restarted"):
            self.state = "training"

    def job_worker(self, rank: int) -> JobWorker:
        """Return the worker's row in the table of ``gossipdp top``."""
        facts = facts_of(self.counts) | {"loss": self.loss}
        if self.state in ("lost", "silent"):
            facts["samples_per_second"] = None
        lives_before = max(0, self.num_lives - 1)
        facts["restarts"] = lives_before
        return JobWorker(rank, lives_before, self.state, True, "", **facts)


class LiveView:
    """The table of ``gossipdp top`` in a terminal, made of the logs; elsewhere a line now and then.

    Call ``poll`` a few times a second. It draws in the calling thread and starts none.

    >>> options = {"num_workers": 4, "budget_samples": 1000, "console": console}  # doctest: +SKIP
    >>> with LiveView(directory, **options) as view:  # doctest: +SKIP
    ...     launch(train, world_size=4, on_poll=view.poll)
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        budget_samples: int,
        console: Console,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self.workers = [WorkerProgress() for _ in range(num_workers)]
        self._tails = [RunLogTail(worker_file(directory, rank)) for rank in range(num_workers)]
        self._start: StartRecord | None = None
        self._budget_samples = budget_samples
        self._console = console
        self._clock = clock
        self._began_s = self._shown_s = clock()
        self._every_s = REDRAW_EVERY_S if console.is_terminal else LINE_EVERY_S
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def poll(self) -> None:
        """Read what the workers have logged since the last call, and show it."""
        notices = []
        for worker, tail in zip(self.workers, self._tails, strict=True):
            for record in tail.read_new():
                worker.take(record)
                if isinstance(record, StartRecord):
                    self._start = record
                if isinstance(record, NoticeRecord) and record.rank < len(self.workers):
                    notices.append(record)
        for notice in sorted(notices, key=lambda notice: notice.at_s):
            self.workers[notice.rank].noticed(notice.what)
        now_s = self._clock()
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(now_s - self._began_s)

    def _show(self, elapsed_s: float) -> None:
        job, (width, height) = self._job(), self._console.size
        starting = f"starting {len(self.workers)} workers"
        if self._console.is_terminal:
            page = draw(job, width, height - 1) if job else Text(starting)
            self._live.update(page, refresh=True)
        else:
            line = f"{elapsed_s:4.0f} s  {summary(job) if job else starting}"
            self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _job(self) -> JobStatus | None:
        """Return the job as far as the logs hold it; None before the first gradient step."""
        if self._start is None or not any(each.counts.gradient_steps for each in self.workers):
            return None
        workers = mark_slow(each.job_worker(rank) for rank, each in enumerate(self.workers))
        asked = self._start.configuration
        return JobStatus(
            run_id=self._start.run_id,
            method=asked.get("method", ""),
            graph=asked.get("graph", ""),
            comm_rate=asked.get("comm_rate", 0.0),
            num_workers=len(workers),
            samples=sum(each.samples for each in workers),
            heard_ago_s=0.0,
            num_answering=len(workers),
            budget_samples=self._budget_samples,
            samples_per_second=sum(each.samples_per_second or 0.0 for each in workers),
            loss=mean_of_known(each.loss for each in workers),
            edge_distance=mean_of_known(each.edge_distance for each in workers),
            workers=workers,
        )


# Doing faults to them, and what came of it.


@dataclass
class Injection:
    """A fault on its way: ``happened_s`` is by ``since_boot_s``, ``missed`` says why it failed."""

    fault: Fault
    process_id: int = 0
    happened_s: float | None = None
    goes_on_s: float | None = None
    is_confirmed: bool = False
    missed: str | None = None


class FaultInjector:
    """The injector of faults, each when it is due; call :meth:`poll` a few times a second.

    No fault comes before all workers train: until then a death ends the run, as it should.

    Args:
        faults: what to do.
        workers: the latest of each worker, by rank, as :class:`LiveView` has.
        say: shows a line.
        send: ``os.kill``.
        clock: that of the workers' logs, the same for all processes of a machine.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        workers: Sequence[WorkerProgress],
        say: Callable[[str], None] = lambda text: None,
        *,
        send: Callable[[int, int], None] = os.kill,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self.injections = [Injection(fault) for fault in faults]
        self._workers = workers
        self._say = say
        self._send = send
        self._clock = clock
        self._gone: set[int | None] = set()

    @property
    def first_step_s(self) -> float | None:
        """Return the time of the run's first gradient step; None until all workers train."""
        began = [worker.began_s for worker in self._workers if worker.began_s is not None]
        return min(began) if len(began) == len(self._workers) else None

    def poll(self) -> None:
        """Do what is due."""
        first_s = self.first_step_s
        if first_s is None:
            return
        now = self._clock()
        for each in self.injections:
            if each.goes_on_s is not None and now >= each.goes_on_s:
                self._resume(each)
                self._say(f"{now - first_s:5.1f} s  worker {each.fault.rank} may go on")
            is_new = each.happened_s is None and each.missed is None
            if is_new and now >= first_s + each.fault.at_s:
                self._inject(each, now, now - first_s)

    def ended(self, failure: Failure) -> bool:
        """Note that a worker's process failed; return whether that was a kill of ours."""
        self._gone.add(self._workers[failure.rank].process_id)
        for each in self.injections:
            is_its_kill = each.fault.rank == failure.rank and each.fault.kind == "kill"
            if (
                is_its_kill
                and each.happened_s is not None
                and not each.is_confirmed
                and "SIGKILL" in failure.ending.reason
            ):
                each.is_confirmed = True
                return True
        return False

    def close(self) -> None:
        """Let stopped workers go on, and settle which faults happened."""
        for each in self.injections:
            if each.goes_on_s is not None:
                self._resume(each)
                each.missed = "the run ended while the worker was stopped"
            elif each.happened_s is None:
                each.missed = each.missed or "the run had ended by then"
            elif not each.is_confirmed:
                each.missed = "the worker had ended by then"

    def _inject(self, each: Injection, now: float, since_s: float) -> None:
        fault = each.fault
        worker = self._workers[fault.rank]
        assert worker.process_id is not None
        if worker.process_id in self._gone:
            each.missed = "the worker had died by then"
            return
        try:
            if worker.ended:
                raise ProcessLookupError
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            self._send(worker.process_id, number)
        except ProcessLookupError:
            each.missed = "the worker had ended by then"
            return
        each.happened_s, each.process_id = now, worker.process_id
        did = "killed"
        if fault.kind == "stop":
            each.goes_on_s, each.is_confirmed = now + fault.for_s, True
            did = f"stopped for {fault.for_s:g} s"
        self._say(f"{since_s:5.1f} s  worker {fault.rank} {did}")

    def _resume(self, each: Injection) -> None:
        each.goes_on_s = None
        try:
            self._send(each.process_id, signal.SIGCONT)
        except ProcessLookupError:
            pass


def fault_results(injections: Sequence[Injection], run_log: RunLog) -> list[dict[str, Any]]:
    """Return the entry of ``--json`` for each fault.

    at_s: seconds from the first gradient step, as it happened; as planned where it did not.
    detected_s: by each worker that lived and ran meanwhile, seconds from the fault to its notice;
        None where it noticed nothing.
    rejoined_s: seconds from the fault to when the first of the others noticed that the worker takes
        part again.
    missed: why it did not happen, where it did not.
    """
    began = [life.at_s for worker in run_log.workers.values() for life in worker.lives]
    results: list[dict[str, Any]] = []
    for each in injections:
        fault, happened_s = each.fault, each.happened_s
        result: dict[str, Any] = {"rank": fault.rank, "kind": fault.kind, "at_s": fault.at_s}
        result |= {"detected_s": {}, "rejoined_s": None}
        if happened_s is not None and each.is_confirmed:
            kinds = ("lost",) if fault.kind == "kill" else ("silent", "lost")
            since_s = dict.fromkeys(run_log.workers, happened_s)
            detected = _noticed_by(run_log, fault.rank, kinds, since_s)
            # Only from who saw it go: to one that came back meanwhile all others are new.
            back = _noticed_by(run_log, fault.rank, ("answered", "restarted"), detected)
            result["at_s"] = round(happened_s - min(began, default=0.0), 3)
            result["detected_s"] = {
                str(rank): round(detected[rank] - happened_s, 3) if rank in detected else None
                for rank in _witnesses(each, injections, run_log)
            }
            if back:
                result["rejoined_s"] = round(min(back.values()) - happened_s, 3)
        if each.missed is not None:
            result["missed"] = each.missed
        results.append(result)
    return results


def fault_line(result: dict[str, Any]) -> str:
    """Return one entry in words."""
    did = "killed" if result["kind"] == "kill" else "stopped"
    times = [time_s for time_s in result["detected_s"].values() if time_s is not None]
    text = f"worker {result['rank']} {did} at {result['at_s']:.1f} s: "
    if times:
        text += f"noticed after {min(times):.2f} to {max(times):.2f} s by {len(times)} of "
        text += f"{len(result['detected_s'])} others"
    else:
        text += "no worker noticed"
    if result["rejoined_s"] is not None:
        text += f", back after {result['rejoined_s']:.1f} s"
    return text


def _noticed_by(
    run_log: RunLog, rank: int, kinds: Collection[str], since_s: Mapping[int, float]
) -> dict[int, float]:
    """Return when each worker of ``since_s`` first noticed this, from its own time on."""
    found: dict[int, float] = {}
    for witness, from_s in since_s.items():
        for notice in run_log.workers[witness].notices:
            if notice.rank == rank and notice.what in kinds and notice.at_s >= from_s:
                found.setdefault(witness, notice.at_s)
    return found


def _witnesses(injection: Injection, injections: Sequence[Injection], run_log: RunLog) -> list[int]:
    """Return the workers that ran from a fault until they could have noticed it."""
    fault, from_s = injection.fault, injection.happened_s
    assert from_s is not None
    to_s = from_s + (KILL_NOTICED_S if fault.kind == "kill" else STOP_NOTICED_S)
    away = {fault.rank}
    for other in injections:
        happened_s = other.happened_s
        if other is injection or happened_s is None:
            continue
        until_s = happened_s + other.fault.for_s
        if other.fault.kind == "kill":
            lives = run_log.workers[other.fault.rank].lives
            until_s = min(
                (life.at_s for life in lives if life.at_s > happened_s), default=float("inf")
            )
        if happened_s <= to_s and until_s >= from_s:
            away.add(other.fault.rank)
    return [rank for rank in run_log.workers if rank not in away]
