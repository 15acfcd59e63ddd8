"""Every transition of the pairing state machine, one at a time."""

import itertools
import math
from collections.abc import Mapping
from random import Random

import pytest

from gossipdp.protocol.actions import Begin, Send, Stop, Withdrawn
from gossipdp.protocol.messages import (
    Abort,
    Accept,
    Busy,
    Cancel,
    ExchangeId,
    Free,
    Pass,
    Propose,
    ProtocolError,
)
from gossipdp.protocol.neighbours import Fresh, NeighbourPolicy
from gossipdp.protocol.pairing import MAX_BACKLOG, Exchanging, Idle, MomentsDue, Pairing, Proposing


class InRankOrder(NeighbourPolicy):
    """Every neighbour, lowest rank first: a policy without chance."""

    def __init__(self) -> None:
        super().__init__(Random(0))

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return sorted(available)

    def exchanged(self, peer: int, *, initiated: bool) -> None: ...


def make_pairing(
    rank: int = 5, neighbours: tuple[int, ...] = (2, 8), policy: NeighbourPolicy | None = None
) -> Pairing:
    policy = policy or InRankOrder()
    pairing = Pairing(rank=rank, incarnation=3, policy=policy, alpha_tilde=0.9)
    assert pairing.set_available(dict.fromkeys(neighbours, 0.5)) == []
    return pairing


def proposing() -> Pairing:
    """Return one that has asked worker 2."""
    pairing = make_pairing()
    pairing.tick()
    return pairing


def own(counter: int) -> ExchangeId:
    return ExchangeId(5, 3, counter)


def ask(peer: int, counter: int = 1, alpha_tilde: float = 0.7) -> Propose:
    return Propose(ExchangeId(peer, 0, counter), alpha_tilde)


def answered(pairing: Pairing, peer: int, counter: int = 1) -> ExchangeId:
    """Make ``peer`` ask an idle pairing, and return the exchange that began."""
    id = ExchangeId(peer, 0, counter)
    assert Begin(peer, id, 0.7) in pairing.receive(peer, ask(peer, counter))
    return id


def test_tick_proposes_to_the_first_of_the_policy():
    pairing = make_pairing()
    assert pairing.tick() == [Send(2, Propose(own(1), 0.9))]
    assert pairing.state == Proposing(2, Propose(own(1), 0.9), (8,))


@pytest.mark.parametrize(
    "event",
    [
        lambda pairing: pairing.lost(2),
        lambda pairing: pairing.unanswered(2),
        lambda pairing: pairing.set_available({8: 0.5}),
    ],
    ids=["lost", "unanswered", "unavailable"],
)
def test_a_proposal_that_comes_to_nothing_moves_on_and_its_demand_is_kept(event):
    pairing = proposing()
    assert event(pairing) == [Send(8, Propose(own(2), 0.9))]
    assert pairing.lost(8) == []
    assert (pairing.state, pairing.backlog) == (Idle(), 1)
    pairing.set_available({})
    assert pairing.set_available({8: 0.5}) == [Send(8, Propose(own(3), 0.9))]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (lambda pairing, id: pairing.lost(2), "the link was lost"),
        (lambda pairing, id: pairing.abort("NaN"), "NaN"),
        (lambda pairing, id: pairing.failed(id), None),
    ],
    ids=["lost", "own abort", "failed"],
)
def test_an_exchange_that_ends_early_keeps_the_demand_and_leaves_the_peer_out(event, reason):
    pairing = proposing()
    assert pairing.receive(2, Accept(own(1), 0.6)) == [Begin(2, own(1), 0.6)]
    assert pairing.is_initiating
    actions = event(pairing, own(1))
    stops = [] if reason is None else [Stop(2, own(1), reason)]
    aborts = [Send(2, Abort(own(1), "NaN"))] if reason == "NaN" else []
    assert actions == [*aborts, *stops, Send(8, Propose(own(2), 0.9))]
    assert pairing.backlog == 1


def test_backlog_is_capped():
    pairing = make_pairing()
    for _ in range(10):
        pairing.tick()
    assert pairing.backlog == MAX_BACKLOG == 4


def test_idle_accepts_with_the_smaller_gain():
    for theirs, agreed in ((0.7, 0.7), (1.5, 0.9)):
        pairing = make_pairing()
        id = ExchangeId(9, 0, 1)
        assert pairing.receive(9, Propose(id, theirs)) == [
            Send(9, Accept(id, agreed)),
            Begin(9, id, agreed),
        ]
        assert pairing.state == Exchanging(9, id)


def test_exchanging_answers_busy_and_later_frees_the_oldest_waiter_only():
    pairing = make_pairing()
    id = answered(pairing, 2)
    assert pairing.receive(8, ask(8)) == [Send(8, Busy(ask(8).id))]
    assert pairing.receive(1, ask(1)) == [Send(1, Busy(ask(1).id))]
    assert pairing.finished(id) == [Send(8, Free())]
    assert pairing.state == Idle()
    assert pairing.receive(8, Pass()) == [Send(1, Free())]
    assert pairing.receive(1, Pass()) == []
    assert pairing.receive(1, Pass()) == []


