"""Verdicts of the failure detector: when, and on whose word."""

from collections.abc import Sequence
from random import Random

import pytest

from gossipdp.protocol import liveness
from gossipdp.protocol.actions import Send
from gossipdp.protocol.messages import AskLife, TellLife

TIMEOUT_S = 10.0
ASKED_AT = liveness.ASK_AFTER * TIMEOUT_S


def nobody(suspect: int) -> tuple[list[int], list[int]]:
    return [], []


def say_no(made: liveness.FailureDetector, peer: int, question: AskLife, now: float) -> None:
    no = TellLife(question.suspect, question.counter, is_heard=False)
    assert made.receive(peer, no, now, is_linked=True, is_live=True) == []


def detector(*watched: int, heard_at: float = 0.0) -> liveness.FailureDetector:
    made = liveness.FailureDetector(0, TIMEOUT_S, Random(0), lambda peer: heard_at)
    made.watch(watched, 0.0)
    return made


def asked(actions: Sequence[liveness.DetectorAction]) -> dict[int, AskLife]:
    return {
        action.peer: action.message
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, AskLife)
    }


def answered(actions: Sequence[liveness.DetectorAction]) -> dict[int, bool]:
    return {
        action.peer: action.message.is_heard
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, TellLife)
    }


def begin_inquiry(made: liveness.FailureDetector) -> dict[int, AskLife]:
    """Begin an inquiry after rank 1, which is silent; 2 and 3 are linked, 4 and 5 not."""
    return asked(made.poll(ASKED_AT, lambda suspect: ([2, 3], [5, 4])))


def test_three_others_are_asked_the_linked_first():
    questions = begin_inquiry(detector(1))
    assert questions.keys() in ({2, 3, 4}, {2, 3, 5})
    assert {question.suspect for question in questions.values()} == {1}


def test_one_yes_keeps_it_alive_and_the_next_inquiry_waits_ever_longer():
    made = detector(1)
    now, pauses = 0.0, []
    for _ in range(6):
        began, now = now, made.next_deadline()
        questions = asked(made.poll(now, lambda suspect: ([2, 3], [])))
        pauses.append(now - began)
        yes = TellLife(1, questions[2].counter, is_heard=True)
        assert made.receive(2, yes, now, is_linked=True, is_live=True) == [
            liveness.Verdict(1, is_dead=False)
        ]
        # What the other answers belongs to an inquiry that is over.
        say_no(made, 3, questions[3], now)
    assert pauses == [ASKED_AT] + [factor * TIMEOUT_S for factor in (1, 2, 4, 8, 8)]


def test_no_answer_in_time_is_a_no_and_neither_strangers_nor_older_inquiries_count():
    made = detector(1)
    counter = begin_inquiry(made)[2].counter
    for peer, answer in [(9, TellLife(1, counter, True)), (2, TellLife(1, counter - 1, True))]:
        assert made.receive(peer, answer, ASKED_AT, is_linked=True, is_live=True) == []
    deadline = ASKED_AT + liveness.ANSWER_WITHIN * TIMEOUT_S
    assert made.next_deadline() == deadline <= 1.1 * TIMEOUT_S
    assert made.poll(deadline - 0.01, nobody) == []
    assert made.poll(deadline, nobody) == [liveness.Verdict(1, is_dead=True)]


def test_who_cannot_be_reached_is_inquired_after_at_once_but_the_time_out_counts():
    made = detector(1)
    made.unreachable(1, 1.0)
    assert asked(made.poll(1.0, lambda suspect: ([2], []))).keys() == {2}
    assert made.poll(1.0 + liveness.ANSWER_WITHIN * TIMEOUT_S, nobody) == []
    assert made.poll(TIMEOUT_S, nobody) == [liveness.Verdict(1, is_dead=True)]


def test_the_asked_says_yes_only_to_what_it_hears_anew():
    made = detector(1)
    made.heard(1, 4.0)
    assert made.receive(7, AskLife(1, 5), 4.1, is_linked=True, is_live=True) == []
    assert made.heard(1, 4.5) == [Send(7, TellLife(1, 5, is_heard=True))]
    assert made.heard(1, 4.6) == [], "an answer is given once"


