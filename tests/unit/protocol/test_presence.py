"""One worker's view of the others: deaths, firewalls, rivals of its rank, joiners."""

import pytest
from driven_worker import TIMEOUT_S, ask, make_worker, member, of_type, protocol_of, run, said, tell
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import LeftBehind, Notice, Reach, Rebuilt, Send, Superseded, Unlink
from gossipdp.protocol.members import MAX_INCARNATION, Member, Status
from gossipdp.protocol.messages import AskLife, AskMembers, Busy, Envelope, Members, TellLife
from gossipdp.protocol.pairing import Idle
from gossipdp.protocol.worker import WorkerProtocol

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


def test_who_is_asked_of_one_that_refuses_or_whose_link_it_loses_answers_or_dials():
    worker = make_worker(0, 2)
    worker.receive(0, Envelope(AskLife(4, 1)), 0.5)
    actions = worker.dial_failed(4, 0.6, is_refused=True)
    assert said(actions, 0) == [TellLife(4, 1, is_heard=False)]
    worker.receive(0, Envelope(AskLife(2, 2)), 0.7)
    reach = Reach(2, "10.0.0.1", 4002)
    assert of_type(worker.link_down(2, 0.8), Reach) == [reach], "the dial is the answer"


def test_bad_news_of_a_peer_on_a_good_link_leaves_the_link():
    worker = make_worker(0, 2)
    dead = (member(rank, Status.DEAD) for rank in (2, 3))
    actions = worker.receive(0, tell(*dead), 0.4)
    assert of_type(actions, Unlink) == []
    assert worker.pairing.available.keys() == {0}
    assert [notice.number for notice in of_type(actions, Notice)] == [1, 2]
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

THREE = LiveGraph(Constants.of(build_graph("ring", 3)))


def make_watcher() -> WorkerProtocol:
    """Make rank 0 of three workers."""
    return protocol_of(0, process_id=100, graph=THREE)


def look(watcher: WorkerProtocol, now: float, *records: Member) -> list[Notice]:
    """Look at the links, then hear of records; return what is noticed."""
    watcher._presence.look(now)
    watcher.membership.merge_all(records)
    return of_type(watcher._presence.review(now, has_changed=True), Notice)


# Process id 0: the worker is known by its address alone. Two of them have been restarted twice.
FIRST_RECORDS = [
    *(Member(1, 0, 0), Member(1, 0, 100), Member(1, 0, 100, Status.DEAD)),
    *(Member(1, 2, 98, restarts=2), Member(2, 0, 100, Status.JOINING)),
    *(Member(3, 0, 100), Member(3, 0, 100, Status.JOINING), Member(3, 2, 98, restarts=2)),
]
life_events = st.lists(
    st.one_of(
        st.sampled_from([1.0, 4.0, TIMEOUT_S]),  # seconds that pass
        st.sampled_from(["link", "unlink", "sign of life"]),
        st.tuples(st.booleans(), st.sampled_from(Status)),  # a record: of a new process or not
    ),
    min_size=12,
    max_size=23,  # joiners that are over are forgotten after 24 time-outs
)


@settings(max_examples=200)
@example(Member(1, 0, 100), ["link", TIMEOUT_S, "unlink", "sign of life"])
@example(
    Member(1, 0, 100),
    ["link", "unlink", *[TIMEOUT_S] * 4, (False, Status.DEAD), (False, Status.ALIVE)],
)
@given(st.sampled_from(FIRST_RECORDS), life_events)
def test_the_notices_are_those_of_a_model_after_every_event(first, events):
    """A silence begins with the last word of that process; see also ``FOUND_DEAD_WITHIN``."""
    watcher, rank, now, num_noticed = make_watcher(), first.rank, 0.0, 0
    record: Member | None = None
    took_part = 0  # the id of the process that took part last; 0: none that is known
    heard_at: float | None = None
    is_linked = is_silent = False
    away: str | None = None
    since: float | None = None
    for event in [first, *events]:
        was, noticed = record, list[tuple[str, float | None]]()
        match event:
            case Member():
                record = event
            case float():
                now += event
            case "unlink":
                watcher.peers.drop(rank)
                is_linked = False
            case "link" | "sign of life":
                is_linked |= event == "link"
                heard_at, is_silent = now, is_silent and not is_linked
                hear = watcher._presence.linked if event == "link" else watcher._presence.heard
                hear(rank, now)
                if is_linked and away == "silent":  # without a link, its address alone answers
                    noticed.append(("answered", since))
                    away = since = None
            case (is_new, status):
                life = was.incarnation + (is_new or status <= was.status)
                restarts = was.restarts + is_new
                is_unknown = was.process_id == 0 and status is Status.DEAD and not is_new
                process_id = 0 if is_unknown else 100 - restarts
                record = Member(rank, life, process_id, status, restarts=restarts)
        if is_linked and not is_silent and now >= heard_at + TIMEOUT_S:
            is_silent = True
            if away is None:
                away, since = "silent", heard_at
                noticed.append(("silent", since))
        if record is not was:
            is_dead, was_live = record.status is Status.DEAD, was is not None and was.is_live
            is_another = record.process_id != took_part
            if took_part == 0:
                is_another = away == "lost" and record.restarts > 0
            is_first_death = is_dead and (was is None or was.status is not Status.DEAD)
            if is_first_death or (is_another and was_live):  # a new process came before the news
                since = heard_at if away is None else since
                since = None if since is None or now - since > 3 * TIMEOUT_S else since
                took_part, away = took_part or record.process_id, "lost"
                noticed.append(("lost", since))
            if is_another and not is_dead and not is_linked:
                heard_at = None
            if record.status is Status.LEFT:  # it is no longer missed
                away, since = "lost" if away == "lost" else None, None
            if record.is_live:
                if is_another or away == "lost":
                    noticed.append(("restarted" if is_another else "answered", since))
                    away = since = None
                elif took_part == 0 and (was is None or was.status is Status.JOINING):
                    if rank == 3 and record.restarts == 0:
                        noticed.append(("joined", None))
                    elif was is not None:  # one of the first workers, or a later process
                        noticed.append(("restarted", None))
                took_part = record.process_id
        found = look(watcher, now, record)
        assert found == [
            Notice(rank, kind, now, num_noticed + number, None if at is None else now - at)
            for number, (kind, at) in enumerate(noticed, start=1)
        ]
        num_noticed += len(found)


