"""One worker's view of the others: deaths, firewalls, rivals of its rank, joiners."""

from random import Random

import pytest
from driven_worker import TIMEOUT_S, ask, make_worker, member, of_type, run, said, tell

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import LeftBehind, Notice, Reach, Rebuilt, Send, Superseded, Unlink
from gossipdp.protocol.liveness import FailureDetector
from gossipdp.protocol.members import MAX_INCARNATION, Member, Membership, Progress, Status
from gossipdp.protocol.messages import AskLife, AskMembers, Envelope, Members, TellLife
from gossipdp.protocol.neighbours import Neighbourhood, at_once
from gossipdp.protocol.pairing import Idle
from gossipdp.protocol.peers import Peers
from gossipdp.protocol.presence import Presence

# --- deaths --------------------------------------------------------------------------------


def test_one_bad_link_kills_nobody_but_is_made_anew():
    worker = make_worker(0, 2)
    actions = run(worker, 0.0, 5.2, [0])
    (question,) = [message for message in said(actions, 0) if isinstance(message, AskLife)]
    actions = worker.receive(0, Envelope(TellLife(2, question.counter, is_heard=True)), 5.2)
    assert [action.peer for action in of_type(actions, Unlink)] == [2]
    run(worker, 5.2, 9.0, [0])
    assert worker.membership.get(2) == member(2)
    assert worker.neighbours == {0, 2}


def test_who_is_asked_of_one_that_refuses_answers_and_asks_nobody():
    """Else each witness would ask three more, and all would dial the dead."""
    worker = make_worker(0, 2)
    worker.receive(0, Envelope(AskLife(4, 1)), 0.5)
    actions = worker.dial_refused(4, 0.6)
    assert said(actions, 0) == [TellLife(4, 1, is_heard=False)]
    assert said(run(worker, 0.6, 2.0, [0, 2]), 0) == []


def test_a_refusal_of_an_old_address_says_nothing_of_the_new_life():
    worker = make_worker(0, 2)
    new = Member(2, 1, 99, Status.ALIVE, "10.0.0.1", 5002)
    worker.receive(0, tell(new), 0.5)
    worker.link_down(2, 0.9)
    worker.dial_refused(2, 1.0, ("10.0.0.1", 4002))
    assert said(worker.poll(1.0), 0) == []
    assert worker.membership.get(2) == new


def test_bad_news_of_a_peer_on_a_good_link_leaves_the_link():
    worker = make_worker(0, 2)
    actions = worker.receive(0, tell(member(2, Status.DEAD)), 0.5)
    assert of_type(actions, Unlink) == []
    actions += run(worker, 0.5, 0.6, [0, 2])
    told = [action.message.members for action in of_type(actions, Send) if action.peer == 2]
    assert member(2, Status.DEAD) in {record for records in told for record in records}
    worker.receive(2, tell(member(2, Status.ALIVE, incarnation=1)), 0.7)
    run(worker, 0.7, 1.2, [0, 2])
    assert worker.neighbours == {0, 2}, "back under a new incarnation"


def test_while_held_at_the_start_nobody_is_missed_but_the_linked():
    worker = make_worker(0)
    worker.hold(0.0)
    run(worker, 0.0, 20.0, [0])
    assert worker.membership.get(2) == member(2)
    worker.release(20.0)
    run(worker, 20.0, 20.0 + 1.15 * TIMEOUT_S, [0])
    assert worker.membership.get(2) == member(2, Status.DEAD)


# --- notices -------------------------------------------------------------------------------


