"""The synchronous methods, for comparison: all-reduce and D-PSGD, in rounds on a virtual clock."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gossipdp.simulate.mixing import (
    ChebyshevWeights,
    FloatArray,
    Mixer,
    mixing_matrix,
    multiplications_per_step,
    second_eigenvalue,
)
from gossipdp.simulate.objectives import Gradients
from gossipdp.simulate.population import Population
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Interval, Recorder, Trace
from gossipdp.tasks.workload import learning_rate_factor

CLOCK_TOLERANCE = 1e-9
"""Sums of step times may be off by this share: a round that ends when a record is due counts."""


def run_allreduce(scenario: Scenario, on_progress: Callable[[float], None]) -> Trace:
    """Simulate data-parallel training by a ring all-reduce of the gradients at every step.

    Every worker computes, all wait for the slowest, then the gradients are averaged at the cost

        2 (n - 1) / n * model_bytes / bytes_per_s + 2 (n - 1) latency_s

    of the slowest link of the ring 0, 1, .., n-1, 0 (Patarasuk, Yuan 2009), and one and the same
    optimizer step is taken everywhere. Communication does not overlap with computation, as it may
    in part in PyTorch's DistributedDataParallel. A round counts the n edges of that ring as
    exchanges, whatever the scenario's graph.

    All start from rank 0's row. Float buffers stay each worker's own afterwards, and are judged by
    their mean as with the other methods; DistributedDataParallel sends rank 0's to all at each
    step.

    Without gradients (consensus) the rows themselves are averaged: one round, and they agree.
    """
    return _AllReduceRun(scenario, on_progress).run()


def run_dpsgd(
    scenario: Scenario, on_progress: Callable[[float], None], *, chebyshev: bool
) -> Trace:
    """Simulate D-PSGD: x <- W x - update, W the Metropolis-Hastings weights of the graph.

    The update is the optimizer's at each worker's own row and own momentum; float buffers are
    averaged alike. Source: Lian et al. 2017, algorithm 1.

    A worker computes its gradient, then sends its row to its neighbours, then waits for theirs of
    the same round; nobody waits for the others (local synchronisation). One network card serves
    all neighbours side by side, so that sending takes

        sum over neighbours of model_bytes / bytes_per_s, then latency_s to each of them.

    Communication does not overlap with computation, though Lian et al. allow it. A round counts
    all |E| edges as exchanges.

    With ``chebyshev`` each gradient step is followed by K multiplications by W, each with its own
    exchanges and waiting: x <- P_K(W) x - update with the Chebyshev polynomial of
    :class:`~gossipdp.simulate.mixing.ChebyshevWeights` and the K of
    :func:`~gossipdp.simulate.mixing.multiplications_per_step`, as in multi-step dual accelerated
    gossip (Scaman et al. 2017). P_K(W) is symmetric, keeps the mean, and contracts everything
    else, so that this is as stable as D-PSGD. (The recursion running on across gradient steps is
    not: it would add heavy-ball momentum omega to the mean, for which the learning rate is not
    meant.)

    Without gradients (consensus) every round is one multiplication, and the Chebyshev recursion
    runs on through all rounds.

    A record shows the last round that all workers have ended: a worker that is ahead of others
    waits in it.
    """
    return _DecentralizedRun(scenario, on_progress, chebyshev=chebyshev).run()


class _SynchronousRun(ABC):
    """Round after round of all workers; the clock is a list of when each worker ended the last."""

    def __init__(
        self, scenario: Scenario, on_progress: Callable[[float], None], method: str
    ) -> None:
        self._scenario = scenario
        self._graph = scenario.make_graph()
        num_workers = scenario.num_workers
        begun = scenario.objective.begin(num_workers, scenario.seed)
        self._source = begun if scenario.objective.has_gradients else None
        start = self._first_rows(begun.start)
        self._population = Population(start, begun.num_trained, momentum=False)
        self._recorder = Recorder(scenario, method, self._population, self._source, on_progress)
        self._draw_step_s = scenario.compute_time.begin(scenario.seed)
        row = begun.start[0]
        model_bytes = scenario.model_bytes or float(row.numel() * row.element_size())
        self._draw_transfer_s = scenario.links.begin(scenario.seed, model_bytes)
        self._ranks = list(range(num_workers))
        self._now_s = [0.0] * num_workers
        self._idle_s = 0.0
        self._num_rounds = 0
        self._exchanges = [0] * num_workers
        self._loss_sum, self._num_losses = 0.0, 0

    def run(self) -> Trace:
        goes_on = True
        while goes_on:
            before_s = self._now_s
            computed_s = [now_s + self._draw_step_s(rank) for rank, now_s in enumerate(before_s)]
            for rank, computed in enumerate(computed_s):
                self._recorder.interval(Interval(rank, "computing", before_s[rank], computed))
            ended_s = self._communicate(computed_s)
            while goes_on and self._recorder.next_s < max(ended_s) * (1 - CLOCK_TOLERANCE):
                goes_on = self._record()
            if not goes_on:
                break
            self._step(max(before_s))
            self._num_rounds += 1
            self._now_s = ended_s
            self._idle_s += math.fsum(ended_s) - math.fsum(computed_s)
        trace = self._recorder.trace
        trace.worker_steps = [self._num_rounds] * len(self._ranks)
        trace.worker_exchanges = list(self._exchanges)
        trace.num_events = sum(trace.worker_steps) + sum(self._exchanges) // 2
        return trace

    @abstractmethod
    def _first_rows(self, start: Tensor) -> Tensor:
        """Where the workers start."""

    @abstractmethod
    def _communicate(self, computed_s: list[float]) -> list[float]:
        """When each worker ends the round, given when it has computed."""

    @abstractmethod
    def _step(self, now_s: float) -> None:
        """Change the rows as the round does, and count its exchanges."""

    def _gradients(self) -> Gradients:
        assert self._source is not None
        found = self._source.gradients(self._ranks, self._population.x)
        self._loss_sum += float(found.losses.sum())
        self._num_losses += len(self._ranks)
        return found

    def _factor(self, now_s: float) -> float:
        """The factor on the learning rate of a step that starts now."""
        if not self._scenario.learning_rate_decay:
            return 1.0
        return learning_rate_factor(min(1.0, now_s / self._recorder.end_s))

    def _record(self) -> bool:
        total_s = math.fsum(self._now_s)
        goes_on = self._recorder.record(
            exchanges=sum(self._exchanges) // 2,
            gradient_steps=self._num_rounds * len(self._ranks),
            batch_loss=self._loss_sum / self._num_losses if self._num_losses else math.nan,
            idle_share=self._idle_s / total_s if total_s else 0.0,
        )
        self._loss_sum, self._num_losses = 0.0, 0
        return goes_on


class _AllReduceRun(_SynchronousRun):
    def __init__(self, scenario: Scenario, on_progress: Callable[[float], None]) -> None:
        super().__init__(scenario, on_progress, "allreduce")
        num_workers = scenario.num_workers
        self._ring = [(rank, rank + 1) for rank in range(num_workers - 1)]
        if num_workers > 2:
            self._ring.append((num_workers - 1, 0))
        self._optimizer = scenario.optimizer.begin(self._population.trained[:1])

    def _first_rows(self, start: Tensor) -> Tensor:
        if self._source is None:
            return start
        return start[:1].expand_as(start)

    def _communicate(self, computed_s: list[float]) -> list[float]:
        num_workers = len(computed_s)
        hops = 2 * (num_workers - 1)
        slowest_s = 0.0
        for i, j in self._ring:
            share_s = hops / num_workers * self._draw_transfer_s(i, j)
            slowest_s = max(slowest_s, share_s + hops * self._scenario.links.latency_s(i, j))
        all_computed_s = max(computed_s)
        end_s = all_computed_s + slowest_s
        for rank, computed in enumerate(computed_s):
            self._recorder.interval(Interval(rank, "waiting", computed, all_computed_s))
            self._recorder.interval(Interval(rank, "exchanging", all_computed_s, end_s))
        return [end_s] * num_workers

    def _step(self, now_s: float) -> None:
        for edge in self._ring:
            for rank in edge:
                self._exchanges[rank] += 1
        population = self._population
        if self._source is None:
            population.x.copy_(population.x.mean(dim=0).expand_as(population.x))
            return
        found = self._gradients()
        mean = found.values.mean(dim=0, keepdim=True)
        change = self._optimizer.changes([0], population.trained[:1], mean, self._factor(now_s))
        changes = torch.cat([change.expand_as(found.values), found.buffer_changes], dim=1)
        population.step(self._ranks, changes)


class _DecentralizedRun(_SynchronousRun):
    def __init__(
        self, scenario: Scenario, on_progress: Callable[[float], None], *, chebyshev: bool
    ) -> None:
        super().__init__(scenario, on_progress, "dpsgd-chebyshev" if chebyshev else "dpsgd")
        self._neighbours = [sorted(self._graph.neighbors(rank)) for rank in self._ranks]
        matrix = mixing_matrix(self._graph)
        self._gamma = second_eigenvalue(matrix) if chebyshev else 0.0
        self._weights = ChebyshevWeights(self._gamma)
        self._per_round = 1 if self._source is None else multiplications_per_step(self._gamma)
        self._mixer = Mixer(matrix)
        self._before = np.zeros(0)
        self._optimizer = scenario.optimizer.begin(self._population.trained)

    def _first_rows(self, start: Tensor) -> Tensor:
        return start

    def _communicate(self, computed_s: list[float]) -> list[float]:
        latency_s = self._scenario.links.latency_s
        ready_s = computed_s
        for _ in range(self._per_round):
            sent_s = [
                ready_s[rank] + sum(self._draw_transfer_s(rank, peer) for peer in peers)
                for rank, peers in enumerate(self._neighbours)
            ]
            ended_s = []
            for rank, peers in enumerate(self._neighbours):
                arrivals_s = (sent_s[peer] + latency_s(peer, rank) for peer in peers)
                ended_s.append(max(sent_s[rank], *arrivals_s) if peers else sent_s[rank])
                self._recorder.interval(Interval(rank, "exchanging", ready_s[rank], sent_s[rank]))
                self._recorder.interval(Interval(rank, "waiting", sent_s[rank], ended_s[rank]))
            ready_s = ended_s
        return ready_s

    def _step(self, now_s: float) -> None:
        for rank, peers in enumerate(self._neighbours):
            self._exchanges[rank] += self._per_round * len(peers)
        population = self._population
        if self._source is None:
            population.x = torch.from_numpy(self._mix(population.x.numpy()))
            return
        found = self._gradients()
        change = self._optimizer.changes(
            self._ranks, population.trained, found.values, self._factor(now_s)
        )
        # In double precision, since rounded weights would not sum to one: that moves the mean.
        rows = population.x.double().numpy()
        self._weights = ChebyshevWeights(self._gamma)
        for _ in range(self._per_round):
            rows = self._mix(rows)
        population.x.copy_(torch.from_numpy(rows))
        population.step(self._ranks, torch.cat([change, found.buffer_changes], dim=1))

    def _mix(self, rows: FloatArray) -> FloatArray:
        """One multiplication of the rows by W."""
        omega = self._weights.take()
        mixed = self._mixer.multiply(rows)
        if omega:
            mixed *= 1.0 + omega
            mixed -= omega * self._before
        self._before = rows
        return mixed
