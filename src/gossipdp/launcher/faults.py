"""``FaultInjector``: kills, stops and slows one supervisor's workers, by a plan.

The injector has no thread. The supervisor's loop calls :meth:`FaultInjector.step` between two looks
at its processes, and wakes when :meth:`FaultInjector.wait_s` says so. Only this loop touches the
injector's state, so there is no lock. The injector sends a signal only through the supervisor's
object for a process, and only before the supervisor has reaped that process: until then the process
id belongs to no other process. As soon as the supervisor has reaped a process, it calls
:meth:`FaultInjector.ended`.

A slow worker is stopped and continued in short turns. The injector measures each turn, and later
turns make up for one that came late. So the worker runs for the right share of the time, although
single turns are too long or too short.
"""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from gossipdp.launcher.fault_plan import Event, FaultPlan
from gossipdp.links.clock import since_boot_s

# A slow worker runs and stands still once in this time, and runs for at least RUN_S of it.
TURN_S, RUN_S = 0.05, 0.005
# Later turns make up for a late one by at most this: far below any time-out of the workers.
MAX_DEBT_S = 0.5


class Process(Protocol):
    """A process that has not been reaped."""

    def send(self, number: int) -> None:
        """Send it a signal; do nothing if it has ended."""


@dataclass(frozen=True)
class Target:
    """One worker of the supervisor: ``process`` is None while none runs.

    ``trains``: the process has made a gradient step.
    """

    rank: int
    process: Process | None
    trains: bool


class FaultRecord(msgspec.Struct, frozen=True):
    """One line of the faults log: a fault that was done, or missed.

    Attributes:
        planned_s, at_s: seconds since all workers here train, as planned and as it happened; at_s
            is None if it did not.
        rank, kind: the worker and "kill", "stop" or "slow".
        for_s, factor: of a stopped or slow worker, as planned; ``for_s`` is None if the plan sets
            no end.
        missed: the reason why it did not happen; None if it did.
        clock_s: when it happened, by the clock of the workers' logs.
    """

    planned_s: float
    at_s: float | None
    rank: int
    kind: Literal["kill", "stop", "slow"]
    for_s: float | None = None
    factor: float | None = None
    missed: str | None = None
    clock_s: float | None = None

    def __str__(self) -> str:
        at_s = self.planned_s if self.at_s is None else self.at_s
        if self.missed is not None:
            return f"{at_s:5.1f} s  no {self.kind} of worker {self.rank}: {self.missed}"
        did = "killed" if self.kind == "kill" else "stopped"
        if self.kind == "slow":
            did = f"{self.factor:g} times slower"
        lasts = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{at_s:5.1f} s  worker {self.rank} {did}{lasts}"


@dataclass
class _Slow:
    """A worker that runs 1/factor of the time: while it runs, it owes time to stand still."""

    clause: int
    factor: float
    until_s: float
    turn_began_s: float
    turn_ends_s: float
    owed_s: float = 0.0
    stands_still: bool = False

    def turn(self, now: float) -> None:
        if now < self.turn_ends_s:
            return
        passed_s = now - self.turn_began_s
        self.owed_s += -passed_s if self.stands_still else passed_s * (self.factor - 1)
        self.owed_s = max(-MAX_DEBT_S, min(self.owed_s, MAX_DEBT_S))
        self.stands_still = not self.stands_still and self.owed_s > 0
        run_s = max(RUN_S, TURN_S / self.factor)
        self.turn_began_s = now
        self.turn_ends_s = now + (self.owed_s if self.stands_still else run_s)


