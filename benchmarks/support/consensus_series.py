"""From what the workers saw to the two figures of a consensus run, measured or simulated alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from support.consensus_worker import WorkerSeries

from gossipdp_lab.simulate.trace import Trace, decay_per_exchange, lowest_share

Series: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

LOWEST_SHARE = 1e-10
"""Down to this share of the first consensus distance the slope is taken: below lies, at 1e-14, what
float32 rounds away."""
# A worker asks for nothing in its first steps: it does not know yet how long they take.
NUM_STEPS_BEFORE_RATE = 5


@dataclass(frozen=True)
class NetworkSeries:
    """The whole network at a row of moments, one gradient step apart.

    exchanges, gradient_steps: so far, over the network.
    distances: (1/n) sum_i |x_i - mean|^2, over the coordinates that are observed.
    """

    num_workers: int
    exchanges: Series
    gradient_steps: Series
    distances: Series

    @classmethod
    def of_workers(cls, workers: Sequence[WorkerSeries], step_s: float) -> NetworkSeries:
        """Put together what the workers saw, each by what it saw last before a moment.

        So a worker's part is up to a step old, always by about the same: that leaves the slope.
        """
        begin = max(worker.times_s[0] for worker in workers)
        end = min(worker.times_s[-1] for worker in workers)
        moments = begin + step_s * np.arange(1 + int((end - begin) / step_s))
        places = [np.searchsorted(worker.times_s, moments, side="right") - 1 for worker in workers]
        values = np.stack(
            [worker.values[place] for worker, place in zip(workers, places, strict=True)]
        ).astype(np.float64)
        centred = values - values.mean(axis=0)
        return cls(
            num_workers=len(workers),
            exchanges=np.sum(
                [worker.initiated[place] for worker, place in zip(workers, places, strict=True)],
                axis=0,
                dtype=np.float64,
            ),
            gradient_steps=np.sum(places, axis=0, dtype=np.float64),
            distances=np.square(centred).sum(axis=(0, 2)) / len(workers),
        )

    @classmethod
    def of_trace(cls, trace: Trace) -> NetworkSeries:
        """Return the series of a simulated run."""
        return cls(
            trace.num_workers,
            trace.column("exchanges"),
            trace.column("gradient_steps"),
            trace.column("consensus_distance"),
        )

    def outcome(self) -> Outcome:
        """Return the figures of this run.

        Raises:
            ValueError: the run is too short for a slope.
        """
        exchanges_per_worker = 2.0 * self.exchanges / self.num_workers
        slope = decay_per_exchange(exchanges_per_worker, self.distances, lowest=LOWEST_SHARE)
        if math.isnan(slope):
            raise ValueError(
                f"{self.exchanges[-1]:g} exchanges took place in {len(self.distances) - 1} steps, "
                "too few for a slope: give more --steps, or a higher --comm-rate"
            )
        return Outcome(slope, self._achieved_comm_rate(), lowest_share(self.distances))

    def _achieved_comm_rate(self) -> float:
        """Exchanges per worker per gradient step, from when the workers can ask."""
        begin = _first(self.gradient_steps >= NUM_STEPS_BEFORE_RATE * self.num_workers)
        exchanges = self.exchanges[-1] - self.exchanges[begin]
        return float(2.0 * exchanges / (self.gradient_steps[-1] - self.gradient_steps[begin]))


@dataclass(frozen=True)
class Outcome:
    """The figures of one run; lowest_share: of the first consensus distance, that it got to."""

    decay_per_exchange: float
    achieved_comm_rate: float
    lowest_share: float


def _first(condition: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """Return the first place where it holds, or the length where it never does."""
    return int(np.argmax(condition)) if condition.any() else len(condition)
