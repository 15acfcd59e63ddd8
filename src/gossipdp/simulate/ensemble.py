"""One method simulated with several seeds: means, spreads, and how fast workers agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from gossipdp.simulate.trace import Trace

Series: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

TAIL_HIGHEST, TAIL_LOWEST = 1e-3, 1e-24
"""Between these shares of its first value the consensus distance falls at its lasting rate."""

LEAST_FALL = 1e-2
"""A run that did not get below this share says nothing about the lasting rate."""


class Estimate(NamedTuple):
    """A figure over seeds; NaN where no seed has one."""

    mean: float
    spread: float
    """Sample standard deviation over seeds; 0 for one seed."""
    by_seed: tuple[float, ...]

    @classmethod
    def of(cls, figures: Sequence[float]) -> Estimate:
        """Mean and spread of one figure a seed; NaN if one of them is."""
        spread = float(np.std(figures, ddof=1)) if len(figures) > 1 else 0.0
        return cls(float(np.mean(figures)), spread, tuple(figures))


@dataclass(frozen=True)
class Ensemble:
    """Traces that differ by their seeds alone.

    Their time series are taken as far as all of them go: a run may end before others, once the
    workers agree.

    Args:
        label: what to call it in figures and tables.
        traces: one a seed.
        case: which of several scenarios it belongs to, from 0.
    """

    label: str
    traces: Sequence[Trace]
    case: int = 0

    def __post_init__(self) -> None:
        if not self.traces:
            raise ValueError(f"{self.label}: an ensemble needs at least one trace")

    @property
    def method(self) -> str:
        """The method of all traces."""
        return self.traces[0].method

    def column(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """One time series of :class:`~gossipdp.simulate.trace.Record`; (num_seeds, num_records)."""
        columns = [trace.column(name) for trace in self.traces]
        length = min(len(column) for column in columns)
        return np.stack([column[:length] for column in columns])

    def mean(self, name: str) -> Series:
        """Mean over seeds; (num_records,)."""
        return np.asarray(self.column(name).mean(axis=0))

    def spread(self, name: str) -> Series:
        """Sample standard deviation over seeds, 0 for one seed; (num_records,)."""
        column = self.column(name)
        if len(column) == 1:
            return np.zeros(column.shape[1])
        return np.asarray(column.std(axis=0, ddof=1))

    def last(self, name: str) -> Estimate:
        """A column's value at the end of each run."""
        return Estimate.of([float(getattr(trace.records[-1], name)) for trace in self.traces])

    @property
    def exchanges_per_worker(self) -> Estimate:
        """Exchanges that a worker took part in, on average over the workers."""
        return Estimate.of(
            [2.0 * trace.records[-1].exchanges / trace.num_workers for trace in self.traces]
        )

    @property
    def achieved_comm_rate(self) -> Estimate:
        """Exchanges per worker per gradient step."""
        return Estimate.of([trace.achieved_comm_rate for trace in self.traces])

    @property
    def decay_per_exchange(self) -> Estimate:
        """Slope of -log(consensus distance) over exchanges per worker; see :func:`tail_decay`."""
        return Estimate.of([tail_decay(trace) for trace in self.traces])

    @property
    def lowest_share(self) -> float:
        """To which share of its first value the consensus distance fell at least, in all runs."""
        return max(lowest_share(trace) for trace in self.traces)

    @property
    def gradient_steps(self) -> tuple[float, float]:
        """Of the slowest and the fastest worker, means over seeds.

        Where steps are counted and not simulated, all workers have taken the same.
        """
        ends = []
        for trace in self.traces:
            per_worker = trace.records[-1].gradient_steps / trace.num_workers
            steps = trace.worker_steps if any(trace.worker_steps) else [per_worker]
            ends.append((min(steps), max(steps)))
        slowest, fastest = np.mean(ends, axis=0)
        return float(slowest), float(fastest)


def lowest_share(trace: Trace) -> float:
    """To which share of its first value the consensus distance fell; 1 for no distance at all."""
    distances = trace.column("consensus_distance")
    return float(np.nanmin(distances) / distances[0]) if distances[0] > 0 else 1.0


def tail_decay(trace: Trace) -> float:
    """The slope between 1e-3 and 1e-24 of the first consensus distance; NaN without one.

    At first modes of all speeds decay together; the slowest is what lasts. Of a run that did not
    get to 1e-24 it is the slope over the second half of the decades that it fell, if those are
    two at least: an estimate that is on the high side.
    """
    lowest = lowest_share(trace)
    if lowest > LEAST_FALL:
        return math.nan
    highest = max(TAIL_HIGHEST, math.sqrt(lowest))
    try:
        return trace.decay_per_exchange(highest, TAIL_LOWEST)
    except ValueError:  # it fell within a few records, as all-reduce does in one round
        return math.nan
