"""Peers: how long answers and exchanges are waited for, and who is left out meanwhile."""

import pytest

from gossipdp.protocol.members import Member, Membership, Progress
from gossipdp.protocol.messages import ExchangeId
from gossipdp.protocol.peers import (
    FIRST_WAIT_S,
    LEFT_OUT_WAITS,
    LONGEST_WAIT,
    SHORTEST_GAP_S,
    SHORTEST_WAIT_S,
    USUAL_ANSWERS,
    USUAL_GAPS,
    Peers,
)

TIMEOUT_S = 5.0


def make_peers(*ranks: int) -> Peers:
    membership = Membership(Member(0, 0, 70))
    membership.merge_all(Member(rank, 0, 70 + rank) for rank in ranks)
    peers = Peers(membership, Progress(0, 70), TIMEOUT_S)
    for rank in ranks:
        peers.up(rank, 0.0)
    return peers


def answer(peers: Peers, peer: int, *after_s: float, in_time: bool = True) -> None:
    for number, seconds in enumerate(after_s):
        id = ExchangeId(0, 0, number)
        peers.proposed(peer, id, 1.0)
        peers.answered(peer, id, 1.0 + seconds, in_time=in_time)


def exchange(peers: Peers, peer: int, now: float = 1.0, **measured: float) -> None:
    values = {"duration_s": 0.01, "gap_s": 0.001, "demands_per_s": 20.0} | measured
    peers.exchanged(peer, now, **values)


@pytest.mark.parametrize(
    ("answers_s", "wait_s"),
    [
        ([], FIRST_WAIT_S),
        ([0.001] * 9, SHORTEST_WAIT_S),
        ([0.3], USUAL_ANSWERS * 0.3),
        ([0.001] * 5 + [0.1, 0.2, 0.3, 0.4], SHORTEST_WAIT_S),
        ([9.0], LONGEST_WAIT * TIMEOUT_S),
    ],
)
def test_a_wait_is_a_few_times_the_median_answer(answers_s, wait_s):
    peers = make_peers(1, 2)
    answer(peers, 1, *answers_s)
    assert peers.wait_s(1) == pytest.approx(wait_s)
    assert peers.wait_s(2) == pytest.approx(wait_s), "at first as others"
    answer(peers, 2, 0.2)
    assert peers.wait_s(2) == pytest.approx(USUAL_ANSWERS * 0.2)


def test_each_withdrawal_doubles_the_wait_until_an_answer_in_time():
    """So a peer 300 ms away is reached, although its first answers come too late."""
    peers = make_peers(1)
    for count in (1, 2, 4):
        assert peers.wait_s(1) == pytest.approx(count * FIRST_WAIT_S)
        peers.unanswered(1, 1.0)
    for _ in range(10):
        peers.unanswered(1, 1.0)
    assert peers.wait_s(1) == LONGEST_WAIT * TIMEOUT_S
    peers = make_peers(1)
    peers.unanswered(1, 1.0)
    answer(peers, 1, 0.3, in_time=False)
    assert peers.wait_s(1) == pytest.approx(2 * USUAL_ANSWERS * 0.3)
    answer(peers, 1, 0.3)
    assert peers.wait_s(1) == pytest.approx(USUAL_ANSWERS * 0.3)


def test_the_answer_to_a_withdrawn_proposal_counts_from_that_proposal():
    peers = make_peers(1)
    for number, sent in enumerate((1.0, 1.2, 1.4)):
        peers.proposed(1, ExchangeId(0, 0, number), sent)
    peers.answered(1, ExchangeId(0, 0, 1), 1.5, in_time=False)
    peers.answered(1, ExchangeId(0, 0, 0), 1.5, in_time=False)  # older than one that was answered
    assert peers.wait_s(1) == pytest.approx(USUAL_ANSWERS * 0.3)