class Watcher:
    """Rank 0 of three workers, and what it notices."""

    def __init__(self) -> None:
        self.membership = Membership(Member(0, 0, 100), 3)
        self.peers = Peers(self.membership, Progress(0, 100), TIMEOUT_S)
        graph = LiveGraph(Constants.of(build_graph("ring", 3)))
        self.presence = Presence(
            self.membership,
            self.peers,
            Neighbourhood(0, graph, has_momentum=False, work_out=at_once),
            FailureDetector(self.membership, self.peers, TIMEOUT_S, Random(0)),
            TIMEOUT_S,
        )

    def look(self, record: Member, heard_s: float | None, now: float) -> list[Notice]:
        """Hear of a record, and the peer itself at ``heard_s``; None: there is no link to it."""
        peer = record.rank
        if heard_s is None:
            self.peers.drop(peer)
        elif peer not in self.peers:
            self.presence.linked(peer, heard_s)
        elif heard_s > self.peers.last_heard(peer):
            self.presence.heard(peer, heard_s)
        self.presence.look(now)
        self.membership.merge(record)
        return of_type(self.presence.review(now, has_changed=True, has_ended=False), Notice)


def one(
    incarnation: int = 0, process_id: int = 101, status: Status = Status.ALIVE, restarts: int = 0
) -> Member:
    return Member(1, incarnation, process_id, status, restarts=restarts)


def kinds(*records: Member) -> list[tuple[int, str, float]]:
    """Return what is noticed as a view goes from one record to the next, one a second."""
    watcher = Watcher()
    notices = [each for at, record in enumerate(records) for each in watcher.look(record, None, at)]
    return [(notice.rank, notice.kind, notice.at_s) for notice in notices]


def seen(*looks: tuple[Member, float | None, float]) -> list[tuple[str, float, float | None]]:
    """Return what is noticed of rank 1, from (record, heard at, now) of each look."""
    watcher = Watcher()
    notices = [notice for look in looks for notice in watcher.look(*look)]
    assert [notice.number for notice in notices] == list(range(1, len(notices) + 1))
    return [(each.kind, each.at_s, each.silent_s) for each in notices]


def test_nothing_is_noticed_of_a_run_that_begins():
    # Process id 0 stands for one that is known by its address alone.
    assert kinds(one(process_id=0), one(), one(status=Status.DONE)) == []
    assert kinds(one(), one(status=Status.LEFT)) == []
    # This worker has just joined; whatever happened before, it did not see.
    assert kinds(one(2, 7, restarts=1)) == []


def test_a_loss_and_what_may_follow_it():
    alive, dead = one(), one(status=Status.DEAD)
    joining = one(1, 7, Status.JOINING, restarts=1)
    again = one(1, 7, restarts=1)
    assert kinds(alive, dead, joining, again) == [(1, "lost", 1), (1, "restarted", 3)]
    # The same process, which was not dead.
    assert kinds(alive, dead, one(1)) == [(1, "lost", 1), (1, "answered", 2)]
    # Back before anybody missed it.
    assert kinds(alive, joining, again) == [(1, "lost", 1), (1, "restarted", 2)]
    assert kinds(alive, again) == [(1, "lost", 1), (1, "restarted", 1)]
    # It died as one that was joining.
    assert kinds(alive, dead, joining, one(1, 7, Status.DEAD, restarts=1)) == [
        (1, "lost", 1),
        (1, "lost", 3),
    ]
    # Lost before this worker came, or before it said a word.
    assert kinds(dead, joining, again) == [(1, "lost", 0), (1, "restarted", 2)]
    assert kinds(dead, one(1)) == [(1, "lost", 0), (1, "answered", 1)]
    unheard = one(process_id=0)
    assert kinds(unheard, one(process_id=0, status=Status.DEAD), again) == [
        (1, "lost", 1),
        (1, "restarted", 2),
    ]


@pytest.mark.parametrize("rank", [1, 2])
def test_none_of_the_first_workers_joins_nor_does_the_last_of_them(rank):
    joining, there = Member(rank, 0, 100, Status.JOINING), Member(rank, 0, 100)
    assert kinds(there) == []
    assert kinds(joining, there) == [(rank, "restarted", 1)]


