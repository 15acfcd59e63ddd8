import math
from random import Random

import pytest
from simulated_faults.network import FaultyNetwork

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Unlink
from gossipdp_lab.simulate.network import Conditions, Engine, VirtualNetwork, Wire, make_workers


def test_events_run_in_order_of_time_priority_and_scheduling():
    engine = Engine()
    log: list[str] = []
    engine.at(2.0, lambda: log.append("late"))
    engine.at(1.0, lambda: log.append("low"), priority=1)
    engine.at(1.0, lambda: log.append("first"))
    engine.at(1.0, lambda: log.append("second"))
    engine.run(until=1.5)
    assert log == ["first", "second", "low"]
    assert engine.now == 1.5
    engine.run(until=2.0)
    assert log[-1] == "late"
    assert engine.num_events == 4


@pytest.mark.parametrize("time", [0.5, math.nan, math.inf])
def test_the_past_and_no_time_are_refused(time):
    engine = Engine()
    engine.run(until=1.0)
    with pytest.raises(ValueError, match="cannot be scheduled"):
        engine.at(time, lambda: None)


def test_messages_keep_their_order():
    wire = Wire(0, 1)
    assert wire.carry_message(0, 1.0, 0.5) == 1.5
    assert wire.carry_message(0, 1.125, 0.125) == 1.5  # not before the one ahead of it
    assert wire.carry_message(0, 2.0, 0.125) == 2.125
    assert wire.carry_message(1, 1.0, 0.125) == 1.125  # the other way has an order of its own


def test_data_follow_messages_which_go_between_chunks_and_behind_the_last():
    wire = Wire(0, 1)
    wire.carry_message(0, 0.0, 0.5)
    assert wire.carry_data(0, 0.1, 0.0, 0.1) == (0.1, 0.5)
    wire = Wire(0, 1)
    assert wire.carry_data(0, 0.0, 10.0, 1.0) == (10.0, 11.0)
    assert wire.carry_message(0, 5.0, 0.1) == 5.1
    assert wire.carry_message(0, 10.0, 0.1) == 11.0


def make_network(graph_name: str, num_workers: int, **changes: object) -> FaultyNetwork:
    random = Random(3)
    conditions: dict[str, object] = {
        "latency_s": lambda sender, receiver: random.uniform(0.0, 0.01),
        "transfer_s": lambda sender, receiver: 0.05,
        "step_s": lambda rank: 0.2,
    }
    constants = Constants.of(build_graph(graph_name, num_workers))
    workers = make_workers(constants, seed=0, num_chunks=3)
    given = Conditions(**(conditions | changes))  # type: ignore[arg-type]
    return FaultyNetwork(workers, constants.edges, given, keeps_exchanges=True)


def test_a_finished_network_falls_quiet():
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


def test_a_transfer_of_many_time_outs_keeps_its_link():
    network = make_network("path", 2, transfer_s=lambda sender, receiver: 40.0)  # 8 time-outs
    suspects: set[frozenset[int]] = set()
    while network.engine.now < 200.0:
        network.engine.run(until=network.engine.now + 0.5)
        suspects |= {worker.peers.silent for worker in network.workers.values()}
    assert network.num_exchanges == 4
    assert suspects == {frozenset()}
    assert all(worker.exchanges_failed == 0 for worker in network.workers.values())


def test_both_directions_of_an_exchange_take_one_draw():
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


def test_without_faults_nobody_can_ask_for_what_only_faults_bring():
    constants = Constants.of(build_graph("ring", 4))
    conditions = Conditions(lambda *_: 0.001, lambda *_: 0.05, lambda rank: 0.2)
    network = VirtualNetwork(make_workers(constants, seed=0), constants.edges, conditions)
    with pytest.raises(RuntimeError, match=r"rank 0 asks for Unlink.*though nothing went wrong"):
        network.act(0, Unlink(1, "silent"))
