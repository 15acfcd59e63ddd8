"""What WorkerProtocol does when others fail, and when it failed itself."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, TypeVar

import pytest

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol.actions import Reach, Rebuilt, Refresh, Send, Stop, Superseded, Unlink
from gossipdp.protocol.consolidation_actions import Prepare
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.messages import (
    AskLife,
    AskMembers,
    Busy,
    Envelope,
    ExchangeId,
    Heartbeat,
    Members,
    Message,
    Propose,
    TellLife,
)
from gossipdp.protocol.pairing import Idle
from gossipdp.protocol.worker import Action, WorkerProtocol

TIMEOUT_S = 5.0
RING = Constants.of(build_graph("ring", 6))
Kind = TypeVar("Kind")


def member(rank: int, status: Status = Status.ALIVE, incarnation: int = 0) -> Member:
    return Member(rank, incarnation, 70 + rank, status, "10.0.0.1", 4000 + rank)


def make_worker(*linked: int, **changes: Any) -> WorkerProtocol:
    """Rank 1 of a ring of six: its neighbours are 0 and 2."""
    own = member(1)
    arguments: dict[str, Any] = {
        "rank": 1,
        "incarnation": 0,
        "process_id": own.process_id,
        "host": own.host,
        "port": own.port,
        "constants": RING,
        "method": "a2cid2",
        "policy_name": "fresh",
        "timeout_s": TIMEOUT_S,
        "random": Random(0),
    }
    worker = WorkerProtocol(**(arguments | changes))
    worker.membership.merge_all(member(rank) for rank in range(6) if rank != worker.rank)
    for peer in linked:
        worker.link_up(peer, 0.0)
    return worker


def of_type(actions: Sequence[Action], kind: type[Kind]) -> list[Kind]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: Sequence[Action], peer: int) -> list[Message]:
    return [
        action.message.message
        for action in actions
        if isinstance(action, Send)
        and action.peer == peer
        and not isinstance(action.message.message, Heartbeat)
    ]


def run(worker: WorkerProtocol, start: float, end: float, talking: Sequence[int]) -> list[Action]:
    """Poll at every deadline while some peers show life; return all actions."""
    actions: list[Action] = []
    now = start
    while (now := max(now, worker.next_deadline(now))) <= end:
        for peer in talking:
            actions += worker.heard(peer, now)
        actions += worker.poll(now)
    return actions


def tell(*members: Member) -> Envelope:
    return Envelope(Heartbeat(), members)


# --- deaths --------------------------------------------------------------------------------


def test_a_silent_neighbour_is_asked_about_and_declared_dead() -> None:
    worker = make_worker(0, 2)
    actions = run(worker, 0.0, 4.0, [0])
    (question,) = [message for message in said(actions, 0) if isinstance(message, AskLife)]
    assert question.suspect == 2
    worker.receive(0, Envelope(TellLife(2, question.counter, is_heard=False)), 4.0)
    actions = run(worker, 4.0, 1.15 * TIMEOUT_S, [0])
    assert worker.membership.get(2) == member(2, Status.DEAD)
    assert [action.peer for action in of_type(actions, Unlink)] == [2]
    (rebuilt,) = of_type(actions, Rebuilt)
    assert rebuilt.neighbours == {0, 3} == worker.neighbours
    assert rebuilt.dead == {2}


def test_one_bad_link_kills_nobody_but_is_made_anew() -> None:
    worker = make_worker(0, 2)
    for _ in range(3):
        actions = run(worker, 0.0, 4.0, [0])
    actions = run(worker, 4.0, 5.2, [0])
    question = next(
        message
        for message in said(run(make_worker(0, 2), 0.0, 4.0, [0]), 0)
        if isinstance(message, AskLife)
    )
    actions = worker.receive(0, Envelope(TellLife(2, question.counter, is_heard=True)), 5.2)
    assert [action.peer for action in of_type(actions, Unlink)] == [2]
    run(worker, 5.2, 9.0, [0])
    assert worker.membership.get(2) == member(2)
    assert worker.neighbours == {0, 2}


def test_a_refused_dial_is_death_at_once_and_rebuilds() -> None:
    worker = make_worker(0, 2)
    actions = worker.peer_dead(2, 1.0, ("10.0.0.1", 4002))
    (rebuilt,) = of_type(actions, Rebuilt)
    assert rebuilt.neighbours == {0, 3}
    assert worker.alpha_tilde == Constants.of(build_graph("ring", 5)).alpha_tilde
    assert worker.pairing.alpha_tilde == worker.alpha_tilde
    assert worker.pairing.available.keys() == {0}


def test_a_refusal_of_an_old_address_says_nothing_of_the_new_life() -> None:
    worker = make_worker(0, 2)
    new = Member(2, 1, 99, Status.ALIVE, "10.0.0.1", 5002)
    worker.receive(0, tell(new), 0.5)
    worker.peer_dead(2, 1.0, ("10.0.0.1", 4002))
    assert worker.membership.get(2) == new


def test_bad_news_of_a_peer_on_a_good_link_leaves_the_link() -> None:
    worker = make_worker(0, 2)
    actions = worker.receive(0, tell(member(2, Status.DEAD)), 0.5)
    assert of_type(actions, Unlink) == []
    actions += run(worker, 0.5, 0.6, [0, 2])
    told = [action.message.members for action in of_type(actions, Send) if action.peer == 2]
    assert member(2, Status.DEAD) in {record for records in told for record in records}
    worker.receive(2, tell(member(2, Status.ALIVE, incarnation=1)), 0.7)
    run(worker, 0.7, 1.2, [0, 2])
    assert worker.neighbours == {0, 2}, "back under a new incarnation"


def test_the_last_two_and_the_last_one() -> None:
    worker = make_worker(0, 2)
    worker.receive(0, tell(*(member(rank, Status.DEAD) for rank in range(2, 6))), 0.1)
    run(worker, 0.1, 0.5, [0])
    assert worker.neighbours == {0}
    actions = run(worker, 0.5, 0.5 + TIMEOUT_S, [])
    assert worker.neighbours == frozenset()
    assert of_type(actions, Rebuilt)[-1].worker_rate == 0.0
    for step in range(20):
        worker.step(8, 10.0 + step)
    assert worker.progress.total_samples == 160
    worker.done(30.0)
    assert worker.consolidation.missing() == ()


def test_a_leaf_asks_more_often_once_the_centre_is_dead() -> None:
    """Its rate was 1/5 and is 1, of which it asks for half."""
    worker = make_worker(0, constants=Constants.of(build_graph("star", 6)))
    worker.peer_dead(0, 0.5)
    for step in range(400):
        worker.step(1, 1.0 + 0.1 * step)
    assert 150 < worker.clock.num_ticks < 250


def test_an_unreachable_peer_without_a_link_dies_too() -> None:
    worker = make_worker(0)
    for second in range(1, 7):
        worker.peer_unreachable(2, float(second))
        run(worker, float(second), second + 0.99, [0])
    assert worker.membership.get(2) == member(2, Status.DEAD)


def test_whoever_is_asked_without_a_link_dials() -> None:
    worker = make_worker(0, 2)
    actions = worker.receive(0, Envelope(AskLife(4, 1)), 0.5)
    assert of_type(actions, Reach) == [Reach(4, "10.0.0.1", 4004)]
    actions = worker.reached(4, 0.7)
    assert said(actions, 0) == [TellLife(4, 1, is_heard=True)]


def test_while_held_at_the_start_nobody_is_missed_but_the_linked() -> None:
    worker = make_worker(0)
    worker.hold(0.0)
    run(worker, 0.0, 20.0, [0])
    assert worker.membership.get(2) == member(2)
    worker.release(20.0)
    run(worker, 20.0, 20.0 + 1.15 * TIMEOUT_S, [0])
    assert worker.membership.get(2) == member(2, Status.DEAD)


def test_deaths_count_in_the_end_too() -> None:
    worker = make_worker(0, 2)
    worker.receive(0, tell(*(member(rank, Status.LEFT) for rank in range(3, 6))), 0.1)
    worker.receive(0, tell(member(0, Status.DONE)), 0.1)
    worker.done(0.2)
    assert worker.consolidation.missing() == (2,)
    run(worker, 0.2, 0.3 + 1.15 * TIMEOUT_S, [0])
    assert worker.membership.get(2) == member(2, Status.DEAD)
    assert worker.consolidation.missing() == ()


# --- its own stalls ------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["poll", "heard", "receive", "step", "link_down"])
def test_who_slept_blames_nobody_whatever_it_is_told_first(first: str) -> None:
    worker = make_worker(0, 2)
    run(worker, 0.0, 4.0, [0, 2])
    now = 4.0 + 0.9 * TIMEOUT_S
    match first:
        case "poll":
            actions = worker.poll(now)
        case "heard":
            actions = worker.heard(0, now)
        case "receive":
            actions = worker.receive(0, tell(), now)
        case "step":
            actions = worker.step(1, now)
        case _:
            actions = worker.link_down(0, now)
    actions += run(worker, now, now + 0.1, [0])
    assert [message for message in said(actions, 0) if isinstance(message, AskLife)] == []
    assert worker.suspects() == frozenset()
    assert worker.membership.live() == tuple(range(6))
    assert of_type(actions, Refresh) == [], "not silent for the whole time-out"


def test_the_clock_is_looked_at_even_where_there_is_nothing_to_wait_for() -> None:
    """Or a long quiet time would look like a stall."""
    worker = make_worker(*(), is_joining=True)
    now = 0.0
    for _ in range(20):
        worker.poll(now)
        due = worker.next_deadline(now)
        assert now < due <= now + TIMEOUT_S / 4
        now = due


def stalled(worker: WorkerProtocol) -> list[Action]:
    run(worker, 0.0, 1.0, [0, 2])
    return worker.poll(1.0 + 2 * TIMEOUT_S)


def test_a_long_stall_is_followed_by_a_refresh_before_any_exchange() -> None:
    worker = make_worker(0, 2)
    (refresh,) = of_type(stalled(worker), Refresh)
    assert refresh.peer in (0, 2)
    assert not worker.can_donate
    ask = Envelope(Propose(ExchangeId(0, 0, 1), 0.6))
    assert isinstance(said(worker.receive(0, ask, 11.1), 0)[0], Busy)
    (second,) = of_type(worker.refresh_failed(refresh.peer, 11.2), Refresh)
    assert second.peer == 2 - refresh.peer
    worker.refreshed(11.3)
    assert worker.can_donate
    assert not worker.clock.is_paused
    ask = Envelope(Propose(ExchangeId(0, 0, 2), 0.6))
    worker.receive(0, ask, 11.4)
    assert worker.pairing.state != Idle()


def test_the_exchange_of_before_the_stall_is_void() -> None:
    worker = make_worker(0, 2)
    run(worker, 0.0, 1.0, [0, 2])
    worker.receive(0, Envelope(Propose(ExchangeId(0, 0, 1), 0.6)), 1.0)
    actions = worker.poll(1.0 + 2 * TIMEOUT_S)
    assert [action.peer for action in of_type(actions, Stop)] == [0]
    assert of_type(actions, Refresh) == [Refresh(2)]


@pytest.mark.parametrize("ending", ["finished", "failed"])
def test_an_exchange_that_ends_with_the_stall_is_not_stopped_as_well(ending: str) -> None:
    worker = make_worker(0, 2)
    run(worker, 0.0, 1.0, [0, 2])
    worker.receive(0, Envelope(Propose(ExchangeId(0, 0, 1), 0.6)), 1.0)
    actions = getattr(worker, ending)(ExchangeId(0, 0, 1), 1.0 + 2 * TIMEOUT_S)
    assert of_type(actions, Stop) == []
    assert len(of_type(actions, Refresh)) == 1
    assert (worker.exchanges_answered, worker.exchanges_failed) == (
        (1, 0) if ending == "finished" else (0, 1)
    )


def test_with_no_donor_it_goes_on_as_it_is() -> None:
    worker = make_worker(0, 2)
    (refresh,) = of_type(stalled(worker), Refresh)
    worker.refresh_failed(refresh.peer, 11.0)
    worker.refresh_failed(2 - refresh.peer, 11.0)
    assert not worker.can_donate
    run(worker, 11.0, 11.1 + TIMEOUT_S, [0, 2])
    assert worker.can_donate
    assert not worker.clock.is_paused


def test_with_nobody_left_it_goes_on_at_once() -> None:
    worker = make_worker(0, 2)
    (refresh,) = of_type(stalled(worker), Refresh)
    worker.peer_dead(2 - refresh.peer, 11.0)
    for rank in (3, 4, 5, refresh.peer):
        worker.peer_dead(rank, 11.0)
    assert not worker.can_donate
    worker.refresh_failed(refresh.peer, 11.1)
    assert worker.can_donate


def test_consolidation_waits_for_the_refresh() -> None:
    worker = make_worker(0, 2)
    worker.receive(0, tell(*(member(rank, Status.DEAD) for rank in (3, 4, 5))), 0.1)
    worker.receive(0, tell(member(0, Status.DONE)), 0.1)
    worker.done(0.2)
    run(worker, 0.2, 1.0, [0, 2])
    (refresh,) = of_type(worker.poll(11.0), Refresh)
    worker.peer_dead(0, 11.1)  # so that this worker leads
    assert of_type(worker.receive(2, tell(member(2, Status.DONE)), 11.2), Prepare) == []
    worker.refreshed(11.3)
    assert refresh.peer in (0, 2)
    assert "consolidation" in worker._closed_for


@pytest.mark.parametrize("state", ["alone", "held", "joining", "none"])
def test_who_does_not_exchange_need_not_refresh(state: str) -> None:
    worker = make_worker(0, 2, **({"method": "none"} if state == "none" else {}))
    if state == "joining":
        worker = make_worker(is_joining=True)
    if state == "held":
        worker.hold(0.1)
    if state == "alone":
        worker.receive(0, tell(*(member(rank, Status.DEAD) for rank in (0, 2, 3, 4, 5))), 0.1)
    assert of_type(stalled(worker), Refresh) == []


def test_a_stall_in_a_checkpoint_is_followed_by_a_refresh_once_that_is_taken() -> None:
    worker = make_worker(0, 2)
    worker.pause(0.0)
    assert of_type(stalled(worker), Refresh) == [], "not while the parameters are copied"
    assert not worker.can_donate
    # Nor until a time-out for it, which would be over for ever.
    run(worker, 11.0, 11.5 + TIMEOUT_S, [0, 2])
    assert worker.next_deadline(11.5 + TIMEOUT_S) > 11.5 + TIMEOUT_S
    (refresh,) = of_type(worker.release(11.6 + TIMEOUT_S), Refresh)
    assert refresh.peer in (0, 2)


def due_without_a_source(worker: WorkerProtocol) -> None:
    """It needs a refresh, and nobody whom it could ask is left to ask."""
    (first,) = of_type(stalled(worker), Refresh)
    worker.refresh_failed(first.peer, 11.0)
    worker.refresh_failed(2 - first.peer, 11.0)
    assert worker.refresher.is_needed
    assert worker.refresher.source is None


@pytest.mark.parametrize("waiting", ["hold", "pause"])
def test_no_refresh_begins_while_the_main_thread_has_the_parameters(waiting: str) -> None:
    worker = make_worker(0, 2)
    due_without_a_source(worker)
    getattr(worker, waiting)(11.1)
    # One more to ask, which every input would find.
    assert of_type(worker.link_up(3, 11.2), Refresh) == []
    assert of_type(run(worker, 11.2, 11.9, [0, 2, 3]), Refresh) == []
    assert not worker.can_donate
    released = of_type(worker.release(12.0), Refresh)
    released += of_type(run(worker, 12.0, 12.5, [0, 2, 3]), Refresh)
    assert released == ([Refresh(3)] if waiting == "pause" else []), "what was loaded stands"
    assert worker.refresher.is_needed == (waiting == "pause")
    assert worker.can_donate == (waiting == "hold")
    assert worker.clock.is_paused == (waiting == "pause")


def test_what_waits_for_a_refresh_is_not_kept_waiting_by_a_checkpoint_that_came_to_nothing() -> (
    None
):
    worker = make_worker(0, 2)
    worker.pause(0.1)
    worker.poisoned(0.2)
    assert len(of_type(worker.refresh(0.3), Refresh)) == 1
    other = make_worker(0, 2)
    due_without_a_source(other)
    other.pause(11.1)
    other.link_up(3, 11.2)
    assert of_type(other.done(11.3), Refresh) == [Refresh(3)]


def test_being_cut_off_is_no_stall() -> None:
    worker = make_worker(0, 2)
    actions = run(worker, 0.0, 10 * TIMEOUT_S, [])
    assert worker.membership.live() == (1, 3, 4, 5) or worker.membership.live() == (1,)
    assert of_type(actions, Refresh) == []


def test_poison_ends_with_a_refresh_by_choice_alone() -> None:
    worker = make_worker(0, 2)
    worker.poisoned(0.5)
    assert not worker.can_donate
    ask = Envelope(Propose(ExchangeId(0, 0, 1), 0.6))
    assert isinstance(said(worker.receive(0, ask, 0.6), 0)[0], Busy)
    (refresh,) = of_type(worker.refresh(0.7), Refresh)
    worker.refresh_failed(refresh.peer, 0.8)
    worker.refreshed(0.9)
    assert worker.can_donate
    assert not worker.clock.is_paused


# --- rivals and joiners --------------------------------------------------------------------


def rival(incarnation: int = 1) -> Member:
    return Member(1, incarnation, 500, Status.ALIVE, "10.0.0.9", 4444)


def test_a_living_rival_supersedes_after_the_time_out() -> None:
    worker = make_worker(0, 2)
    actions = worker.receive(0, tell(rival()), 0.5)
    assert of_type(actions, Reach) == [Reach(1, "10.0.0.9", 4444)]
    ask = Envelope(Propose(ExchangeId(0, 0, 1), 0.6))
    assert isinstance(said(worker.receive(0, ask, 0.6), 0)[0], Busy), "not in another's name"
    worker.reached(1, 0.7)
    assert of_type(run(worker, 0.7, 5.4, [0, 2]), Superseded) == []
    assert of_type(run(worker, 5.4, 5.6, [0, 2]), Superseded) == [Superseded()]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_ghost_is_outbid(is_refused: bool) -> None:
    worker = make_worker(0, 2)
    worker.receive(0, tell(rival()), 0.5)
    if is_refused:
        worker.peer_dead(1, 0.6, ("10.0.0.9", 4444))
    else:
        worker.peer_unreachable(1, 1.5)
    run(worker, 1.5, 5.6, [0, 2])
    assert worker.incarnation == 2 == worker.pairing.incarnation
    assert not worker.membership.is_superseded
    worker.receive(0, Envelope(Propose(ExchangeId(0, 0, 1), 0.6)), 5.7)
    assert worker.pairing.state != Idle()


def test_a_joiner_counts_once_it_has_parameters() -> None:
    joiner = make_worker(rank=6, process_id=900, is_joining=True)
    other = make_worker(0, 2)
    assert joiner.neighbours == frozenset()
    assert not joiner.can_donate
    other.receive(0, tell(joiner.membership.own), 0.1)
    assert other.neighbours == {0, 2}
    assert other.membership.live() == tuple(range(6))
    (rebuilt,) = of_type(joiner.joined(1.0), Rebuilt)
    assert rebuilt.neighbours == {0, 1}
    assert joiner.can_donate
    other.receive(0, tell(joiner.membership.own), 1.1)
    assert other.neighbours == {0, 2, 6}


def test_a_joiner_whose_rank_is_taken_is_told_at_once() -> None:
    joiner = make_worker(0, rank=6, process_id=10, is_joining=True)
    other = Member(6, 0, 11, Status.JOINING, "10.0.0.3", 4000)
    assert of_type(joiner.receive(0, tell(other), 0.5), Superseded) == [Superseded()]


def test_who_asks_for_members_is_told_all() -> None:
    worker = make_worker(0, 7)
    worker.step(32, 0.2)
    (answer,) = said(worker.receive(7, Envelope(AskMembers(4)), 0.5), 7)
    assert isinstance(answer, Members)
    assert (answer.counter, answer.num_workers, answer.is_ending) == (4, 6, False)
    assert [record.rank for record in answer.members] == list(range(6))
    assert [entry.samples for entry in answer.progress] == [32]


def test_the_end_takes_in_nobody() -> None:
    worker = make_worker(0, 2)
    worker.done(0.1)
    assert not worker.answer_joiner(1).is_ending, "the others still train"
    worker.receive(0, tell(*(member(rank, Status.DONE) for rank in (0, 2, 3, 4, 5))), 0.2)
    assert worker.answer_joiner(1).is_ending
