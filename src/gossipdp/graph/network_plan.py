"""What a graph promises, and what a model on a network makes of it, before anything is run.

plan                 constants, and the speed of consensus that theory guarantees
stationary_distance  how far apart gradient noise keeps the workers, exactly
TrainingConditions   a model, a step time, a link: durations of exchange and all-reduce
predict, candidates, recommended    graphs under such conditions, and the one to take
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gossipdp.graph.constants import Constants
from gossipdp.graph.stationary import GradientNoise, stationary_distance
from gossipdp.graph.topology import build_graph, graph_name, torus_shape

if TYPE_CHECKING:
    import networkx as nx

WORTHWHILE_SPEEDUP = 1.1
"""Below this the acceleration is lost in the noise of training."""

LATENCY_S = 0.0005
"""How long a message travels where nothing else is said: within one data center."""

LARGEST_STEP_SPREAD = 3.0
"""With more the mean comes from steps so rare that a run does not see them: nearly all of its steps
take next to no time, and there is no end of them."""

CANDIDATES = ("ring", "exponential", "torus", "complete")

CLOSE_ENOUGH = 1.1
"""Among graphs whose consensus distance is within this factor of the least, the one with the
fewest edges is preferred: fewer connections, and exchanges on shorter paths."""


@dataclass(frozen=True)
class Plan:
    """The constants of a graph at a comm rate, and the speed of consensus that theory guarantees.

    The bounds hold for the ideal network: exchanges are instantaneous, edges fire as Poisson
    clocks, and no gradients disturb. Then for any start the expected consensus distance falls as
    exp(-rate k), up to a constant factor of at most 2, with k the mean number of exchanges per
    worker and the rate at least

        gossip:  1 / (2 chi1)               per unit of time
        a2cid2:  1 / (2 sqrt(chi1 chi2))    per unit of time (this is eta)

    divided by the mean exchanges per worker per unit of time; so the bounds do not depend on the
    comm rate. Simulated rates are one to two times the bound: two for gossip on sparse graphs, 1.5
    to 1.8 for a2cid2, one for both on the complete graph.

    Why: an exchange takes 1/2 (x_i - x_j)^2 from the sum of squares, so under gossip
    d E|x|^2 = -1/2 x^T L x dt <= -|x|^2 / (2 chi1) dt. For A2CiD2 take the energy
    |x|^2 + x_tilde^T L^+ x_tilde / chi1, both centred; with the constants of `Constants` the mixed
    terms cancel and it falls at rate eta or faster.

    References:
        Boyd, Ghosh, Prabhakar, Shah, 2006 (gossip); Nabli, Belilovsky, Oyallon, 2023, arXiv
        2306.08289, section 3 (A2CiD2).
    """

    graph: str
    """What the graph is called, with its size."""

    num_workers: int
    num_edges: int

    comm_rate: float
    """Exchanges per worker per gradient step that each worker may take part in."""

    chi1: float
    chi2: float
    eta: float
    alpha_tilde: float

    exchanges_per_unit_time: float
    """Over the whole network, per gradient step of one worker."""

    gossip_decay_bound: float
    """Least decay rate of the consensus distance per exchange per worker, method gossip; 0 where
    one worker has nobody to agree with."""

    a2cid2_decay_bound: float
    """Least decay rate of the consensus distance per exchange per worker, method a2cid2."""

    @property
    def expected_speedup(self) -> float:
        """sqrt(chi1 / chi2): by how much the bound of A2CiD2 exceeds that of plain gossip."""
        return 2.0 * self.alpha_tilde

    @property
    def a2cid2_helps(self) -> bool:
        """Whether the expected speed-up is large enough to be seen."""
        return self.expected_speedup >= WORTHWHILE_SPEEDUP


def plan(graph: nx.Graph[int], comm_rate: float = 1.0) -> Plan:
    """Plan a run on ``graph`` with the default rates at ``comm_rate``.

    Raises:
        ValueError: As `Constants.of`.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> ring = plan(build_graph("ring", 64))
        >>> round(ring.expected_speedup, 1), ring.a2cid2_helps
        (14.5, True)
        >>> plan(build_graph("complete", 64)).a2cid2_helps
        False
    """
    constants = Constants.of(graph, comm_rate)
    num_workers = len(constants.workers)
    total_rate = constants.exchanges_per_unit_time
    if constants.edges:
        units_per_exchange = num_workers / (2.0 * total_rate)
        gossip_decay_bound = units_per_exchange / (2.0 * constants.chi1)
        a2cid2_decay_bound = units_per_exchange * constants.eta
    else:
        gossip_decay_bound = a2cid2_decay_bound = 0.0
    return Plan(
        graph=graph_name(graph),
        num_workers=num_workers,
        num_edges=len(constants.edges),
        comm_rate=comm_rate,
        chi1=constants.chi1,
        chi2=constants.chi2,
        eta=constants.eta,
        alpha_tilde=constants.alpha_tilde,
        exchanges_per_unit_time=total_rate,
        gossip_decay_bound=gossip_decay_bound,
        a2cid2_decay_bound=a2cid2_decay_bound,
    )


def check_step_spread(name: str, spread: float) -> None:
    """Raise a ValueError unless ``spread`` can be the spread of the logarithm of step times."""
    if not 0.0 <= spread <= LARGEST_STEP_SPREAD:
        raise ValueError(
            f"{name} is {spread:g}, but must be from 0 to {LARGEST_STEP_SPREAD:g}: it is the "
            "standard deviation of the logarithm of step times, 0.1 is typical"
        )


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

    latency_s: float = LATENCY_S
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
    achieved = 2.0 * served.exchanges_per_unit_time / num_workers
    per_worker = achieved / conditions.step_s * conditions.model_bytes
    return GraphPrediction(
        name=name,
        num_edges=num_edges,
        nominal_comm_rate=achieved / served_share,
        achieved_comm_rate=achieved,
        consensus_distance=stationary_distance(served, noise),
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
