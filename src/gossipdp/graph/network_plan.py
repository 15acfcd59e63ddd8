"""What a model, a step time and a network promise: bytes, all-reduce, and the graph to take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossipdp.graph.constants import Constants
from gossipdp.graph.gradient_noise import GradientNoise
from gossipdp.graph.second_moments import SecondMoments
from gossipdp.graph.step_spread import check_step_spread
from gossipdp.graph.topology import build_graph, torus_shape

if TYPE_CHECKING:
    import networkx as nx

CANDIDATES = ("ring", "exponential", "torus", "complete")

CLOSE_ENOUGH = 1.1
"""Among graphs whose consensus distance is within this factor of the least, the one with the
fewest edges is preferred: fewer connections, and exchanges on shorter paths."""


@dataclass(frozen=True)
class TrainingConditions:
    """A model and the machines and links it trains on, the same for every worker.

    A worker takes part in one exchange at a time, so that its bandwidth does not depend on its
    degree; both directions carry data at once.
    """

    model_bytes: float
    """Of the parameters that an exchange or an all-reduce moves."""

    step_s: float
    """Mean duration of a gradient step."""

    bytes_per_s: float
    """Of a worker's link, in each direction."""

    latency_s: float = 0.001
    step_spread: float = 0.0
    """Standard deviation of the logarithm of step times, drawn anew in every step; at most 3."""

    def __post_init__(self) -> None:
        for name in ("model_bytes", "step_s", "bytes_per_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}, but must be a positive number")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"latency_s is {self.latency_s}, but must be 0 or a positive number")
        check_step_spread("step_spread", self.step_spread)

    @property
    def exchange_s(self) -> float:
        """How long an exchange takes once both ends agree: model_bytes/bytes_per_s + latency."""
        return self.model_bytes / self.bytes_per_s + self.latency_s

    def all_reduce_s(self, num_workers: int) -> float:
        """Ring all-reduce: 2(n-1)/n model_bytes/bytes_per_s + 2(n-1) latency."""
        hops = 2.0 * (num_workers - 1)
        return hops / num_workers * self.model_bytes / self.bytes_per_s + hops * self.latency_s

    def slowest_step_s(self, num_workers: int) -> float:
        """Mean of the longest of n lognormal step times: what a barrier waits for.

        E max = int F^-1(u) n u^(n-1) du, here over the normal z = Phi^-1(u), with F^-1(u) =
        step_s exp(sigma z - sigma^2/2).
        """
        if self.step_spread == 0.0 or num_workers == 1:
            return self.step_s
        from scipy.special import log_ndtr

        sigma = self.step_spread
        z = np.linspace(-9.0, 9.0 + sigma, 20_001)
        log_weight = (num_workers - 1) * log_ndtr(z) - 0.5 * z**2 - 0.5 * sigma**2 + sigma * z
        density = num_workers * np.exp(log_weight) / math.sqrt(2.0 * math.pi)
        return self.step_s * float(density.sum()) * float(z[1] - z[0])

    def synchronous_step_s(self, num_workers: int) -> float:
        """A step with a barrier and an all-reduce after it, not overlapped with computing."""
        return self.slowest_step_s(num_workers) + self.all_reduce_s(num_workers)


@dataclass(frozen=True)
class GraphPrediction:
    """A graph under stated conditions, at the comm rate that it achieves."""

    name: str
    num_edges: int
    nominal_comm_rate: float
    """Mean exchanges per worker per gradient step that the rates ask for; on graphs of unequal
    degrees less than the budget."""

    achieved_comm_rate: float
    """Those that take place."""

    consensus_distance: float
    """Stationary, of A2CiD2 with the paper's constants, all rates lessened alike."""

    worker_bytes_per_s: float
    """That a worker sends on average, and as much that it receives."""

    link_bytes_per_s: float
    """Each way on a link between two neighbours, on average over links."""


def predict(
    name: str,
    constants: Constants,
    conditions: TrainingConditions,
    noise: GradientNoise,
    *,
    served_share: float,
) -> GraphPrediction:
    """What a graph makes of a network on which a share of the exchanges asked for take place.

    Raises:
        ValueError: ``served_share`` is not positive, or there is no edge.
    """
    num_workers, num_edges = len(constants.workers), len(constants.edges)
    if not (math.isfinite(served_share) and served_share > 0 and num_edges):
        raise ValueError(f"{name}: no exchanges take place, so that workers never agree")
    served = Constants(
        constants.workers,
        constants.edges,
        tuple(served_share * rate for rate in constants.rates),
    )
    moments = SecondMoments.of(served)
    achieved = moments.modes.exchanges_per_worker
    per_worker = achieved / conditions.step_s * conditions.model_bytes
    return GraphPrediction(
        name=name,
        num_edges=num_edges,
        nominal_comm_rate=achieved / served_share,
        achieved_comm_rate=achieved,
        consensus_distance=moments.stationary_distance(noise),
        worker_bytes_per_s=per_worker,
        link_bytes_per_s=per_worker * num_workers / (2 * num_edges),
    )


def candidates(num_workers: int) -> dict[str, nx.Graph[int]]:
    """Those of `CANDIDATES` that exist for n workers and are not another of them."""
    names = [name for name in CANDIDATES if name != "torus" or torus_shape(num_workers)[0] > 1]
    found: dict[str, nx.Graph[int]] = {}
    for name in names:
        graph = build_graph(name, num_workers)
        if all(set(graph.edges) != set(other.edges) for other in found.values()):
            found[name] = graph
    return found


def recommended(predictions: list[GraphPrediction]) -> GraphPrediction:
    """The graph that serves best.

    Gradients wait on no graph, so that all train equally long; what differs is how far apart
    workers drift. The least consensus distance wins, but graphs within `CLOSE_ENOUGH` of it are
    as good, and of these the one with the fewest edges is taken.
    """
    least = min(prediction.consensus_distance for prediction in predictions)
    close = [each for each in predictions if each.consensus_distance <= CLOSE_ENOUGH * least]
    return min(close, key=lambda each: (each.num_edges, each.consensus_distance))
