"""When to dial, and the bytes that a worker may send: its rate, and all of it if it wants to."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from links import MemoryLink

from gossipdp.links.link import (
    BETWEEN_LINKS_S,
    FIRST_RETRY_S,
    GRACE_AFTER_LOSS_S,
    GRACE_S,
    LONGEST_RETRY_S,
    MOST_SAVED,
    Dialer,
    SendLimit,
    portion_of,
)
from gossipdp.protocol.peers import SHORTEST_GAP_S

ADDRESSES = {peer: ("127.0.0.1", 1000 + peer) for peer in range(5)}


def test_the_lower_rank_dials_at_once_and_the_higher_one_waits():
    dialer = Dialer(2, Random(0), {})
    dialer.want([1, 3, 4, 7], 0.0)  # 7, without an address, is not dialled
    assert dialer.due(ADDRESSES, 0.0) == [3, 4]
    assert dialer.due(ADDRESSES, 0.0) == []
    assert dialer.next_due_s(ADDRESSES) == GRACE_S
    assert dialer.due(ADDRESSES, GRACE_S) == [1]
    assert dialer.next_due_s(ADDRESSES) == math.inf
    dialer = Dialer(2, Random(0), {})
    dialer.want([1], 0.0)
    dialer.want([1], 0.1, at_once=True)
    assert dialer.due(ADDRESSES, 0.1) == [1], "at once, without the grace"


def test_a_failed_dial_is_tried_again_ever_more_rarely_for_ever():
    dialer = Dialer(0, Random(0), {})
    dialer.want([1], 0.0)
    now, waits = 0.0, []
    for _ in range(20):
        assert dialer.due(ADDRESSES, now) == [1]
        dialer.failed(1, now)
        waits.append(dialer.next_due_s(ADDRESSES) - now)
        now = dialer.next_due_s(ADDRESSES)
    assert 0.8 * FIRST_RETRY_S <= waits[0] <= 1.2 * FIRST_RETRY_S < waits[1]
    assert waits[-1] <= 1.2 * LONGEST_RETRY_S
    assert sum(waits[-5:]) > 5 * 0.8 * LONGEST_RETRY_S


def test_a_link_ends_dialling_and_its_loss_begins_it_anew():
    links = {}
    dialer = Dialer(0, Random(0), links)
    dialer.want([1], 0.0)
    dialer.due(ADDRESSES, 0.0)
    links[1] = MemoryLink(1)
    dialer.failed(1, 0.0)  # the crossed dial of a link that is up
    assert dialer.due(ADDRESSES, 100.0) == []
    del links[1]
    dialer.unlinked(1, 100.0)
    assert dialer.due(ADDRESSES, 100.0) == [1]
    higher = Dialer(2, Random(0), {})
    higher.want([1], 0.0)
    higher.unlinked(1, 100.0)
    assert higher.due(ADDRESSES, 100.0) == []
    assert higher.due(ADDRESSES, 100.0 + GRACE_AFTER_LOSS_S) == [1]


def test_links_that_end_as_soon_as_they_are_up_follow_one_another_with_pauses():
    """Two workers that do not understand each other made links without a pause."""
    for rank, asks_at_once in ((0, False), (0, True), (2, False), (2, True)):
        dialer, now, num_links = Dialer(rank, Random(0), {}), 0.0, 0
        dialer.want([1], now, at_once=True)
        while now < 10.0 and num_links < 100:
            assert dialer.due(ADDRESSES, now) == [1]
            num_links += 1
            dialer.linked(1, now)
            dialer.unlinked(1, now)
            if asks_at_once:  # a message waits for the link
                dialer.want([1], now, at_once=True)
            now = dialer.next_due_s(ADDRESSES)
        assert 20 < num_links <= 10.0 / BETWEEN_LINKS_S
        dialer.linked(1, 20.0)
        dialer.unlinked(1, 20.0 + BETWEEN_LINKS_S)
        grace_s = 0.0 if rank == 0 else GRACE_AFTER_LOSS_S
        assert dialer.next_due_s(ADDRESSES) == 20.0 + BETWEEN_LINKS_S + grace_s


@given(
    rate=st.floats(1250.0, 1e10),
    waits=st.lists(st.floats(0.0, 3.0), max_size=50),
    spent=st.integers(0, 10_000),
)
def test_it_lets_pass_its_rate_and_what_was_saved(rate, waits, spent):
    limit = SendLimit(rate)
    portion = portion_of(rate)
    now, sent = 5.0, limit.take(10**12, 5.0)
    assert sent == int(MOST_SAVED * portion)
    limit.spend(spent)
    sent += spent
    for wait in waits:
        # A sender that comes when it may.
        now = limit.opens_at(now) + min(wait, 1.0) * portion / rate
        taken = limit.take(10**12, now)
        assert taken >= int(portion) - 1
        sent += taken
        assert sent <= MOST_SAVED * portion + (now - 5.0) * rate + spent + 1
    # Nothing that was earned is lost.
    assert sent >= MOST_SAVED * portion + (now - 5.0) * rate * (1 - 1e-9) - portion - 2


def test_no_less_than_a_portion_passes_unless_no_more_is_wanted():
    """It is small beside a time-out and the shortest patience, and large beside a packet."""
    assert portion_of(1e3) == 1500
    assert portion_of(20e3) == 2000
    assert all(portion_of(rate) / rate < SHORTEST_GAP_S / 2 for rate in (20e3, 125e3, 320e3))
    assert portion_of(1e6) == 32 << 10
    assert portion_of(100e6) == 1e6
    limit = SendLimit(1e6)
    limit.take(10**12, 0.0)
    assert limit.take(10**12, 0.031) == 0
    assert limit.take(400, 0.031) == 400
    assert limit.take(10**12, 0.033) == 0
    assert limit.take(10**12, 0.034) > 32 << 10
