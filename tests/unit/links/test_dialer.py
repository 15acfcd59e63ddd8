import math
from random import Random

from links import MemoryLink

from gossipdp.links.link import (
    BETWEEN_LINKS_S,
    GRACE_AFTER_LOSS_S,
    GRACE_S,
    LONGEST_RETRY_S,
    Dialer,
)

ADDRESSES = {peer: ("127.0.0.1", 1000 + peer) for peer in range(5)}


def test_the_lower_rank_dials_at_once_and_the_higher_one_waits():
    dialer = Dialer(2, Random(0), {})
    dialer.want([1, 3], 0.0)
    assert dialer.due(ADDRESSES, 0.0) == [3]
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
    assert waits[0] < 0.1
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


def test_without_an_address_nobody_is_dialled():
    dialer = Dialer(0, Random(0), {})
    dialer.want([7], 0.0)
    assert dialer.due(ADDRESSES, 0.0) == []
    assert dialer.next_due_s(ADDRESSES) == math.inf  # or the loop would spin
