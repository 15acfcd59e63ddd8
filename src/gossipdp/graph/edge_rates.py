"""Rates of the edges, under the budget of every worker, that make a graph mix fastest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gossipdp.graph.constants import Constants
from gossipdp.graph.rate_program import RateProgram, Solution
from gossipdp.graph.spectrum import FloatArray, dense_spectrum
from gossipdp.graph.topology import graph_name

if TYPE_CHECKING:
    import networkx as nx

Goal = Literal["gossip", "a2cid2"]

FLOOR_SHARE = 0.001
"""No edge gets less than this share of its default rate, since a rate must be positive."""

MAX_EDGES = 2500
"""Each of some hundred steps solves a dense system of this size."""

OPTIMALITY_TOLERANCE = 1e-3
"""Relative: where no rates are better than the default's by more, the default stays."""

JUST_BELOW = 1.0 - 1e-7
MAX_SOLUTIONS = 40


@dataclass(frozen=True)
class EdgeRates:
    """Rates found by `best_rates`, and how good they are sure to be."""

    goal: Goal
    default: Constants
    """The graph with lambda_ij = r min(1/deg_i, 1/deg_j)."""

    best: Constants
    """The graph with the rates that were found: no smaller value than the default's."""

    bound: float
    """No rates within the budgets and above the floors have a larger value."""

    @property
    def value(self) -> float:
        """What is maximised: lambda_2 (gossip) or eta = 1 / (2 sqrt(chi1 chi2)) (a2cid2)."""
        return _value(self.goal, self.best)

    @property
    def gap(self) -> float:
        """The most by which other rates may be better, relatively."""
        return max(0.0, self.bound / self.value - 1.0)

    @property
    def gain(self) -> float:
        """By how much the guaranteed decay rate grows over the default's; 1 for no gain."""
        return self.value / _value(self.goal, self.default)

    @property
    def by_edge(self) -> dict[tuple[int, int], float]:
        """The rates as `Constants.of` takes them."""
        return dict(zip(self.best.edges, self.best.rates, strict=True))


def best_rates(
    graph: nx.Graph[int],
    comm_rate: float = 1.0,
    *,
    goal: Goal = "a2cid2",
    on_evaluation: Callable[[], None] = lambda: None,
) -> EdgeRates:
    """Rates lambda_ij with sum_j lambda_ij <= r that guarantee the fastest decay.

    For ``gossip`` lambda_2 of the Laplacian is maximised: a concave function of the rates, so
    that what is found is the best, and its bound is proved by duality.

    For ``a2cid2`` the product chi1 chi2 is minimised. Both factors are convex in the rates, their
    product is not. But 2 sqrt(chi1 chi2) = min over u > 0 of (u chi1 + chi2) / sqrt(u), where

        phi(u) = min over rates of  u chi1 + chi2

    is a convex programme for each u, and phi is concave in u: a chord lies below it. So a search
    over u alone, splitting the interval whose chord promises most, finds the best rates of all
    and bounds what may be missed. Constraints are 0 < chi2 <= chi1, hence u = chi2/chi1 <= 1.

    The exact decay (`SecondMoments`) and the distance under noise are neither convex nor smooth
    in the rates; look at them afterwards. On graphs whose edges are all alike (ring, complete,
    square torus, star) there is nothing to gain, and the default comes back. Rates stay above
    `FLOOR_SHARE` times the default: an edge that the best rates do not want is hardly used.

    Args:
        graph: Undirected and connected, at least two workers, at most `MAX_EDGES` edges.
        comm_rate: r, the budget of each worker.
        goal: The method that will be run.
        on_evaluation: Called at each of some hundred or thousand steps, for progress.

    Raises:
        ValueError: As `Constants.of`; or too many edges, or no edge.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> found = best_rates(build_graph("torus", 12), goal="gossip")
        >>> round(found.gain, 3), found.gap < 1e-3
        (1.2, True)
    """
    default = Constants.of(graph, comm_rate)
    num_edges = len(default.edges)
    if not 1 <= num_edges <= MAX_EDGES:
        raise ValueError(
            f"graph {graph_name(graph)!r} has {num_edges} edges, but rates are searched for 1 to "
            f"{MAX_EDGES}: keep the default rates, or use a sparser graph"
        )
    search = _Search.of(default, comm_rate, on_evaluation)
    start = np.array(default.rates) / comm_rate
    if goal == "gossip":
        rates, bound = search.for_gossip(start)
    elif goal == "a2cid2":
        rates, bound = search.for_a2cid2(start)
    else:
        raise ValueError(f"goal {goal!r} must be 'gossip' or 'a2cid2'")
    # The barrier stays inside the budgets: use them up.
    rates = rates / np.bincount(search.program.edges.ravel(), np.repeat(rates, 2)).max()
    best = Constants(default.workers, default.edges, tuple((comm_rate * rates).tolist()))
    if _value(goal, best) <= _value(goal, default) * (1.0 + OPTIMALITY_TOLERANCE):
        best = default
    return EdgeRates(goal, default, best, max(bound * comm_rate, _value(goal, best)))


