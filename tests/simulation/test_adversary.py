"""One worker of eight that holds the key and lies stops the others only for a few time-outs."""

from __future__ import annotations

import pytest
from simulated_faults.adversary import Adversary, draw_adversary, run_adversary
from simulated_faults.network import FaultyNetwork, Loss

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.messages import Accept, Busy, Envelope
from gossipdp_lab.simulate.network import Conditions, make_workers


@pytest.mark.parametrize(
    "lies",
    [("stall", "progress"), ("lengths", "ids"), ("members", "gains"), ("deaths",), ("epochs",)],
    ids=" and ".join,
)
def test_each_lie(lies: tuple[str, ...]) -> None:
    """``make chaos`` draws 200 schedules of several lies, other ones each time."""
    adversary = Adversary(seed=1, graph="ring", rank=3, lies=lies, share=0.3, is_ever_done=False)
    assert run_adversary(adversary).broken == []


@pytest.mark.parametrize("seed", [71, 1059, 1087])
def test_drawn_lies(seed: int) -> None:
    assert run_adversary(draw_adversary(seed)).broken == []


class Unanswered(FaultyNetwork):
    """Rank 0 answers no proposal, and beats."""

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        if rank == 0 and isinstance(envelope.message, Accept | Busy):
            return "message lost"
        return envelope


def test_who_answers_no_proposal_is_waited_for_no_longer_than_the_time_out() -> None:
    constants = Constants.of(build_graph("ring", 5))
    network = Unanswered(
        make_workers(constants, seed=0, timeout_s=1.0),
        constants.edges,
        Conditions(lambda *_: 0.001, lambda *_: 0.01, lambda rank: 0.2),
        keeps_exchanges=True,
    )
    network.engine.run(until=30.0)
    for rank in (1, 2, 3, 4):
        ended_s = [
            exchange.ends[rank].ended
            for exchange in network.exchanges.values()
            if rank in exchange.ends and exchange.is_complete
        ]
        assert len(ended_s) > 10
        assert ended_s[-1] > 25.0
