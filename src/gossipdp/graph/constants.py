"""A graph with its exchange rates, and the constants of A2CiD2 that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gossipdp.graph.spectrum import FloatArray, IndexArray, Spectrum, laplacian_matrix, spectrum
from gossipdp.graph.topology import check_graph, graph_name

if TYPE_CHECKING:
    import networkx as nx

# Rounding that the checks allow: of a user's rates, and of the eigenvalues.
BUDGET_TOLERANCE = 1e-9
SPECTRUM_TOLERANCE = 1e-6

# Beyond, chi1 chi2 is zero or infinite in double precision.
LEAST_RATE, LARGEST_RATE = 1e-100, 1e100


@dataclass(frozen=True)
class Constants:
    """Workers, edges and rates lambda_ij, checked, with all that derives from them.

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

    Example:
        >>> from gossipdp.graph import build_graph
        >>> constants = Constants.of(build_graph("ring", 8))
        >>> round(constants.chi1, 4), round(constants.chi2, 4), round(constants.alpha_tilde, 4)
        (3.4142, 0.875, 0.9877)

    References:
        Nabli, Belilovsky, Oyallon, 2023, arXiv 2306.08289, section 3.
    """

    workers: tuple[int, ...]
    """Ranks, ascending."""

    edges: tuple[tuple[int, int], ...]
    """Pairs i < j, ascending."""

    rates: tuple[float, ...]
    """lambda_ij of each edge: expected exchanges per unit of time."""

    @classmethod
    def of(
        cls,
        graph: nx.Graph[int],
        comm_rate: float = 1.0,
        rates: Mapping[tuple[int, int], float] | None = None,
    ) -> Constants:
        """The constants of ``graph``, by default with lambda_ij = r min(1/deg_i, 1/deg_j).

        Args:
            graph: Undirected and connected; nodes are ranks, with gaps where workers died.
            comm_rate: r, the most exchanges per unit of time that a worker may take part in.
            rates: lambda_ij of every edge, under (i, j) or (j, i), in place of the default.

        Raises:
            ValueError: ``graph`` is not valid; ``comm_rate`` is not a positive number; ``rates``
                misses an edge, names one that is not there, holds a rate that is not a positive
                number, or gives a worker more than ``comm_rate`` in sum.
        """
        if not (math.isfinite(comm_rate) and comm_rate > 0):
            raise ValueError(
                f"comm rate {comm_rate} is not a positive number: it is the exchanges per worker "
                "per gradient step, such as 1.0 (to train without exchanges, use method 'none')"
            )
        check_graph(graph)
        edges = tuple(sorted((int(min(edge)), int(max(edge))) for edge in graph.edges))
        if rates is None:
            chosen = [comm_rate / max(graph.degree[i], graph.degree[j]) for i, j in edges]
        else:
            chosen = _given_rates(graph_name(graph), edges, comm_rate, rates)
        return cls(tuple(sorted(map(int, graph))), edges, tuple(chosen))

    def __post_init__(self) -> None:
        if list(self.workers) != sorted(set(self.workers)) or not self.workers:
            raise ValueError(f"workers {self.workers} must be ascending ranks, at least one")
        if list(self.edges) != sorted(set(self.edges)) or any(i >= j for i, j in self.edges):
            raise ValueError("edges must be distinct pairs (i, j) with i < j, ascending")
        if len(self.rates) != len(self.edges):
            raise ValueError(f"{len(self.edges)} edges need as many rates, not {len(self.rates)}")
        for edge, rate in zip(self.edges, self.rates, strict=True):
            if not LEAST_RATE <= rate <= LARGEST_RATE:
                raise ValueError(
                    f"the rate of edge {edge} is {rate:g}, but must be positive, from "
                    f"{LEAST_RATE:g} to {LARGEST_RATE:g}"
                )
        import networkx as nx

        graph: nx.Graph[int] = nx.Graph(self.edges)
        if not set(graph) <= set(self.workers):
            raise ValueError(f"edges name ranks that are not among the workers {self.workers}")
        graph.add_nodes_from(self.workers)
        check_graph(graph)
        self._check_spectrum()

    def _check_spectrum(self) -> None:
        if not self.edges:
            return
        lambda_2, resistances = self._spectrum
        # Foster's theorem: over any connected graph, sum lambda_ij R_ij = n - 1.
        foster = float(np.dot(self.rates, resistances)) / (len(self.workers) - 1)
        if not (
            lambda_2 > 0
            and abs(foster - 1.0) < SPECTRUM_TOLERANCE
            and self.chi2 <= self.chi1 * (1.0 + SPECTRUM_TOLERANCE)
        ):
            raise ValueError(
                f"rates from {min(self.rates):.3g} to {max(self.rates):.3g} are too far apart for "
                "the constants to be computed: bring the rates of the edges closer together"
            )

    @cached_property
    def chi1(self) -> float:
        """1 / lambda_2: how long the slowest disagreement lives, in units of time."""
        return 1.0 / self._spectrum.lambda_2 if self.edges else 0.0

    @cached_property
    def chi2(self) -> float:
        """Half the largest effective resistance over edges, in units of time; at most chi1."""
        return 0.5 * float(self._spectrum.resistances.max()) if self.edges else 0.0

    @cached_property
    def eta(self) -> float:
        """Mixing speed of parameters and momentum copy, per unit of time."""
        return 0.5 / math.sqrt(self.chi1 * self.chi2) if self.edges else 0.0

    @cached_property
    def alpha_tilde(self) -> float:
        """Gain of an exchange on the momentum copy; 1/2 is plain gossip."""
        return 0.5 * math.sqrt(self.chi1 / self.chi2) if self.edges else 0.5

    @cached_property
    def exchanges_per_unit_time(self) -> float:
        """Expected exchanges over the whole network per unit of time: the sum of the rates."""
        return math.fsum(self.rates)

    @cached_property
    def laplacian(self) -> FloatArray:
        """L, in the order of ``workers``; read-only. Shape (n, n)."""
        matrix = laplacian_matrix(len(self.workers), self._positions, np.array(self.rates))
        matrix.flags.writeable = False
        return matrix

    def neighbours(self, worker: int) -> dict[int, float]:
        """lambda_ij of each neighbour j of worker i, in ascending order of rank."""
        self._check_worker(worker)
        return dict(self._adjacency[worker])

    def worker_rate(self, worker: int) -> float:
        """Expected exchanges of one worker per unit of time: sum_j lambda_ij."""
        self._check_worker(worker)
        return math.fsum(self._adjacency[worker].values())

    def _check_worker(self, worker: int) -> None:
        if worker not in self._adjacency:
            raise ValueError(f"worker {worker} is not in the graph: its ranks are {self.workers}")

    @cached_property
    def _adjacency(self) -> dict[int, dict[int, float]]:
        adjacency: dict[int, dict[int, float]] = {worker: {} for worker in self.workers}
        # Edges ascend, so that each worker meets its lower neighbours first, then its higher.
        for (i, j), rate in zip(self.edges, self.rates, strict=True):
            adjacency[i][j] = adjacency[j][i] = rate
        return {worker: dict(sorted(rates.items())) for worker, rates in adjacency.items()}

    @cached_property
    def _positions(self) -> IndexArray:
        return np.searchsorted(self.workers, np.array(self.edges).reshape(-1, 2))

    @cached_property
    def _spectrum(self) -> Spectrum:
        rates = np.array(self.rates)
        return _spectrum_of(len(self.workers), self._positions.tobytes(), rates.tobytes())


@lru_cache(maxsize=8)
def _spectrum_of(num_workers: int, positions: bytes, rates: bytes) -> Spectrum:
    # Kept, since every run of a study makes the same ones: of 4096 workers they take ten seconds.
    edges = np.frombuffer(positions, np.intp).reshape(-1, 2)
    found = spectrum(num_workers, edges, np.frombuffer(rates))
    found.resistances.flags.writeable = False
    return found


def _given_rates(
    name: str,
    edges: tuple[tuple[int, int], ...],
    comm_rate: float,
    rates: Mapping[tuple[int, int], float],
) -> list[float]:
    given: dict[tuple[int, int], float] = {}
    for (i, j), rate in rates.items():
        edge = (min(i, j), max(i, j))
        if edge in given:
            raise ValueError(f"rates give edge {edge} of graph {name!r} twice: give it once")
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"the rate of edge {edge} of graph {name!r} is {rate}, but must be a positive "
                "number: leave an edge that is not to be used out of the graph"
            )
        given[edge] = rate
    if given.keys() != set(edges):
        edge = min(given.keys() ^ set(edges))
        problem = "not an edge" if edge in given else "an edge without a rate"
        raise ValueError(f"{edge} is {problem} of graph {name!r}: give one rate for every edge")
    total: dict[int, float] = {}
    for edge, rate in given.items():
        for worker in edge:
            total[worker] = total.get(worker, 0.0) + rate
    busiest = max(total, key=total.__getitem__, default=None)
    if busiest is not None and total[busiest] > comm_rate * (1.0 + BUDGET_TOLERANCE):
        raise ValueError(
            f"the rates of worker {busiest} of graph {name!r} sum to {total[busiest]:.6g}, above "
            f"the comm rate {comm_rate:.6g}: lower them or raise the comm rate"
        )
    return [given[edge] for edge in edges]
