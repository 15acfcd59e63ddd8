"""All-reduce and D-PSGD, which communicate at every step, and DiLoCo, which rarely does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from gossipdp.dynamics import update
from gossipdp.dynamics.outer import OuterStep
from gossipdp_lab.simulate.rounds import Rounds
from gossipdp_lab.simulate.scenario import Scenario

FloatArray = NDArray[np.float64]

MAX_SPARSE_SHARE = 0.1
"""Matrices with more entries than this share are multiplied as dense ones, which is quicker."""


def mixing_matrix(graph: nx.Graph[int], *, lazy: bool = False) -> FloatArray:
    """Return Metropolis-Hastings weights: symmetric, non-negative, rows and columns sum to one.

        w_ij = 1 / (1 + max(deg_i, deg_j)) on edges,   w_ii = 1 - sum_j w_ij

    Source: Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation",
    2007. They need the degrees of neighbours only.

    Args:
        graph: ranks 0..n-1.
        lazy: return (I + W) / 2, whose eigenvalues are not negative. On a complete graph W itself
            is the mean: one round, and no rate to speak of.

    Returns:
        W; (n, n).
    """
    num_workers = len(graph)
    matrix = np.zeros((num_workers, num_workers))
    for i, j in graph.edges:
        matrix[i, j] = matrix[j, i] = 1.0 / (1.0 + max(graph.degree[i], graph.degree[j]))
    np.fill_diagonal(matrix, 1.0 - matrix.sum(axis=1))
    if lazy:
        matrix = 0.5 * (np.eye(num_workers) + matrix)
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
        self._neighbours = [sorted(graph.neighbors(rank)) for rank in self.ranks]

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
