"""Membership: which record wins, its news, joiners that are forgotten, how one joins."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gossipdp.protocol.members import (
    MAX_RANK,
    Member,
    Membership,
    Progress,
    ProgressEntry,
    Status,
    first_incarnation,
)

LEAP, LIVES = 1000, 2**31 - 1

membership_events = st.one_of(
    st.builds(
        Member,
        rank=st.integers(0, 2),
        incarnation=st.sampled_from([0, 1, 1, 2, 2, 3, LEAP + 3, 2 * LEAP + 5]),
        process_id=st.integers(6, 8),
        status=st.sampled_from(Status),
        host=st.sampled_from(["", "a"]),
    ),
    st.sampled_from([Status.ALIVE, Status.DONE, Status.LEFT]),  # this worker's own
    st.integers(0, 3),  # a rank that it declares dead
)


@given(st.lists(membership_events, max_size=40))
def test_membership_has_the_greatest_record_of_each_rank_after_every_event(events):
    """Rank 0 outbids a greater record of itself; none raises a known incarnation very far."""
    table = Membership(Member(0, 1, 7))
    own, rival = table.own, None
    known = {0: own}
    for event in events:
        version, is_news = table.version, False
        match event:
            case Member(rank=rank, incarnation=incarnation, process_id=process_id, status=status):
                old = known.get(rank)
                is_news = old is None or (
                    (incarnation, process_id, status, event.host)
                    > (old.incarnation, old.process_id, old.status, old.host)
                    and incarnation <= old.incarnation + LEAP
                )
                table.merge(event)
                if is_news and rank == 0 and own.status is not Status.LEFT:
                    rival = event if process_id != 7 and status < Status.LEFT else None
                    own = known[0] = replace(own, incarnation=incarnation + 1)
                elif is_news:
                    known[rank] = event
            case Status():
                if is_news := event > own.status:
                    own = known[0] = replace(own, status=event)
                table.set_status(event)
            case 0 if known[0] == own and own.status < Status.LEFT:
                with pytest.raises(ValueError, match="worker 0 cannot declare itself dead"):
                    table.declare_dead(0)
            case rank:
                is_news = rank in known and known[rank].status < Status.LEFT
                if is_news:
                    known[rank] = replace(known[rank], status=Status.DEAD)
                table.declare_dead(rank)
        assert (table.version > version) == is_news
        assert (table.own, table.rival) == (own, rival)
        assert table.members() == tuple(known[rank] for rank in sorted(known))
        live = {rank for rank, each in known.items() if each.status in (Status.ALIVE, Status.DONE)}
        assert table.live() == tuple(sorted(live))
        dialled = {rank for rank, each in known.items() if each.status is not Status.LEFT}
        assert table.addresses().keys() == dialled - {0}


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
    assert ([member.rank for member in news], brought_to) == (list(range(n)), table.version)


def test_joiners_are_capped_and_forgotten_and_not_dialled_for_ever(monkeypatch):
    monkeypatch.setattr("gossipdp.protocol.members.MAX_JOINERS", most := 20)
    table = Membership(Member(0, 1, 7), num_workers=2)
    table.merge(Member(1, 0, 5, Status.DEAD))
    table.merge_all(Member(rank, 0, rank) for rank in range(2, 3 * most))
    assert len(table.members()) == 2 + most
    table.forget(99.0, 60.0)  # while they live, which does not count
    for rank in (*range(2, 2 + most - 1), 1):
        table.declare_dead(rank)
    table.forget(100.0, 60.0)
    table.forget(159.0, 60.0)
    assert len(table.addresses()) == 1 + most
    version = table.version
    table.forget(160.0, 60.0)
    assert table.version > version
    assert table.addresses().keys() == {1, 1 + most}, "those of the start may come back"
    table.merge(Member(2, 0, 2, Status.DEAD))
    assert table.get(2) is None, "what others have not forgotten yet"
    table.merge(again := Member(2, 1, 9, Status.JOINING))
    table.forget(200.0, 60.0)
    table.forget(1399.0, 60.0)
    assert table.get(2) == again, "its state may take long, and its rank is its own"
    table.forget(1400.0, 60.0)
    assert table.get(2) is None
    table.merge(Member(2, 1, 9, Status.ALIVE))
    table.forget(2000.0, 60.0)
    assert table.live() == (0, 2, 1 + most)
    monkeypatch.setattr("gossipdp.protocol.members.MAX_PROCESSES", 2)
    (progress := Progress(0, 7)).merge_all((ProgressEntry(rank, 1, 1, 1) for rank in range(3)), 0.0)
    assert progress.by_rank().keys() == {0, 1}


def test_news_comes_in_parts():
    table = Membership(Member(0, 1, 7))
    table.merge_all(Member(rank, 0, rank) for rank in (9, 5, 3, 7))
    version = 0
    for ranks in ([0, 9], [3, 5], [7], []):
        told, version = table.news(version, 2)
        assert [member.rank for member in told] == ranks
    table.merge(Member(2, 0, 2))
    assert [member.rank for member in table.news(version)[0]] == [2]


BAD_FIELDS = [MAX_RANK + 1, LIVES + 1, 2**63, 5, "h" * 256, 65536, "h" * 256, 65536, -1]


@pytest.mark.parametrize(("index", "value"), [(0, -1), *enumerate(BAD_FIELDS)])
def test_ill_typed_members_do_not_decode(index, value):
    fields = [0, 1, 2, 0, "h", 1, "h", 1, 0]
    fields[index] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Member)


KNOWN = [Member(0, 2, 7, Status.DEAD), Member(1, 0, 8), Member(5, 1, 3, Status.JOINING)]


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, (0, 3)), (1, (1, 1)), (2, (2, 0)), (5, (5, 2)), (None, (6, 0))]
)
def test_the_next_life(rank, expected):
    assert first_incarnation(KNOWN, rank) == expected


def test_a_forgotten_life_is_not_lived_again():
    """Else a joiner has the seed of one before it, and trains on the same data once more."""
    ended = [ProgressEntry(6, life << 32 | 77, 10, 1) for life in (0, 4)]
    assert first_incarnation(KNOWN, None, ended) == (6, 5)
    assert first_incarnation(KNOWN, 5, ended) == (5, 2)
    assert first_incarnation(KNOWN, 0, [ProgressEntry(0, 77, 10, 1)]) == (0, 3)
    lives = [ProgressEntry(0, life << 32, 10, 1) for life in (1 + LEAP, 2 + LEAP)]
    assert first_incarnation(KNOWN, 0, lives) == (0, 2 + LEAP), "the others drop a record above it"


@pytest.mark.parametrize(
    ("members", "rank", "match"),
    [
        ([], None, "ask a live worker"),
        (KNOWN, -1, "rank -1"),
        ([Member(MAX_RANK, 0, 1)], None, "give another"),
        ([Member(1, LIVES, 1)], 1, "all its"),
    ],
)
def test_what_cannot_join(members, rank, match):
    with pytest.raises(ValueError, match=match):
        first_incarnation(members, rank)