def test_loss_of_the_freed_waiter_frees_the_next():
    for is_lost in (True, False):
        pairing = make_pairing()
        id = answered(pairing, 2)
        pairing.receive(8, ask(8))
        pairing.receive(1, ask(1))
        pairing.finished(id)
        assert (pairing.lost(8) if is_lost else pairing.unanswered(8)) == [Send(1, Free())]


def test_while_one_free_is_unanswered_nobody_else_is_freed():
    """Between FREE and its answer another worker asks, and its exchange ends."""
    pairing = make_pairing()
    id = answered(pairing, 2)
    for peer in (8, 1):
        pairing.receive(peer, ask(peer))
    assert pairing.finished(id) == [Send(8, Free())]
    assert pairing.finished(answered(pairing, 2, counter=2)) == []
    assert pairing.receive(8, Pass()) == [Send(1, Free())]


def test_backlog_is_served_before_waiters():
    pairing = make_pairing()
    id = answered(pairing, 2)
    pairing.receive(8, ask(8))
    pairing.tick()
    assert pairing.finished(id) == [Send(2, Propose(own(1), 0.9))]
    assert pairing.receive(2, Busy(own(1))) == [Send(8, Propose(own(2), 0.9))]
    assert pairing.receive(8, Busy(own(2))) == [Send(8, Free())]
    assert pairing.backlog == 1


def test_proposing_parks_lower_and_refuses_higher_ranks():
    pairing = proposing()
    assert pairing.receive(4, ask(4)) == []
    assert pairing.receive(6, ask(6)) == [Send(6, Busy(ask(6).id))]


def test_accepted_proposal_refuses_the_parked():
    pairing = proposing()
    pairing.receive(4, ask(4))
    pairing.receive(3, ask(3))
    assert pairing.receive(2, Accept(own(1), 0.9)) == [
        Begin(2, own(1), 0.9),
        Send(4, Busy(ask(4).id)),
        Send(3, Busy(ask(3).id)),
    ]
    assert pairing.finished(own(1)) == [Send(4, Free())]


def test_refused_proposal_accepts_the_oldest_parked_and_refuses_the_others():
    pairing = proposing()
    pairing.receive(4, ask(4))
    pairing.receive(3, ask(3))
    assert pairing.receive(2, Busy(own(1))) == [
        Send(4, Accept(ask(4).id, 0.7)),
        Begin(4, ask(4).id, 0.7),
        Send(3, Busy(ask(3).id)),
    ]
    assert pairing.backlog == 1


def test_crossing_proposals_merge_into_that_of_the_lower_rank():
    higher = make_pairing(rank=5, neighbours=(2,))
    higher.tick()
    higher.receive(4, ask(4))
    assert higher.receive(2, ask(2)) == [
        Send(2, Accept(ask(2).id, 0.7)),
        Begin(2, ask(2).id, 0.7),
        Send(4, Busy(ask(4).id)),
    ]
    assert higher.backlog == 1

    lower = make_pairing(rank=5, neighbours=(8,))
    lower.tick()
    assert lower.receive(8, ask(8)) == []
    assert lower.receive(8, Accept(own(1), 0.9)) == [Begin(8, own(1), 0.9)]


def test_free_is_answered_by_propose_only_with_a_demand():
    pairing = make_pairing()
    assert pairing.receive(8, Free()) == [Send(8, Pass())]
    pairing.tick()
    assert pairing.receive(8, Free()) == [Send(8, Pass())]
    pairing.receive(2, Busy(own(1)))
    pairing.receive(8, Busy(own(2)))
    assert pairing.receive(7, Free()) == [Send(7, Pass())]
    assert pairing.receive(8, Free()) == [Send(8, Propose(own(3), 0.9))]


def test_free_of_a_neighbour_that_the_policy_leaves_out_is_passed():
    fresh = Fresh(Random(0))
    pairing = Pairing(rank=5, incarnation=3, policy=fresh, alpha_tilde=0.9)
    pairing.set_available({2: 0.5, 8: 0.5})
    pairing.finished(answered(pairing, 8))
    pairing.tick()
    pairing.receive(2, Busy(own(1)))
    assert pairing.receive(8, Free()) == [Send(8, Pass())]
    assert pairing.receive(2, Free()) == [Send(2, Propose(own(2), 0.9))]


def test_a_waiter_that_was_served_waits_behind_the_others():
    pairing = make_pairing()
    id = answered(pairing, 2)
    for peer in (8, 1):
        pairing.receive(peer, ask(peer))
    pairing.set_available({8: 0.5})
    pairing.tick()
    assert pairing.finished(id) == [Send(8, Propose(own(1), 0.9))]
    pairing.receive(8, Accept(own(1), 0.9))
    pairing.receive(8, ask(8, 2))
    assert pairing.finished(own(1)) == [Send(1, Free())]


