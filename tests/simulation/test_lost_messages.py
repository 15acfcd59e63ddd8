"""Consolidation relies on no single message: what has not arrived is said again."""

from __future__ import annotations

from typing import Any

import pytest

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.consolidation_messages import ConsolidationMessage
from gossipdp.protocol.messages import Envelope
from gossipdp.simulate.conditions import Conditions
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.network import Network, make_workers

NUM_WORKERS = 6


class Forgetful(Network):
    """Loses one consolidation message on its way, on a link that stays up."""

    lost: int
    seen = 0

    def _deliver(self, link: Any, rank: int, peer: int, envelope: Envelope) -> None:
        if isinstance(envelope.message, ConsolidationMessage):
            self.seen += 1
            if self.seen == self.lost:
                return
        super()._deliver(link, rank, peer, envelope)


@pytest.mark.parametrize("lost", range(1, 36))
def test_consolidation_ends_although_a_message_is_lost(lost: int) -> None:
    constants = Constants.of(build_graph("ring", NUM_WORKERS))
    conditions = Conditions(
        latency_s=lambda sender, receiver: 0.001,
        transfer_s=lambda sender, receiver: 0.01,
        step_s=lambda rank: 0.1,
    )
    network = Forgetful(
        Engine(),
        make_workers(constants, seed=0, num_chunks=2, timeout_s=5.0),
        constants.edges,
        conditions,
    )
    network.lost = lost
    network.engine.run(until=2.0)
    for rank in range(NUM_WORKERS):
        network.done(rank)
    network.engine.run(until=60.0)
    assert network.seen >= lost
    assert sorted(network.left) == list(range(NUM_WORKERS))