def _value(goal: Goal, constants: Constants) -> float:
    return 1.0 / constants.chi1 if goal == "gossip" else constants.eta


@dataclass(frozen=True, eq=False)
class _Search:
    """Both goals at comm rate 1."""

    program: RateProgram
    on_evaluation: Callable[[], None]

    @classmethod
    def of(cls, default: Constants, comm_rate: float, on_evaluation: Callable[[], None]) -> _Search:
        edges = np.searchsorted(default.workers, np.array(default.edges))
        floors = FLOOR_SHARE * np.array(default.rates) / comm_rate
        return cls(RateProgram(len(default.workers), edges, floors), on_evaluation)

    def for_gossip(self, start: FloatArray) -> tuple[FloatArray, float]:
        """Rates, and an upper bound on lambda_2."""
        lambda_2, _ = self._spectrum(start)
        bound = self.program.lambda_2_bound(start, JUST_BELOW * lambda_2)
        if bound <= lambda_2 * (1.0 + OPTIMALITY_TOLERANCE):
            return start, bound
        solution = self.program.minimise(1.0, 0.0, start, self.on_evaluation)
        return solution.rates, self.program.lambda_2_bound(solution.rates, solution.below)

    def for_a2cid2(self, start: FloatArray) -> tuple[FloatArray, float]:
        """Rates, and an upper bound on eta."""
        num_workers = self.program.num_workers
        # Foster: sum lambda_e R_e = n - 1, and the rates sum to at most n / 2.
        least_chi2 = (num_workers - 1) / num_workers
        lambda_2, chi2 = self._spectrum(start)
        bound = self.program.lambda_2_bound(start, JUST_BELOW * lambda_2)
        best, least_root = start, math.sqrt(chi2 / lambda_2)
        foster_root = math.sqrt(least_chi2 / bound)
        if least_root <= foster_root * (1.0 + OPTIMALITY_TOLERANCE):
            return start, 0.5 / foster_root

        points: list[tuple[float, float]] = []  # u and a lower bound of phi(u), ascending

        def solve(u: float) -> None:
            nonlocal best, least_root
            solution: Solution = self.program.minimise(u, 1.0, start, self.on_evaluation)
            lambda_2, chi2 = self._spectrum(solution.rates)
            if math.sqrt(chi2 / lambda_2) < least_root:
                best, least_root = solution.rates, math.sqrt(chi2 / lambda_2)
            points.append((u, solution.lower_bound))
            points.sort()

        # chi2 of better rates is at least Foster's, and chi1 chi2 at most what start gives.
        for u in ((least_chi2 / least_root) ** 2, 1.0):
            solve(u)
        while True:
            promise, u = min(map(_chord_minimum, points, points[1:]))
            is_close = promise >= least_root * (1.0 - OPTIMALITY_TOLERANCE)
            if is_close or len(points) == MAX_SOLUTIONS:
                return best, 0.5 / min(promise, least_root)
            solve(u)

    def _spectrum(self, rates: FloatArray) -> tuple[float, float]:
        lambda_2, resistances = dense_spectrum(self.program.num_workers, self.program.edges, rates)
        return lambda_2, 0.5 * float(resistances.max())


def _chord_minimum(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    """The least (a + b u) / (2 sqrt(u)) on the chord from left to right, and where to split."""
    slope = max(0.0, (right[1] - left[1]) / (right[0] - left[0]))
    intercept = left[1] - slope * left[0]
    lowest = intercept / slope if slope > 0 else math.inf
    inside = min(max(lowest, left[0]), right[0])
    if not left[0] * 1.01 < inside < right[0] / 1.01:
        split = math.sqrt(left[0] * right[0])
    else:
        split = inside
    return (intercept + slope * inside) / (2.0 * math.sqrt(inside)), split
