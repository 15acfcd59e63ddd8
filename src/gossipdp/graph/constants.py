"""A graph with its exchange rates, the constants of A2CiD2, and the graph over the live workers.

Below them is the linear algebra behind the constants: the spectrum of the Laplacian.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossipdp.graph.topology import Graph, attach, checked_graph, without

if TYPE_CHECKING:
    import networkx as nx

FloatArray = NDArray[np.float64]
IndexArray = NDArray[np.intp]

# Rounding of the eigenvalues that the checks allow.
SPECTRUM_TOLERANCE = 1e-6

# Beyond these, chi1 chi2 is zero or infinite in double precision.
LEAST_RATE, LARGEST_RATE = 1e-100, 1e100

MAX_CACHED = 64
"""The most graphs that a `LiveGraph` keeps, one for each set of live workers."""

MAX_DENSE_WORKERS = 256
"""Up to this many, dense numpy is as quick, and a worker need not import scipy."""

LANCZOS_TOLERANCE = 1e-12
RESISTANCE_BLOCK = 256


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
    def of(cls, graph: Graph | nx.Graph[int], comm_rate: float = 1.0) -> Constants:
        """Return the constants of ``graph`` with the rates lambda_ij = r min(1/deg_i, 1/deg_j).

        Args:
            graph: Undirected and connected; nodes are ranks, with gaps where workers died.
            comm_rate: r, the most exchanges per unit of time that a worker may take part in.

        Raises:
            ValueError: ``graph`` is not valid, or ``comm_rate`` is not a positive number.
        """
        if not (math.isfinite(comm_rate) and comm_rate > 0):
            raise ValueError(
                f"comm rate {comm_rate} is not a positive number: it is the exchanges per worker "
                "per gradient step, such as 1.0 (to train without exchanges, use method 'none')"
            )
        graph = checked_graph(graph)
        edges = tuple(graph.edges)
        rates = tuple(comm_rate / max(len(graph[i]), len(graph[j])) for i, j in edges)
        return cls(tuple(sorted(graph)), edges, rates)

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
        graph = Graph(self.workers, self.edges)
        if len(graph) > len(self.workers):
            raise ValueError(f"edges name ranks that are not among the workers {self.workers}")
        checked_graph(graph)
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
            and 0.5 * resistances.max() <= self.chi1 * (1.0 + SPECTRUM_TOLERANCE)
        ):
            raise ValueError(
                f"rates from {min(self.rates):.3g} to {max(self.rates):.3g} are too far apart for "
                "the constants to be computed: bring the rates of the edges closer together"
            )

    @cached_property
    def chi1(self) -> float:
        """Return 1 / lambda_2, the time that the slowest disagreement lives."""
        return 1.0 / self._spectrum.lambda_2 if self.edges else 0.0

    @cached_property
    def chi2(self) -> float:
        """Return half the largest effective resistance over edges, a time of at most chi1.

        On complete graphs the two are equal, and rounding would now and then make chi2 the larger,
        differently on each kind of processor. Then alpha_tilde would be below 1/2, and no worker
        accepts that from another.
        """
        if not self.edges:
            return 0.0
        return min(self.chi1, 0.5 * float(self._spectrum.resistances.max()))

    @cached_property
    def eta(self) -> float:
        """Return the mixing speed of parameters and momentum copy, per unit of time."""
        return 0.5 / math.sqrt(self.chi1 * self.chi2) if self.edges else 0.0

    @cached_property
    def alpha_tilde(self) -> float:
        """Return the gain of an exchange on the momentum copy; 1/2 is plain gossip."""
        return 0.5 * math.sqrt(self.chi1 / self.chi2) if self.edges else 0.5

    @cached_property
    def exchanges_per_unit_time(self) -> float:
        """Return the expected exchanges of the whole network per unit of time."""
        return math.fsum(self.rates)

    def neighbours(self, worker: int) -> dict[int, float]:
        """Return lambda_ij of each neighbour j of worker i, in ascending order of rank."""
        self._check_worker(worker)
        return dict(self._adjacency[worker])

    def worker_rate(self, worker: int) -> float:
        """Return the expected exchanges of one worker per unit of time: sum_j lambda_ij."""
        self._check_worker(worker)
        return math.fsum(self._adjacency[worker].values())

    def _check_worker(self, worker: int) -> None:
        if worker not in self._adjacency:
            raise ValueError(f"worker {worker} is not in the graph: its ranks are {self.workers}")

    @cached_property
    def _adjacency(self) -> dict[int, dict[int, float]]:
        adjacency: dict[int, dict[int, float]] = {worker: {} for worker in self.workers}
        # Edges ascend, so each worker gets its lower neighbours first, then its higher ones.
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


class LiveGraph:
    """The graph of a run as a function of the set of its live workers.

    `without` removes the dead from the original graph, then `attach` adds joiners. The result
    depends on the set alone, so workers with the same view of who lives have the same graph,
    whatever the order in which they learned it. The original set keeps its own rates; all other
    sets have the default rates.

    A set that is not cached takes 1 to 3 ms for 64 workers and 9 to 19 for 256; complete graphs
    take ten times as long.

    Args:
        constants: The original graph with its rates; ``comm_rate`` is its busiest worker's rate.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> live = LiveGraph(Constants.of(build_graph("ring", 4)))
        >>> live.constants({0, 1, 3}).edges
        ((0, 1), (0, 3), (1, 3))
    """

    def __init__(self, constants: Constants) -> None:
        self.original = constants
        self.comm_rate = max(map(constants.worker_rate, constants.workers))
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

    def graph(self, live: Collection[int]) -> Graph:
        """Return the edges alone, without the cost of the constants.

        Raises:
            ValueError: no worker lives.
        """
        ranks, originals = set(live), set(self.original.workers)
        if not ranks:
            raise ValueError("a graph of no live workers: keep at least one")
        survivors = without(self._graph, originals - ranks) if ranks & originals else Graph()
        return attach(survivors, ranks - originals)

    def _work_out(self, ranks: frozenset[int]) -> Constants:
        # One worker has no edges, so any rate will do.
        return Constants.of(self.graph(ranks), self.comm_rate or 1.0)


# The spectrum of a Laplacian.


class Spectrum(NamedTuple):
    """The part of a Laplacian's spectrum that the constants need."""

    lambda_2: float
    """The second smallest eigenvalue; its inverse is chi1."""

    resistances: FloatArray
    """Effective resistance of each edge: (e_i - e_j)^T L^+ (e_i - e_j). Shape (edges,)."""


