"""Looking for somebody to take parameters from."""

from __future__ import annotations

import math
from random import Random

from gossipdp.protocol.actions import Refresh
from gossipdp.protocol.refresher import Refresher

TIMEOUT_S = 5.0


def needing(*, insists: bool = False) -> Refresher:
    refresher = Refresher(TIMEOUT_S, Random(0))
    refresher.need(10.0, insists=insists)
    return refresher


def test_nothing_is_asked_unless_needed() -> None:
    refresher = Refresher(TIMEOUT_S, Random(0))
    assert refresher.poll(0.0, {1, 2}, is_alone=False) == []
    assert refresher.next_deadline() == math.inf


def test_one_at_a_time_each_once() -> None:
    refresher = needing()
    asked = []
    for _ in range(3):
        (refresh,) = refresher.poll(10.0, {1, 2, 3}, is_alone=False)
        asked.append(refresh.peer)
        assert refresher.poll(10.0, {1, 2, 3}, is_alone=False) == []
        refresher.failed(99)
        assert refresher.source == refresh.peer, "the word of another does not matter"
        refresher.failed(refresh.peer)
    assert sorted(asked) == [1, 2, 3]
    assert refresher.poll(10.1, {1, 2, 3}, is_alone=False) == []
    assert refresher.is_needed
    assert refresher.poll(10.2, {4}, is_alone=False) == [Refresh(4)]
    refresher.refreshed()
    assert not refresher.is_needed


def test_a_stalled_worker_gives_up_after_the_time_out_or_alone() -> None:
    refresher = needing()
    assert refresher.next_deadline() == 10.0 + TIMEOUT_S
    assert refresher.poll(14.9, set(), is_alone=False) == []
    assert refresher.is_needed
    refresher.poll(15.0, set(), is_alone=False)
    assert not refresher.is_needed
    alone = needing()
    alone.poll(10.0, set(), is_alone=True)
    assert not alone.is_needed


def test_a_poisoned_worker_begins_anew_for_as_long_as_others_live() -> None:
    refresher = needing(insists=True)
    assert refresher.poll(10.0, {1}, is_alone=False) == [Refresh(1)]
    refresher.failed(1)
    assert refresher.poll(15.0, {1}, is_alone=False) == []
    assert refresher.is_needed
    assert refresher.poll(15.1, {1}, is_alone=False) == [Refresh(1)]
    refresher.failed(1)
    refresher.poll(15.2, set(), is_alone=True)
    assert not refresher.is_needed
