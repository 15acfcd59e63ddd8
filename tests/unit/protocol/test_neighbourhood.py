"""With whom a worker exchanges as others die, leave and join."""

from __future__ import annotations

import math

import pytest

from gossipdp.graph.constants import Constants
from gossipdp.graph.live import LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.neighbourhood import REBUILD_INTERVAL_S, Neighbourhood

RING = Constants.of(build_graph("ring", 8), 2.0)


def make(rank: int = 0, *, has_momentum: bool = True) -> Neighbourhood:
    return Neighbourhood(rank, LiveGraph(RING), has_momentum=has_momentum)


def members(**statuses: Status) -> list[Member]:
    """For example ``r3=Status.DEAD``."""
    return [Member(int(name[1:]), 0, 1, status) for name, status in statuses.items()]


def test_it_begins_with_the_original_graph() -> None:
    neighbourhood = make()
    assert neighbourhood.rates == RING.neighbours(0)
    assert neighbourhood.alpha_tilde == RING.alpha_tilde
    assert neighbourhood.next_deadline() == math.inf
    neighbourhood.review(members(r0=Status.ALIVE, r1=Status.DONE))
    assert neighbourhood.next_deadline() == math.inf, "of the others nothing is known"


@pytest.mark.parametrize("status", [Status.DEAD, Status.LEFT, Status.JOINING])
def test_whoever_does_not_take_part_is_left_out(status: Status) -> None:
    neighbourhood, view = make(), members(r1=status)
    neighbourhood.review(view)
    rebuilt = neighbourhood.rebuild(view, 5.0, has_ended=False)
    seven = LiveGraph(RING).constants({0, 2, 3, 4, 5, 6, 7})
    assert rebuilt.neighbours == {2, 7} == neighbourhood.rates.keys()
    assert rebuilt.dead == ({1} if status is Status.DEAD else set())
    assert neighbourhood.alpha_tilde == seven.alpha_tilde != RING.alpha_tilde
    # At comm rate 1, whatever the run's is.
    assert rebuilt.eta == pytest.approx(seven.eta / 2)
    assert rebuilt.worker_rate == pytest.approx(1.0)
    assert neighbourhood.worker_rate == pytest.approx(2.0)


def test_a_burst_of_deaths_is_followed_once_an_interval() -> None:
    neighbourhood = make()
    neighbourhood.review(members(r1=Status.DEAD))
    assert neighbourhood.next_deadline() <= 5.0
    neighbourhood.rebuild(members(r1=Status.DEAD), 5.0, has_ended=False)
    neighbourhood.review(members(r1=Status.DEAD, r2=Status.DEAD))
    assert neighbourhood.next_deadline() == 5.0 + REBUILD_INTERVAL_S
    neighbourhood.review(members(r1=Status.DEAD, r2=Status.ALIVE))
    assert neighbourhood.next_deadline() == math.inf, "as it was"


def test_the_last_worker_has_no_neighbours() -> None:
    neighbourhood = make()
    view = [Member(rank, 0, 1, Status.DEAD) for rank in range(1, 8)]
    neighbourhood.review(view)
    rebuilt = neighbourhood.rebuild(view, 5.0, has_ended=False)
    assert (rebuilt.eta, rebuilt.worker_rate, rebuilt.neighbours) == (0.0, 0.0, frozenset())


def test_a_joiner_is_in_the_graph_once_it_lives() -> None:
    joiner = make(8)
    assert joiner.rates == {}
    joiner.review(members(r8=Status.JOINING))
    assert joiner.next_deadline() == math.inf
    view = members(r8=Status.ALIVE)
    joiner.review(view)
    assert joiner.rebuild(view, 1.0, has_ended=False).neighbours == {0, 1}
    other = make(1)
    other.review(view)
    assert other.rebuild(view, 1.0, has_ended=False).neighbours == {0, 2, 8}


def test_plain_gossip_has_no_mixing() -> None:
    neighbourhood, view = make(has_momentum=False), members(r1=Status.DEAD)
    neighbourhood.review(view)
    assert neighbourhood.rebuild(view, 5.0, has_ended=False).eta == 0.0
    assert neighbourhood.alpha_tilde == 0.5


def test_after_the_exchanges_neighbours_alone_are_worked_out() -> None:
    neighbourhood, view = make(), members(r1=Status.LEFT)
    neighbourhood.review(view)
    rebuilt = neighbourhood.rebuild(view, 5.0, has_ended=True)
    assert rebuilt.neighbours == {2, 7}
    assert neighbourhood.alpha_tilde == RING.alpha_tilde
