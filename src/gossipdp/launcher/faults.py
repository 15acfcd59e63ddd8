"""``--faults``: what is done to which worker and when, and the injector that does it.

::

    PLAN      =  CLAUSE { ";" CLAUSE }
    CLAUSE    =  "kill"             [ RANK ]  [ WHEN ]
              |  "stop" DURATION    [ RANK ]  [ WHEN ]
              |  "slow" FACTOR "x"  [ RANK ]  [ WHEN ]  [ "for" DURATION ]
    WHEN      =  "at" DURATION  |  "every" DURATION
    DURATION  =  NUMBER ( "ms" | "s" | "m" | "h" )

The words after the first may be in any order, and ``stop for 8s`` is ``stop 8s``. Time counts from
the moment when all workers have made their first gradient step. A clause without WHEN is due at
that moment. ``every 60s`` is due after 60 s, 120 s, and so on. If a clause names no rank, each of
its events draws one, and never the same worker twice in a row. A ``slow`` without ``for`` lasts
until the clause's next event, which makes another worker slow, or to the end of the run.

:class:`FaultPlan` knows no process and no clock. :class:`FaultInjector` has no thread and no lock:
the supervisor's loop alone calls it, :meth:`FaultInjector.step` between two looks at the processes,
and :meth:`FaultInjector.ended` as soon as it has reaped one.
"""

import heapq
import itertools
import math
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, Protocol, Self

import msgspec

from gossipdp.links.clock import since_boot_s

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SHAPES = {
    "kill": "kill [RANK] [at TIME | every TIME]",
    "stop": "stop DURATION [RANK] [at TIME | every TIME]",
    "slow": "slow FACTORx [RANK] [at TIME | every TIME] [for DURATION]",
}
# Events of one clause may not flood the log.
SHORTEST_PERIOD_S = 0.1
LARGEST_FACTOR = 100.0  # a worker runs for at least 5 ms at a time
# A slow worker runs and stands still once in this time, and runs for at least RUN_S of it.
TURN_S, RUN_S = 0.05, 0.005
# Later turns make up for a late one by at most this: far below any time-out of the workers.
MAX_DEBT_S = 0.5