@lru_cache(maxsize=8)
def _spectrum_of(num_workers: int, positions: bytes, rates: bytes) -> Spectrum:
    # Cached: every run of a study asks for the same spectra; one of 4096 workers takes ten seconds.
    edges = np.frombuffer(positions, np.intp).reshape(-1, 2)
    found = spectrum(num_workers, edges, np.frombuffer(rates))
    found.resistances.flags.writeable = False
    return found


def spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """Return the spectrum of L = sum rates_ij (e_i-e_j)(e_i-e_j)^T."""
    if num_workers <= MAX_DENSE_WORKERS:
        return dense_spectrum(num_workers, edges, rates)
    return sparse_spectrum(num_workers, edges, rates)


def laplacian_matrix(num_workers: int, edges: IndexArray, rates: FloatArray) -> FloatArray:
    """Return the dense Laplacian. Shape (n, n); ``edges`` as in `spectrum`."""
    laplacian = np.zeros((num_workers, num_workers))
    left, right = edges[:, 0], edges[:, 1]
    laplacian[left, right] = laplacian[right, left] = -rates
    np.fill_diagonal(laplacian, -laplacian.sum(axis=1))
    return laplacian


def dense_spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """Compute the spectrum by one eigendecomposition: L^+ = sum_k>1 v_k v_k^T / lambda_k."""
    values, vectors = np.linalg.eigh(laplacian_matrix(num_workers, edges, rates))
    # The first eigenvector is the constant one; its eigenvalue is zero but for rounding.
    pseudo_inverse = (vectors[:, 1:] / values[1:]) @ vectors[:, 1:].T
    left, right = edges[:, 0], edges[:, 1]
    diagonal = np.diagonal(pseudo_inverse)
    resistances = diagonal[left] + diagonal[right] - 2.0 * pseudo_inverse[left, right]
    return Spectrum(float(values[1]), resistances)


def sparse_spectrum(num_workers: int, edges: IndexArray, rates: FloatArray) -> Spectrum:
    """Compute the spectrum by one sparse factorisation, grounded at the first worker.

    Without row and column 0, L is positive definite: call this matrix grounded. A solution with it,
    less its mean, is L^+ times the vector. The largest eigenvalue of L^+ is 1/lambda_2, and Lanczos
    finds it in a few steps (a shift-invert about zero). The effective resistances follow from the
    entries of the grounded inverse at the edges.
    """
    from scipy import sparse
    from scipy.sparse import linalg

    left, right = edges[:, 0], edges[:, 1]
    incidence = sparse.csr_array(
        (
            np.concatenate([np.ones(len(edges)), -np.ones(len(edges))]),
            (np.tile(np.arange(len(edges)), 2), np.concatenate([left, right])),
        ),
        shape=(len(edges), num_workers),
    )[:, 1:]
    grounded = sparse.csc_array(incidence.T @ (sparse.diags_array(rates) @ incidence))
    factor = linalg.splu(
        grounded,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )

    def apply_pseudo_inverse(vector: FloatArray) -> FloatArray:
        solution = np.zeros(num_workers)
        solution[1:] = factor.solve((vector - vector.mean())[1:])
        solution -= solution.mean()
        return solution

    operator: Any = linalg.LinearOperator(
        (num_workers, num_workers), matvec=apply_pseudo_inverse, dtype=np.float64
    )
    largest = linalg.eigsh(
        operator,
        k=1,
        which="LA",
        # A fixed start, so that the same graph gives the same bits.
        v0=np.random.default_rng(0).standard_normal(num_workers),
        tol=LANCZOS_TOLERANCE,
        return_eigenvectors=False,
    )
    return Spectrum(float(1.0 / largest[0]), _grounded_resistances(factor, num_workers, edges))


def _grounded_resistances(factor: Any, num_workers: int, edges: IndexArray) -> FloatArray:
    """Return G_ii + G_jj - 2 G_ij of each edge, with G the grounded inverse, block by block."""
    left, right = edges[:, 0], edges[:, 1]
    diagonal = np.zeros(num_workers)
    across = np.zeros(len(edges))
    for start in range(1, num_workers, RESISTANCE_BLOCK):
        stop = min(start + RESISTANCE_BLOCK, num_workers)
        unit_columns = np.zeros((num_workers - 1, stop - start))
        unit_columns[np.arange(start, stop) - 1, np.arange(stop - start)] = 1.0
        columns = np.zeros((num_workers, stop - start))
        columns[1:] = factor.solve(unit_columns)
        diagonal[start:stop] = columns[np.arange(start, stop), np.arange(stop - start)]
        here = (left >= start) & (left < stop)
        across[here] = columns[right[here], left[here] - start]
    resistances: FloatArray = diagonal[left] + diagonal[right] - 2.0 * across
    return resistances
