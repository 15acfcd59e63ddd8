"""Mixing matrices of synchronous gossip, and how many rounds they take to agree."""

from __future__ import annotations

import math
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

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


class ChebyshevWeights:
    """The weights of accelerated gossip: the Chebyshev semi-iteration.

        x_1     = W x_0
        x_{t+1} = (1 + omega_t) W x_t - omega_t x_{t-1}
        1 + omega_1 = 1 / (1 - gamma^2 / 2),   1 + omega_t = 1 / (1 - gamma^2 (1 + omega_{t-1}) / 4)

    so that x_t = T_t(W / gamma) / T_t(1 / gamma) x_0 with the Chebyshev polynomials T_t: of all
    polynomials of degree t in W that keep the mean, the one whose largest value over the
    eigenvalues [-gamma, gamma] is least. omega_t rises at once to

        omega = (1 - sqrt(1 - gamma^2)) / (1 + sqrt(1 - gamma^2))

    the constant weight of second-order gossip, and disagreement shrinks by sqrt(omega) a round:
    a gap 1 - gamma of W becomes about sqrt(2 (1 - gamma)).

    Source: Golub, Varga 1961; for gossip Arioli, Scott 2014, and Scaman et al. 2017 (algorithm 2).

    Args:
        gamma: the second largest absolute eigenvalue of W; 0 <= gamma < 1.
    """

    def __init__(self, gamma: float) -> None:
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma is {gamma}; it must be at least 0 and less than 1")
        self._gamma = gamma
        self._next = 0.0

    @property
    def limit(self) -> float:
        """What omega_t tends to."""
        root = math.sqrt(1.0 - self._gamma**2)
        return (1.0 - root) / (1.0 + root)

    def take(self) -> float:
        """omega_0 = 0 (the first multiplication is by W), omega_1, omega_2 and so on."""
        omega = self._next
        first = omega == 0.0
        self._next = 1.0 / (1.0 - self._gamma**2 * (1.0 + omega) / (2.0 if first else 4.0)) - 1.0
        return omega


def multiplications_per_step(gamma: float) -> int:
    """K = ceil(1 / sqrt(1 - gamma)): Chebyshev multiplications for each gradient step.

    After so many, disagreement is at most about half (1 / cosh(sqrt 2) = 0.46) of what it was,
    whatever the graph. Source: Scaman et al. 2017, section 4.2, who take the floor.
    """
    return math.ceil(1.0 / math.sqrt(1.0 - gamma))


class Mixer:
    """Multiplies rows by a mixing matrix: sparse or dense, whichever is quicker.

    Args:
        matrix: W; (n, n).
    """

    def __init__(self, matrix: FloatArray) -> None:
        is_sparse = np.count_nonzero(matrix) <= MAX_SPARSE_SHARE * matrix.size
        self._matrix: Any = sparse.csr_array(matrix) if is_sparse else matrix

    def multiply(self, rows: FloatArray) -> FloatArray:
        """W times rows of shape (n, d)."""
        product: FloatArray = self._matrix @ rows
        return product


def consensus_rounds(
    matrix: FloatArray,
    start: FloatArray,
    *,
    chebyshev: bool = False,
    until: float = 1e-12,
    max_rounds: int = 10_000_000,
) -> FloatArray:
    """Multiply by W round after round until the rows agree; no clock, nothing else.

    Args:
        matrix: W, as of :func:`mixing_matrix`; (n, n).
        start: (n, d).
        chebyshev: weigh rounds as :class:`ChebyshevWeights`.
        until: end at the first consensus distance below this share of the first.
        max_rounds: end here in any case.

    Returns:
        The consensus distance before the first round and after each; (rounds + 1,).
    """
    mixer = Mixer(matrix)
    weights = ChebyshevWeights(second_eigenvalue(matrix) if chebyshev else 0.0)
    # Rounds keep the mean, so that it is taken away once.
    rows = before = start - start.mean(axis=0)
    distances = [float(np.vdot(rows, rows)) / len(rows)]
    lowest = until * distances[0]
    while distances[-1] >= lowest and distances[-1] > 0 and len(distances) <= max_rounds:
        omega = weights.take()
        mixed = mixer.multiply(rows)
        if omega:
            mixed *= 1.0 + omega
            mixed -= omega * before
        rows, before = mixed, rows
        distances.append(float(np.vdot(rows, rows)) / len(rows))
    return np.array(distances)
