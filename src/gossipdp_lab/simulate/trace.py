"""The results of a simulated run: its time series, their recorder, and the decay of distances."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from gossipdp_lab.simulate.objectives import Evaluation
from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import Scenario

Series: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

TAIL_HIGHEST, TAIL_LOWEST = 1e-3, 1e-24
"""Between these shares of its first value the consensus distance falls at its lasting rate."""
LEAST_FALL = 1e-2
"""A run that did not get below this share does not show the lasting rate."""
MIN_DECAY_RECORDS = 3

Activity: TypeAlias = Literal["computing", "exchanging", "waiting"]


class Interval(NamedTuple):
    """An activity of a worker from one moment to another, in seconds of virtual time."""

    rank: int
    activity: Activity
    start_s: float
    end_s: float


class Record(NamedTuple):
    """The state of the network at one moment.

    Attributes:
        time_s: virtual time, in seconds.
        loss: of the mean of the workers, over the training objective; NaN without gradients.
        metric: of the mean of the workers on held-out data; NaN where there is none.
        consensus_distance: (1/n) sum_i |x_i - mean|^2.
        exchanges: so far, over the network; a synchronous round counts the edges it used.
        gradient_steps: so far, of all workers.
        idle_share: share of all workers' time so far that was spent waiting.
        drift: distance of the mean of x + c/2 from where gradient steps moved it.
    """

    time_s: float
    loss: float
    metric: float
    consensus_distance: float
    exchanges: int
    gradient_steps: int
    idle_share: float
    drift: float


@dataclass
class Trace:
    """One simulated run.

    Attributes:
        method: its method.
        num_workers: number of workers.
        unit_s: the duration of an ordinary gradient step: the unit of time.
        records: in the order of time; the first is the start.
        worker_steps: gradient steps of each worker.
        models_sent: by all workers, in models; moments count as models.
        num_messages: control messages sent, by type; empty where there are none.
        intervals: each activity of each worker, if the scenario asks for it.
        wall_s: how long the simulation itself took; not part of :meth:`digest`.
    """

    method: str
    num_workers: int
    unit_s: float
    records: list[Record] = field(default_factory=list)
    worker_steps: list[int] = field(default_factory=list)
    models_sent: float = 0.0
    num_messages: dict[str, int] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    wall_s: float = 0.0

    def column(self, name: str) -> Series:
        """Return one time series by its name in :class:`Record`; (num_records + 1,)."""
        return np.array([getattr(record, name) for record in self.records], dtype=np.float64)

    @property
    def achieved_comm_rate(self) -> float:
        """Return 2 exchanges / all gradient steps: exchanges per worker per step; NaN if none."""
        last = self.records[-1]
        return 2 * last.exchanges / last.gradient_steps if last.gradient_steps else math.nan

    @property
    def models_per_step(self) -> float:
        """Return the models that a worker sends for each of its gradient steps; NaN if none."""
        steps = self.records[-1].gradient_steps
        return self.models_sent / steps if steps else math.nan

    @property
    def exchanges_per_worker(self) -> float:
        """Return the exchanges of an average worker, asked for or answered."""
        return 2.0 * self.records[-1].exchanges / self.num_workers

    def digest(self) -> str:
        """Hash everything that the run did, except its duration: same seed, same digest."""
        content = vars(self) | {
            # Bytes, since JSON and equality know no NaN.
            "records": np.array(self.records, dtype=np.float64).tobytes(),
            "num_messages": dict(sorted(self.num_messages.items())),
            "wall_s": None,
        }
        return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()

    def decay_per_exchange(self, lowest: float = TAIL_LOWEST) -> float:
        """Return the rate at which the workers agreed: see :func:`decay_per_exchange`."""
        exchanges = self.column("exchanges") * 2.0 / self.num_workers
        return decay_per_exchange(exchanges, self.column("consensus_distance"), lowest)


def decay_per_exchange(
    exchanges_per_worker: ArrayLike, consensus_distances: ArrayLike, lowest: float = TAIL_LOWEST
) -> float:
    """Return the slope of -log(consensus distance) over exchanges per worker, by least squares.

    At first modes of all speeds decay together; the slowest lasts. So the slope is taken between
    1e-3 and ``lowest`` of the first distance: from the first record at or below 1e-3 to the last
    before the first one below ``lowest``. If the run did not get to ``lowest``, the slope is taken
    over the second half of the decades that it fell: an estimate that is on the high side.

    Args:
        exchanges_per_worker, consensus_distances: one each record.
        lowest: below this share of the first distance lies rounding; 1e-24 for float64.

    Returns:
        The slope; NaN for a run that fell by less than two decades, or within three records.
    """
    distances = np.asarray(consensus_distances, dtype=np.float64)
    fallen = lowest_share(distances)
    if fallen > LEAST_FALL:
        return math.nan
    shares = distances / distances[0]
    begin = _first(shares <= max(TAIL_HIGHEST, math.sqrt(fallen)))
    end = _first(shares < lowest)
    exchanges = np.asarray(exchanges_per_worker, dtype=np.float64)[begin:end]
    if len(set(exchanges.tolist())) < MIN_DECAY_RECORDS:
        return math.nan
    slope, _ = np.polyfit(exchanges, -np.log(shares[begin:end]), 1)
    return float(slope)


def lowest_share(consensus_distances: Series) -> float:
    """Return the share of its first value to which the consensus distance fell; 1 for zeros."""
    first = consensus_distances[0]
    return float(np.nanmin(consensus_distances) / first) if first > 0 else 1.0


def _first(condition: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return the first place where the condition holds; the length if it never does."""
    return int(np.argmax(condition)) if condition.any() else len(condition)


class Recorder:
    """Records the network at evenly spaced moments, and says when the run is over."""

    def __init__(
        self,
        scenario: Scenario,
        method: str,
        training: Training,
        on_progress: Callable[[float], None],
    ) -> None:
        self.trace = Trace(method, scenario.num_workers, scenario.compute_time.step_s)
        self._scenario = scenario
        self._training = training
        self._on_progress = on_progress

    @property
    def next_s(self) -> float:
        """Return the time of the next record; inf once all are made."""
        made = len(self.trace.records)
        if made > self._scenario.num_records:
            return math.inf
        return self._scenario.end_s * made / self._scenario.num_records

    def record(self, *, exchanges: int, gradient_steps: int, idle_share: float = 0.0) -> bool:
        """Make the record that is due at :attr:`next_s`; return whether the run goes on."""
        training, population = self._training, self._training.population
        judged = Evaluation(loss=math.nan)
        if training.source is not None:
            judged = training.source.evaluate(population.mean())
        records, time_s = self.trace.records, self.next_s
        records.append(
            Record(
                time_s=time_s,
                loss=judged.loss,
                metric=math.nan if judged.metric is None else judged.metric,
                consensus_distance=population.consensus_distance(),
                exchanges=exchanges,
                gradient_steps=gradient_steps,
                idle_share=idle_share,
                drift=population.drift(),
            )
        )
        distance, first = records[-1].consensus_distance, records[0].consensus_distance
        is_over = distance < self._scenario.stop_below * first or not math.isfinite(distance)
        self._on_progress(1.0 if is_over else min(1.0, time_s / self._scenario.end_s))
        return not is_over and len(records) <= self._scenario.num_records

    def interval(self, rank: int, activity: Activity, start_s: float, end_s: float) -> None:
        """Keep an activity of a worker, if the scenario asks for it."""
        if self._scenario.keep_timeline:
            self.trace.intervals.append(Interval(rank, activity, start_s, end_s))
