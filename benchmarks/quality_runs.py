"""The runs of quality.py: a grid of learning rates, widened, then seeds at the best one.

Every finished run is a line of a file, found again by its settings: a second call goes on where the
first was stopped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from quality_worker import RunResult, RunSettings
from support.provenance import Provenance

TUNING_SEED = 0
RATE_STEP = 2.0
MOST_WIDENINGS = 6


class NoBestRateError(RuntimeError):
    """The grid of learning rates was widened as far as it may be, and the best is still at its end.

    A row that diverges at every rate ends so too.
    """


class Line(msgspec.Struct, frozen=True):
    """A finished run as it is stored."""

    key: str
    result: RunResult
    provenance: Provenance


class Runs:
    """Runs that are finished, in a file of JSON lines; with None they are kept nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: dict[str, Line] = {}
        self._commits: set[str] = set()
        if path is not None and path.exists():
            for number, text in enumerate(path.read_bytes().splitlines(), start=1):
                try:
                    line = msgspec.json.decode(text, type=Line)
                except msgspec.MsgspecError as error:
                    raise ValueError(
                        f"{path}, line {number} is no finished run ({error}): delete that line"
                    ) from error
                self._lines[line.key] = line

    def find(self, settings: RunSettings) -> RunResult | None:
        """Return the result of a run of these settings; None if none is finished."""
        line = self._lines.get(settings.key)
        if line is None:
            return None
        self._commits.add(line.provenance.commit)
        return line.result

    def add(self, settings: RunSettings, result: RunResult) -> None:
        """Keep a run that has just finished."""
        line = Line(settings.key, result, Provenance.here(result.seconds))
        self._lines[line.key] = line
        self._commits.add(line.provenance.commit)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # one write: an interrupted call leaves whole lines
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def commits(self) -> str:
        """Return the commits by which the runs that were found or added were made."""
        return ", ".join(sorted(self._commits))


def next_rate(tried: Mapping[float, float], start: Sequence[float]) -> float | None:
    """Return the learning rate to try next; None when the best one has a neighbour on both sides.

    tried: rate → loss, infinity where it diverged. start: the written grid, of factors of two.

    Raises:
        NoBestRateError: no end was found after :data:`MOST_WIDENINGS` rates beyond the grid.

    >>> next_rate({0.002: 3.1, 0.004: 3.0}, [0.002, 0.004])
    0.008
    >>> next_rate({0.002: 3.1, 0.004: 3.0, 0.008: 3.2}, [0.002, 0.004])
    """
    for rate in start:
        if rate not in tried:
            return rate
    best, rates = best_rate(tried), sorted(tried)
    if best not in (rates[0], rates[-1]):
        return None
    if len(tried) >= len(start) + MOST_WIDENINGS:
        raise NoBestRateError(
            f"the best of the learning rates {rates} is still at the end of them: start elsewhere"
        )
    return best / RATE_STEP if best == rates[0] else best * RATE_STEP


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the rate of the least loss; the smaller of two equal ones."""
    return min(sorted(tried), key=lambda rate: tried[rate])


@dataclass
class Measured:
    """One row on one kind of data. tried: rate → loss of the tuning seed. results: by seed."""

    tried: dict[float, float] = field(default_factory=dict)
    is_tuned: bool = False
    results: dict[int, RunResult] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The best learning rate."""
        return best_rate(self.tried)


def measure(
    base: RunSettings,
    rates: Sequence[float],
    num_seeds: int,
    run: Callable[[RunSettings], RunResult | None],
) -> Measured:
    """Tune the row of ``base``, then run seeds 1 to ``num_seeds`` at the rate that was best.

    The tuning seed is none of those: a rate that was best by chance gains nothing by it.

    Args:
        base: row, data and size. Its condition is that of the seeds alone: timed runs take longer.
        rates: the grid to begin with.
        num_seeds: how many; with 0 the row is only tuned.
        run: gives a run's result, or None where it is not to be had now.
    """
    found = Measured()
    while (rate := next_rate(found.tried, rates)) is not None:
        settings = replace(base, learning_rate=rate, seed=TUNING_SEED, condition=None)
        result = run(settings)
        if result is None:
            return found
        found.tried[rate] = math.inf if result.loss is None else result.loss
    found.is_tuned = True
    for seed in range(1, num_seeds + 1):
        settings = replace(base, learning_rate=found.rate, seed=seed)
        result = run(settings)
        if result is None:
            return found
        found.results[seed] = result
    return found
