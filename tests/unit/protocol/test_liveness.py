"""Verdicts of the failure detector: when, and on whose word."""

from collections.abc import Sequence
from random import Random

import pytest
from driven_worker import of_type

from gossipdp.protocol import liveness
from gossipdp.protocol.actions import Reach, Send
from gossipdp.protocol.members import Member, Membership, Progress, Status
from gossipdp.protocol.messages import AskLife, TellLife
from gossipdp.protocol.peers import Peers

TIMEOUT_S = 10.0
ASKED_AT = liveness.ASK_AFTER * TIMEOUT_S
REACH = Reach(1, "10.0.0.1", 4001)


def say_no(made: liveness.FailureDetector, peer: int, question: AskLife, now: float) -> None:
    no = TellLife(question.suspect, question.counter, is_heard=False)
    assert made.receive(peer, no, now) == []


def detector(
    *watched: int, live: Sequence[int] = (1,), linked: Sequence[int] = (), heard_at: float = 0.0
) -> liveness.FailureDetector:
    """Make the detector of rank 0; those that are live, or linked, may be asked."""
    membership = Membership(Member(0, 0, 100), 10)
    membership.merge_all(
        Member(rank, 0, 100 + rank, Status.ALIVE, f"10.0.0.{rank}", 4000 + rank)
        for rank in {*watched, *live, *linked}
    )
    peers = Peers(membership, Progress(0, 100), TIMEOUT_S)
    for peer in linked:
        peers.up(peer, heard_at)
    made = liveness.FailureDetector(membership, peers, TIMEOUT_S, Random(0))
    made.watch(watched, 0.0)
    return made


def found_dead(made: liveness.FailureDetector, now: float) -> list[int]:
    """Let it do what is due, which brings nothing to say; return all that it has found dead."""
    assert made.poll(now) == []
    return [each.rank for each in made._membership.members() if each.status is Status.DEAD]


def asked(actions: Sequence[liveness.DetectorAction]) -> dict[int, AskLife]:
    sent = of_type(actions, Send)
    return {each.peer: each.message for each in sent if isinstance(each.message, AskLife)}


def answered(actions: Sequence[liveness.DetectorAction]) -> dict[int, bool]:
    sent = of_type(actions, Send)
    return {each.peer: each.message.is_heard for each in sent if isinstance(each.message, TellLife)}


def begin_inquiry(made: liveness.FailureDetector) -> dict[int, AskLife]:
    """Begin an inquiry after rank 1, which is silent."""
    return asked(made.poll(ASKED_AT))


def test_three_others_are_asked_the_linked_first():
    questions = begin_inquiry(detector(1, live=[4, 5], linked=[2, 3]))
    assert questions.keys() in ({2, 3, 4}, {2, 3, 5})
    assert {question.suspect for question in questions.values()} == {1}


def test_one_yes_keeps_it_alive_and_the_next_inquiry_waits_ever_longer():
    made = detector(1, linked=[2, 3])
    now, pauses = 0.0, []
    for _ in range(6):
        began, now = now, made.next_deadline()
        questions = asked(made.poll(now))
        pauses.append(now - began)
        yes = TellLife(1, questions[2].counter, is_heard=True)
        assert made.receive(2, yes, now) == [], "there is no link to close"
        # What the other answers belongs to an inquiry that is over.
        say_no(made, 3, questions[3], now)
    assert pauses == [ASKED_AT] + [factor * TIMEOUT_S for factor in (1, 2, 4, 8, 8)]


def test_no_answer_in_time_is_a_no_and_neither_strangers_nor_older_inquiries_count():
    made = detector(1, linked=[2, 3])
    counter = begin_inquiry(made)[2].counter
    for peer, answer in [(9, TellLife(1, counter, True)), (2, TellLife(1, counter - 1, True))]:
        assert made.receive(peer, answer, ASKED_AT) == []
    deadline = ASKED_AT + liveness.ANSWER_WITHIN * TIMEOUT_S
    assert made.next_deadline() == deadline <= 1.1 * TIMEOUT_S
    assert found_dead(made, deadline - 0.01) == []
    assert found_dead(made, deadline) == [1]


def test_who_cannot_be_reached_is_inquired_after_at_once_but_the_time_out_counts():
    made = detector(1, linked=[2])
    made.unreachable(1, 1.0)
    assert asked(made.poll(1.0)).keys() == {2}
    assert found_dead(made, 1.0 + liveness.ANSWER_WITHIN * TIMEOUT_S) == []
    assert found_dead(made, TIMEOUT_S) == [1]


