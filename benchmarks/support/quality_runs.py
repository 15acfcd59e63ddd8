"""The runs of quality.py: a grid of learning rates, widened, then seeds at the best one.

Every finished run is a line of a file, found again by its settings: a second call goes on where the
first was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from support.finished_runs import FinishedRuns
from support.learning_rates import best_rate, next_rate
from support.provenance import Provenance
from support.quality_worker import RunResult, RunSettings

TUNING_SEED = 0


class Line(msgspec.Struct, frozen=True):
    """A finished run as it is stored."""

    key: str
    result: RunResult
    provenance: Provenance


class Runs(FinishedRuns[Line]):
    """Runs that are finished, by their settings; notes the commits of those that are asked for."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, Line, key=lambda line: line.key)
        self._commits: set[str] = set()

    def find(self, settings: RunSettings) -> RunResult | None:
        """Return the result of a run of these settings; None if none is finished."""
        line = self.known.get(settings.key)
        if line is None:
            return None
        self._commits.add(line.provenance.commit)
        return line.result

    def add(self, settings: RunSettings, result: RunResult) -> None:
        """Keep a run that has just finished."""
        line = Line(settings.key, result, Provenance.here(result.seconds))
        self._commits.add(line.provenance.commit)
        self.keep(line)

    def commits(self) -> str:
        """Return the commits by which the runs that were found or added were made."""
        return ", ".join(sorted(self._commits))


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
    tuning: RunSettings,
    rates: Sequence[float],
    num_seeds: int,
    run: Callable[[RunSettings], RunResult | None],
) -> Measured:
    """Tune the row of ``base``, then run seeds 1 to ``num_seeds`` at the rate that was best.

    The tuning seed is none of those: a rate that was best by chance gains nothing by it.

    Args:
        base: what is measured, but for rate and seed.
        tuning: what its rate is tuned by: the same, or something that takes less time.
        rates: the grid to begin with.
        num_seeds: how many; with 0 the row is only tuned.
        run: gives a run's result, or None where it is not to be had now.
    """
    found = Measured()
    while (rate := next_rate(found.tried, rates)) is not None:
        result = run(replace(tuning, learning_rate=rate, seed=TUNING_SEED))
        if result is None:
            return found
        found.tried[rate] = math.inf if result.loss is None else result.loss
    found.is_tuned = True
    for seed in range(1, num_seeds + 1):
        result = run(replace(base, learning_rate=found.rate, seed=seed))
        if result is None:
            return found
        found.results[seed] = result
    return found