class FaultInjector:
    """The faults of a plan, done to the workers of one supervisor.

    Time counts from the moment when all workers here have made a gradient step. The plan is that of
    the whole run, the same for every supervisor. Each supervisor injects the faults of its own
    workers only.

    A worker can take a fault if it trains and is not stopped. If the plan draws the worker, the
    ranks are tried in the drawn order, and the first worker that can take the fault takes it. If
    other supervisors have workers of the run, only the first rank is tried: they could not know
    that the fault went to another rank. The last worker that lives here is killed only if the
    clause names its rank.

    Args:
        plan: what to do.
        num_workers: of the whole run, among whom the plan draws.
        first_rank: the lowest rank here; drawn ranks count from it.
        others_elsewhere: other supervisors have workers of the run.
        seed: of the draws of workers.
        say: shows a line.
        directory: for the faults log, ``faults-RANK.jsonl``, where RANK is the lowest rank here.
        clock: that of the workers' logs, the same for all processes of a machine.

    Attributes:
        records: what was done and missed so far.
        first_step_s: when all workers here had made a gradient step, by ``clock``; None: not yet.
    """

    def __init__(
        self,
        plan: FaultPlan,
        num_workers: int,
        *,
        first_rank: int = 0,
        others_elsewhere: bool = False,
        seed: int = 0,
        say: Callable[[str], None] = lambda text: None,
        directory: Path | None = None,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self._plan, self._first_rank, self._elsewhere = plan, first_rank, others_elsewhere
        self._say, self._directory, self._clock = say, directory, clock
        self._events: Iterator[Event] = plan.events(num_workers, seed)
        self._next = next(self._events, None)
        # Events of clauses that do not repeat; they are missed if the run ends before.
        self._single = {
            number: next(plan.events_of(number, num_workers, seed))
            for number, clause in enumerate(plan.clauses)
            if not clause.every
        }
        self.records: list[FaultRecord] = []
        self.first_step_s: float | None = None
        self._targets: Sequence[Target] = ()
        # By place: the index of the worker among the supervisor's.
        self._kills: dict[int, FaultRecord] = {}
        self._stops: dict[int, float] = {}
        self._slow: dict[int, _Slow] = {}
        self._stopped: dict[int, Process] = {}

    def wait_s(self) -> float:
        """Return the seconds until something is due."""
        if self.first_step_s is None:
            return math.inf
        dues = [*self._stops.values()]
        dues += [min(each.until_s, each.turn_ends_s) for each in self._slow.values()]
        if self._next is not None:
            dues.append(self.first_step_s + self._next.at_s)
        return max(0.0, min(dues, default=math.inf) - self._clock())

    def step(self, targets: Sequence[Target]) -> None:
        """Do what is due; ``targets`` are all workers of the supervisor, in its order."""
        now, is_first = self._clock(), not self._targets
        self._targets = targets
        if is_first:
            self._log("wb", b"")  # empty the log of an earlier run
        if self.first_step_s is None:
            running = [each for each in targets if each.process is not None]
            if not running or not all(each.trains for each in running):
                return
            self.first_step_s = now
        while self._next is not None and now >= self.first_step_s + self._next.at_s:
            event, self._next = self._next, next(self._events, None)
            self._single.pop(event.clause, None)
            self._inject(event, now)
        for place in [place for place, until_s in self._stops.items() if now >= until_s]:
            del self._stops[place]
            self._tell(now, f"worker {targets[place].rank} may go on")
        for place, slow in list(self._slow.items()):
            slow.turn(now)
            if now >= slow.until_s:
                self._speed_up(place, now)
        self._send_signals()

    def ended(self, place: int, reason: str) -> bool:
        """Note that a worker's process was reaped; return whether a kill of ours ended it."""
        self._stops.pop(place, None)
        self._stopped.pop(place, None)
        record = self._kills.pop(place, None)
        if record is None:
            return False
        is_ours = "SIGKILL" in reason
        if not is_ours:
            missed = "it had ended by itself by then"
            record = msgspec.structs.replace(record, at_s=None, clock_s=None, missed=missed)
        self._write(record)
        return is_ours

    def release(self) -> None:
        """Let all workers run, and do nothing more: the run ends."""
        self._next = None
        self._stops.clear()
        self._slow.clear()
        self._send_signals()

    def close(self) -> None:
        """Record as missed what was not done, and show how many faults were done and missed."""
        self.release()
        for place in list(self._kills):
            self.ended(place, "")
        for event in self._single.values():
            self._miss(event, "the run had ended by then")
        self._single.clear()
        num_missed = sum(record.missed is not None for record in self.records)
        did_begin = self.first_step_s is not None
        why = "" if did_begin else "; not all workers here had made a gradient step"
        self._say(f"faults: {len(self.records) - num_missed} done, {num_missed} missed{why}")

    def _places(self, event: Event) -> list[int]:
        """Return the places of the workers here that may take it, in the order to try them."""
        if self._plan.clauses[event.clause].rank is not None:
            (rank,) = event.ranks
            return [place for place, each in enumerate(self._targets) if each.rank == rank]
        drawn = event.ranks[:1] if self._elsewhere else event.ranks
        places = [rank - self._first_rank for rank in drawn]
        return [place for place in places if 0 <= place < len(self._targets)]

    def _inject(self, event: Event, now: float) -> None:
        clause = self._plan.clauses[event.clause]
        assert self.first_step_s is not None
        since_s = now - self.first_step_s
        if clause.kind == "slow" and clause.for_s is None:
            for place in [p for p, slow in self._slow.items() if slow.clause == event.clause]:
                self._speed_up(place, now)
        if clause.every and since_s >= event.at_s + clause.time_s:
            self._miss(event, "the launcher did not run at that time")
            return
        obstacles = {place: self._obstacle(event, place) for place in self._places(event)}
        chosen = next((place for place, obstacle in obstacles.items() if not obstacle), None)
        if chosen is None:
            self._miss(event, next(iter(obstacles.values()), ""))
            return
        target = self._targets[chosen]
        assert target.process is not None
        record = self._say_record(event, chosen, round(since_s, 3), clock_s=round(now, 3))
        for_s = math.inf if clause.for_s is None else clause.for_s
        if clause.kind == "kill":
            target.process.send(signal.SIGKILL)
            self._kills[chosen] = record  # until the supervisor has reaped it
            return
        if clause.kind == "stop":
            self._stops[chosen] = now + for_s
        else:
            self._slow[chosen] = _Slow(event.clause, clause.factor, now + for_s, now, now)
        self._write(record)

    def _obstacle(self, event: Event, place: int) -> str:
        clause, target = self._plan.clauses[event.clause], self._targets[place]
        if target.process is None or place in self._kills:
            return "it does not run"
        if not target.trains:
            return "it has been started again and does not train yet"
        if place in self._stops:
            return "it is stopped"
        if clause.kind == "slow" and place in self._slow:
            return "it is slow already"
        others = [
            other
            for other, each in enumerate(self._targets)
            if other != place and each.process is not None and each.trains
        ]
        if clause.kind == "kill" and clause.rank is None and set(others) <= self._kills.keys():
            return "it is the last one that lives here; name its rank to kill it too"
        return ""

    def _speed_up(self, place: int, now: float) -> None:
        del self._slow[place]
        self._tell(now, f"worker {self._targets[place].rank} at full speed")

    def _send_signals(self) -> None:
        slow = {place for place, each in self._slow.items() if each.stands_still}
        stand_still = self._stops.keys() | slow
        for place in self._stopped.keys() - stand_still:
            self._stopped.pop(place).send(signal.SIGCONT)
        for place in stand_still - self._stopped.keys():
            process = self._targets[place].process
            if process is not None:
                process.send(signal.SIGSTOP)
                self._stopped[place] = process

    def _miss(self, event: Event, reason: str) -> None:
        """Record an event that did not happen, unless its worker is another supervisor's."""
        for place in self._places(event)[:1]:
            self._write(self._say_record(event, place, None, missed=reason))

    def _say_record(self, event: Event, place: int, at_s: float | None, **more: Any) -> FaultRecord:
        clause, rank = self._plan.clauses[event.clause], self._targets[place].rank
        factor = clause.factor if clause.kind == "slow" else None
        record = FaultRecord(event.at_s, at_s, rank, clause.kind, clause.for_s, factor, **more)
        self._say(str(record))
        return record

    def _tell(self, now: float, text: str) -> None:
        assert self.first_step_s is not None
        self._say(f"{now - self.first_step_s:5.1f} s  {text}")

    def _write(self, record: FaultRecord) -> None:
        self.records.append(record)
        self._log("ab", msgspec.json.encode(record) + b"\n")

    def _log(self, mode: Literal["ab", "wb"], line: bytes) -> None:
        if self._directory is None:
            return
        lowest = min((each.rank for each in self._targets), default=self._first_rank)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with (self._directory / f"faults-{lowest}.jsonl").open(mode) as file:
                file.write(line)
        except OSError as error:
            self._say(f"the faults log in {self._directory} is given up: {error.strerror}")
            self._directory = None
