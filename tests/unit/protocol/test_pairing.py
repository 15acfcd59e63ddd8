"""Transitions of the pairing, one at a time; sequences of them: tests/property/test_pairing.py."""

from collections.abc import Mapping
from random import Random

import pytest

from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Begin, Send, Withdrawn
from gossipdp.protocol.neighbours import NeighbourPolicy
from gossipdp.protocol.pairing import Exchanging, Idle, Pairing, Proposing


class InRankOrder(NeighbourPolicy):
    """Every neighbour, lowest rank first: a policy without chance."""

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return sorted(available)

    def exchanged(self, peer: int, *, initiated: bool) -> None: ...


def make_pairing(*neighbours: int, policy: NeighbourPolicy | None = None) -> Pairing:
    policy = policy or InRankOrder(Random(0))
    pairing = Pairing(rank=5, incarnation=3, policy=policy, alpha_tilde=0.9)
    assert pairing.set_available(dict.fromkeys(neighbours or (2, 8), 0.5)) == []
    return pairing


def own(counter: int) -> say.ExchangeId:
    return say.ExchangeId(5, 3, counter)


def proposes(peer: int, counter: int) -> Send[say.Propose]:
    return Send(peer, say.Propose(own(counter), 0.9))


def ask(peer: int, counter: int = 1) -> say.Propose:
    return say.Propose(say.ExchangeId(peer, 0, counter), 0.7)


def busy(peer: int, *, is_closed: bool = False) -> Send[say.Busy]:
    return Send(peer, say.Busy(ask(peer).id, is_closed=is_closed))


def accepted(peer: int) -> list[Send[say.Accept] | Begin]:
    id = ask(peer).id
    return [Send(peer, say.Accept(id, 0.7)), Begin(peer, id, 0.7)]


def proposing(*parked: int) -> Pairing:
    """Return one that has asked worker 2, while these have asked it."""
    pairing = make_pairing()
    pairing.tick()
    for peer in parked:
        assert pairing.receive(peer, ask(peer)) == []
    return pairing


def answering(*refused: int) -> Pairing:
    """Return one in the exchange that worker 2 has asked for, while these have asked in vain."""
    pairing = make_pairing()
    assert pairing.receive(2, ask(2)) == accepted(2)
    for peer in refused:
        assert pairing.receive(peer, ask(peer)) == [busy(peer)]
    return pairing


def asking() -> Pairing:
    """Return one in the exchange for which it has asked worker 2."""
    pairing = proposing()
    assert pairing.receive(2, say.Accept(own(1), 0.6)) == [Begin(2, own(1), 0.6)]
    return pairing


def test_while_one_free_is_unanswered_nobody_else_is_freed():
    """Meanwhile another worker asks, its exchange ends, and two that asked at rest come back."""
    pairing = answering(8, 1)
    assert pairing.finished(ask(2).id) == [Send(8, say.Free())]
    assert pairing.receive(2, ask(2)) == accepted(2)
    assert pairing.finished(ask(2).id) == []
    for peer in (3, 4):
        assert pairing.asked(peer, ask(peer), is_resting=True) == [busy(peer, is_closed=True)]
    assert pairing.set_available({3: 0.5, 4: 0.5}) == []
    for peer, freed in ((8, 1), (1, 3), (3, 4)):
        assert pairing.receive(peer, say.Pass()) == [Send(freed, say.Free())]


def test_backlog_is_served_before_waiters():
    pairing = answering(8)
    pairing.tick()
    assert pairing.finished(ask(2).id) == [proposes(2, 1)]
    assert pairing.receive(2, say.Busy(own(1))) == [proposes(8, 2)]
    assert pairing.receive(8, say.Busy(own(2))) == [Send(8, say.Free())]
    assert pairing.backlog == 1


