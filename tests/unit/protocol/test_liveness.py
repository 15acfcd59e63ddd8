"""Verdicts of the failure detector: when, and on whose word."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from driven_worker import protocol_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossipdp.protocol.actions import Reach, Send, Unlink
from gossipdp.protocol.liveness import FailureDetector
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import AskLife, TellLife

TIMEOUT_S = 10.0
ASKED_AT, REACH_S = 0.6 * TIMEOUT_S, 0.3 * TIMEOUT_S
REACH = Reach(1, "10.0.0.1", 4001)


def detector(
    *watched: int, live: Sequence[int] = (1,), linked: Sequence[int] = ()
) -> FailureDetector:
    """Make the detector of rank 0; those that are live, or linked, may be asked."""
    worker = protocol_of(0, process_id=100, timeout_s=TIMEOUT_S)
    worker.membership.merge_all(
        Member(rank, 0, 100 + rank, Status.ALIVE, f"10.0.0.{rank}", 4000 + rank)
        for rank in {*watched, *live, *linked}
    )
    for peer in linked:
        worker.peers.up(peer, 0.0)
    worker._detector.watch(watched, 0.0)
    return worker._detector


def found_dead(made: FailureDetector) -> list[int]:
    return [each.rank for each in made._membership.members() if each.status is Status.DEAD]


@dataclass
class Watched:
    """What a model knows of the watch over rank 1; ``deadline``: of the answers, once it asked."""

    since: float
    not_before: float = -math.inf
    retry_s: float = TIMEOUT_S
    inquire_at: float = math.inf
    deadline: float | None = None
    asked: set[int] = field(default_factory=set)
    is_confirmed: bool = False
    is_refused: bool = False

    def due_at(self, heard_at: float) -> float:
        """Return when the next inquiry, or the verdict, is due."""
        silent_since = max(self.since, heard_at)
        if self.deadline is None:
            return max(min(self.inquire_at, silent_since + ASKED_AT), self.not_before)
        answered_at = self.deadline if self.asked else -math.inf
        if not self.is_refused:
            return max(answered_at, silent_since + TIMEOUT_S)
        early = 0.5 - 0.15 if self.is_confirmed else 0.0
        return answered_at - early * TIMEOUT_S


# Events of rank 1 and this worker; ranks that ask about rank 1; ranks to be asked, with the outcome
about_rank_1 = ["heard", "refused", "unreachable", "gone", "link lost"]
answers = ["yes", "no", "no", "an old yes", "refuses", "gone", "link up"]
detector_event = st.one_of(
    st.sampled_from([0.5, 3.0, "until it is due", "until it is due"]),
    st.sampled_from([*about_rank_1, "slept", "watched anew", 7, 7, 8]),
    st.tuples(st.sampled_from([2, 3, 4, 6, 9]), st.sampled_from(answers)),
)
detector_events = st.lists(detector_event, min_size=10, max_size=30)


@settings(max_examples=300)
@example(False, 2, 0, ["until it is due", (4, "yes"), (2, "yes")] * 6)
@example(False, 2, 0, ["until it is due", (2, "an old yes"), (3, "no"), "refused", 0.5, 3.0])
@given(st.booleans(), st.integers(0, 4), st.integers(0, 2), detector_events)
def test_questions_answers_and_verdicts_are_those_of_a_model_after_every_event(
    is_linked, num_linked, num_others, events
):
    """Without a refusal or a yes, a silent worker is found dead after 1.1 time-outs at most."""
    linked, others = set(range(2, 2 + num_linked)), set(range(6, 6 + num_others))
    made = detector(1, live=[*others], linked=[*linked, *[1] * is_linked])
    now, heard_at, counter = 0.0, 0.0 if is_linked else -math.inf, 0
    watch: Watched | None = Watched(0.0)
    askers: dict[int, int] = {}
    answer_at, dead = math.inf, list[int]()

    def due_at() -> float:
        dues = [answer_at] if askers else []
        dues += [] if watch is None else [watch.due_at(heard_at)]
        return min(dues, default=math.inf)

    def tell(*, is_heard: bool) -> list[Send[TellLife]]:
        told = [Send(peer, TellLife(1, number, is_heard)) for peer, number in askers.items()]
        askers.clear()
        return told

    for number, event in enumerate(events):
        actions, expected = [], []
        match event:
            case float():
                now += event
            case "until it is due" if due_at() < math.inf:
                assert made.poll(math.nextafter(due_at(), 0.0)) == []
                now = due_at()
            case "heard":
                made._peers.heard(1, now)
                actions, expected = made.heard(1, now), tell(is_heard=True)
                heard_at, watch = now, watch and Watched(now)
            case "refused" | "unreachable":
                actions = made.dial_failed(1, now, is_refused=event == "refused")
                expected = tell(is_heard=False)
                if watch is not None:
                    watch.is_refused |= event == "refused"
                    watch.inquire_at = now if watch.deadline is None else watch.inquire_at
            case "gone":
                actions, expected, watch = made.gone(1), tell(is_heard=False), None
            case "link lost":
                made._peers.drop(1)
                actions, expected = made.link_lost(1, now), [REACH] * bool(askers)
                is_linked, answer_at = False, min(answer_at, now + REACH_S)
            case "slept":
                made._peers.slept(now)
                made.slept(now)
                askers.clear()
                heard_at, watch = now, watch and Watched(now)
            case "watched anew":
                made.watch([], now)
                made.watch([1], now)
                watch = Watched(now)
            case int():
                actions = made.receive(event, AskLife(1, number), now)
                latest = heard_at + TIMEOUT_S if is_linked else now + REACH_S
                if now >= latest:
                    expected = [Send(event, TellLife(1, number, is_heard=False))]
                else:
                    expected, answer_at = [REACH] * (not is_linked), answer_at if askers else latest
                    askers[event] = number
            case (peer, outcome):
                is_asked = watch is not None and peer in watch.asked
                if outcome == "link up":
                    actions = made.link_up(peer)
                    expected = [Send(peer, AskLife(1, counter))] * is_asked
                elif outcome == "gone":
                    actions = made.gone(peer)
                elif outcome == "refuses":
                    actions = made.dial_failed(peer, now, is_refused=True)
                else:
                    answer = TellLife(1, counter - (outcome == "an old yes"), outcome != "no")
                    actions = made.receive(peer, answer, now)
                if is_asked and outcome == "yes":
                    retry_s = min(2 * watch.retry_s, 8 * TIMEOUT_S)
                    watch = Watched(watch.since, now + watch.retry_s, retry_s)
                elif is_asked and outcome in ("no", "refuses", "gone"):
                    watch.asked.remove(peer)
                    watch.is_confirmed |= outcome == "no"
        polled = made.poll(now)
        if askers and now >= answer_at:
            expected += tell(is_heard=False)
        if watch is not None and watch.deadline is None and now >= watch.due_at(heard_at):
            counter += 1
            asked = [each.peer for each in polled if isinstance(each.message, AskLife)]
            assert {*asked} <= linked | others
            assert len({*asked}) == len(asked) == min(3, num_linked + num_others)
            assert len(linked.intersection(asked)) == min(3, num_linked), "these come first"
            expected += [Send(peer, AskLife(1, counter)) for peer in asked]
            watch.asked, watch.deadline = {*asked}, now + 0.5 * TIMEOUT_S
        if watch is not None and watch.deadline is not None and now >= watch.due_at(heard_at):
            watch, dead = None, [1]
        assert [*actions, *polled] == expected
        assert (found_dead(made), set(made.watched)) == (dead, {1} if watch else set())
        assert now < made.next_deadline() <= due_at()
        if dead:
            break


def test_only_the_watched_are_judged():
    made = detector(1, 2, linked=[1, 2, 3])
    made.dial_failed(1, 0.0, is_refused=False)
    made.poll(0.0)
    made._peers.fall_silent(TIMEOUT_S)  # so that none of them is asked any more
    (unlink,) = made.receive(3, TellLife(1, 1, is_heard=True), 5.0)
    assert unlink == Unlink(1, "it is silent here, but others hear it")
    made.watch([2, 3], 5.0)
    for now, dead in [(TIMEOUT_S, [2]), (5.0 + TIMEOUT_S, [2, 3])]:
        assert (made.poll(now), found_dead(made)) == ([], dead)


def test_questions_are_answered_each_in_its_own_time_and_those_about_strangers_at_once():
    made = detector(live=[1], linked=[2])
    assert made.receive(7, AskLife(2, 5), 0.0) == []
    assert made.receive(7, AskLife(1, 6), 0.0) == made.link_lost(1, 1.0) == [REACH]
    for rank in range(10, 1010):
        no = Send(7, TellLife(rank, 5, is_heard=False))
        assert made.receive(7, AskLife(rank, 5), 0.0) == [no]
    assert made.poll(REACH_S) == [Send(7, TellLife(1, 6, is_heard=False))]
    assert made.poll(TIMEOUT_S) == [Send(7, TellLife(2, 5, is_heard=False))]
    assert made.poll(100.0) == [], "nothing is kept"


def test_no_inquiry_waits_for_a_witness_that_refuses():
    made = detector(1, 2, linked=[3])
    assert len(made.poll(ASKED_AT)) == 4, "the third is asked about both, and they about each other"
    made.slept(ASKED_AT)
    assert len(made.poll(2 * ASKED_AT)) == 4, "both inquiries begin anew after a sleep"
    for suspect, witness in ((1, 2), (2, 1)):
        made.receive(witness, TellLife(suspect, suspect + 2, is_heard=False), 2 * ASKED_AT)
    made.dial_failed(3, 2 * ASKED_AT, is_refused=True)
    assert (made.poll(ASKED_AT + TIMEOUT_S), found_dead(made)) == ([], [1, 2])
