"""The plan of ``--faults``: what is done to which worker, and when. Pure: no process, no clock.

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
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal, Self

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SHAPES = {
    "kill": "kill [RANK] [at TIME | every TIME]",
    "stop": "stop DURATION [RANK] [at TIME | every TIME]",
    "slow": "slow FACTORx [RANK] [at TIME | every TIME] [for DURATION]",
}
# Events of one clause may not flood the log.
SHORTEST_PERIOD_S = 0.1
LARGEST_FACTOR = 100.0  # a worker runs for at least 5 ms at a time


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
        """Return the clause of a text.

        Raises:
            ValueError: it is none; the message shows it, and the shape of a right one.
        """
        kind, *words = text.lower().split() or [""]
        if kind not in SHAPES:
            unknown = f"{kind!r} is no fault" if kind else "an empty clause"
            raise _refusal(text, unknown, *SHAPES.values())
        found: dict[str, float] = {}
        rest = iter(words)
        for word in rest:
            name, value = _read(kind, word, rest, text)
            if name in found:
                raise _refusal(text, f"{name!r} is given twice", SHAPES[kind])
            found[name] = value
        problem = _problem(kind, found)
        if problem:
            raise _refusal(text, problem, SHAPES[kind])
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


@dataclass(frozen=True)
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
        """Return whether a clause kills."""
        return any(clause.kind == "kill" for clause in self.clauses)

    @classmethod
    def parse(cls, text: str, num_workers: int | None = None) -> Self:
        """Return the plan of ``--faults``; if ``num_workers`` is given, ranks must be below it.

        Raises:
            ValueError: a clause cannot be read, or names a rank that does not exist.
        """
        plan = cls(tuple(map(Clause.parse, text.removesuffix(";").split(";"))))
        if num_workers is None:
            return plan
        for clause in plan.clauses:
            if clause.rank is not None and clause.rank >= num_workers:
                raise ValueError(
                    f"--faults: {str(clause)!r}: there is no rank {clause.rank} among "
                    f"{num_workers} workers; choose 0 to {num_workers - 1}"
                )
        return plan


def _read(kind: str, word: str, rest: Iterator[str], text: str) -> tuple[str, float]:
    """Return the meaning and the value of a word; it may take the next one for its time."""
    if word in ("at", "every", "for"):
        time = next(rest, "")
        value = _seconds(time)
        if value is None:
            what = f"{time!r} after {word!r}" if time else f"nothing after {word!r}"
            raise _refusal(text, f"{what} is no time such as 500ms, 8s, 2m or 1h", SHAPES[kind])
        return word, value
    if word.isascii() and word.isdigit() and len(word) < 7:
        return "rank", int(word)
    if re.fullmatch(r"\d{1,4}(\.\d{1,3})?x", word, re.ASCII):
        return "factor", float(word[:-1])
    seconds = _seconds(word)
    if kind == "stop" and seconds is not None:
        return "for", seconds
    raise _refusal(text, f"{word!r} has no meaning here", SHAPES[kind])


def _problem(kind: str, found: dict[str, float]) -> str:
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


def _refusal(text: str, problem: str, *shapes: str) -> ValueError:
    return ValueError(f"--faults: {text.strip()!r}: {problem}; write {', or '.join(shapes)}")
