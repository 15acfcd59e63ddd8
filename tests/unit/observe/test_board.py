import math
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gossipdp.observe.board import JobStatus, JobWorker, Speeds, StatusBoard
from gossipdp.observe.status import MemberStatus, WorkerStatus
from gossipdp.protocol.actions import Notice

NOW_S = 1000.0
"""The time of every answer, by the clock of the worker that gives it."""
REFUSED = ConnectionRefusedError(111, "Connection refused")


def address_of(rank: int) -> str:
    return f"10.0.0.1:{9400 + rank}"


def member(rank: int, state: str = "training", **facts: Any) -> MemberStatus:
    return replace(MemberStatus(rank, 0, state, status_address=address_of(rank)), **facts)


def status(rank: int, num_workers: int = 4, /, **facts: Any) -> WorkerStatus:
    about = "7f", "a2cid2", "ring", 1.0, f"node{rank}", 100 + rank, "training", 100 * num_workers
    usual = WorkerStatus(0, *about, rank=rank, world_size=num_workers, at_s=NOW_S)
    counts = {"gradient_steps": 10, "samples": 100, "step_seconds": 0.1, "since_step_s": 0.05}
    members = tuple(member(each, samples=90) for each in range(num_workers))
    known = {"logged": {"loss": 1.0 + rank}, "members": members}
    return replace(usual, **counts | known | facts)


class Job:
    """A job whose workers answer what the test says, asked every second."""

    def __init__(self, *first: int) -> None:
        self.board = StatusBoard(address_of(rank) for rank in first)
        self.now_s = 100.0

    def look(self, answers: Mapping[int, WorkerStatus | None], after_s: float = 1.0) -> JobStatus:
        self.now_s += after_s
        asked = self.board.addresses()
        known = {address_of(rank): each or REFUSED for rank, each in answers.items()}
        self.board.take({each: known[each] for each in asked if each in known}, self.now_s)
        return self.board.job(self.now_s)


def worker(job: JobStatus, rank: int) -> JobWorker:
    return next(each for each in job.workers if each.rank == rank)


def test_one_worker_names_all_and_then_all_are_asked(monkeypatch):
    with monkeypatch.context() as patch:  # but for no more than a run can have
        patch.setattr("gossipdp.observe.board.MAX_WORKERS", 3)
        assert [each.rank for each in Job(2).look({2: status(2)}).workers] == [0, 1, 2]
    job = Job(2)
    assert job.board.addresses() == (address_of(2),)
    seen = job.look({2: status(2)})
    assert [each.rank for each in seen.workers] == [0, 1, 2, 3]
    assert [each.is_answering for each in seen.workers] == [False, False, True, False]
    assert worker(seen, 0).samples == 90
    assert worker(seen, 0).loss is None
    assert set(job.board.addresses()) == {address_of(rank) for rank in range(4)}
    seen = job.look({rank: status(rank) for rank in range(4)})
    assert (seen.num_answering, seen.loss) == (4, 2.5)
    assert (seen.samples, worker(seen, 0).samples) == (400, 100)
    assert {each.state for each in seen.workers} == {"training"}


def test_workers_without_a_status_port_are_shown_by_what_others_know():
    job = Job(0)
    known = tuple(
        member(rank, status_address="", samples=50 * rank, gradient_steps=5) for rank in range(3)
    )
    seen = job.look({0: status(0, 3, members=known)})
    assert worker(seen, 2).state == "training"
    assert (worker(seen, 2).samples, worker(seen, 2).gradient_steps) == (100, 5)
    known = tuple(replace(each, samples=each.samples + 30) for each in known)
    seen = job.look({0: status(0, 3, members=known, samples=180)}, after_s=2.0)
    assert worker(seen, 2).samples_per_second == 15.0
    assert worker(seen, 0).samples_per_second == 40.0