def test_the_asked_says_yes_only_to_what_it_hears_anew():
    made = detector(1, linked=[1])
    made.heard(1, 4.0)
    assert made.receive(7, AskLife(1, 5), 4.1) == []
    assert made.heard(1, 4.5) == [Send(7, TellLife(1, 5, is_heard=True))]
    assert made.heard(1, 4.6) == [], "an answer is given once"


def test_the_asked_says_no_after_its_own_time_out():
    made = detector(linked=[1], heard_at=4.0)
    made.receive(7, AskLife(1, 5), 9.0)
    assert made.next_deadline() == 4.0 + TIMEOUT_S
    assert answered(made.poll(4.0 + TIMEOUT_S)) == {7: False}
    late = made.receive(7, AskLife(1, 6), 20.0)
    assert answered(late) == {7: False}, "at once: its link has been silent for long"


@pytest.mark.parametrize(
    ("ending", "is_reached"),
    [
        (lambda made: made.heard(1, 3.2), True),
        (lambda made: made.unreachable(1, 3.2), False),
        (lambda made: made.gone(1), False),
        (lambda made: made.poll(3.0 + liveness.REACH_FOR * TIMEOUT_S), False),
    ],
    ids=["reached", "unreachable", "gone", "deadline"],
)
def test_without_a_link_the_asked_seeks_the_suspect(ending, is_reached):
    made = detector()
    assert made.receive(7, AskLife(1, 5), 3.0) == [REACH]
    made.receive(8, AskLife(1, 2), 3.1)
    assert answered(ending(made)) == {7: is_reached, 8: is_reached}
    assert made.poll(100.0) == []


def test_who_slept_begins_all_waits_anew():
    made = detector(1, 2, linked=[2])
    made.receive(7, AskLife(2, 5), 3.0)
    begin_inquiry(made)
    made.slept(50.0)
    assert made.poll(50.0) == []
    assert made.next_deadline() == 50.0 + ASKED_AT


def test_a_new_link_to_the_asked_carries_the_question_again():
    made = detector(1, linked=[2, 3])
    question = begin_inquiry(made)[2]
    assert made.link_up(2) == [Send(2, question)]
    say_no(made, 2, question, 7.0)
    assert made.link_up(2) == []
    assert made.link_up(9) == []


def test_only_the_watched_are_judged():
    made = detector(1, 2, linked=[1, 2, 3])
    made._peers.fall_silent(TIMEOUT_S)  # so that none of them is asked
    made.watch([2, 3], 5.0)
    assert set(made.watched) == {2, 3}
    assert made.next_deadline() == ASKED_AT  # rank 2, since the beginning
    assert found_dead(made, TIMEOUT_S) == [2]
    assert found_dead(made, 5.0 + TIMEOUT_S) == [2, 3]


def test_one_of_the_asked_that_stands_still_holds_up_a_confirmed_death_for_a_moment_only():
    made, confirmed_at = detector(1, linked=[2, 3]), 1.0 + liveness.CONFIRMED_WITHIN * TIMEOUT_S
    made.refused(1, 1.0)
    question = asked(made.poll(1.0))[2]
    assert found_dead(made, confirmed_at) == []
    say_no(made, 2, question, 1.1)
    assert made.next_deadline() == pytest.approx(confirmed_at)
    assert found_dead(made, confirmed_at - 0.01) == []
    assert found_dead(made, confirmed_at + 0.01) == [1]


def test_a_refused_dial_is_death_at_once_where_nobody_is_left_to_ask():
    made = detector(1)
    made.refused(1, 1.0)
    assert made.next_deadline() == 1.0
    assert found_dead(made, 1.0) == [1]


def test_the_asked_dials_the_suspect_where_its_link_is_lost_meanwhile():
    made = detector(linked=[1])
    made.receive(7, AskLife(1, 5), 3.0)
    assert made.link_lost(1, 3.1) == [REACH]
    assert answered(made.refused(1, 3.2)) == {7: False}


def test_of_those_not_known_to_live_nothing_is_heard_and_nothing_kept():
    made = detector()
    for rank in range(1000):
        actions = made.receive(7, AskLife(10 + rank, 5), 3.0)
        assert answered(actions) == {7: False}
    assert made.poll(100.0) == []
