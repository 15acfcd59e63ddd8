"""Two processes of one rank."""

from __future__ import annotations

import math

import msgspec

from gossipdp.protocol.actions import Superseded
from gossipdp.protocol.failure_detector import Seek, Verdict
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.rivalry import Rivalry

OWN = Member(3, 0, 5, Status.ALIVE, "10.0.0.1", 4000)
RIVAL = Member(3, 0, 9, Status.ALIVE, "10.0.0.2", 4001)


def test_without_a_rival_nothing_is_done() -> None:
    rivalry = Rivalry(5.0)
    assert rivalry.review(OWN, OWN, 0.0) == []
    assert rivalry.next_deadline() == math.inf


def test_a_rival_that_answers_and_stays_wins_after_the_time_out() -> None:
    rivalry = Rivalry(5.0)
    assert rivalry.review(OWN, RIVAL, 10.0) == [Seek(3)]
    rivalry.reached()
    assert rivalry.review(OWN, RIVAL, 12.0) == []
    assert rivalry.poll(3, 14.9) == []
    assert rivalry.next_deadline() == 15.0
    assert rivalry.poll(3, 15.0) == [Superseded()]
    assert rivalry.poll(3, 20.0) == [], "said once"


def test_a_ghost_is_outbid() -> None:
    rivalry = Rivalry(5.0)
    rivalry.review(OWN, RIVAL, 10.0)
    assert rivalry.poll(3, 15.0) == [Verdict(3, is_dead=True)]


def test_a_rival_found_dead_meanwhile_is_forgotten() -> None:
    rivalry = Rivalry(5.0)
    rivalry.review(OWN, RIVAL, 10.0)
    rivalry.reached()
    rivalry.review(OWN, msgspec.structs.replace(OWN, incarnation=1), 12.0)
    assert rivalry.poll(3, 15.0) == []


def test_nobody_else_listens_where_this_worker_does() -> None:
    ghost = msgspec.structs.replace(RIVAL, host=OWN.host, port=OWN.port)
    assert Rivalry(5.0).review(OWN, ghost, 10.0) == [Verdict(3, is_dead=True)]


def test_a_joiner_gives_way_at_once() -> None:
    joiner = msgspec.structs.replace(OWN, status=Status.JOINING)
    rivalry = Rivalry(5.0)
    assert rivalry.review(joiner, RIVAL, 10.0) == [Superseded()]
    assert rivalry.review(joiner, RIVAL, 10.1) == []


def test_refused_by_those_who_know_its_successor_it_gives_way_after_the_time_out() -> None:
    rivalry = Rivalry(5.0)
    assert rivalry.refused(10.0) == []
    assert rivalry.refused(14.9) == []
    assert rivalry.refused(15.0) == [Superseded()]
    assert rivalry.refused(16.0) == [], "said once"


def test_a_link_in_between_shows_that_it_is_still_wanted() -> None:
    rivalry = Rivalry(5.0)
    rivalry.refused(10.0)
    rivalry.linked()
    assert rivalry.refused(15.0) == []
    assert rivalry.refused(20.0) == [Superseded()]