def test_all_links_that_fall_silent_at_once_are_noticed():
    watcher = make_watcher()
    look(watcher, 1.0, Member(1, 0, 101), Member(2, 0, 102))
    for rank in (1, 2):
        watcher._presence.linked(rank, 1.0)
    noticed = look(watcher, 1.0 + TIMEOUT_S)
    assert noticed == [Notice(rank, "silent", 6.0, rank, TIMEOUT_S) for rank in (1, 2)]


def test_a_new_process_does_not_inherit_the_rest_of_the_former_one():
    watcher = make_watcher()
    look(watcher, 1.0, Member(1, 0, 101))
    watcher.peers.stood_still(1, 1.0)
    assert watcher.peers.rests(1, 1.0)
    look(watcher, 1.1, Member(1, 1, 7, restarts=1))
    assert not watcher.peers.rests(1, 1.1)


def test_nothing_stays_of_a_joiner_that_is_forgotten():
    watcher, joiners = make_watcher(), (7, 8)
    look(watcher, 1.0, Member(1, 0, 101), *(Member(rank, 0, 100 + rank) for rank in joiners))
    for rank in (1, *joiners):
        watcher._presence.linked(rank, 1.0)
        watcher.peers.drop(rank)
    look(watcher, 2.0, *(Member(rank, 0, 100 + rank, Status.DEAD) for rank in joiners))
    for number in range(1, 26):
        assert watcher.membership.get(7) is not None
        look(watcher, 1.0 + number * TIMEOUT_S)
    assert watcher.membership.get(7) is None, "24 time-outs after a look has found it dead"
    assert watcher._presence._lives.keys() == watcher.peers._partners.keys() == {1}


# --- one that stood still, and finds nobody ------------------------------------------------


def after_a_sleep(
    ending: Status,
    *,
    woken_s: float = 7.0,
    heard_s: float | None = None,
    died_s: float = 9.0,
    has_left: bool = False,
) -> list[LeftBehind]:
    """Let worker 0 sleep from 2 s on, and both others end at ``died_s``, seen there or at 9 s."""
    watcher = make_watcher()
    look(watcher, 1.0, *(Member(rank, 0, 100 + rank) for rank in (1, 2)))
    ended = [Member(rank, 0, 100 + rank, ending) for rank in (1, 2)]
    if died_s < 2.0:
        look(watcher, died_s, *ended)
    watcher._presence.slept(2.0, woken_s)
    if heard_s is not None:
        watcher._presence.heard(2, heard_s)
    if has_left:
        watcher.membership.set_status(Status.LEFT)
    watcher.membership.merge_all(ended)
    actions = watcher._presence.review(9.0, has_changed=True)
    actions += watcher._presence.review(9.1, has_changed=False)
    return of_type(actions, LeftBehind)


@pytest.mark.parametrize("ending", [Status.LEFT, Status.DEAD])
def test_one_that_stood_still_is_left_behind_unless_it_was_among_others_again(ending):
    assert after_a_sleep(ending) == [LeftBehind(5.0)]
    # What it reads at once may have been sent long ago.
    in_buffers_s = 7.0 + 0.1 * TIMEOUT_S
    assert after_a_sleep(ending, heard_s=in_buffers_s) == [LeftBehind(5.0)]
    assert after_a_sleep(ending, heard_s=in_buffers_s + 0.1) == []