def test_the_view_outlives_the_worker_that_was_asked_first():
    job = Job(0)
    job.look({0: status(0)})
    job.look({rank: status(rank, edge_distance=99.0) for rank in range(4)})
    dead = tuple(member(rank, "lost" if rank == 0 else "training") for rank in range(4))
    notice = (Notice(0, "lost", NOW_S - 0.2),)
    answers = {
        rank: status(rank, members=dead, noticed=notice, edge_distance=0.1 * rank)
        for rank in (1, 2, 3)
    }
    seen = job.look({0: None, **answers})
    assert worker(seen, 0).state == "lost"
    assert worker(seen, 0).samples_per_second is None
    assert worker(seen, 0).loss == 1.0, "what it said last"
    assert seen.loss == 3.0, "the mean is over those that live"
    assert worker(seen, 0).edge_distance == 99.0
    assert seen.edge_distance == pytest.approx(0.2)
    assert seen.num_answering == 3
    found = [(each.rank, each.kind, seen.at_s - each.at_s) for each in seen.notices]
    assert found == [(0, "lost", pytest.approx(0.2))], "of three, one"
    # It is asked no more, but for the address that was given.
    assert job.board.addresses()[0] == address_of(0)
    job = Job(1)
    job.look({1: answers[1]})
    assert address_of(0) not in job.board.addresses()


def test_a_silent_worker_is_shown_with_the_time_since_it_was_heard():
    others = member(0, heard_ago_s=0.1, is_neighbour=True), member(1, is_neighbour=True)
    answers = {
        rank: status(rank, 3, members=(*others, member(2, is_silent=True, heard_ago_s=ago_s)))
        for rank, ago_s in enumerate((7.0, 6.0))
    }
    seen = Job(0, 1).look(answers)
    assert (worker(seen, 2).state, worker(seen, 2).silent_s) == ("silent", 6.0)
    assert worker(seen, 0).silent_s is None
    assert worker(seen, 1).neighbours == (0,), "of the two in the graph, the one with a link"


def test_a_worker_that_came_back_is_asked_where_it_is_now():
    job = Job(1)
    job.look({1: status(1, 2)})
    job.look({0: status(0, 2, logged={"loss": 7.0}), 1: status(1, 2)})
    again = member(0, incarnation=1, restarts=1, status_address=address_of(9), samples=120)
    seen = job.look({0: None, 1: status(1, 2, members=(again, member(1)))})
    came_back = worker(seen, 0)
    assert (came_back.incarnation, came_back.restarts, came_back.loss) == (1, 1, None)
    assert address_of(9) in job.board.addresses()
    assert address_of(0) not in job.board.addresses()
    life = status(0, 2, incarnation=1, samples=130, members=(again, member(1)))
    seen = job.look({9: life, 1: status(1, 2, members=(again, member(1)))})
    assert worker(seen, 0).is_answering
    assert (worker(seen, 0).state, worker(seen, 0).samples) == ("training", 130)


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([0.1, 0.1, 0.1, 0.14], []),
        ([0.1, 0.1, 0.1, 0.16], [3]),
        ([0.1, 0.1, 0.2, 0.2], [2, 3]),
        ([0.1, 0.2], [1]),
        ([0.1], []),
        ([0.1, math.nan, 0.1], []),
    ],
)
def test_who_is_slow(seconds, slow):
    job, n = Job(*range(len(seconds))), len(seconds)
    seen = job.look(
        {rank: status(rank, n, step_seconds=s or math.nan) for rank, s in enumerate(seconds)}
    )
    assert [each.rank for each in seen.workers if each.state == "slow"] == slow