@dataclass(frozen=True)
class Clause:
    """One clause: if ``every``, ``time_s`` is a period; if ``rank`` is None, each event draws one.

    ``for_s`` is how long a worker is stopped or slow. If it is None, a slow one stays slow.
    """

    kind: Literal["kill", "stop", "slow"]
    rank: int | None = None
    time_s: float = 0.0
    every: bool = False
    for_s: float | None = None
    factor: float = 1.0

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.kind == "stop" and self.for_s is not None:
            words.append(_shown(self.for_s))
        if self.kind == "slow":
            words.append(f"{self.factor:.9g}x")
        if self.rank is not None:
            words.append(str(self.rank))
        if self.every or self.time_s:
            words += ["every" if self.every else "at", _shown(self.time_s)]
        if self.kind == "slow" and self.for_s is not None:
            words += ["for", _shown(self.for_s)]
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the clause of a text, or raise ValueError with the shape of a right one."""
        kind, *words = text.lower().split() or [""]
        shapes = [SHAPES[kind]] if kind in SHAPES else SHAPES.values()
        try:
            found = _read(kind, words)
        except ValueError as problem:
            refusal = f"{text.strip()!r}: {problem}; write {', or '.join(shapes)}"
            raise ValueError(f"--faults: {refusal}") from None
        return cls(
            kind,  # type: ignore[arg-type]
            rank=int(found["rank"]) if "rank" in found else None,
            time_s=found.get("every", found.get("at", 0.0)),
            every="every" in found,
            for_s=found.get("for"),
            factor=found.get("factor", 1.0),
        )

    def events(self, number: int, num_workers: int, seed: int = 0) -> "Iterator[Event]":
        """Yield its events: a pure function of clause, its number, the seed and the workers.

        Endless if it repeats.
        """
        random, order = Random(f"{seed} {number}"), list[int]()
        for count in itertools.count(1):
            if self.rank is not None:
                order = [self.rank]
            else:
                last, order = order[:1], list(range(num_workers))
                random.shuffle(order)
                order.sort(key=lambda rank: [rank] == last)  # stable: the last one comes last
            yield Event(round(count * self.time_s, 3), number, self, tuple(order))
            if not self.every:
                return


@dataclass(frozen=True, order=True)
class Event:
    """One event of a plan, ``at_s`` after all workers train; ``number`` is that of its clause.

    ``ranks``: the one that the clause names, or all, in the order in which they are tried.
    """

    at_s: float
    number: int
    clause: Clause
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class FaultPlan:
    """Clauses, in the order of their text."""

    clauses: tuple[Clause, ...] = ()

    def __str__(self) -> str:
        return "; ".join(map(str, self.clauses))

    @property
    def kills(self) -> bool:
        return any(clause.kind == "kill" for clause in self.clauses)

    @classmethod
    def parse(cls, text: str, num_workers: int | None = None) -> Self:
        """Return the plan of ``--faults``; if ``num_workers`` is given, ranks must be below it."""
        plan = cls(tuple(map(Clause.parse, text.removesuffix(";").split(";"))))
        for clause in plan.clauses:
            if num_workers and clause.rank is not None and clause.rank >= num_workers:
                raise ValueError(
                    f"--faults: {str(clause)!r}: there is no rank {clause.rank} among "
                    f"{num_workers} workers; choose 0 to {num_workers - 1}"
                )
        return plan


def _read(kind: str, words: Iterable[str]) -> dict[str, float]:
    """Return the values of the words after ``kind``, by name; raise ValueError for a problem."""
    if kind not in SHAPES:
        raise ValueError(f"{kind!r} is no fault" if kind else "an empty clause")
    found: dict[str, float] = {}
    rest = iter(words)
    for word in rest:
        value: float | None
        if word in ("at", "every", "for"):
            time = next(rest, "")
            name, value = word, _seconds(time)
            if value is None:
                what = f"{time!r} after {word!r}" if time else f"nothing after {word!r}"
                raise ValueError(f"{what} is no time such as 500ms, 8s, 2m or 1h")
        elif word.isascii() and word.isdigit() and len(word) < 7:
            name, value = "rank", int(word)
        elif re.fullmatch(r"\d{1,4}(\.\d{1,3})?x", word, re.ASCII):
            name, value = "factor", float(word[:-1])
        elif kind == "stop" and (value := _seconds(word)) is not None:
            name = "for"
        else:
            raise ValueError(f"{word!r} has no meaning here")
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    if problem := _problem(kind, found):
        raise ValueError(problem)
    return found


def _problem(kind: str, found: Mapping[str, float]) -> str:
    if "at" in found and "every" in found:
        return "choose 'at' or 'every'"
    if found.get("every", 1.0) < SHORTEST_PERIOD_S:
        return "'every' takes at least 100ms"
    if kind == "kill" and "for" in found:
        return "a kill has no duration (gossipdp run --max-restarts starts the worker again)"
    if kind == "stop" and "for" not in found:
        return "say for how long"
    if found.get("for", 1.0) == 0:
        return "the duration is 0"
    if kind != "slow" and "factor" in found:
        return "a factor belongs to 'slow'"
    if kind == "slow" and not 1 < found.get("factor", 0.0) <= LARGEST_FACTOR:
        return f"say how many times slower: 4x, above 1x and up to {LARGEST_FACTOR:g}x"
    return ""


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(ms|s|m|h)", text, re.ASCII)
    return round(float(match[1]) * UNITS_S[match[2]], 3) if match else None


def _shown(seconds: float) -> str:
    for unit in ("h", "m"):
        if seconds and seconds % UNITS_S[unit] == 0:
            return f"{seconds / UNITS_S[unit]:.15g}{unit}"
    return f"{seconds:.15g}s"


class FaultRecord(msgspec.Struct, frozen=True):
    """A fault that was done, or missed.

    Attributes:
        planned_s, at_s: seconds since all workers here train, as planned and as it happened; at_s
            is None if it did not.
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


class Target(Protocol):
    """A worker that faults befall."""

    @property
    def rank(self) -> int: ...
    @property
    def runs(self) -> bool: ...
    @property
    def trains(self) -> bool: ...
    def send(self, number: int) -> None: ...