def test_one_beyond_the_first_workers_joins_and_is_restarted():
    joining, joined = Member(3, 0, 103, Status.JOINING), Member(3, 0, 103)
    again = Member(3, 1, 7, restarts=1)
    assert kinds(joining, joined, again, Member(4, 0, 104)) == [
        (3, "joined", 1),
        (3, "lost", 2),
        (3, "restarted", 2),
        (4, "joined", 3),
    ]


def test_one_that_was_silent_and_not_missed_answers_again():
    alive = one()
    assert seen(
        (alive, 1.0, 1.0),
        (alive, 1.0, 6.0),
        (alive, 1.0, 6.5),
        (alive, 9.0, 9.0),
        (alive, 10.0, 10.0),
        (alive, 10.0, 15.0),
    ) == [("silent", 6.0, 5.0), ("answered", 9.0, 8.0), ("silent", 15.0, 5.0)]


def test_a_link_that_is_closed_is_no_answer():
    alive = one()
    looks = [(alive, 1.0, 1.0), (alive, 1.0, 6.0), (alive, None, 7.0)]
    assert seen(*looks) == [("silent", 6.0, 5.0)]
    assert seen(*looks, (alive, 9.0, 9.0))[1:] == [("answered", 9.0, 8.0)]
    left = one(status=Status.LEFT)
    assert seen(*looks, (left, None, 8.0), (left, 9.0, 9.0))[1:] == []


def test_an_address_that_answers_is_no_answer_of_a_silent_worker():
    """It turned this worker away: whether it exchanges shows once there is a link."""
    watcher = Watcher()
    watcher.look(one(), 1.0, 1.0)
    watcher.look(one(), 1.0, 6.0)
    watcher.look(one(), None, 7.0)
    watcher.presence.heard(1, 8.0)
    assert watcher.look(one(), None, 8.0) == []


def test_one_that_was_lost_answers_again_after_the_whole_silence():
    alive, dead = one(), one(status=Status.DEAD)
    lost = [(alive, 1.0, 1.0), (alive, 1.0, 6.0), (dead, None, 6.5)]
    expected = [("silent", 6.0, 5.0), ("lost", 6.5, 5.5)]
    # A link to it may be up before the news that it goes on.
    linked = [*lost, (dead, 9.0, 9.0)]
    assert seen(*linked) == expected
    assert seen(*linked, (one(1), 9.2, 9.2)) == [*expected, ("answered", 9.2, 8.2)]
    again = one(1, 7, restarts=1)
    assert seen(*lost, (again, 9.0, 9.0)) == [*expected, ("restarted", 9.0, 8.0)]
    # Found silent and lost in one turn.
    together = seen(lost[0], (dead, None, 6.5), (one(1), None, 9.0))
    assert together == [("lost", 6.5, 5.5), ("answered", 9.0, 8.0)]


def test_one_that_lived_on_without_a_link_has_an_unknown_silence():
    alive, dead = one(), one(status=Status.DEAD)
    unlinked = [(alive, 1.0, 1.0), (alive, None, 2.0)]
    assert seen(*unlinked, (dead, None, 2.5)) == [("lost", 2.5, 1.5)]
    lost = [*unlinked, (dead, None, 900.0)]
    assert seen(*lost) == [("lost", 900.0, None)]
    assert seen(*lost, (one(1), None, 901.0))[1:] == [("answered", 901.0, None)]
    # The same if its link was silent before it closed.
    silent = [unlinked[0], (alive, 1.0, 6.0), (alive, None, 7.0)]
    assert seen(*silent, (dead, None, 7.5))[1:] == [("lost", 7.5, 6.5)]
    assert seen(*silent, (dead, None, 900.0))[1:] == [("lost", 900.0, None)]


def test_the_silence_of_a_process_does_not_begin_with_its_predecessor_s():
    again, dead = one(1, 7, restarts=1), one(1, 7, Status.DEAD, restarts=1)
    heard = [(one(), 1.0, 1.0), (again, None, 2.0)]
    expected = [("lost", 2.0, 1.0), ("restarted", 2.0, 1.0)]
    assert seen(*heard, (dead, None, 3.0)) == [*expected, ("lost", 3.0, None)]