@pytest.mark.parametrize(
    ("facts", "known", "state"),
    [
        ({"since_step_s": 6.0}, {}, "idle"),
        ({"since_step_s": 6.0, "step_seconds": 1.0}, {}, "training"),
        ({"state": "averaging", "since_step_s": 99.0}, {}, "averaging"),
        ({}, {"state": "joining"}, "joining"),
        ({}, {"state": "lost"}, "cut off"),
        ({"incarnation": 1}, {"state": "lost"}, "training"),
        (None, {}, "no answer"),
        (None, {"is_silent": True}, "silent"),
        # It beats, and its loop hangs.
        (None, {"since_step_s": 6.0}, "idle"),
        (None, {"since_step_s": 6.0, "status_address": ""}, "idle"),
        (None, {"since_step_s": 4.0, "status_address": ""}, "training"),
        (None, {"since_step_s": 6.0, "state": "done", "status_address": ""}, "averaging"),
        (None, {"since_step_s": 6.0, "is_silent": True}, "silent"),
        ({}, {"since_step_s": 6.0}, "training"),
        (None, {"state": "done", "status_address": ""}, "averaging"),
        (None, {"state": "left"}, "left"),
        (None, {"state": "lost", "is_silent": True}, "lost"),
    ],
)
def test_the_word_for_a_worker(facts, known, state):
    job = Job(0, 1)
    members = (member(0), member(1, **known))
    own = None if facts is None else status(1, 2, **{"members": members} | facts)
    step_seconds = own.step_seconds if own is not None else 0.1
    other = status(0, 2, members=members, step_seconds=step_seconds)
    assert worker(job.look({0: other, 1: own}), 1).state == state


def test_the_shortest_standstill_that_anybody_heard_counts():
    job = Job(0, 1)
    for ages, heard in (((20.0, 12.0), 12.0), ((None, 30.0), 30.0), ((None, None), None)):
        answers = {
            rank: status(rank, 3, members=(member(0), member(1), member(2, since_step_s=age)))
            for rank, age in enumerate(ages)
        }
        assert worker(job.look(answers), 2).since_step_s == heard


def test_steps_that_take_long_everywhere_are_no_standstill():
    members = (member(0), member(1, since_step_s=20.0))
    seen = Job(0).look({0: status(0, 2, members=members, step_seconds=4.0)})
    assert worker(seen, 1).state == "no answer"


def test_counts_that_fall_or_are_unknown_begin_anew():
    speeds = Speeds()
    assert speeds.since(0, 0.0) is None
    for at_s, count in enumerate((0, 100, 600)):
        speeds.note(0, at_s, count)
    assert [speeds.since(0, from_s) for from_s in (0.0, 1.0, 9.0)] == [300.0, 500.0, 500.0]
    for count, speed in ((599, None), (599, 0.0), (5, None), (None, None), (30, None), (40, 10.0)):
        at_s += 1
        speeds.note(0, at_s, count)
        assert speeds.since(0, 0.0) == speed
    for at_s in range(600):  # it keeps 512
        speeds.note(1, at_s, at_s**2)
    assert speeds.since(1, 0.0) == (599**2 - 88**2) / (599 - 88)


@pytest.mark.parametrize(("step_s", "over_s"), [(0.1, 5.0), (3.0, 9.0), (25.0, 60.0)])
def test_speeds_are_over_five_seconds_or_three_steps_up_to_a_minute(step_s, over_s):
    job = Job(0)

    def look(count: int) -> JobWorker:
        counts = dict.fromkeys(("samples", "bytes_sent", "shared_bytes_sent"), count)
        return worker(job.look({0: status(0, 1, step_seconds=step_s, **counts)}), 0)

    assert look(100).samples_per_second is None
    assert look(1000).samples_per_second == 900.0
    for second in range(1, 71):  # ever faster
        last = look(1000 + second**2)
    speed = (70**2 - (70 - over_s) ** 2) / over_s
    assert (last.samples_per_second, last.bytes_sent_per_second) == (speed, 2 * speed)


def test_what_a_worker_sends_is_unknown_while_it_does_not_answer():
    job = Job(0, 1)
    for second in range(3):
        job.look({rank: status(rank, 2, bytes_sent=1000 * second) for rank in range(2)})
    seen = job.look({0: status(0, 2, bytes_sent=3000), 1: None})
    assert [each.bytes_sent_per_second for each in seen.workers] == [1000.0, None]
    assert worker(seen, 1).state == "no answer"
    seen = job.look({0: None, 1: None})
    assert worker(seen, 0).bytes_sent_per_second == 1000.0, "no worker answers: the last stays"