@dataclass
class _Slow:
    """A worker that is stopped and continued in short turns, and runs 1/factor of the time.

    While it runs, it owes time to stand still. Each turn is measured, and later ones make up for
    one that came late.
    """

    clause: Clause
    until_s: float
    turn_began_s: float
    turn_ends_s: float
    owed_s: float = 0.0
    stands_still: bool = False

    def turn(self, now: float) -> None:
        if now < self.turn_ends_s:
            return
        passed_s = now - self.turn_began_s
        self.owed_s += -passed_s if self.stands_still else passed_s * (self.clause.factor - 1)
        self.owed_s = max(-MAX_DEBT_S, min(self.owed_s, MAX_DEBT_S))
        self.stands_still = not self.stands_still and self.owed_s > 0
        run_s = max(RUN_S, TURN_S / self.clause.factor)
        self.turn_began_s = now
        self.turn_ends_s = now + (self.owed_s if self.stands_still else run_s)


class FaultInjector:
    """The faults of a plan, done to the workers of one supervisor.

    The plan is that of the whole run, the same for every supervisor. Each supervisor injects the
    faults of its own workers only, in time from the moment when these have all made a step.

    A worker can take a fault if it trains and is not stopped. If the plan draws the worker, the
    ranks are tried in the drawn order, and the first worker that can take the fault takes it. If
    other supervisors have workers of the run, only the first rank is tried: they could not know
    that the fault went to another rank. Workers that join a run are drawn by their order here. The
    last worker that lives here is killed only if the clause names its rank.

    A signal is sent only before the supervisor has reaped the process: until then no other process
    has its id.

    Args:
        num_workers: of the whole run, among whom the plan draws; or those here, if they join one.
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
        seed: int = 0,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        self._num_workers = num_workers
        self._say, self._clock = say, clock
        clauses = enumerate(plan.clauses)
        self._events = [clause.events(number, num_workers, seed) for number, clause in clauses]
        self._next = [next(events) for events in self._events]  # a heap with one of each clause
        heapq.heapify(self._next)
        self.records: list[FaultRecord] = []
        self.first_step_s: float | None = None
        self._workers: dict[int, Target] = {}
        # By rank: kills that the supervisor has not seen yet, the ends of stops, slow workers, and
        # the workers that a signal of ours has stopped.
        self._kills: dict[int, FaultRecord] = {}
        self._stops: dict[int, float] = {}
        self._slow: dict[int, _Slow] = {}
        self._stopped: set[int] = set()

    def wait_s(self) -> float:
        if self.first_step_s is None:
            return math.inf
        dues = [*self._stops.values()]
        dues += [min(each.until_s, each.turn_ends_s) for each in self._slow.values()]
        dues += [self.first_step_s + event.at_s for event in self._next[:1]]
        return max(0.0, min(dues, default=math.inf) - self._clock())

    def step(self, workers: Sequence[Target]) -> None:
        """Do what is due; ``workers`` are all of the supervisor, in its order."""
        now = self._clock()
        self._workers = {worker.rank: worker for worker in workers}
        if self.first_step_s is None:
            running = [worker for worker in workers if worker.runs]
            if not running or not all(worker.trains for worker in running):
                return
            self.first_step_s = now
        while self._next and now >= self.first_step_s + self._next[0].at_s:
            event = heapq.heappop(self._next)
            if (following := next(self._events[event.number], None)) is not None:
                heapq.heappush(self._next, following)
            self._inject(event, now - self.first_step_s, now)
        for rank in [rank for rank, until_s in self._stops.items() if now >= until_s]:
            del self._stops[rank]
            self._say(f"{now - self.first_step_s:5.1f} s  worker {rank} may go on")
        for rank, slow in list(self._slow.items()):
            slow.turn(now)
            if now >= slow.until_s:
                self._speed_up(rank, now - self.first_step_s)
        self._send_signals()

    def ended(self, rank: int, reason: str) -> bool:
        """Note that a worker's process was reaped; return whether a kill of ours ended it."""
        self._stops.pop(rank, None)
        self._stopped.discard(rank)
        record = self._kills.pop(rank, None)
        if record is None:
            return False
        is_ours = "SIGKILL" in reason
        if not is_ours:
            missed = "it had ended by itself by then"
            record = msgspec.structs.replace(record, at_s=None, clock_s=None, missed=missed)
        self.records.append(record)
        return is_ours

    def release(self) -> None:
        """Let all workers run, and do nothing more: the run ends."""
        for event in sorted(self._next):
            if not event.clause.every:
                self._miss(event, self._candidates(event), "the run had ended by then")
        self._next.clear()
        self._stops.clear()
        self._slow.clear()
        self._send_signals()

    def close(self) -> None:
        """End, and show how many faults were done and missed."""
        self.release()
        for rank in list(self._kills):
            self.ended(rank, "")
        num_missed = sum(record.missed is not None for record in self.records)
        why = "; not all workers here had made a gradient step" * (self.first_step_s is None)
        self._say(f"faults: {len(self.records) - num_missed} done, {num_missed} missed{why}")

    def _candidates(self, event: Event) -> list[int]:
        """Return the ranks of the workers here that may take it, in the order to try them."""
        here = list(self._workers)
        if event.clause.rank is not None or self._num_workers > len(here):
            return [rank for rank in event.ranks[:1] if rank in here]
        return [here[place] for place in event.ranks]

    def _inject(self, event: Event, since_s: float, now: float) -> None:
        clause = event.clause
        if clause.kind == "slow" and clause.for_s is None:
            for rank in [r for r, slow in self._slow.items() if slow.clause is clause]:
                self._speed_up(rank, since_s)
        candidates = self._candidates(event)
        if clause.every and since_s >= event.at_s + clause.time_s:
            self._miss(event, candidates, "the launcher did not run at that time")
            return
        obstacles = {rank: self._obstacle(clause, rank) for rank in candidates}
        chosen = next((rank for rank, obstacle in obstacles.items() if not obstacle), None)
        if chosen is None:
            self._miss(event, candidates, next(iter(obstacles.values()), ""))
            return
        record = self._say_record(event, chosen, round(since_s, 3), clock_s=round(now, 3))
        if clause.kind == "kill":
            self._workers[chosen].send(signal.SIGKILL)
            self._kills[chosen] = record  # until the supervisor has reaped it
            return
        until_s = math.inf if clause.for_s is None else now + clause.for_s
        if clause.kind == "stop":
            self._stops[chosen] = until_s
        else:
            self._slow[chosen] = _Slow(clause, until_s, now, now)
        self.records.append(record)

    def _obstacle(self, clause: Clause, rank: int) -> str:
        worker = self._workers[rank]
        if not worker.runs or rank in self._kills:
            return "it does not run"
        if not worker.trains:
            return "it has been started again and does not train yet"
        if rank in self._stops:
            return "it is stopped"
        if clause.kind == "slow" and rank in self._slow:
            return "it is slow already"
        others = {r for r, each in self._workers.items() if r != rank and each.runs and each.trains}
        if clause.kind == "kill" and clause.rank is None and others <= self._kills.keys():
            return "it is the last one that lives here; name its rank to kill it too"
        return ""

    def _speed_up(self, rank: int, since_s: float) -> None:
        del self._slow[rank]
        self._say(f"{since_s:5.1f} s  worker {rank} at full speed")

    def _send_signals(self) -> None:
        slow = {rank for rank, each in self._slow.items() if each.stands_still}
        # A worker that joins may take another rank.
        running = {rank for rank, worker in self._workers.items() if worker.runs}
        stand_still = running & (self._stops.keys() | slow)
        for rank in (self._stopped - stand_still) & self._workers.keys():
            self._workers[rank].send(signal.SIGCONT)
        for rank in stand_still - self._stopped:
            self._workers[rank].send(signal.SIGSTOP)
        self._stopped = stand_still

    def _miss(self, event: Event, candidates: Sequence[int], reason: str) -> None:
        """Record an event that did not happen, unless its worker is another supervisor's."""
        for rank in candidates[:1]:
            self.records.append(self._say_record(event, rank, None, missed=reason))

    def _say_record(self, event: Event, rank: int, at_s: float | None, **more: Any) -> FaultRecord:
        clause = event.clause
        factor = clause.factor if clause.kind == "slow" else None
        record = FaultRecord(event.at_s, at_s, rank, clause.kind, clause.for_s, factor, **more)
        self._say(str(record))
        return record
