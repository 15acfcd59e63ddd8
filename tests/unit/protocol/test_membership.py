"""The membership table: which record wins, and what a worker does about its own."""

import msgspec
import pytest

from gossipdp.protocol.membership import Member, Membership, Status


def view(rank: int = 0, process_id: int = 7, incarnation: int = 1) -> Membership:
    return Membership(Member(rank, incarnation, process_id, Status.ALIVE, "127.0.0.1", 4000))


def record(table: Membership, rank: int) -> Member:
    member = table.get(rank)
    assert member is not None
    return member


def test_higher_incarnation_beats_higher_status() -> None:
    table = view()
    assert table.merge(Member(1, 1, 5, Status.DEAD))
    assert table.merge(Member(1, 2, 5, Status.ALIVE))
    assert not table.merge(Member(1, 1, 5, Status.DEAD))
    assert record(table, 1).status is Status.ALIVE


def test_status_only_rises_within_a_life() -> None:
    table = view()
    for status in (Status.DONE, Status.ALIVE, Status.LEFT, Status.DONE):
        table.merge(Member(1, 1, 5, status))
    assert record(table, 1).status is Status.LEFT


def test_process_id_breaks_the_tie_of_two_lives() -> None:
    table = view()
    table.merge(Member(1, 1, 5, Status.DONE))
    assert table.merge(Member(1, 1, 6, Status.ALIVE))
    assert record(table, 1).process_id == 6


def test_a_worker_declared_dead_takes_the_next_incarnation_and_keeps_its_status() -> None:
    table = view()
    table.set_status(Status.DONE)
    assert table.merge(Member(0, 1, 7, Status.DEAD, "127.0.0.1", 4000))
    assert (table.own.incarnation, table.own.status) == (2, Status.DONE)
    assert record(table, 0) == table.own
    assert not table.merge(Member(0, 1, 7, Status.DEAD, "127.0.0.1", 4000))


def test_a_worker_outbids_a_dead_process_of_its_rank_but_yields_to_a_live_one() -> None:
    table = view(process_id=7, incarnation=1)
    table.merge(Member(0, 4, 9, Status.DEAD))
    assert table.own.incarnation == 5
    assert not table.is_superseded
    table.merge(Member(0, 5, 9, Status.ALIVE))
    assert table.is_superseded
    assert table.declare_dead(0), "the other process, whose address refuses connections"
    assert not table.is_superseded
    assert record(table, 0) == table.own


def test_news_is_what_changed_since() -> None:
    table = view()
    everything, version = table.news()
    assert everything == (table.own,)
    assert table.news(version) == ((), version)
    table.merge(Member(3, 1, 1))
    table.merge(Member(2, 1, 1))
    changed, newer = table.news(version)
    assert [member.rank for member in changed] == [2, 3]
    assert newer > version
    assert not table.merge(Member(3, 1, 1))
    assert table.news(newer) == ((), newer)


def test_live_ranks() -> None:
    table = view(rank=2)
    table.merge(Member(0, 1, 1, Status.DEAD))
    table.merge(Member(1, 1, 1, Status.DONE))
    table.merge(Member(5, 1, 1, Status.LEFT))
    assert table.live() == (1, 2)
    assert table.lowest_live() == 1
    assert table.declare_dead(1)
    assert table.lowest_live() == 2
    assert not table.declare_dead(5), "who has left did not fail"
    assert not table.declare_dead(9), "nothing is known of 9"
    table.set_status(Status.LEFT)
    assert table.lowest_live() is None


def test_a_joiner_is_known_but_does_not_take_part_before_it_lives() -> None:
    table = view()
    table.merge(Member(1, 0, 5, Status.ALIVE))
    table.merge(Member(1, 1, 6, Status.JOINING))
    assert table.live() == (0,), "the new life has begun, so the old one is over"
    assert not record(table, 1).is_over
    assert table.merge(Member(1, 1, 6, Status.ALIVE))
    assert table.live() == (0, 1)
    table.merge(Member(2, 0, 7, Status.JOINING))
    assert table.declare_dead(2), "its address refuses connections"


def test_a_joiner_yields_to_another_of_its_rank_that_joins_too() -> None:
    table = Membership(Member(4, 0, 7, Status.JOINING))
    table.merge(Member(4, 0, 9, Status.JOINING))
    assert table.is_superseded


def test_mistakes_are_refused() -> None:
    table = view()
    with pytest.raises(ValueError, match="worker 0 cannot declare itself dead"):
        table.declare_dead(0)
    table.set_status(Status.LEFT)
    assert not table.set_status(Status.DONE), "a status only rises"
    assert table.own.status is Status.LEFT


def test_who_has_left_does_not_come_back() -> None:
    table = view()
    table.set_status(Status.LEFT)
    table.merge(Member(0, 1, 7, Status.DEAD, "127.0.0.1", 4000))
    assert record(table, 0).status is Status.DEAD
    assert table.own.incarnation == 1


@pytest.mark.parametrize(
    "fields",
    [
        [0, 1, 2, 5, "h", 1],
        [0, 1, 2, 0, "h", 70000],
        [-1, 1, 2, 0, "h", 1],
        [0, 1, 2, 0, "h" * 256, 1],
        [0, 1, 2, 0, "h", 1, 2],
        [0, 1, 2, 0, "h", 1, "h", 70000],
        [0, 1, 2, 0, "h", 1, "h" * 256, 1],
        [0, 1, 2, 0, "h", 1, "h", 1, "more"],
    ],
)
def test_ill_typed_members_do_not_decode(fields: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Member)


def test_a_member_survives_the_wire() -> None:
    member = Member(3, 1, 2**64 - 1, Status.DONE, "::1", 65535, "::", 9400)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(member), type=Member) == member
