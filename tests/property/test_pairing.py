"""Pairing of real protocols on random networks, whatever the graph, the delays and the cuts."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest import mock

import networkx as nx
from driven_worker import InPhase
from hypothesis import example, given, settings
from hypothesis import strategies as st
from policies import NEIGHBOUR_POLICIES
from simulated_faults.network import FaultyNetwork

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol import peers
from gossipdp.protocol.neighbours import Fresh, NeighbourPolicy
from gossipdp.protocol.pairing import Idle, Pairing
from gossipdp.protocol.step_clock import StepClock
from gossipdp_lab.simulate.network import Conditions, make_workers

TRAINING_S = 25.0
LATEST_END_S = TRAINING_S + 120.0
# Ten times as many as any of these runs has; messages in a circle that take no time have no end.
MAX_EVENTS = 150_000


@dataclass(frozen=True)
class Scenario:
    """A network and what befalls it."""

    graph: nx.Graph
    policy_type: type[NeighbourPolicy]
    comm_rate: float
    latency_s: tuple[float, float]
    transfer_s: tuple[float, float]
    step_s: tuple[float, float]
    is_in_phase: bool
    cut_at_messages: frozenset[int]
    seed: int


@st.composite
def graphs(draw: st.DrawFn) -> nx.Graph:
    """Draw a connected graph: a random tree on shuffled ranks and some more edges."""
    num_workers = draw(st.integers(2, 6))
    ranks = draw(st.permutations(range(num_workers)))
    graph: nx.Graph = nx.Graph()
    for position in range(1, num_workers):
        graph.add_edge(ranks[position], ranks[draw(st.integers(0, position - 1))])
    others = list(nx.non_edges(graph))
    if others:
        graph.add_edges_from(draw(st.lists(st.sampled_from(others), unique=True)))
    return graph


def spans(*choices: tuple[float, float]) -> st.SearchStrategy[tuple[float, float]]:
    return st.sampled_from(choices)


SCENARIOS = st.builds(
    Scenario,
    graph=graphs(),
    policy_type=st.sampled_from(list(NEIGHBOUR_POLICIES.values())),
    comm_rate=st.sampled_from([0.5, 1.0, 4.0]),
    latency_s=spans((0.001, 0.001), (0.0, 0.0), (0.0, 0.3), (0.1, 0.1), (0.0, 1.5)),
    transfer_s=spans((0.01, 0.01), (0.0, 0.0), (0.0, 0.5), (0.3, 0.3)),
    step_s=spans((1.0, 1.0), (0.5, 1.5), (0.2, 3.0)),
    is_in_phase=st.booleans(),
    cut_at_messages=st.frozensets(st.integers(0, 1000), max_size=12),
    seed=st.integers(0, 2**32),
)


def make_network(scenario: Scenario) -> FaultyNetwork:
    constants = Constants.of(scenario.graph, scenario.comm_rate)
    workers = make_workers(constants, seed=scenario.seed, policy_type=scenario.policy_type)
    random = Random(scenario.seed)
    for rank, worker in workers.items():
        worker.pairing = Pairing(
            rank=rank,
            incarnation=0,
            policy=worker.pairing._policy,
            alpha_tilde=random.uniform(0.5, 2.0),
        )
        if scenario.is_in_phase:
            worker.clock = StepClock(constants.worker_rate(rank) / 2, InPhase())
    conditions = Conditions(
        latency_s=lambda sender, receiver: random.uniform(*scenario.latency_s),
        transfer_s=lambda sender, receiver: random.uniform(*scenario.transfer_s),
        step_s=lambda rank: random.uniform(*scenario.step_s),
    )
    network = FaultyNetwork(
        workers,
        constants.edges,
        conditions,
        lost_at_messages=scenario.cut_at_messages,
        detection_s=lambda sender, receiver: random.uniform(0.0, 0.2),
        keeps_exchanges=True,
    )
    at = network.engine.at

    def at_most(*arguments: Any, **options: Any) -> Any:
        engine = network.engine
        assert engine.num_events < MAX_EVENTS, f"{MAX_EVENTS:,} events by {engine.now:.3f} s"
        return at(*arguments, **options)

    network.engine.at = at_most  # type: ignore[method-assign]
    return network


def check_run(scenario: Scenario) -> None:
    """Train, end, and check all that must hold; the network itself refuses overlaps."""
    is_calm = scenario.latency_s[1] <= 0.1 and not scenario.cut_at_messages
    # Waits end by themselves: a proposal is given up for liars and for those that stand still.
    with mock.patch.multiple(peers, SHORTEST_WAIT_S=1e9 if is_calm else 0.02, LONGEST_WAIT=1.0):
        network = trained(scenario)
    for worker in network.workers.values():
        assert worker.pairing.state == Idle(), f"rank {worker.rank} is stuck"
        if is_calm:
            assert worker.proposals_unanswered == 0, f"rank {worker.rank} was stuck"
            assert worker.exchanges_failed == 0
        assert not worker.pairing._parked
    assert network.left.keys() == network.workers.keys()
    for record in network.exchanges.values():
        assert len({end.alpha_tilde for end in record.ends.values()}) == 1
        assert record.is_complete or not is_calm
        assert record.id.initiator in record.ends or len(record.ends) == 1
        assert all(end.ended is not None for end in record.ends.values())


def trained(scenario: Scenario) -> FaultyNetwork:
    """Return a network that has trained, and whose workers have left."""
    network = make_network(scenario)
    engine = network.engine
    engine.run(until=TRAINING_S)
    for rank in network.workers:
        network.done(rank)
    while network.left.keys() != network.workers.keys() and engine.now < LATEST_END_S:
        engine.run(until=engine.now + 5.0)
    return network


# All ask at the same moments: if higher ranks were parked too, their waits would form a cycle.
IN_PHASE = Scenario(
    graph=build_graph("complete", 6),
    policy_type=Fresh,
    comm_rate=1.0,
    latency_s=(0.01, 0.01),
    transfer_s=(0.05, 0.05),
    step_s=(1.0, 1.0),
    is_in_phase=True,
    cut_at_messages=frozenset(),
    seed=1,
)


@settings(max_examples=40)
@given(SCENARIOS)
@example(IN_PHASE)
def test_no_overlap_no_deadlock_and_both_ends_agree(scenario):
    check_run(scenario)


@settings(max_examples=6)
@given(SCENARIOS)
def test_proposals_that_are_withdrawn_from_late_peers_leave_nobody_stuck(scenario):
    """Latencies vary by most of the time-out: answers come late all the time."""
    check_run(replace(scenario, latency_s=(0.0, 4.0)))
