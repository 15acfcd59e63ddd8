"""Consolidation relies on no single message: what has not arrived is said again."""

from __future__ import annotations

import pytest
from simulated_faults.network import FaultyNetwork, Loss

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.messages import ConsolidationMessage, Envelope, ReductionMessage
from gossipdp_lab.simulate.network import Conditions, make_workers

NUM_WORKERS = 6


class Forgetful(FaultyNetwork):
    """Loses one consolidation message on its way, on a link that stays up."""

    lost = 0
    seen = 0

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        if isinstance(envelope.message, ConsolidationMessage | ReductionMessage):
            self.seen += 1
            if self.seen == self.lost:
                return "message lost"
        return envelope


@pytest.mark.parametrize("lost", range(1, 36))
def test_consolidation_ends_although_a_message_is_lost(lost: int) -> None:
    constants = Constants.of(build_graph("ring", NUM_WORKERS))
    conditions = Conditions(
        latency_s=lambda sender, receiver: 0.001,
        transfer_s=lambda sender, receiver: 0.01,
        step_s=lambda rank: 0.1,
    )
    network = Forgetful(
        make_workers(constants, seed=0, num_chunks=2, timeout_s=5.0),
        constants.edges,
        conditions,
    )
    network.lost = lost
    network.engine.run(until=2.0)
    for rank in range(NUM_WORKERS):
        network.done(rank)
    while len(network.left) < NUM_WORKERS and network.engine.now < 60.0:
        network.engine.run(until=network.engine.now + 1.0)
    assert network.seen >= lost
    assert sorted(network.left) == list(range(NUM_WORKERS))
