"""What a worker notices of the others' lives."""

from gossipdp.gossip.snapshot import MAX_NOTICES, Noticed
from gossipdp.protocol.members import Member, Status


def member(rank, incarnation=0, process_id=None, status=Status.ALIVE):
    return Member(rank, incarnation, 100 + rank if process_id is None else process_id, status)


def kinds(*views, silent=()):
    """What of rank 1 is noticed by rank 0 of three as its view goes from one record to the next."""
    noticed = Noticed(0, 3)
    for version, view in enumerate(views):
        noticed.look(version, lambda view=view: [member(0), view], silent, float(version))
    return [(notice.kind, notice.at_s) for notice in noticed.notices if notice.rank == 1]


def test_nothing_is_noticed_of_a_run_that_begins():
    # Process id 0 stands for one that is known by its address alone.
    assert kinds(member(1, process_id=0), member(1), member(1, status=Status.DONE)) == []
    assert kinds(member(1), member(1, status=Status.LEFT)) == []


def test_a_death_and_what_may_follow_it():
    alive, dead = member(1), member(1, status=Status.DEAD)
    joining = member(1, 1, 7, Status.JOINING)
    again = member(1, 1, 7)
    assert kinds(alive, dead, joining, again) == [("dead", 1.0), ("rejoined", 3.0)]
    # Taken for dead, and not.
    assert kinds(alive, dead, member(1, 1)) == [("dead", 1.0), ("rejoined", 2.0)]
    # Back before anybody missed it.
    assert kinds(alive, joining, again) == [("dead", 1.0), ("rejoined", 2.0)]
    assert kinds(alive, again) == [("dead", 1.0), ("rejoined", 1.0)]
    # It died as one that was joining.
    assert kinds(alive, dead, joining, member(1, 1, 7, Status.DEAD)) == [
        ("dead", 1.0),
        ("dead", 3.0),
    ]


def test_one_beyond_the_first_workers_joins_and_comes_back():
    noticed = Noticed(0, 3)
    for version, view in enumerate(
        [member(3, status=Status.JOINING), member(3), member(3, 1, 7), member(4)]
    ):
        noticed.look(version, lambda view=view: [view], (), float(version))
    assert [(notice.rank, notice.kind) for notice in noticed.notices] == [
        (3, "joined"),
        (3, "dead"),
        (3, "rejoined"),
        (4, "joined"),
    ]


def test_silence_is_noticed_once_each_time():
    noticed = Noticed(0, 3)
    for now, silent in enumerate([{1}, {1}, {1, 2}, set(), {1}]):
        noticed.look(0, list, silent, float(now))
    assert [(notice.rank, notice.kind, notice.at_s) for notice in noticed.notices] == [
        (1, "stopped", 0.0),
        (2, "stopped", 2.0),
        (1, "stopped", 4.0),
    ]


def test_a_death_is_not_forgotten_whatever_happens_to_others():
    noticed = Noticed(2, 3)
    noticed.note(0, "dead", 1.0)
    for number in range(2 * MAX_NOTICES):
        noticed.note(1, ("dead", "rejoined")[number % 2], float(number))
    assert len(noticed.notices) == MAX_NOTICES
    assert (noticed.notices[0].rank, noticed.notices[0].kind) == (0, "dead")
    numbers = [notice.number for notice in noticed.notices[1:]]
    assert numbers == list(range(MAX_NOTICES + 3, 2 * MAX_NOTICES + 2))


def test_the_list_is_bounded():
    noticed = Noticed(0, 3)
    for number in range(2 * MAX_NOTICES):
        noticed.note(1, "rejoined", float(number))
    assert len(noticed.notices) == MAX_NOTICES
    assert noticed.notices[-1].at_s == 2 * MAX_NOTICES - 1
