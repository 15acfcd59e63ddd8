"""The live view of ``gossipdp demo``, and the effects of the faults on its workers.

Both follow the logs that the workers write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gossipdp.cli.top import draw, progress_facts, states_of
from gossipdp.gossip.counters import Counters
from gossipdp.launcher.faults import FaultRecord
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.board import StatusBoard
from gossipdp.observe.status import MemberStatus, WorkerStatus
from gossipdp_lab.console import Display
from gossipdp_lab.demo import KILL_NOTICED_S, STOP_NOTICED_S
from gossipdp_lab.report.run_log import RunLog, WorkerLog
from gossipdp_lab.report.view import RunView

# The workers, live.


class LiveView(Display):
    """The table of ``gossipdp top`` in a terminal, made of the logs; elsewhere a line now and then.

    Call ``poll`` a few times a second.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        console: Console,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        super().__init__(console, clock=clock)
        self._directory = directory
        self._num_workers = num_workers
        self._run_log, self._board = RunLog(), StatusBoard(())

    def poll(self) -> None:
        """Read what the workers have logged since the last look, and show it, if that is due."""
        if not self.is_due:
            return
        self._run_log.follow(self._directory)
        if not any(worker.lives for worker in self._run_log.workers.values()):
            starting = f"starting {self._num_workers} workers"
            self.show(Text(starting), starting)
            return
        now_s, (width, height) = self._clock(), self._console.size
        self._board.take(answers_of(self._run_log), now_s)
        job = self._board.job(now_s)
        self.show(draw(job, width, height - 1), f"{states_of(job)} · {progress_facts(job)}")


def answers_of(run_log: RunLog) -> dict[str, WorkerStatus | Exception]:
    """Return the logs as answers of status ports; a worker that others miss does not answer."""
    missed = {rank: event.kind for rank, event in RunView(run_log).missed.items()}
    members = tuple(
        MemberStatus(
            rank,
            worker.num_restarts,
            "lost" if missed.get(rank) == "lost" else "training" if worker.lives else "joining",
            is_silent=rank in missed,
            restarts=worker.num_restarts,
        )
        for rank, worker in run_log.workers.items()
    )
    return {
        str(rank): TimeoutError("no answer") if rank in missed else _answer(worker, members)
        for rank, worker in run_log.workers.items()
    }


def _answer(worker: WorkerLog, members: tuple[MemberStatus, ...]) -> WorkerStatus:
    start = worker.latest_start
    last = worker.counts[-1] if worker.counts else Counters(rank=start.rank)
    losses = (each.loss for each in reversed(worker.counts) if not math.isnan(each.loss))
    asked = start.configuration
    return WorkerStatus(
        incarnation=worker.num_restarts,
        run_id=start.run_id,
        method=asked.get("method", ""),
        graph=asked.get("graph", ""),
        comm_rate=asked.get("comm_rate", 0.0),
        host="",
        process_id=start.process_id,
        state="averaging" if worker.averaging else "training",
        run_samples=last.samples,
        budget_samples=asked.get("budget_samples"),
        logged={"loss": next(losses, None)},
        members=members,
        **{name: getattr(last, name) for name in Counters.__struct_fields__},
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
            again_s = (
                each.clock_s
                for each in records
                if each.rank == record.rank and each.kind != "slow" and each.clock_s is not None
            )
            until_s = min((at_s for at_s in again_s if at_s > record.clock_s), default=math.inf)
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
    noticed, back = "no worker noticed", ""
    if times:
        others = f"{len(times)} of {len(result['detected_s'])} others"
        noticed = f"noticed after {min(times):.2f} to {max(times):.2f} s by {others}"
    if result["rejoined_s"] is not None:
        back = f", back after {result['rejoined_s']:.1f} s"
    return f"worker {result['rank']} {did} at {result['at_s']:.1f} s: {noticed}{back}"


def _noticed_by(
    run_log: RunLog, rank: int, kinds: Collection[str], since_s: Mapping[int, float], until_s: float
) -> dict[int, float]:
    """Return when each worker of ``since_s`` first noticed ``rank``, from its time there on."""
    found: dict[int, float] = {}
    for witness, from_s in since_s.items():
        for notice in run_log.workers[witness].noticed:
            if notice.rank == rank and notice.kind in kinds and from_s <= notice.at_s < until_s:
                found.setdefault(witness, notice.at_s)
    return found


def _witnesses(record: FaultRecord, records: Sequence[FaultRecord], run_log: RunLog) -> list[int]:
    """Return the workers that ran from a fault until they could have noticed it."""
    from_s = record.clock_s
    assert from_s is not None
    to_s = from_s + (KILL_NOTICED_S if record.kind == "kill" else STOP_NOTICED_S)
    away = {record.rank}
    for other in records:
        if (happened_s := other.clock_s) is None or other.kind == "slow":
            continue
        until_s = happened_s + (other.for_s or 0.0)
        if other.kind == "kill":
            lives = run_log.workers[other.rank].lives
            until_s = min((life.at_s for life in lives if life.at_s > happened_s), default=math.inf)
        if happened_s <= to_s and until_s >= from_s:
            away.add(other.rank)
    return [rank for rank in run_log.workers if rank not in away]