def test_an_address_of_another_run_is_left_out():
    job = Job(0, 1)
    seen = job.look({0: status(0, 1), 1: status(1, 2, run_id="other")})
    assert [each.rank for each in seen.workers] == [0]
    assert "another run" in job.board.failures[address_of(1)]


def test_once_nobody_answers_the_last_stays_and_says_how_old_it_is():
    job = Job(0, 1)
    with pytest.raises(ValueError, match="no worker has answered"):
        job.board.job(0.0)
    job.look({0: status(0, 2), 1: status(1, 2)})
    seen = job.look({0: None, 1: None}, after_s=3.0)
    assert (seen.num_answering, seen.heard_ago_s, len(seen.workers)) == (0, 3.0, 2)
    assert not seen.is_over


def test_a_run_is_over_when_all_average_or_the_budget_is_or_must_be_used_up():
    for facts in ({"state": "averaging"}, {"budget_samples": 100}):
        assert Job(0).look({0: status(0, 1, **facts)}).is_over
    assert not Job(0).look({0: status(0, 1, budget_samples=101)}).is_over
    job = Job(0)
    facts: dict[str, Any] = {"budget_samples": 1000, "members": (member(0),)}
    job.look({0: status(0, 1, samples=850, run_samples=850, **facts)})
    seen = job.look({0: status(0, 1, samples=900, run_samples=900, **facts)})
    assert (seen.samples_per_second, seen.is_over) == (50.0, False)
    assert not job.look({0: None}).is_over
    assert job.look({0: None}).is_over


def trained(rank: int, samples: int, *others: MemberStatus, **facts: Any) -> WorkerStatus:
    """Return what worker ``rank`` of two answers after as many steps as samples."""
    members = (member(rank, samples=samples), *others)
    return status(rank, 2, members=members, samples=samples, gradient_steps=samples, **facts)


def test_goodput_is_since_the_first_look_and_who_is_away_goes_on_at_full_speed():
    job = Job(0, 1)
    for seconds in range(0, 50, 10):  # the other makes nothing in half of the time
        its = 500 + 10 * min(seconds, 20)
        seen = job.look({0: trained(0, 10 * seconds + 90), 1: trained(1, its)}, after_s=10.0)
    assert worker(seen, 0).goodput == 1.0
    assert (worker(seen, 1).goodput, seen.goodput) == (None, 1.0), "one speed is not known yet"
    for its in (710, 810, 910):
        seconds += 10
        seen = job.look({0: trained(0, 10 * seconds + 90), 1: trained(1, its)}, after_s=10.0)
    assert worker(seen, 1).goodput == pytest.approx(410 / 700)
    # It made ten more steps before it died; 30 s later it is still dead.
    dead = member(1, "lost", samples=920, gradient_steps=920)
    job.look({0: trained(0, 890, dead), 1: None}, after_s=10.0)
    seen = job.look({0: trained(0, 1090, dead), 1: None}, after_s=20.0)
    assert worker(seen, 1).goodput == pytest.approx(420 / 1000)
    assert seen.goodput == pytest.approx(1420 / 2000)
    # Nobody answers any more: the run may have ended, and no time passes.
    assert job.look({0: None}, after_s=50.0).goodput == seen.goodput


def test_who_has_trained_its_last_loses_nothing_any_more():
    job = Job(0, 1)
    for samples in (0, 10, 20, 30, 40):
        answers = {rank: trained(rank, 1 + samples) for rank in range(2)}
        job.look(answers, after_s=1.0)
    last = trained(1, 41, state="averaging")
    assert job.look({0: trained(0, 341), 1: last}, after_s=30.0).goodput == 1.0
    assert job.look({0: trained(0, 641), 1: None}, after_s=30.0).goodput == 1.0
