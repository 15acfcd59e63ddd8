"""A graph with its exchange rates, the constants of A2CiD2, and the graph over the live workers."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gossipdp.graph.topology import Graph, attach, checked_graph, without

if TYPE_CHECKING:
    import networkx as nx

# Beyond these, chi1 chi2 is zero or infinite in double precision.
LEAST_RATE, LARGEST_RATE = 1e-90, 1e90

MAX_CACHED = 64
"""The most graphs that a `LiveGraph` keeps, one for each set of live workers."""

WORTHWHILE_SPEEDUP = 1.1
"""A smaller speed-up is lost in the noise of training."""


@dataclass(frozen=True)
class Constants:
    """Workers, edges and rates lambda_ij, with all that derives from them; made by :meth:`of`.

        L     = sum_(i,j) lambda_ij (e_i - e_j)(e_i - e_j)^T
        chi1  = 1 / lambda_2(L)
        chi2  = 1/2 max over edges of (e_i - e_j)^T L^+ (e_i - e_j)
        eta   = 1 / (2 sqrt(chi1 chi2))
        alpha_tilde = 1/2 sqrt(chi1 / chi2)

    Rates are exchanges per unit of time, and a worker takes one gradient step per unit of time:
    chi1 and chi2 are times, eta a rate, alpha_tilde has no unit and does not change when all
    rates are scaled. The runtime measures time in communication periods, so it takes these
    constants at comm rate 1 whatever rate is asked of the network.

    One worker has no edges: chi1 = chi2 = eta = 0 and alpha_tilde = 1/2. Workers need not be
    0..n-1: after deaths there are gaps.

    Theory bounds the speed of agreement on the ideal network: exchanges are instantaneous, edges
    fire as Poisson clocks, and no gradients disturb. Then for any start the expected consensus
    distance falls as exp(-rate k), up to a constant factor of at most 2, with k the mean number of
    exchanges per worker and the rate at least

        gossip:  1 / (2 chi1)               per unit of time
        a2cid2:  1 / (2 sqrt(chi1 chi2))    per unit of time (this is eta)

    divided by the mean exchanges per worker per unit of time; so the bounds do not depend on the
    comm rate. Simulated rates are one to two times the bound: two for gossip on sparse graphs, 1.5
    to 1.8 for a2cid2, one for both on the complete graph.

    Why: an exchange takes 1/2 (x_i - x_j)^2 from the sum of squares, so under gossip
    d E|x|^2 = -1/2 x^T L x dt <= -|x|^2 / (2 chi1) dt. For A2CiD2 take the energy
    |x|^2 + x_tilde^T L^+ x_tilde / chi1, both centred; with these constants the mixed terms cancel
    and it falls at rate eta or faster.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> constants = Constants.of(build_graph("ring", 8))
        >>> round(constants.chi1, 4), round(constants.chi2, 4), round(constants.alpha_tilde, 4)
        (3.4142, 0.875, 0.9877)
        >>> round(constants.expected_speedup, 1), constants.a2cid2_helps
        (2.0, True)

    References:
        Boyd, Ghosh, Prabhakar, Shah, 2006 (gossip); Nabli, Belilovsky, Oyallon, 2023, arXiv
        2306.08289, section 3 (A2CiD2).
    """

    workers: tuple[int, ...]
    """Ranks, ascending."""

    edges: tuple[tuple[int, int], ...]
    """Pairs i < j, ascending."""

    rates: tuple[float, ...]
    """lambda_ij of each edge: expected exchanges per unit of time."""

    @classmethod
    def of(cls, graph: Graph | nx.Graph[int], comm_rate: float = 1.0) -> Constants:
        """Return the constants of ``graph`` with the rates lambda_ij = r min(1/deg_i, 1/deg_j).

        Args:
            graph: Undirected and connected; nodes are ranks, with gaps where workers died.
            comm_rate: r, the most exchanges per unit of time that a worker may take part in.

        Raises:
            ValueError: ``graph`` is not valid, or ``comm_rate`` is not a positive number.
        """
        if not LEAST_RATE <= comm_rate <= LARGEST_RATE:
            raise ValueError(
                f"comm rate {comm_rate} is not a positive number of ordinary size: it is the "
                "exchanges per worker per gradient step, such as 1.0 (to train without exchanges, "
                "use method 'none')"
            )
        graph = checked_graph(graph)
        edges = tuple(graph.edges)
        rates = tuple(comm_rate / max(len(graph[i]), len(graph[j])) for i, j in edges)
        return cls(tuple(sorted(graph)), edges, rates)

    @cached_property
    def chi1(self) -> float:
        """Return 1 / lambda_2, the time that the slowest disagreement lives."""
        return 1.0 / self._spectrum[0] if self.edges else 0.0

    @cached_property
    def chi2(self) -> float:
        """Return half the largest effective resistance over edges, a time of at most chi1.

        On complete graphs the two are equal, and rounding would now and then make chi2 the larger,
        differently on each kind of processor. Then alpha_tilde would be below 1/2, and no worker
        accepts that from another.
        """
        if not self.edges:
            return 0.0
        return min(self.chi1, 0.5 * self._spectrum[1])

    @cached_property
    def eta(self) -> float:
        """Return the mixing speed of parameters and momentum copy, per unit of time."""
        return 0.5 / math.sqrt(self.chi1 * self.chi2) if self.edges else 0.0

    @cached_property
    def alpha_tilde(self) -> float:
        """Return the gain of an exchange on the momentum copy; 1/2 is plain gossip."""
        return 0.5 * math.sqrt(self.chi1 / self.chi2) if self.edges else 0.5

    @property
    def comm_rate(self) -> float:
        """Return the exchanges of the busiest worker per unit of time."""
        return max(map(self.worker_rate, self.workers))

    @cached_property
    def exchanges_per_unit_time(self) -> float:
        """Return the expected exchanges of the whole network per unit of time."""
        return math.fsum(self.rates)

    @property
    def expected_speedup(self) -> float:
        """Return sqrt(chi1 / chi2), the bound of A2CiD2 divided by that of plain gossip."""
        return 2.0 * self.alpha_tilde

    @property
    def a2cid2_helps(self) -> bool:
        """Return whether the expected speed-up is large enough to be seen."""
        return self.expected_speedup >= WORTHWHILE_SPEEDUP

    @property
    def gossip_decay_bound(self) -> float:
        """Return the least decay rate of the consensus distance per exchange per worker.

        It is that of plain gossip; 0 for a single worker.
        """
        return self._units_per_exchange / (2.0 * self.chi1) if self.edges else 0.0

    @property
    def a2cid2_decay_bound(self) -> float:
        """Return the same for A2CiD2."""
        return self._units_per_exchange * self.eta if self.edges else 0.0

    @property
    def _units_per_exchange(self) -> float:
        """Return the mean time from one exchange of a worker to its next."""
        return len(self.workers) / (2.0 * self.exchanges_per_unit_time)

    def neighbours(self, worker: int) -> dict[int, float]:
        """Return lambda_ij of each neighbour j of worker i, in ascending order of rank."""
        if worker not in self._adjacency:
            raise ValueError(f"worker {worker} is not in the graph: its ranks are {self.workers}")
        return dict(self._adjacency[worker])

    def worker_rate(self, worker: int) -> float:
        """Return the expected exchanges of one worker per unit of time: sum_j lambda_ij."""
        return math.fsum(self.neighbours(worker).values())

    @cached_property
    def _adjacency(self) -> dict[int, dict[int, float]]:
        adjacency: dict[int, dict[int, float]] = {worker: {} for worker in self.workers}
        # Edges ascend, so each worker gets its lower neighbours first, then its higher ones.
        for (i, j), rate in zip(self.edges, self.rates, strict=True):
            adjacency[i][j] = adjacency[j][i] = rate
        return adjacency

    @cached_property
    def _spectrum(self) -> tuple[float, float]:
        return _spectrum_of(self.workers, self.edges, self.rates)


class LiveGraph:
    """The graph of a run as a function of the set of its live workers.

    `without` removes the dead from the original graph, then `attach` adds joiners. The result
    depends on the set alone, so workers with the same view of who lives have the same graph,
    whatever the order in which they learned it. The original set keeps its own rates; all other
    sets have the default rates.

    A set that is not cached takes 1 to 3 ms for 64 workers and 9 to 19 for 256; complete graphs
    take ten times as long.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> live = LiveGraph(Constants.of(build_graph("ring", 4)))
        >>> live.constants({0, 1, 3}).edges
        ((0, 1), (0, 3), (1, 3))
    """

    def __init__(self, constants: Constants) -> None:
        self.original = constants
        self.comm_rate = constants.comm_rate
        self._graph = Graph(constants.workers, constants.edges)
        self._constants_of = lru_cache(MAX_CACHED)(self._work_out)

    def constants(self, live: Collection[int]) -> Constants:
        """Return the rates and constants over the workers ``live``.

        Raises:
            ValueError: no worker lives.
        """
        ranks = frozenset(live)
        if ranks == frozenset(self.original.workers):
            return self.original
        return self._constants_of(ranks)

    def _work_out(self, ranks: frozenset[int]) -> Constants:
        originals = frozenset(self.original.workers)
        if not ranks:
            raise ValueError("a graph of no live workers: keep at least one")
        survivors = without(self._graph, originals - ranks) if ranks & originals else Graph()
        graph = attach(survivors, ranks - originals)
        # One worker has no edges, so any rate will do.
        return Constants.of(graph, self.comm_rate or 1.0)


@lru_cache(maxsize=8)
def _spectrum_of(
    workers: tuple[int, ...], edges: tuple[tuple[int, int], ...], rates: tuple[float, ...]
) -> tuple[float, float]:
    """Return lambda_2 of the Laplacian, and the largest effective resistance over edges.

    By one eigendecomposition L^+ = sum_k>1 v_k v_k^T / lambda_k; the resistance of an edge is
    (e_i - e_j)^T L^+ (e_i - e_j). It takes 0.01 s for 256 workers, 0.4 s for 1,024 and 3 s for
    2,048 (one core). Cached, since every run of a study asks for the same spectra.
    """
    left, right = np.searchsorted(workers, np.array(edges)).T
    laplacian = np.zeros((len(workers), len(workers)))
    laplacian[left, right] = laplacian[right, left] = -np.array(rates)
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    values, vectors = np.linalg.eigh(laplacian)
    # The first eigenvector is the constant one; its eigenvalue is zero but for rounding.
    pseudo_inverse = (vectors[:, 1:] / values[1:]) @ vectors[:, 1:].T
    diagonal = np.diagonal(pseudo_inverse)
    resistances = diagonal[left] + diagonal[right] - 2.0 * pseudo_inverse[left, right]
    return float(values[1]), float(resistances.max())
