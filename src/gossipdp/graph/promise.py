"""The promise of a graph before anything runs: its constants, and the speed of agreement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import Graph, checked_graph

if TYPE_CHECKING:
    import networkx as nx

WORTHWHILE_SPEEDUP = 1.1
"""A smaller speed-up is lost in the noise of training."""


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
    """The graph's name, with its size."""

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
    """Least decay rate of the consensus distance per exchange per worker, method gossip; 0 for a
    single worker."""

    a2cid2_decay_bound: float
    """Least decay rate of the consensus distance per exchange per worker, method a2cid2."""

    @property
    def expected_speedup(self) -> float:
        """Return sqrt(chi1 / chi2), the bound of A2CiD2 divided by that of plain gossip."""
        return 2.0 * self.alpha_tilde

    @property
    def a2cid2_helps(self) -> bool:
        """Return whether the expected speed-up is large enough to be seen."""
        return self.expected_speedup >= WORTHWHILE_SPEEDUP


def plan(graph: Graph | nx.Graph[int], comm_rate: float = 1.0) -> Plan:
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
    graph = checked_graph(graph)
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
        graph=graph.name,
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
