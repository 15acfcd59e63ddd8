"""Membership: its news, joiners that are forgotten, how one joins."""

import msgspec
import pytest

from gossipdp.protocol.members import (
    MAX_INCARNATION,
    MAX_RANK,
    Member,
    Membership,
    Status,
    first_incarnation,
)


class Watched(dict):
    """A dictionary that counts lookups from its end."""

    num_seen = 0

    def __reversed__(self):
        for key in super().__reversed__():
            self.num_seen += 1
            yield key


def test_news_costs_what_is_new_and_not_what_is_known():
    """At the end of a run of n workers n of them say that they are done, one after another."""
    table, n = Membership(Member(0, 1, 7)), 1000
    table.merge_all(Member(rank, 0, 1) for rank in range(1, n))
    table._changed_at = watched = Watched(table._changed_at)
    for rank in range(1, n):
        before = table.version
        done = Member(rank, 0, 1, Status.DONE)
        table.merge(done)
        assert table.news(before) == ((done,), table.version)
    assert n - 1 <= watched.num_seen <= 2 * n
    news, brought_to = table.news(0, n + 1)
    assert [member.rank for member in news] == list(range(n))
    assert brought_to == table.version


def test_joiners_are_capped_and_forgotten_and_not_dialled_for_ever(monkeypatch):
    most = 20
    monkeypatch.setattr("gossipdp.protocol.members.MAX_JOINERS", most)
    table = Membership(Member(0, 1, 7), num_workers=2)
    table.merge(Member(1, 0, 5, Status.DEAD))
    table.merge_all(Member(rank, 0, rank) for rank in range(2, 3 * most))
    assert len(table.members()) == 2 + most
    for rank in (*range(2, 2 + most - 1), 1):
        table.declare_dead(rank)
    table.forget(100.0, 60.0)
    table.forget(159.0, 60.0)
    assert len(table.addresses()) == 1 + most
    version = table.version
    table.forget(160.0, 60.0)
    assert table.version > version
    assert table.addresses().keys() == {1, 1 + most}, "those of the start may come back"
    assert not table.merge(Member(2, 0, 2, Status.DEAD)), "what others have not forgotten yet"
    assert table.merge(Member(2, 1, 9, Status.JOINING))


def test_one_that_never_joins_is_forgotten_too_until_it_lives():
    table = Membership(Member(0, 1, 7), num_workers=2)
    table.merge(Member(5, 0, 5, Status.JOINING))
    table.forget(0.0, 60.0)
    table.forget(60.0, 60.0)
    assert table.get(5) is None
    table.merge(Member(5, 0, 5, Status.ALIVE))
    table.forget(200.0, 60.0)
    assert table.live() == (0, 5)


def test_news_comes_in_parts():
    table = Membership(Member(0, 1, 7))
    table.merge_all(Member(rank, 0, rank) for rank in (9, 5, 3, 7))
    version = 0
    for ranks in ([0, 9], [3, 5], [7], []):
        told, version = table.news(version, 2)
        assert [member.rank for member in told] == ranks
    assert not table.merge(Member(3, 0, 3)), "nothing new"
    assert table.news(version) == ((), version)
    table.merge(Member(2, 0, 2))
    assert [member.rank for member in table.news(version)[0]] == [2]


@pytest.mark.parametrize(
    "fields",
    [
        [0, 1, 2, 5, "h", 1],
        [0, 1, 2, 0, "h", 70000],
        [-1, 1, 2, 0, "h", 1],
        [MAX_RANK + 1, 1, 2, 0, "h", 1],
        [0, MAX_INCARNATION + 1, 2, 0, "h", 1],
        [0, 1, 2**63, 0, "h", 1],
        [0, 1, 2, 0, "h" * 256, 1],
        [0, 1, 2, 0, "h", 1, "h", 1, "more"],
    ],
)
def test_ill_typed_members_do_not_decode(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Member)


# --- joining -------------------------------------------------------------------------------

KNOWN = [Member(0, 2, 7, Status.DEAD), Member(1, 0, 8), Member(5, 1, 3, Status.JOINING)]


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 3)), (1, (1, 1)), (2, (2, 0)), (5, (5, 2)), (None, (6, 0))]
)
def test_the_next_life(rank, expected):
    assert first_incarnation(KNOWN, rank) == expected


@pytest.mark.parametrize(
    ("members", "rank", "match"),
    [
        ([], None, "ask a live worker"),
        (KNOWN, -1, "rank -1"),
        ([Member(MAX_RANK, 0, 1)], None, "give another"),
        ([Member(1, MAX_INCARNATION, 1)], 1, "all its"),
    ],
)
def test_what_cannot_join(members, rank, match):
    with pytest.raises(ValueError, match=match):
        first_incarnation(members, rank)