def test_a_new_process_does_not_inherit_the_rest_of_the_former_one():
    watcher = Watcher()
    watcher.look(one(), 1.0, 1.0)
    watcher.peers.stood_still(1, 1.0)
    assert watcher.peers.rests(1, 1.0)
    watcher.look(one(1, 7, restarts=1), 1.1, 1.1)
    assert not watcher.peers.rests(1, 1.1)


# --- one that stood still, and finds nobody ------------------------------------------------


def after_a_sleep(
    ending: Status, *, heard_s: float | None = None, died_s: float = 9.0
) -> list[LeftBehind]:
    """Let worker 0 sleep from 2 to 6 s, and both others end at ``died_s``, seen there or at 9 s."""
    watcher = Watcher()
    for rank in (1, 2):
        watcher.look(Member(rank, 0, 100 + rank), 1.0, 1.0)
    ended = [Member(rank, 0, 100 + rank, ending) for rank in (1, 2)]
    for each in ended if died_s < 2.0 else ():
        watcher.look(each, None, died_s)
    watcher.presence.slept(2.0, 6.0)
    if heard_s is not None:
        watcher.presence.heard(2, heard_s)
    watcher.membership.merge_all(ended)
    actions = watcher.presence.review(9.0, has_changed=True, has_ended=True)
    actions += watcher.presence.review(9.1, has_changed=False, has_ended=True)
    return of_type(actions, LeftBehind)


@pytest.mark.parametrize("ending", [Status.LEFT, Status.DEAD])
def test_one_that_stood_still_is_left_behind_unless_it_was_among_others_again(ending):
    assert after_a_sleep(ending) == [LeftBehind(4.0)]
    # What it reads at once may have been sent long ago.
    in_buffers_s = 6.0 + 0.1 * TIMEOUT_S
    assert after_a_sleep(ending, heard_s=in_buffers_s) == [LeftBehind(4.0)]
    assert after_a_sleep(ending, heard_s=in_buffers_s + 0.1) == []


def test_a_last_survivor_goes_on_even_if_it_sleeps():
    assert after_a_sleep(Status.DEAD, died_s=1.5) == []


def test_one_that_has_left_itself_is_not_left_behind():
    watcher = Watcher()
    watcher.look(one(), 1.0, 1.0)
    watcher.presence.slept(2.0, 6.0)
    watcher.membership.set_status(Status.LEFT)
    watcher.membership.merge(one(status=Status.LEFT))
    actions = watcher.presence.review(7.0, has_changed=True, has_ended=True)
    assert of_type(actions, LeftBehind) == []


# --- rivals and joiners --------------------------------------------------------------------


def rival(incarnation: int = 1) -> Member:
    return Member(1, incarnation, 500, Status.ALIVE, "10.0.0.9", 4444)


@pytest.mark.parametrize("is_higher", [True, False])
def test_of_two_processes_that_live_the_one_with_the_lower_id_ends(is_higher):
    worker = make_worker(0, 2, process_id=499 if is_higher else 501)
    actions = worker.receive(0, tell(rival()), 0.5)
    assert of_type(actions, Reach) == [Reach(1, "10.0.0.9", 4444)]
    assert worker.incarnation == 2, "it goes on in its own name meanwhile"
    actions = worker.reached(1, 0.7)
    assert [type(each) for each in of_type(actions, Superseded)] == [Superseded] * is_higher
    assert of_type(worker.reached(1, 0.8), Superseded) == [], "said once"


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_ghost_is_outbid(is_refused):
    worker = make_worker(0, 2)
    worker.receive(0, tell(rival()), 0.5)
    if is_refused:
        worker.dial_refused(1, 0.6, ("10.0.0.9", 4444))
    else:
        worker.peer_unreachable(1, 1.5)
    actions = run(worker, 1.5, 15.6, [0, 2])
    assert of_type(actions, Superseded) == []
    assert worker.incarnation == 2 == worker.pairing.incarnation
    worker.receive(0, ask(0), 15.7)
    assert worker.pairing.state != Idle()


