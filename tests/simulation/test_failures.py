"""Crashes, stalls, bad links and restarts: when each is known, and that nothing else follows."""

from random import Random

import pytest
from simulated_faults.network import FaultyNetwork

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.members import Status
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, make_workers

TIMEOUT_S = 5.0
KILL_NOTICED_S = 1.0
STOP_NOTICED_S = 6.0


def make_network(graph: str = "ring", num_workers: int = 8, until: float = 5.0) -> FaultyNetwork:
    """Make a network whose workers have trained until then."""
    random = Random(0)
    constants = Constants.of(build_graph(graph, num_workers))
    conditions = Conditions(
        latency_s=lambda *_: random.uniform(0.0005, 0.01),
        transfer_s=lambda *_: 0.05,
        step_s=lambda _: random.uniform(0.15, 0.25),
    )
    workers = make_workers(constants, seed=0, timeout_s=TIMEOUT_S, num_chunks=3)
    network = FaultyNetwork(workers, constants.edges, conditions)
    network.engine.run(until=until)
    return network


def running(network: FaultyNetwork) -> dict[int, WorkerProtocol]:
    gone = network.crashed | network.left.keys()
    return {rank: worker for rank, worker in network.workers.items() if rank not in gone}


def who_know_dead(network: FaultyNetwork, rank: int) -> set[int]:
    records = {other: each.membership.get(rank) for other, each in running(network).items()}
    return {other for other, known in records.items() if known and known.status is Status.DEAD}


def run_on(network: FaultyNetwork, seconds: float) -> None:
    network.engine.run(until=network.engine.now + seconds)


def exchanges(network: FaultyNetwork) -> dict[int, int]:
    return {
        rank: worker.exchanges_initiated + worker.exchanges_answered
        for rank, worker in running(network).items()
    }


def check_agreement_and_end(network: FaultyNetwork) -> None:
    """All views of who lives are right, all exchange, and all end."""
    workers = running(network)
    live = tuple(sorted(workers))
    assert {worker.membership.live() for worker in workers.values()} == {live}
    assert len({worker.pairing.alpha_tilde for worker in workers.values()}) == 1
    before = exchanges(network)
    run_on(network, 12.0)
    assert all(count > before[rank] for rank, count in exchanges(network).items())
    for rank in live:
        network.done(rank)
    run_on(network, 10.0)
    assert network.left.keys() >= set(live)


@pytest.mark.parametrize(
    ("graph_name", "victim"), [("ring", 3), ("star", 0), ("exponential", 0), ("path", 3)]
)
def test_a_kill_is_known_to_all_within_a_second(graph_name, victim):
    network = make_network(graph_name, until=10.0)
    network.crash(victim)
    run_on(network, KILL_NOTICED_S)
    assert who_know_dead(network, victim) == set(running(network))
    check_agreement_and_end(network)


@pytest.mark.parametrize(("graph_name", "victim"), [("star", 0), ("ring", 3)])
def test_a_stop_is_known_to_all_within_six_seconds_and_costs_no_parameters(graph_name, victim):
    network = make_network(graph_name, until=10.0)
    network.stall(victim, 30.0)
    run_on(network, TIMEOUT_S - 1.0)
    assert who_know_dead(network, victim) == set()
    run_on(network, STOP_NOTICED_S - TIMEOUT_S + 1.0)
    assert who_know_dead(network, victim) == set(network.workers) - {victim}
    network.engine.run(until=45.0)
    assert network.took_over == []
    assert network.workers[victim].incarnation == 1
    assert {worker.incarnation for worker in network.workers.values()} == {0, 1}
    check_agreement_and_end(network)


def expect_no_death(network: FaultyNetwork, until: float) -> None:
    while network.engine.now < until:
        run_on(network, 0.5)
        assert all(who_know_dead(network, rank) == set() for rank in network.workers)
    assert all(worker.incarnation == 0 for worker in network.workers.values())


def test_one_bad_link_declares_nobody_dead():
    network = make_network("ring", 6)
    network.partition([[0], [1]], until=75.0)
    expect_no_death(network, 100.0)
    # Asked ever more rarely: a question for every five seconds would be over a hundred.
    assert 0 < network.num_messages["AskLife"] < 80
    check_agreement_and_end(network)


def test_a_firewall_between_two_workers_costs_that_edge_alone():
    """Its dials are refused as those of a dead worker are: they brought a death each."""
    network = make_network("ring", 6)
    network.reject(0, 1, until=1000.0)
    expect_no_death(network, 65.0)
    assert network.num_messages["AskLife"] < 40
    before = exchanges(network)
    network.crash(5)
    run_on(network, KILL_NOTICED_S)
    assert who_know_dead(network, 5) == {0, 1, 2, 3, 4}, "a real death is known as soon as ever"
    run_on(network, 10.0)
    assert all(count > before[rank] for rank, count in exchanges(network).items())
    # The two are neighbours in the first tree of consolidation, and not in all of them.
    for rank in range(5):
        network.done(rank)
    run_on(network, 12 * TIMEOUT_S)
    assert network.left.keys() == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stop_in_the_end_does_not_hold_it_up(has_begun):
    """Stop one that still trains, or the leader in the midst of consolidation."""
    network = make_network("ring", 6)
    victim = 0 if has_begun else 2
    for rank in network.workers:
        if has_begun or rank != victim:
            network.done(rank)
    views = [worker.consolidation.participants for worker in network.workers.values()]
    while has_begun and not any(view.missing() == () for view in views):
        run_on(network, 0.001)
    network.stall(victim, 60.0)
    run_on(network, 12.0)
    assert network.left.keys() == set(network.workers) - {victim}


@pytest.mark.parametrize("wait_s", [0.02, 8.0])
def test_a_restarted_worker_is_back_at_once(wait_s):
    network = make_network(until=10.0)
    network.crash(3)
    run_on(network, wait_s)
    network.join(network.new_process(3, 1000, asked=0))
    run_on(network, 2.0)
    assert network.workers[3].incarnation == 1
    check_agreement_and_end(network)
