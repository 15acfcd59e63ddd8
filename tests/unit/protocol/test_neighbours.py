"""The neighbour policy of the runtime, and the graph over the live workers."""

import math
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

import pytest

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.neighbours import Fresh, Neighbourhood, Place, weighted_order


@pytest.mark.parametrize(("degree", "num_left_out"), [(1, 0), (2, 1), (3, 1), (4, 2), (15, 7)])
def test_fresh_leaves_out_the_most_recent_half_of_those_that_can_exchange_now(degree, num_left_out):
    policy = Fresh(Random(0))
    for peer in range(degree):
        policy.exchanged(peer, initiated=False)
    policy.exchanged(0, initiated=True)
    policy.exchanged(99, initiated=True)  # which cannot exchange now
    recent = [0, *range(degree - 1, 0, -1)][:num_left_out]
    order = policy.draw(dict.fromkeys(range(degree), 1.0))
    assert set(order) == set(range(degree)) - set(recent)


def test_the_seed_alone_decides_on_the_order():
    one, other = {1: 0.5, 2: 0.5, 3: 0.1}, {3: 0.1, 2: 0.5, 1: 0.5}
    assert weighted_order(one, Random(7)) == weighted_order(other, Random(7))


def test_first_choice_follows_lambda():
    random = Random(0)
    first = [weighted_order({1: 0.1, 2: 0.3}, random)[0] for _ in range(4000)]
    assert first.count(2) / 4000 == pytest.approx(0.75, abs=0.03)


RING = Constants.of(build_graph("ring", 8), 2.0)


def make(**options: Any) -> Neighbourhood:
    return Neighbourhood(0, LiveGraph(RING), has_momentum=True, **options)


def members(**statuses: Status) -> list[Member]:
    """For example ``r3=Status.DEAD``."""
    return [Member(int(name[1:]), 0, 1, status) for name, status in statuses.items()]


@pytest.mark.parametrize("status", [Status.DEAD, Status.LEFT, Status.JOINING])
def test_whoever_does_not_take_part_is_left_out(status):
    neighbourhood, view = make(), members(r1=status)
    neighbourhood.review(view)
    rebuilt = neighbourhood.rebuild(view, 5.0)
    seven = LiveGraph(RING).constants({0, 2, 3, 4, 5, 6, 7})
    assert rebuilt.neighbours == {2, 7} == neighbourhood.place.rates.keys()
    assert rebuilt.dead == ({1} if status is Status.DEAD else set())
    assert neighbourhood.place.alpha_tilde == seven.alpha_tilde != RING.alpha_tilde
    # At comm rate 1, whatever the run's is.
    assert rebuilt.eta == pytest.approx(seven.eta / 2)
    assert rebuilt.worker_rate == pytest.approx(1.0)
    assert neighbourhood.place.worker_rate == pytest.approx(2.0)


def test_a_burst_of_deaths_is_followed_once_an_interval():
    neighbourhood = make()
    neighbourhood.review(members(r1=Status.DEAD))
    assert neighbourhood.next_deadline() <= 5.0
    neighbourhood.rebuild(members(r1=Status.DEAD), 5.0)
    neighbourhood.review(members(r1=Status.DEAD, r2=Status.DEAD))
    assert neighbourhood.next_deadline() == 5.25
    neighbourhood.review(members(r1=Status.DEAD, r2=Status.DONE))
    assert neighbourhood.next_deadline() == math.inf, "as it was"


def test_the_old_graph_holds_while_the_next_is_worked_out_elsewhere():
    """Meanwhile another worker dies: what comes of the first set is not taken for the second."""
    results: dict[Hashable, Place] = {}
    asked: list[tuple[Hashable, Callable[[], Place]]] = []

    def later(key: Hashable, function: Callable[[], Place]) -> Place | None:
        asked.append((key, function))
        return results.get(key)

    neighbourhood, now = make(work_out=later), 5.0
    for view in (members(r1=Status.DEAD), members(r1=Status.DEAD, r2=Status.DEAD)):
        neighbourhood.review(view)
        assert neighbourhood.next_deadline() <= now
        assert neighbourhood.rebuild(view, now) is None
        assert neighbourhood.place.rates == RING.neighbours(0)
        assert neighbourhood.next_deadline() == now + 0.05
        now += 1.0
    assert len(asked) == 2
    results.update({key: function() for key, function in asked})
    first, second = results.values()
    rebuilt = neighbourhood.rebuild(view, now)
    assert rebuilt.neighbours == {3, 7}
    assert neighbourhood.place == second
    assert second.alpha_tilde != first.alpha_tilde
    assert neighbourhood.next_deadline() == math.inf
