"""All-reduce and D-PSGD, which communicate at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse

from gossipdp_lab.simulate.rounds import Rounds
from gossipdp_lab.simulate.scenario import Scenario

FloatArray = NDArray[np.float64]

MAX_SPARSE_SHARE = 0.1
"""Matrices with more entries than this share are multiplied as dense ones, which is quicker."""


def mixing_matrix(graph: nx.Graph[int], *, lazy: bool = False) -> FloatArray:
    """Metropolis-Hastings weights: symmetric, non-negative, rows and columns sum to one.

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
    """The second largest absolute eigenvalue: the factor by which a round shrinks disagreement."""
    if len(matrix) == 1:
        return 0.0
    values = np.linalg.eigvalsh(matrix)
    # The largest is one, of the constant vector. What rounding leaves of a zero is a zero.
    gamma = max(abs(float(values[0])), abs(float(values[-2])))
    return gamma if gamma > len(matrix) * np.finfo(np.float64).eps else 0.0


def quick_to_multiply(matrix: FloatArray) -> Any:
    """The matrix, sparse where that is quicker, for products with rows of shape (n, d)."""
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

    A worker computes its gradient, then sends its row to its neighbours, then waits for theirs of
    the same round; nobody waits for the others (local synchronisation). Communication does not
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