def test_nobody_but_this_worker_listens_where_it_does():
    worker = make_worker(0, 2)
    ghost = Member(1, 3, 500, Status.ALIVE, "10.0.0.1", 4001)
    assert of_type(worker.receive(0, tell(ghost), 0.5), Reach) == []
    assert worker.incarnation == 4


def test_turned_away_as_outdated_for_the_time_out_it_ends():
    worker = make_worker()
    assert of_type(worker.outdated(0, 10.0), Superseded) == []
    assert of_type(worker.outdated(2, 10.0 + 0.9 * TIMEOUT_S), Superseded) == []
    assert len(of_type(worker.outdated(0, 10.0 + TIMEOUT_S), Superseded)) == 1
    assert of_type(worker.outdated(2, 11.0 + TIMEOUT_S), Superseded) == [], "said once"
    wanted = make_worker()
    wanted.outdated(0, 10.0)
    wanted.link_up(2, 11.0)
    assert of_type(wanted.outdated(0, 10.0 + TIMEOUT_S), Superseded) == []


def test_a_worker_that_has_had_all_its_lives_ends_with_a_clear_reason():
    worker = make_worker(0, 2, incarnation=MAX_INCARNATION)
    dead = member(1, Status.DEAD, incarnation=MAX_INCARNATION)
    (end,) = of_type(worker.receive(0, tell(dead), 0.5), Superseded)
    assert "had all its lives" in end.reason


def test_a_joiner_counts_once_it_has_parameters():
    joiner = make_worker(rank=6, process_id=900, status=Status.JOINING)
    other = make_worker(0, 2)
    assert joiner.neighbours == frozenset()
    assert not joiner.can_donate
    other.receive(0, tell(joiner.membership.own), 0.1)
    assert other.neighbours == {0, 2}
    assert other.membership.live() == tuple(range(6))
    (rebuilt,) = of_type(joiner.release(1.0), Rebuilt)
    assert rebuilt.neighbours == {0, 1}
    assert joiner.can_donate
    other.receive(0, tell(joiner.membership.own), 1.1)
    assert other.neighbours == {0, 2, 6}


def test_a_joiner_that_has_parameters_says_so_at_once():
    joiner = make_worker(0, 2, rank=6, process_id=900, status=Status.JOINING)
    joiner.poll(1.0)  # all links have heard all that there was
    told = {
        action.peer: action.message.members
        for action in joiner.release(1.0)
        if isinstance(action, Send)
    }
    alive = (joiner.membership.own,)
    assert told == {0: alive, 2: alive}


def test_a_joiner_whose_rank_is_taken_is_told_at_once():
    joiner = make_worker(0, rank=6, process_id=10, status=Status.JOINING)
    other = Member(6, 0, 11, Status.JOINING, "10.0.0.3", 4000)
    assert len(of_type(joiner.receive(0, tell(other), 0.5), Superseded)) == 1


def test_who_asks_for_members_is_told_all():
    worker = make_worker(0, 7)
    worker.step(32, 0.2)
    (answer,) = said(worker.receive(7, Envelope(AskMembers(4)), 0.5), 7)
    assert isinstance(answer, Members)
    assert (answer.counter, answer.num_workers, answer.is_ending) == (4, 6, False)
    assert [record.rank for record in answer.members] == list(range(6))
    assert [entry.samples for entry in answer.progress] == [32]


def test_the_end_takes_in_nobody():
    worker = make_worker(0, 2)
    worker.done(0.1)
    assert not worker.answer_joiner(1).is_ending, "the others still train"
    worker.receive(0, tell(*(member(rank, Status.DONE) for rank in (0, 2, 3, 4, 5))), 0.2)
    assert worker.answer_joiner(1).is_ending