def test_unexpected_accept_is_cancelled():
    pairing = make_pairing()
    assert pairing.receive(2, Accept(own(7), 0.9)) == [Send(2, Cancel(own(7)))]
    pairing.tick()
    assert pairing.receive(8, Accept(own(1), 0.9)) == [Send(8, Cancel(own(1)))]
    assert pairing.state == Proposing(2, Propose(own(1), 0.9), (8,))


def test_cancel_withdraws_the_answered_exchange_only():
    pairing = make_pairing()
    id = answered(pairing, 2)
    assert pairing.receive(2, Cancel(ExchangeId(2, 0, 9))) == []
    assert pairing.receive(8, Cancel(id)) == []
    assert pairing.receive(2, Cancel(id)) == [Withdrawn(2, id)]
    assert pairing.state == Idle()
    assert 2 in pairing.available, "its link stays"

    pairing = proposing()
    pairing.receive(2, Accept(own(1), 0.9))
    assert pairing.receive(2, Cancel(own(1))) == []
    assert isinstance(pairing.state, Exchanging)


def test_abort_stops_the_exchange_at_either_end():
    pairing = proposing()
    pairing.receive(2, Accept(own(1), 0.9))
    stop, propose = pairing.receive(2, Abort(own(1), "NaN"))
    assert isinstance(stop, Stop)
    assert "NaN" in stop.reason
    assert propose == Send(8, Propose(own(2), 0.9))  # the demand lives on, the peer is left out


def test_foreign_ids_are_dropped():
    pairing = proposing()
    assert pairing.receive(2, Busy(own(9))) == []
    assert pairing.receive(8, Busy(own(1))) == []
    assert pairing.receive(2, ask(8)) == []  # a proposal in another's name
    assert pairing.finished(own(1)) == []
    assert pairing.failed(own(1)) == []
    assert pairing.state == Proposing(2, Propose(own(1), 0.9), (8,))


def test_closed_answers_busy_withdraws_and_opens_again():
    pairing = proposing()
    pairing.receive(4, ask(4))
    assert pairing.close() == [Send(4, Busy(ask(4).id, is_closed=True))]
    assert pairing.receive(2, Accept(own(1), 0.9)) == [Send(2, Cancel(own(1)))]
    assert pairing.receive(8, ask(8)) == [Send(8, Busy(ask(8).id, is_closed=True))]
    assert pairing.receive(8, Free()) == [Send(8, Pass())]
    assert pairing.tick() == []
    assert pairing.open() == [Send(2, Propose(own(2), 0.9))]
    assert pairing.receive(2, Busy(own(2))) == [Send(8, Propose(own(3), 0.9))]
    assert pairing.receive(8, Busy(own(3))) == [Send(4, Free())]


def test_running_exchange_outlives_close():
    pairing = make_pairing()
    id = answered(pairing, 2)
    pairing.receive(8, ask(8))
    assert pairing.close() == []
    assert pairing.finished(id) == []
    assert pairing.open() == [Send(8, Free())]


def test_the_gain_of_accept_stands_though_the_own_one_fell_since_the_proposal():
    pairing = proposing()
    pairing.alpha_tilde = 0.6  # on a new graph
    actions = pairing.receive(2, Accept(own(1), 0.8))
    assert actions == [Begin(2, own(1), 0.8)]


def test_an_accept_with_more_than_was_proposed_is_refused():
    pairing = proposing()
    with pytest.raises(ProtocolError, match=r"gain of 0\.91"):
        pairing.receive(2, Accept(own(1), 0.91))
    pairing.lost(2)
    assert pairing.state == Proposing(8, Propose(own(2), 0.9), ())


@pytest.mark.parametrize(
    ("num_steps", "comm_rate", "between"),
    [
        (250, 4.0, 4),
        (250, 1.0, 4),
        (250, 1 / 8, 4),
        # Sooner, where so many steps have passed.
        (2.5, 4.0, 4),
        (2.5, 1.0, 3),
        (16, 1 / 8, 2),
        (5, 1 / 8, 1),
    ],
)
def test_one_exchange_in_four_carries_moments_and_more_where_these_are_rare(
    num_steps, comm_rate, between
):
    moments = MomentsDue([4], num_steps)
    number, carrying, due = 0, [], 0.0
    for _ in range(240):
        moments.step()
        due += comm_rate
        while due >= 1.0:
            due -= 1.0
            number += 1
            if moments.now():
                carrying.append(number)
            moments.began(moments.now())
    assert {after - before for before, after in itertools.pairwise(carrying)} == {between}


def test_exchanges_that_peers_asked_for_count_and_each_period_has_its_own_count():
    moments = MomentsDue([4, 2], math.inf)
    moments.began(())
    assert moments.now() == (2,)
    moments.began((2,))
    moments.began(())
    assert moments.now() == (2, 4)
    moments.began((4,))
    assert moments.now() == (2,)
