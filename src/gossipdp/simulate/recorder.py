"""Writes the time series of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from gossipdp.simulate.objective import Evaluation, GradientSource
from gossipdp.simulate.population import Population
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Interval, Record, Trace


class Recorder:
    """Records the network at evenly spaced moments, and says when the run is over.

    Args:
        scenario: how long the run is, how many records, and when to stop before.
        method: its method.
        population: what is recorded.
        source: judges the mean row; None where there are no gradients.
        on_progress: told the share of the run that is done, at each record.
    """

    def __init__(
        self,
        scenario: Scenario,
        method: str,
        population: Population,
        source: GradientSource | None,
        on_progress: Callable[[float], None],
    ) -> None:
        self.trace = Trace(method, scenario.num_workers, scenario.compute_time.nominal_s)
        self.end_s = scenario.num_steps * scenario.compute_time.nominal_s
        """When the run is over at the latest, in virtual seconds."""
        self._scenario = scenario
        self._population = population
        self._source = source
        self._on_progress = on_progress

    @property
    def next_s(self) -> float:
        """When the next record is due; inf once all are made."""
        made = len(self.trace.records)
        if made > self._scenario.num_records:
            return math.inf
        return self.end_s * made / self._scenario.num_records

    def record(
        self,
        *,
        exchanges: int,
        gradient_steps: int,
        batch_loss: float = math.nan,
        idle_share: float = 0.0,
    ) -> bool:
        """Make the record that is due at :attr:`next_s`; return whether the run goes on."""
        judged = Evaluation(loss=math.nan)
        if self._source is not None:
            judged = self._source.evaluate(self._population.mean())
        records = self.trace.records
        time_s = self.next_s
        records.append(
            Record(
                time_s=time_s,
                loss=judged.loss,
                batch_loss=batch_loss,
                metric=math.nan if judged.metric is None else judged.metric,
                consensus_distance=self._population.consensus_distance(),
                exchanges=exchanges,
                gradient_steps=gradient_steps,
                idle_share=idle_share,
                drift=self._population.drift(),
            )
        )
        self._on_progress(min(1.0, time_s / self.end_s))
        distance, first = records[-1].consensus_distance, records[0].consensus_distance
        if distance < self._scenario.stop_below * first or not math.isfinite(distance):
            self._on_progress(1.0)
            return False
        return len(records) <= self._scenario.num_records

    def interval(self, interval: Interval) -> None:
        """Keep what a worker did, if the scenario asks for it."""
        if self._scenario.keep_timeline:
            self.trace.intervals.append(interval)
