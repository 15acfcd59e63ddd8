"""Lock-step on a virtual clock: all-reduce at every step.

:class:`Rounds` is the seam of further methods: a subclass gives the time at which each worker ends
a round, from what it sends over the links, and changes the rows as the round does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.trace import Recorder, Trace

CLOCK_TOLERANCE = 1e-9
"""Sums of step times may be off by this share: a round that ends when a record is due counts."""


class Rounds(ABC):
    """Round after round of all workers, which start from rank 0's row.

    The clock is a list of the times at which each worker ended a round.

    Attributes:
        number: of the round under way, from 1.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        self.scenario = scenario
        self.ranks = range(scenario.num_workers)
        self.training = Training.of(scenario, momentum=False, starts_alike=True)
        self.population = self.training.population
        self.recorder = Recorder(scenario, method, self.training, on_progress)
        self.number = 1
        row = self.population.x[0]
        model_bytes = scenario.model_bytes or float(row.numel() * row.element_size())
        self._draw_transfer_s = scenario.links.begin(scenario.seed, model_bytes)
        self._num_exchanges = 0
        """Of this round: its edges, each once for every time that it is used."""
        self._models_sent = 0.0
        """By all workers in this round."""

    def run(self) -> Trace:
        """Simulate all rounds of the scenario."""
        draw_step_s = self.scenario.compute_time.begin(self.scenario.seed)
        recorder, num_workers, trace = self.recorder, len(self.ranks), self.recorder.trace
        now_s, idle_s, num_exchanges, goes_on = [0.0] * num_workers, 0.0, 0, True
        while True:
            computed_s = [begun_s + draw_step_s(rank) for rank, begun_s in enumerate(now_s)]
            for rank in self.ranks:
                recorder.interval(rank, "computing", now_s[rank], computed_s[rank])
            self._num_exchanges, self._models_sent = 0, 0.0
            ended_s = self.communicate(computed_s)
            num_rounds = self.number - 1
            while goes_on and recorder.next_s < max(ended_s) * (1 - CLOCK_TOLERANCE):
                total_s = math.fsum(now_s)
                goes_on = recorder.record(
                    exchanges=num_exchanges,
                    gradient_steps=num_rounds * num_workers,
                    idle_share=idle_s / total_s if total_s else 0.0,
                )
            if not goes_on:
                break
            self.step(self.training.factor(max(now_s)))
            idle_s += math.fsum(ended_s) - math.fsum(computed_s)
            num_exchanges += self._num_exchanges
            trace.models_sent += self._models_sent
            self.number, now_s = self.number + 1, ended_s
        trace.worker_steps = [num_rounds] * num_workers
        return trace

    @abstractmethod
    def communicate(self, computed_s: list[float]) -> list[float]:
        """Return the time at which each worker ends the round, from that of its gradient."""

    @abstractmethod
    def step(self, factor: float) -> None:
        """Change the rows as a round does. factor: on the learning rate."""

    # --- what communication takes ----------------------------------------------------------

    def all_reduced(self, computed_s: Sequence[float]) -> list[float]:
        """Return the times at which a ring all-reduce ends; all wait for the slowest to compute.

        Over the ring 0, 1, .., n-1, 0 it takes 2 (n - 1) / n * model_bytes / bytes_per_s +
        2 (n - 1) latency_s, of the slowest link (Patarasuk, Yuan 2009).
        """
        num_workers = len(self.ranks)
        edges = [(rank, rank + 1) for rank in self.ranks[:-1]]
        if num_workers > 2:
            edges.append((num_workers - 1, 0))
        hops, slowest_s = 2 * (num_workers - 1), 0.0
        for i, j in edges:
            share_s = hops / num_workers * self._draw_transfer_s(i, j)
            slowest_s = max(slowest_s, share_s + hops * self.scenario.links.latency_s(i, j))
        self._num_exchanges += len(edges)
        self._models_sent += hops
        all_computed_s = max(computed_s)
        end_s = all_computed_s + slowest_s
        for rank, computed in enumerate(computed_s):
            self.recorder.interval(rank, "waiting", computed, all_computed_s)
            self.recorder.interval(rank, "exchanging", all_computed_s, end_s)
        return [end_s] * len(computed_s)


class AllReduce(Rounds):
    """Data-parallel training by a ring all-reduce of the gradients at every step.

    Communication does not overlap with computation, as it may in part in PyTorch's
    DistributedDataParallel. A round counts the n edges of that ring as exchanges, whatever the
    scenario's graph. Float buffers stay each worker's own afterwards, and are judged by
    their mean as with the other methods; DistributedDataParallel sends rank 0's to all at each
    step.

    Without gradients (consensus) the rows themselves are averaged: one round, and they agree.
    """

    def communicate(self, computed_s: list[float]) -> list[float]:
        return self.all_reduced(computed_s)

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        if training.source is None:
            population.x.copy_(population.x.mean(dim=0).expand_as(population.x))
            return
        found = training.gradients(self.ranks, population.x)
        mean = found.values.mean(dim=0, keepdim=True)
        assert training.optimizers is not None
        change = training.optimizers.changes([0], population.trained[:1], mean, factor)
        changes = torch.cat([change.expand_as(found.values), found.buffer_changes], dim=1)
        population.step(self.ranks, changes)
