"""A worker's view of the others, and its end by itself when its run has no average."""

from types import SimpleNamespace

import pytest

from gossipdp.gossip.counters import Counters
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.sums import Outcome
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.status import MemberStatus
from gossipdp.parallel.stats import (
    Consolidated,
    missing_workers,
    view_of,
    warn_of_absence,
    warn_of_no_average,
    warn_of_steps_after,
)
from gossipdp.protocol.actions import Notice
from gossipdp.protocol.members import Member, Status

ALIVE, DONE, LEFT, DEAD = Status.ALIVE, Status.DONE, Status.LEFT, Status.DEAD


@pytest.mark.parametrize(
    ("statuses", "lost_ago_s", "is_early", "speakers"),
    [
        ([ALIVE], None, False, []),  # its own parameters are the average
        ([ALIVE, ALIVE], None, False, [0]),
        ([DEAD, ALIVE], 4.0, False, []),  # 0 has ended as 1 does, and has said it
        ([DEAD, ALIVE], 6.0, False, [1]),  # 0 was killed long ago
        ([LEFT, ALIVE], None, False, [1]),
        ([DONE, ALIVE], None, False, [1]),
        ([ALIVE, ALIVE], None, True, [0, 1]),
    ],
)
def test_who_says_that_a_run_has_no_average(caplog, statuses, lost_ago_s, is_early, speakers):
    """``speakers``: those that would say it, of the workers that are alive."""
    members = [Member(rank, 0, 70 + rank, status) for rank, status in enumerate(statuses)]
    lost = () if lost_ago_s is None else (Notice(0, "lost", since_boot_s() - lost_ago_s),)
    seen = SimpleNamespace(members=members, counters=Counters(noticed=lost))
    for each in members:
        if each.status is ALIVE:
            warn_of_no_average(each.rank, seen, is_early, timeout_s=5.0, newest=None)
    said = [f"worker {rank} ends without consolidate()" for rank in speakers]
    assert [message.partition(": ")[0] for message in caplog.messages] == said


def test_an_average_without_some_workers_is_told(caplog):
    for num_workers in (3, 2):
        outcome = Outcome([], num_workers, {2: "it is silent"}, consensus_distance=0.0, lead=0)
        warn_of_absence(1, outcome, num_known=3)
    (message,) = caplog.messages
    assert message.startswith("worker 1: the average is over 2 of 3 workers; the others are lost")
    assert message.endswith("which every worker has to call; worker 2: it is silent")


def test_who_is_waited_for_at_the_end_is_named_with_its_last_step():
    members = [Member(1, 0, 71, DONE), Member(2, 0, 72, DEAD)]
    seen = SimpleNamespace(members=members, stepped_s={3: 6.0})
    assert missing_workers(seen, 10.0) == "all live workers are done and average their parameters"
    members.append(Member(3, 0, 73))
    first = "worker 3 (its last step came 4 s ago)"
    assert missing_workers(seen, 10.0) == f"{first} still trains"
    members.append(Member(4, 0, 74))
    text = f"{first}, worker 4 (its last step came 0 s ago) still train"
    assert missing_workers(seen, 10.0) == text


def test_a_worker_that_ended_long_before_the_others_is_told_so(caplog):
    for own, later in ((100, 49), (100, 50), (600, 59), (600, 60)):
        steps = {0: own, 1: 300 + later - 5, 2: 5}  # it had not heard of the last
        warn_of_steps_after(0, {1: 300}, Consolidated(0.0, 3, 0, 0, steps))
    text = "worker 0 ended after {} steps of its own, and then the others made {}"
    told = [each.partition(" more. ")[0] for each in caplog.messages]
    assert told == [text.format(*of) for of in ((100, 50), (600, 60))]


def test_the_members_are_shown_by_rank_with_all_that_is_known_of_each():
    place = {"status_host": "10.0.0.1", "status_port": 9401}
    seen = SimpleNamespace(
        members=(Member(0, 0, 70), Member(1, 2, 71, DEAD, **place, restarts=1)),
        recent_exchanges=[CompletedExchange(1, True, s, 2 * s, 0.0) for s in (1.0, 3.0)],
        progress={1: (80, 8)},
        stepped_s={1: 6.0},
        heard={1: 10.5},  # after the moment that counts as now
        silent={1},
        neighbours={1},
    )
    counts = {"gradient_steps": 8, "samples": 80, "restarts": 1, "exchange_seconds": 2.0}
    facts = {"is_silent": True, "is_neighbour": True, "status_address": "10.0.0.1:9401"}
    other = MemberStatus(1, 2, "lost", since_step_s=4.0, heard_ago_s=0.0, **counts, **facts)
    assert view_of(seen, 10.0) == (MemberStatus(0, 0, "training"), other)