def test_a_last_survivor_goes_on_even_if_it_sleeps():
    assert after_a_sleep(Status.DEAD, died_s=1.5) == []
    # It slept too briefly for the others to find it dead, and to end without it.
    assert after_a_sleep(Status.DEAD, woken_s=2.0 + 3.9) == []
    assert len(after_a_sleep(Status.DEAD, woken_s=2.0 + 4.1)) == 1, "it may have been left out"
    assert after_a_sleep(Status.LEFT, has_left=True) == [], "it has left itself"


# --- rivals and joiners --------------------------------------------------------------------

RIVAL = Member(1, 1, 500, Status.ALIVE, "10.0.0.9", 4444)


@pytest.mark.parametrize("is_higher", [True, False])
def test_of_two_processes_that_live_the_one_with_the_lower_id_ends(is_higher):
    worker = make_worker(0, 2, process_id=499 if is_higher else 501)
    told = [*worker.reached(1, 0.4), *worker.receive(0, tell(RIVAL), 0.5), *worker.reached(0, 0.6)]
    assert of_type(told, Reach) == [Reach(1, "10.0.0.9", 4444)]
    assert of_type(told, Superseded) == [], "the other has not answered at its own address"
    assert worker.incarnation == 2, "it goes on in its own name meanwhile"
    ends = [of_type(worker.reached(1, now), Superseded) for now in (0.7, 0.8)]
    assert [len(each) for each in ends] == [is_higher, 0], "said once"


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_ghost_is_outbid(is_refused):
    worker = make_worker(0, 2)
    worker.receive(0, tell(RIVAL), 0.5)
    now = 0.6 if is_refused else 1.5
    worker.dial_failed(1, now, is_refused=is_refused)
    assert said(worker.poll(now)) == [], "nobody is asked whether this worker itself lives"
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


def test_one_that_has_had_all_its_lives_and_a_joiner_whose_rank_is_taken_end_at_once():
    worker = make_worker(0, 2, incarnation=MAX_INCARNATION)
    dead = member(1, Status.DEAD, incarnation=MAX_INCARNATION)
    (end,) = of_type(worker.receive(0, tell(dead), 0.5), Superseded)
    assert "had all its lives" in end.reason
    assert worker.incarnation == MAX_INCARNATION, "a greater one would not decode"
    joiner = make_worker(0, rank=6, process_id=10, status=Status.JOINING)
    other = Member(6, 0, 11, Status.JOINING, "10.0.0.3", 4000)
    assert len(of_type(joiner.receive(0, tell(other), 0.5), Superseded)) == 1


def test_a_joiner_counts_once_it_has_parameters_and_says_so_at_once():
    joiner = make_worker(0, 2, rank=6, process_id=900, status=Status.JOINING)
    other = make_worker(0, 2)
    assert joiner.neighbourhood.place == ({}, 0.0, 0.0, 0.5)
    assert not joiner.can_donate
    assert isinstance(said(joiner.receive(0, ask(0), 0.5), 0)[0], Busy)
    other.receive(0, tell(joiner.membership.own), 0.1)
    assert other.neighbours == {0, 2}
    assert other.membership.live() == tuple(range(6))
    joiner.poll(1.0)  # all links have heard all that there was
    actions = joiner.release(1.0)
    (rebuilt,) = of_type(actions, Rebuilt)
    assert rebuilt.neighbours == {0, 1}
    told = {each.peer: each.message.members for each in of_type(actions, Send)}
    assert told == {0: (joiner.membership.own,), 2: (joiner.membership.own,)}
    assert joiner.can_donate
    other.receive(0, tell(joiner.membership.own), 1.1)
    assert other.neighbours == {0, 2, 6}


def test_one_that_leaves_says_so_at_once():
    """Its process ends then, maybe before the next heartbeat."""
    worker = make_worker(0, 2)
    worker.receive(0, tell(*(member(rank, Status.LEFT) for rank in (0, 2, 3, 4, 5))), 0.5)
    worker.poll(1.0)
    actions = of_type(worker.done(1.0), Send)
    left = (member(1, Status.LEFT),)
    assert {each.peer: each.message.members for each in actions} == {0: left, 2: left}


def test_who_asks_for_members_is_told_all_until_the_others_train_no_more():
    worker = make_worker(0, 2, 7)
    worker.step(32, 0.2)
    (answer,) = said(worker.receive(7, Envelope(AskMembers()), 0.5), 7)
    assert isinstance(answer, Members)
    assert (answer.num_workers, answer.is_ending) == (6, False)
    assert [record.rank for record in answer.members] == list(range(6))
    assert [entry.samples for entry in answer.progress] == [32]
    worker.done(0.6)
    assert not worker.answer_joiner().is_ending, "the others still train"
    worker.receive(0, tell(*(member(rank, Status.DONE) for rank in (0, 2, 3, 4, 5))), 0.7)
    assert worker.answer_joiner().is_ending