def test_the_asked_says_no_after_its_own_time_out():
    made = detector(heard_at=4.0)
    made.receive(7, AskLife(1, 5), 9.0, is_linked=True, is_live=True)
    assert made.next_deadline() == 4.0 + TIMEOUT_S
    assert answered(made.poll(4.0 + TIMEOUT_S, nobody)) == {7: False}
    late = made.receive(7, AskLife(1, 6), 20.0, is_linked=True, is_live=True)
    assert answered(late) == {7: False}, "at once: its link has been silent for long"


@pytest.mark.parametrize("ending", ["reached", "unreachable", "gone", "deadline"])
def test_without_a_link_the_asked_seeks_the_suspect(ending):
    made = detector()
    assert made.receive(7, AskLife(1, 5), 3.0, is_linked=False, is_live=True) == [liveness.Seek(1)]
    made.receive(8, AskLife(1, 2), 3.1, is_linked=False, is_live=True)
    match ending:
        case "reached":
            actions = made.heard(1, 3.2)
        case "unreachable":
            actions = made.unreachable(1, 3.2)
        case "gone":
            actions = made.gone(1)
        case _:
            actions = made.poll(3.0 + liveness.REACH_FOR * TIMEOUT_S, nobody)
    assert answered(actions) == {7: ending == "reached", 8: ending == "reached"}
    assert made.poll(100.0, nobody) == []


def test_who_slept_begins_all_waits_anew():
    made = detector(1, 2)
    made.receive(7, AskLife(2, 5), 3.0, is_linked=True, is_live=True)
    begin_inquiry(made)
    made.slept(50.0)
    assert made.poll(50.0, nobody) == []
    assert made.next_deadline() == 50.0 + ASKED_AT


def test_a_new_link_to_the_asked_carries_the_question_again():
    made = detector(1)
    question = begin_inquiry(made)[2]
    assert made.link_up(2) == [Send(2, question)]
    say_no(made, 2, question, 7.0)
    assert made.link_up(2) == []
    assert made.link_up(9) == []


def test_only_the_watched_are_judged():
    made = detector(1, 2)
    made.watch([2, 3], 5.0)
    assert made._watches.keys() == {2, 3}
    assert made.next_deadline() == ASKED_AT  # rank 2, since the beginning
    made.poll(TIMEOUT_S, nobody)
    assert made.poll(TIMEOUT_S, nobody) == []
    assert made.poll(5.0 + TIMEOUT_S, nobody) == [liveness.Verdict(3, is_dead=True)]


# --- refused dials -------------------------------------------------------------------------


def test_one_of_the_asked_that_stands_still_holds_up_a_confirmed_death_for_a_moment_only():
    made, confirmed_at = detector(1), 1.0 + liveness.CONFIRMED_WITHIN * TIMEOUT_S
    made.refused(1, 1.0)
    question = asked(made.poll(1.0, lambda suspect: ([2, 3], [])))[2]
    assert made.poll(confirmed_at, nobody) == []
    say_no(made, 2, question, 1.1)
    assert made.next_deadline() == pytest.approx(confirmed_at)
    assert made.poll(confirmed_at - 0.01, nobody) == []
    assert made.poll(confirmed_at + 0.01, nobody) == [liveness.Verdict(1, is_dead=True)]


def test_a_refused_dial_is_death_at_once_where_nobody_is_left_to_ask():
    made = detector(1)
    made.refused(1, 1.0)
    assert made.next_deadline() == 1.0
    assert made.poll(1.0, nobody) == [liveness.Verdict(1, is_dead=True)]


def test_the_asked_dials_the_suspect_where_its_link_is_lost_meanwhile():
    made = detector()
    made.receive(7, AskLife(1, 5), 3.0, is_linked=True, is_live=True)
    assert made.link_lost(1, 3.1) == [liveness.Seek(1)]
    assert answered(made.refused(1, 3.2)) == {7: False}


def test_of_those_not_known_to_live_nothing_is_heard_and_nothing_kept():
    made = detector()
    for rank in range(1000):
        actions = made.receive(7, AskLife(10 + rank, 5), 3.0, is_linked=False, is_live=False)
        assert answered(actions) == {7: False}
    assert made.poll(100.0, nobody) == []
