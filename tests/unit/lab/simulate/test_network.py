"""The links fidelity: order, delays, cuts, and a whole run from first step to last farewell."""

from __future__ import annotations

from random import Random

import pytest
from simulated_faults.network import FaultyNetwork

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Unlink
from gossipdp_lab.simulate.network import Conditions, VirtualNetwork, make_workers


def make_network(graph_name: str, num_workers: int, **changes: object) -> FaultyNetwork:
    random = Random(3)
    conditions: dict[str, object] = {
        "latency_s": lambda sender, receiver: random.uniform(0.0, 0.01),
        "transfer_s": lambda sender, receiver: 0.05,
        "step_s": lambda rank: 0.2,
    }
    constants = Constants.of(build_graph(graph_name, num_workers))
    return FaultyNetwork(
        make_workers(constants, seed=0, num_chunks=3),
        constants.edges,
        Conditions(**(conditions | changes)),  # type: ignore[arg-type]
        keeps_exchanges=True,
    )


def test_an_exchange_takes_its_transfer_at_both_ends() -> None:
    network = make_network("ring", 4)
    network.engine.run(until=20.0)
    assert network.num_exchanges > 20
    for record in network.exchanges.values():
        for end in record.ends.values():
            if end.ended is not None:
                # The other end may have begun up to a latency earlier.
                assert 0.04 <= end.ended - end.began <= 0.08


@pytest.mark.parametrize(("graph_name", "num_workers"), [("ring", 5), ("star", 4), ("path", 1)])
def test_all_leave_once_all_are_done(graph_name: str, num_workers: int) -> None:
    network = make_network(graph_name, num_workers)
    network.engine.run(until=4.0)
    for rank in list(network.workers)[1:]:
        network.done(rank)
    network.engine.run(until=8.0)
    assert not network.left
    exchanged = network.workers[0].exchanges_initiated
    assert num_workers == 1 or exchanged > 0  # with those that are done
    network.done(0)
    network.engine.run(until=11.0)
    assert network.left.keys() == network.workers.keys()
    assert max(network.left.values()) < 10.0


def test_a_finished_network_falls_quiet() -> None:
    network = make_network("ring", 4)
    network.engine.run(until=2.0)
    for rank in network.workers:
        network.done(rank)
    network.engine.run(until=5.0)
    assert network.left.keys() == network.workers.keys()
    before = network.num_messages.total()
    network.engine.run(until=10.0)
    # Ten heartbeats in a time-out each way, on the ring and the two links dialled for the tree.
    assert network.num_messages.total() - before <= (4 + 2) * 2 * 10 + 12


def test_a_cut_stops_its_exchange_and_heals() -> None:
    network = make_network("path", 2)
    network.engine.run(until=3.0)
    while network.running(0) is None or network.running(1) is None:
        network.engine.run(until=network.engine.now + 0.01)
    id = network.running(0)
    assert id is not None
    network.cut(0, 1)
    network.engine.run(until=network.engine.now + 0.1)
    assert {end.outcome for end in network.exchanges[id].ends.values()} == {"stopped"}
    before = network.num_exchanges
    network.engine.run(until=network.engine.now + 20.0)
    assert network.num_exchanges > before + 10
    assert network.workers[0].exchanges_failed == 1


def test_a_transfer_of_many_time_outs_keeps_its_link() -> None:
    network = make_network("path", 2, transfer_s=lambda sender, receiver: 40.0)  # 8 time-outs
    suspects: set[frozenset[int]] = set()
    while network.engine.now < 200.0:
        network.engine.run(until=network.engine.now + 0.5)
        suspects |= {worker.suspects() for worker in network.workers.values()}
    assert network.num_exchanges == 4
    assert suspects == {frozenset()}
    assert all(worker.exchanges_failed == 0 for worker in network.workers.values())


def test_both_directions_of_an_exchange_take_one_draw() -> None:
    random = Random(5)
    network = make_network(
        "path", 2, latency_s=lambda *_: 0.0, transfer_s=lambda *_: random.uniform(0.1, 0.9)
    )
    network.engine.run(until=30.0)
    records = [record for record in network.exchanges.values() if record.is_complete]
    assert len(records) > 10
    for record in records:
        for end in record.ends.values():
            assert end.ended is not None
            assert end.ended - end.began == pytest.approx(record.transfer_s)


def test_exchanges_that_are_over_may_be_forgotten() -> None:
    constants = Constants.of(build_graph("ring", 4))
    conditions = Conditions(lambda *_: 0.001, lambda *_: 0.05, lambda rank: 0.2)
    kept, forgotten = (
        FaultyNetwork(
            make_workers(constants, seed=0),
            constants.edges,
            conditions,
            keeps_exchanges=keeps_exchanges,
        )
        for keeps_exchanges in (True, False)
    )
    for network in (kept, forgotten):
        network.engine.run(until=20.0)
    assert kept.num_exchanges == forgotten.num_exchanges > 20
    assert sum(record.is_complete for record in kept.exchanges.values()) == kept.num_exchanges
    assert len(forgotten.exchanges) <= 2
    assert kept.num_messages == forgotten.num_messages


def test_without_faults_nobody_can_ask_for_what_only_faults_bring() -> None:
    constants = Constants.of(build_graph("ring", 4))
    conditions = Conditions(lambda *_: 0.001, lambda *_: 0.05, lambda rank: 0.2)
    network = VirtualNetwork(make_workers(constants, seed=0), constants.edges, conditions)
    with pytest.raises(RuntimeError, match=r"rank 0 asks for Unlink.*though nothing went wrong"):
        network.act(0, Unlink(1, "silent"))
