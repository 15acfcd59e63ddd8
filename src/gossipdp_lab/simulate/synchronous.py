"""Lock-step on a virtual clock: all-reduce and D-PSGD at every step, DiLoCo rarely.

They share :class:`Rounds`: a subclass gives the time at which each worker ends a round, from what
it sends over the links, and changes the rows as the round does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gossipdp.dynamics.outer import OuterStep
from numpy.typing import NDArray
from scipy import sparse

from gossipdp.dynamics import update
from gossipdp.graph.topology import Graph
from gossipdp_lab.simulate.population import Training
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.trace import Recorder, Trace

FloatArray = NDArray[np.float64]

CLOCK_TOLERANCE = 1e-9
"""Sums of step times may be off by this share: a round that ends when a record is due counts."""

MAX_SPARSE_SHARE = 0.1
"""Matrices with more entries than this share are multiplied as dense ones, which is quicker."""


def mixing_matrix(graph: Graph) -> FloatArray:
    """Return Metropolis-Hastings weights: symmetric, non-negative, rows and columns sum to one.

        w_ij = 1 / (1 + max(deg_i, deg_j)) on edges,   w_ii = 1 - sum_j w_ij

    Source: Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation",
    2007. They need the degrees of neighbours only.

    Args:
        graph: ranks 0..n-1.

    Returns:
        W; (n, n).
    """
    num_workers = len(graph)
    matrix = np.zeros((num_workers, num_workers))
    for i, j in graph.edges:
        matrix[i, j] = matrix[j, i] = 1.0 / (1.0 + max(len(graph[i]), len(graph[j])))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    return matrix


def second_eigenvalue(matrix: FloatArray) -> float:
    """Return the second largest absolute eigenvalue: a round shrinks disagreement by it."""
    if len(matrix) == 1:
        return 0.0
    values = np.linalg.eigvalsh(matrix)
    # The largest is one, of the constant vector. A zero may come out as a rounding error.
    gamma = max(abs(float(values[0])), abs(float(values[-2])))
    return gamma if gamma > len(matrix) * np.finfo(np.float64).eps else 0.0


def quick_to_multiply(matrix: FloatArray) -> Any:
    """Return the matrix, sparse if that is quicker, for products with rows of shape (n, d)."""
    is_sparse = np.count_nonzero(matrix) <= MAX_SPARSE_SHARE * matrix.size
    return sparse.csr_array(matrix) if is_sparse else matrix


class Rounds(ABC):
    """Round after round of all workers; the clock is a list of the times at which each ended one.

    Attributes:
        number: of the round under way, from 1.
        starts_alike: whether all workers start from rank 0's row.
    """

    starts_alike: ClassVar[bool] = True

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        self.scenario = scenario
        self.ranks = range(scenario.num_workers)
        self.training = Training.of(scenario, momentum=False, starts_alike=self.starts_alike)
        self.population = self.training.population
        self.recorder = Recorder(scenario, method, self.training, on_progress)
        self.number = 1
        row = self.population.x[0]
        model_bytes = scenario.model_bytes or float(row.numel() * row.element_size())
        self._draw_transfer_s = scenario.links.begin(scenario.seed, model_bytes)
        self._used: list[tuple[int, int]] = []
        """The edges of this round, each once for every time that it is used."""
        self._models_sent = 0.0
        """By all workers in this round."""

    def run(self) -> Trace:
        """Simulate all rounds of the scenario."""
        draw_step_s = self.scenario.compute_time.begin(self.scenario.seed)
        recorder, num_workers, trace = self.recorder, len(self.ranks), self.recorder.trace
        worker_exchanges = np.zeros(num_workers, dtype=np.int64)
        now_s, idle_s, num_exchanges, goes_on = [0.0] * num_workers, 0.0, 0, True
        while True:
            computed_s = [begun_s + draw_step_s(rank) for rank, begun_s in enumerate(now_s)]
            for rank in self.ranks:
                recorder.interval(rank, "computing", now_s[rank], computed_s[rank])
            self._used, self._models_sent = [], 0.0
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
            if self.training.source is None:
                self.agree()
            else:
                self.step(self.training.factor(max(now_s)))
            idle_s += math.fsum(ended_s) - math.fsum(computed_s)
            num_exchanges += len(self._used)
            trace.models_sent += self._models_sent
            used = np.array(self._used, dtype=np.int64).ravel()
            worker_exchanges += np.bincount(used, minlength=num_workers)
            self.number, now_s = self.number + 1, ended_s
        trace.worker_steps = [num_rounds] * num_workers
        trace.worker_exchanges = worker_exchanges.tolist()
        trace.num_events = num_rounds * num_workers + num_exchanges
        return trace

    @abstractmethod
    def communicate(self, computed_s: list[float]) -> list[float]:
        """Return the time at which each worker ends the round, from that of its gradient."""

    @abstractmethod
    def step(self, factor: float) -> None:
        """Change the rows as a round with gradients does."""

    @abstractmethod
    def agree(self) -> None:
        """Change the rows as a round without gradients does."""

    # --- what communication takes ----------------------------------------------------------

    def all_reduced(self, computed_s: Sequence[float], models: float = 1.0) -> list[float]:
        """Return the times at which a ring all-reduce ends; all wait for the slowest to compute.

        Over the ring 0, 1, .., n-1, 0 it takes 2 (n - 1) / n * models * model_bytes / bytes_per_s +
        2 (n - 1) latency_s, of the slowest link (Patarasuk, Yuan 2009).
        """
        num_workers = len(self.ranks)
        edges = [(rank, rank + 1) for rank in self.ranks[:-1]]
        if num_workers > 2:
            edges.append((num_workers - 1, 0))
        hops, slowest_s = 2 * (num_workers - 1), 0.0
        for i, j in edges:
            share_s = hops / num_workers * models * self._draw_transfer_s(i, j)
            slowest_s = max(slowest_s, share_s + hops * self.scenario.links.latency_s(i, j))
        self._used += edges
        self._models_sent += hops * models
        all_computed_s = max(computed_s)
        end_s = all_computed_s + slowest_s
        for rank, computed in enumerate(computed_s):
            self.recorder.interval(rank, "waiting", computed, all_computed_s)
            self.recorder.interval(rank, "exchanging", all_computed_s, end_s)
        return [end_s] * len(computed_s)

    def sent_to(self, ready_s: Sequence[float], peers: Sequence[Sequence[int]]) -> list[float]:
        """Return the times at which each has sent to its peers and received what they sent.

        One network card serves all peers side by side, so that sending takes the sum over them of
        model_bytes / bytes_per_s, then latency_s to each.
        """
        latency_s, interval = self.scenario.links.latency_s, self.recorder.interval
        sent_s = [
            ready_s[rank] + sum(self._draw_transfer_s(rank, peer) for peer in peers[rank])
            for rank in self.ranks
        ]
        ended_s = []
        for rank in self.ranks:
            arrivals_s = [sent_s[peer] + latency_s(peer, rank) for peer in peers[rank]]
            ended_s.append(max(sent_s[rank], *arrivals_s) if arrivals_s else sent_s[rank])
            interval(rank, "exchanging", ready_s[rank], sent_s[rank])
            interval(rank, "waiting", sent_s[rank], ended_s[rank])
            self._used += [(rank, peer) for peer in peers[rank] if rank < peer]
            self._models_sent += len(peers[rank])
        return ended_s


class AllReduce(Rounds):
    """Data-parallel training by a ring all-reduce of the gradients at every step.

    Every worker computes, all wait for the slowest, then the gradients are averaged
    (:meth:`Rounds.all_reduced`), and one and the same optimizer step is taken everywhere.
    Communication does not overlap with computation, as it may in part in PyTorch's
    DistributedDataParallel. A round counts the n edges of that ring as exchanges, whatever the
    scenario's graph.

    All start from rank 0's row. Float buffers stay each worker's own afterwards, and are judged by
    their mean as with the other methods; DistributedDataParallel sends rank 0's to all at each
    step.

    Without gradients (consensus) the rows themselves are averaged: one round, and they agree.
    """

    def communicate(self, computed_s: list[float]) -> list[float]:
        return self.all_reduced(computed_s)

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        mean = found.values.mean(dim=0, keepdim=True)
        change = training.optimizer.changes(
            training.state, [0], population.trained[:1], mean, factor
        )
        changes = torch.cat([change.expand_as(found.values), found.buffer_changes], dim=1)
        population.step(self.ranks, changes)

    def agree(self) -> None:
        rows = self.population.x
        rows.copy_(rows.mean(dim=0).expand_as(rows))


class Dpsgd(Rounds):
    """D-PSGD: x <- W x - update, W the Metropolis-Hastings weights of the graph.

    The update is the optimizer's at each worker's own row and own momentum; float buffers are
    averaged alike. Source: Lian et al. 2017, algorithm 1.

    A worker computes its gradient, sends its row to its neighbours, then waits for theirs of the
    same round; it does not wait for other workers (local synchronisation). Communication does not
    overlap with computation, though Lian et al. allow it. A round counts all |E| edges as
    exchanges. Without gradients (consensus) every round is one multiplication by W.

    A record shows the last round that all workers have ended: a worker that is ahead of others
    waits in it.
    """

    starts_alike: ClassVar[bool] = False

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        graph = scenario.make_graph()
        self._matrix = quick_to_multiply(mixing_matrix(graph))
        self._neighbours = [sorted(graph[rank]) for rank in self.ranks]

    def communicate(self, computed_s: list[float]) -> list[float]:
        return self.sent_to(computed_s, self._neighbours)

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        changes = training.changes(self.ranks, population.x, found, factor)
        self.agree()
        population.step(self.ranks, changes)

    def agree(self) -> None:
        # In double precision, since rounded weights would not sum to one: that moves the mean.
        rows = self.population.x
        rows.copy_(torch.from_numpy(self._matrix @ rows.double().numpy()))


class DiLoCo(Rounds):
    """H steps apart, then an all-reduce of the changes, and an outer Nesterov step.

        g = mean_i x_i - base,   m = mu m + g,   base = x_i = base + lr (g + mu m)

    every ``sync_every`` = H rounds. With momentum 0 and lr 1 it is local SGD. The paper's mu is 0.9
    and its lr 0.7, our defaults here. With ``exchange_moments`` the optimizers' moments are
    averaged at every so many of these steps.

    All start from rank 0's row, and their buffers (BatchNorm statistics) are averaged where
    parameters are. Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1; the code is our
    own.
    """

    def __init__(
        self, scenario: Scenario, method: str, on_progress: Callable[[float], None]
    ) -> None:
        super().__init__(scenario, method, on_progress)
        self._outer = scenario.outer or OuterStep(momentum=0.9, lr=0.7)
        self._base = self.population.trained[0].clone()
        self._momentum = torch.zeros_like(self._base)

    def communicate(self, computed_s: list[float]) -> list[float]:
        if self.number % self.scenario.sync_every:
            return computed_s
        return self.all_reduced(computed_s, self.training.models_due(self._num_averages))

    def step(self, factor: float) -> None:
        training, population = self.training, self.population
        found = training.gradients(self.ranks, population.x)
        population.step(self.ranks, training.changes(self.ranks, population.x, found, factor))
        if self.number % self.scenario.sync_every == 0:
            self._average()

    def agree(self) -> None:
        raise AssertionError("methods of local steps need gradients")

    def _average(self) -> None:
        rows, outer = self.population.x, self._outer
        mean = rows.mean(dim=0)
        trained = mean[: self.population.num_trained]
        brought = torch.zeros_like(trained)
        update.outer_step(trained, brought, self._base, self._momentum, outer.momentum, outer.lr)
        trained += brought
        self._base += brought
        self.population.put(slice(0, len(mean)), mean.expand_as(rows))
        for moment in self.training.moments_due(self._num_averages):
            moment.copy_(moment.mean(dim=0).expand_as(moment))

    @property
    def _num_averages(self) -> int:
        return self.number // self.scenario.sync_every