@pytest.mark.parametrize(
    "sign", [lambda peers: peers.says(1, is_closed=False), lambda peers: peers.up(1, 1.0)]
)
def test_who_does_not_answer_is_left_out_until_an_answer_or_a_sign_of_life_some_waits_later(sign):
    peers = make_peers(1, 2)
    peers.has_changed = False
    peers.unanswered(1, 1.0)
    assert peers.has_changed
    back = 1.0 + LEFT_OUT_WAITS * FIRST_WAIT_S
    peers.heard(1, back - 0.01)
    assert peers.can_exchange([1, 2], back) == [2]
    peers.heard(1, back)
    assert peers.can_exchange([1, 2], back) == [1, 2]
    peers.unanswered(1, 1.0)
    sign(peers)
    assert peers.can_exchange([1, 2], 1.0) == [1, 2]


def test_an_exchange_may_stand_still_for_a_few_of_the_longest_gaps_but_one():
    peers = make_peers(1, 2)
    assert peers.patience_s(1) == TIMEOUT_S, "nothing is known yet"
    exchange(peers, 1, gap_s=0.001)
    exchange(peers, 1, gap_s=3.0)
    assert peers.patience_s(1) == SHORTEST_GAP_S
    assert peers.patience_s(2) == SHORTEST_GAP_S, "as with others"
    for _ in range(2):
        exchange(peers, 2, gap_s=0.5)
    assert peers.patience_s(2) == USUAL_GAPS * 0.5
    assert peers.patience_s(1) == SHORTEST_GAP_S


def test_who_stands_still_rests_twice_as_long_each_time_until_an_exchange_succeeds():
    peers = make_peers(1, 2)
    exchange(peers, 1)
    rest_s = SHORTEST_GAP_S
    for now in (10.0, 20.0, 30.0):
        peers.stood_still(1, now)
        assert peers.can_exchange([1, 2], now + rest_s - 0.01) == [2]
        assert peers.can_exchange([1, 2], now + rest_s) == [1, 2]
        assert peers.can_exchange([1], now) == []
        rest_s *= 2
    exchange(peers, 1, 40.0)
    peers.stood_still(1, 50.0)
    assert peers.can_exchange([1, 2], 50.0 + SHORTEST_GAP_S) == [1, 2]
    for now in range(100, 1000, 100):
        peers.stood_still(1, now)
    assert peers.can_exchange([1, 2], 900.0 + 16 * TIMEOUT_S) == [1, 2]


def test_a_peer_whose_exchanges_take_long_rests_so_that_few_demands_are_lost():
    peers = make_peers(1, 2)
    for _ in range(8):
        exchange(peers, 2)
    for now in (7.0, 8.0):
        exchange(peers, 1, now, duration_s=1.0)
        assert peers.can_exchange([1, 2], now) == [1, 2], "chance makes one long here and there"
    exchange(peers, 1, 10.0, duration_s=1.0)
    # Of 20 demands in that second four are kept; 16 are 3% of those of 26.7 s.
    assert peers.can_exchange([1, 2], 10.0 + 25.6) == [2]
    assert peers.can_exchange([1, 2], 10.0 + 25.7) == [1, 2]
    assert peers.can_exchange([1], 10.0) == [1], "there is nobody else"
    exchange(peers, 1, 50.0, duration_s=0.19)  # 3.8 demands: all are kept
    assert peers.can_exchange([1, 2], 50.0) == [1, 2]


def test_nobody_rests_where_all_exchanges_take_long():
    peers = make_peers(1, 2)
    for _ in range(4):
        for peer in (1, 2):
            exchange(peers, peer, duration_s=2.0)
    assert peers.can_exchange([1, 2], 1.0) == [1, 2]


def test_a_visitor_leaves_nothing_behind():
    peers = make_peers(1)
    for visitor in range(1000, 1010):
        peers.up(visitor, 0.0)
        peers.wait_s(visitor)
        peers.drop(visitor)
    peers.wait_s(1)
    peers.drop(1)
    assert peers._partners.keys() == {1}
