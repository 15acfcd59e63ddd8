"""The live view of ``gossipdp demo``, and the effects of the faults on its workers.

Both follow the logs that the workers write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gossipdp.cli.top import draw, summary
from gossipdp.launcher.fault_plan import FaultPlan
from gossipdp.launcher.faults import FaultRecord
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.board import JobStatus, JobWorker, facts_of, mark_slow, mean_of_known
from gossipdp.observe.log import (
    BeganRecord,
    ConsolidatingRecord,
    CountsRecord,
    EndRecord,
    NoticeRecord,
    Record,
    StartRecord,
    worker_file,
)
from gossipdp_lab.report.run_log import RunLog, RunLogTail

# All workers that can notice a fault have noticed it after this time.
KILL_NOTICED_S, STOP_NOTICED_S = 1.0, 6.0
# A run goes on for one of these after its last fault: BACK_S if that worker must come back first.
BACK_S = 8.0
AFTER_S = 4.0
REDRAW_EVERY_S, LINE_EVERY_S = 0.1, 5.0


def least_duration_s(plan: FaultPlan, *, restart: bool) -> float:
    """Return how long a run must train so that all faults happen, are noticed and pass.

    If a clause repeats, only its first fault counts.
    """
    least_s = 0.0
    for clause in plan.clauses:
        after_s = BACK_S if restart and clause.kind == "kill" else AFTER_S
        if clause.kind == "stop":
            least_s = max(least_s, clause.time_s + STOP_NOTICED_S + 1)
        if clause.kind != "slow" or clause.time_s:  # a slow worker may be slow all the time
            least_s = max(least_s, clause.time_s + (clause.for_s or 0.0) + after_s)
    return least_s


# The workers, live.


@dataclass
class WorkerProgress:
    """The latest news of one worker.

    Attributes:
        state: from its own log, or from another's while the worker is lost or silent.
        counts: its latest record.
        loss: the latest that it logged.
    """

    state: str = "starting"
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
            self.num_lives += 1
            self.state = "training"
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
        budget_samples: int | None,
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


# The effects of the faults.


def fault_results(records: Sequence[FaultRecord], run_log: RunLog) -> list[dict[str, Any]]:
    """Return the entry of ``--json`` for each fault.

    at_s: seconds from when all workers trained to the fault; the planned ones if it was missed.
    factor: of a slow worker.
    detected_s: for each worker that lived and ran meanwhile, the seconds from the fault to its
        notice; None if it noticed nothing. Not counted for a slow worker.
    rejoined_s: seconds from the fault until the first of the others noticed that the worker takes
        part again.
    missed: why the fault did not happen, if it was missed.
    """
    results: list[dict[str, Any]] = []
    for record in sorted(records, key=lambda each: (each.planned_s, each.rank)):
        result: dict[str, Any] = {"rank": record.rank, "kind": record.kind, "at_s": record.at_s}
        result |= {"detected_s": {}, "rejoined_s": None}
        if record.kind == "slow":
            result["factor"] = record.factor
        if record.missed is not None:
            result |= {"at_s": record.planned_s, "missed": record.missed}
        elif record.kind != "slow":
            assert record.clock_s is not None
            kinds = ("lost",) if record.kind == "kill" else ("silent", "lost")
            since_s = dict.fromkeys(run_log.workers, record.clock_s)
            later = [each.clock_s for each in records if _befalls_again(each, record)]
            until_s = min((at_s for at_s in later if at_s is not None), default=math.inf)
            detected = _noticed_by(run_log, record.rank, kinds, since_s, until_s)
            # Only witnesses of the loss count: to a worker that came back meanwhile, all are new.
            back = _noticed_by(run_log, record.rank, ("answered", "restarted"), detected, until_s)
            result["detected_s"] = {
                str(rank): round(detected[rank] - record.clock_s, 3) if rank in detected else None
                for rank in _witnesses(record, records, run_log)
            }
            if back:
                result["rejoined_s"] = round(min(back.values()) - record.clock_s, 3)
        results.append(result)
    return results


def fault_line(result: dict[str, Any]) -> str:
    """Return one entry in words."""
    if result["kind"] == "slow":
        return (
            f"worker {result['rank']} {result['factor']:g} times slower from {result['at_s']:.1f} s"
        )
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


def _befalls_again(later: FaultRecord, record: FaultRecord) -> bool:
    """Return whether ``later`` befell the same worker after ``record``, and can be noticed."""
    if later.clock_s is None or record.clock_s is None or later.kind == "slow":
        return False
    return later.rank == record.rank and later.clock_s > record.clock_s


def _noticed_by(
    run_log: RunLog,
    rank: int,
    kinds: Collection[str],
    since_s: Mapping[int, float],
    until_s: float,
) -> dict[int, float]:
    """Return when each worker of ``since_s`` first noticed ``rank``, from its time there on."""
    found: dict[int, float] = {}
    for witness, from_s in since_s.items():
        for notice in run_log.workers[witness].notices:
            if notice.rank == rank and notice.what in kinds and from_s <= notice.at_s < until_s:
                found.setdefault(witness, notice.at_s)
    return found


def _witnesses(record: FaultRecord, records: Sequence[FaultRecord], run_log: RunLog) -> list[int]:
    """Return the workers that ran from a fault until they could have noticed it."""
    from_s = record.clock_s
    assert from_s is not None
    to_s = from_s + (KILL_NOTICED_S if record.kind == "kill" else STOP_NOTICED_S)
    away = {record.rank}
    for other in records:
        happened_s = other.clock_s
        if other is record or happened_s is None or other.kind == "slow":
            continue
        until_s = happened_s + (other.for_s or 0.0)
        if other.kind == "kill":
            lives = run_log.workers[other.rank].lives
            until_s = min(
                (life.at_s for life in lives if life.at_s > happened_s), default=float("inf")
            )
        if happened_s <= to_s and until_s >= from_s:
            away.add(other.rank)
    return [rank for rank in run_log.workers if rank not in away]