def test_a_proposal_parks_lower_ranks_refuses_higher_and_in_vain_accepts_the_oldest_parked():
    pairing = proposing(4, 3)
    assert pairing.receive(6, ask(6)) == [busy(6)]
    assert pairing.lost(6) == pairing.unanswered(6) == [], "it awaits the answer of another"
    assert pairing.receive(2, say.Busy(own(1))) == [*accepted(4), busy(3)]


def test_one_that_all_refuse_asks_again_at_the_2nd_4th_and_8th_tick_since_an_exchange():
    pairing = proposing()
    for _ in range(2):
        asked = []
        for number in range(10):
            if number and pairing.tick():
                asked.append(number)
            while isinstance(pairing.state, Proposing):
                pairing.receive(pairing.state.peer, say.Busy(pairing.state.id))
        assert asked == [2, 4, 8]
        pairing.receive(2, ask(2))
        pairing.finished(ask(2).id)


def test_crossing_proposals_merge_into_that_of_the_lower_rank():
    higher = proposing(4)
    assert higher.receive(2, ask(2)) == [*accepted(2), busy(4)]
    assert higher.backlog == 1

    lower = make_pairing(8)
    lower.tick()
    assert lower.receive(8, ask(8)) == []
    assert lower.receive(8, say.Accept(own(1), 0.9)) == [Begin(8, own(1), 0.9)]


def test_a_waiter_that_was_served_waits_behind_the_others():
    pairing = answering(8, 1)
    pairing.set_available({8: 0.5})
    pairing.tick()
    assert pairing.finished(ask(2).id) == [proposes(8, 1)]
    pairing.receive(8, say.Accept(own(1), 0.9))
    pairing.receive(8, ask(8, 2))
    assert pairing.finished(own(1)) == [Send(1, say.Free())]


def test_an_accept_that_is_not_awaited_is_cancelled_and_what_else_is_foreign_is_dropped():
    pairing = make_pairing()
    assert pairing.receive(2, say.Accept(own(7), 0.9)) == [Send(2, say.Cancel(own(7)))]
    pairing.tick()
    assert pairing.receive(8, say.Accept(own(1), 0.9)) == [Send(8, say.Cancel(own(1)))]
    assert pairing.receive(2, say.Busy(own(9))) == pairing.receive(8, say.Busy(own(1))) == []
    assert pairing.receive(2, ask(8)) == []  # a proposal in another's name
    assert pairing.state == Proposing(2, say.Propose(own(1), 0.9), (8,))


def test_cancel_withdraws_the_answered_exchange_only():
    pairing, id = answering(), ask(2).id
    assert pairing.receive(2, say.Cancel(ask(2, 9).id)) == pairing.receive(8, say.Cancel(id)) == []
    assert pairing.receive(2, say.Cancel(id)) == [Withdrawn(2, id)]
    assert (pairing.state, 2 in pairing.available) == (Idle(), True), "its link stays"

    pairing = asking()
    assert pairing.receive(2, say.Cancel(own(1))) == []
    assert isinstance(pairing.state, Exchanging)


def test_closed_answers_busy_withdraws_and_opens_again():
    pairing = proposing(4)
    assert pairing.close() == [busy(4, is_closed=True)]
    assert pairing.receive(2, say.Accept(own(1), 0.9)) == [Send(2, say.Cancel(own(1)))]
    assert pairing.receive(8, ask(8)) == [busy(8, is_closed=True)]
    assert pairing.receive(8, say.Free()) == [Send(8, say.Pass())]
    assert pairing.tick() == []
    assert pairing.open() == [proposes(2, 2)]
    assert pairing.receive(2, say.Busy(own(2))) == [proposes(8, 3)]
    assert pairing.receive(8, say.Busy(own(3))) == [Send(4, say.Free())]


def test_an_accept_with_more_than_was_proposed_is_refused():
    pairing = proposing()
    with pytest.raises(say.ProtocolError, match=r"gain of 0\.91"):
        pairing.receive(2, say.Accept(own(1), 0.91))
    pairing.lost(2)
    assert pairing.state == Proposing(8, say.Propose(own(2), 0.9), ())
