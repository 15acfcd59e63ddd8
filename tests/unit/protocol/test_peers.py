"""Peers: how long answers and exchanges are waited for, and who is left out meanwhile."""

import math
from dataclasses import dataclass
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Member, Membership, Progress, ProgressEntry
from gossipdp.protocol.messages import Envelope, ExchangeId, Heartbeat
from gossipdp.protocol.peers import Peers

TIMEOUT_S = 5.0


def make_peers(*ranks: int, timeout_s: float = TIMEOUT_S) -> Peers:
    membership = Membership(Member(0, 0, 70))
    membership.merge_all(Member(rank, 0, 70 + rank) for rank in ranks)
    peers = Peers(membership, Progress(0, 70), timeout_s)
    for rank in ranks:
        peers.up(rank, 0.0)
    return peers


def exchange(peers: Peers, peer: int, now: float = 1.0, **measured: float) -> None:
    values = {"duration_s": 0.01, "gap_s": 0.001, "demands_per_s": 20.0} | measured
    peers.exchanged(peer, now, **values)


answer_kinds = ["ask", "ask", "answer", "late answer", "no answer", "heard", "says"]
answer_event = st.tuples(
    st.sampled_from([*answer_kinds, "link", "slept"]),
    st.sampled_from([1, 2]),
    st.sampled_from([0.001, 0.1, 0.4, 3.0]),  # seconds that pass before it
)


@given(st.lists(answer_event, min_size=20, max_size=60))
def test_waits_and_who_is_left_out_are_those_of_a_model_after_every_event(events):
    """A wait is four times the median answer, and doubles until an answer in time.

    One that does not answer is left out until it says something or, some waits later, shows life.
    """
    peers, now = make_peers(1, 2), 1.0
    asked: dict[int, list[tuple[ExchangeId, float]]] = {1: [], 2: []}
    answers: dict[int, list[float]] = {1: [], 2: []}
    of_all = list[float]()
    withdrawn, left_out = {1: 0, 2: 0}, dict[int, float]()

    def wait_of(peer: int) -> float:
        last = (answers[peer] or of_all)[-9:]
        usual_s = 4 * median(last) if last else 0.5
        return min(max(0.02, usual_s) * 2 ** withdrawn[peer], TIMEOUT_S / 2)

    for number, (kind, peer, passed_s) in enumerate(events):
        now += passed_s
        before, peers.has_changed = dict(left_out), False
        match kind:
            case "ask":
                asked[peer] = [*asked[peer], (ExchangeId(0, 0, number), now)][-9:]
                peers.proposed(peer, *asked[peer][-1])
            case "answer" | "late answer" if asked[peer]:
                index = number % len(asked[peer])  # those before it crossed with one of the peer
                id, asked_at = asked[peer][index]
                del asked[peer][: index + 1]
                peers.answered(peer, id, now, in_time=kind == "answer")
                peers.answered(peer, id, now + 1.0, in_time=False)  # once more
                answers[peer].append(now - asked_at)
                of_all.append(now - asked_at)
                withdrawn[peer] *= kind != "answer"
            case "no answer":
                left_out[peer] = now + 4 * wait_of(peer)
                peers.unanswered(peer, now)
                withdrawn[peer] += 1
            case "heard":
                peers.heard(peer, now)
                if now >= left_out.get(peer, math.inf):
                    del left_out[peer]
            case "says":
                peers.says(peer, is_closed=False)
                left_out.pop(peer, None)
            case "link":
                peers.up(peer, now)
                left_out.pop(peer, None)
            case "slept":
                peers.slept(now)
        for each in {"link": [peer], "slept": [1, 2]}.get(kind, []):
            for id, _ in asked[each]:  # an answer that comes now tells nothing
                peers.answered(each, id, now, in_time=True)
            asked[each].clear()
        assert peers.has_changed == (kind in ("link", "no answer", "slept") or left_out != before)
        assert peers.can_exchange([1, 2], now) == [each for each in (1, 2) if each not in left_out]
        for each in (1, 2):
            assert peers.wait_s(each) == pytest.approx(wait_of(each))


def test_an_exchange_may_stand_still_for_a_few_of_the_longest_gaps_but_one():
    peers = make_peers(1, 2)
    assert peers.patience_s(1) == TIMEOUT_S, "nothing is known yet"
    exchange(peers, 1, gap_s=0.001)
    exchange(peers, 1, gap_s=3.0)
    assert peers.patience_s(1) == 0.25
    assert peers.patience_s(2) == 0.25, "as with others"
    for _ in range(2):
        exchange(peers, 2, gap_s=0.5)
    assert peers.patience_s(2) == 4 * 0.5
    for number, (answer_s, patience_s) in enumerate([(0.25, 2.0), (1.25, 3.0)]):
        peers.proposed(2, ExchangeId(0, 0, number), 1.0)
        peers.answered(2, ExchangeId(0, 0, number), 1.0 + answer_s, in_time=True)
        assert peers.patience_s(2) == patience_s, "its first byte comes no sooner than its answer"
    assert peers.patience_s(1) == 0.25


def test_who_stands_still_rests_twice_as_long_each_time_until_an_exchange_succeeds():
    peers = make_peers(1, 2)
    exchange(peers, 1)
    rest_s = 0.25
    for now in (10.0, 20.0, 30.0):
        peers.stood_still(1, now)
        assert peers.can_exchange([1, 2], now + rest_s - 0.01) == [2]
        assert peers.can_exchange([1, 2], now + rest_s) == [1, 2]
        assert peers.can_exchange([1], now) == []
        rest_s *= 2
    exchange(peers, 1, 40.0)
    peers.stood_still(1, 50.0)
    assert peers.can_exchange([1, 2], 50.25) == [1, 2]
    for now in range(100, 1000, 100):
        peers.stood_still(1, now)
    assert peers.can_exchange([1, 2], 900.0 + 16 * TIMEOUT_S) == [1, 2]


def test_a_peer_whose_exchanges_take_long_rests_so_that_few_demands_are_lost():
    peers = make_peers(1, 2)
    for _ in range(8):
        exchange(peers, 2)
    for now in (7.0, 8.0):
        exchange(peers, 1, now, duration_s=1.0)
        assert peers.can_exchange([1, 2], now) == [1, 2], "chance makes one long here and there"
    exchange(peers, 1, 10.0, duration_s=1.0)
    # Of 20 demands in that second four are kept; 16 are 3% of those of 26.7 s.
    assert peers.can_exchange([1, 2], 10.0 + 25.6) == [2]
    assert peers.can_exchange([1, 2], 10.0 + 25.7) == [1, 2]
    assert peers.can_exchange([1], 10.0) == [1], "there is nobody else"
    peers.has_changed = False
    exchange(peers, 1, 50.0, duration_s=0.2)  # four demands: all are kept
    assert not peers.has_changed
    assert peers.can_exchange([1, 2], 50.0) == [1, 2]
    peers = make_peers(1, 2)
    for _ in range(4):
        for peer in (1, 2):
            exchange(peers, peer, duration_s=2.0)
    assert not any(peers.rests(peer, 1.0) for peer in (1, 2)), "all take long"


def test_little_is_kept_of_a_peer_that_never_answers_and_nothing_of_a_visitor():
    peers = make_peers(1, timeout_s=2000.0)
    for number in range(1000):
        peers.proposed(1, ExchangeId(0, 0, number), float(number))
        peers.unanswered(1, float(number))
    assert len(peers._links[1].proposed) < 10
    for visitor in range(1000, 1010):
        peers.up(visitor, 0.0)
        peers.drop(visitor)
    assert peers.wait_s(1) == 2**10 * 0.5, "it doubles no further"
    peers.drop(1)
    assert peers._partners.keys() == {1}


kinds = ["up", "drop", "heard", "slept", "stood", "step", "work", "send", "news", "urgent"]
link_event = st.tuples(
    st.sampled_from(kinds) | st.just("poll"),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.5, 2.0, TIMEOUT_S]),
)
link_events = st.lists(link_event, min_size=30, max_size=80)


@dataclass
class Known:
    """What a model knows of one link: when and up to which news something was sent."""

    sent: float = -math.inf
    members: int = 0
    progress: int = 0
    progress_sent: float = -math.inf
    own: ProgressEntry | None = None


@given(link_events, st.sampled_from([TIMEOUT_S, TIMEOUT_S, 0.2]))
def test_silence_news_rests_and_deadlines_are_those_of_a_model_after_every_event(events, timeout_s):
    """Worker 9 is no member: nothing is kept of it without a link."""
    membership, progress = Membership(Member(0, 0, 70)), Progress(0, 70)
    membership.merge_all(Member(rank, 0, 70 + rank) for rank in (1, 2))
    peers, now, awake = Peers(membership, progress, timeout_s), 100.0, -math.inf
    heard: dict[int, float] = {}
    rests: dict[int, tuple[float, float]] = {}  # until when, and how long
    silent: set[int] = set()
    links: dict[int, Known] = {}
    urgent = 0

    def beat_at(peer: int) -> float:
        interval = timeout_s / 10
        if links[peer].members < membership.version:
            interval = 0.0 if links[peer].members < urgent else min(interval, 0.05)
        return links[peer].sent + interval

    def falls_at(peer: int) -> float:
        return max(heard[peer], awake) + timeout_s

    def check_sent(sent: Send[Envelope]) -> None:
        link, members = links[sent.peer], membership.news(links[sent.peer].members)[0]
        told: tuple[ProgressEntry, ...] = ()
        if members or now >= link.progress_sent + 0.25:
            told, link.progress_sent = progress.news(link.progress)[0], now
            link.progress = progress.version
        elif progress.own != link.own and progress.own is not None:
            told = (progress.own,)
        assert sent.message == Envelope(Heartbeat(), members, told)
        link.sent, link.members, link.own = now, membership.version, progress.own

    for number, (kind, peer, wait_s) in enumerate(events, start=1):
        now += wait_s
        peers.has_changed = has_changed = False
        match kind:
            case "up":
                peers.up(peer, now)
                heard[peer], links[peer], has_changed = now, Known(), True
                silent.discard(peer)
            case "drop":
                peers.drop(peer)
                links.pop(peer, None)
                silent.discard(peer)
                has_changed = True
                if peer == 9:
                    heard.pop(peer, None)
                    rests.pop(peer, None)
            case "heard":
                peers.heard(peer, now - 0.25)
                if peer in links or peer != 9:
                    heard[peer] = max(now - 0.25, heard.get(peer, -math.inf))
                has_changed = peer in silent
                silent.discard(peer)
            case "poll":
                fallen = [each for each in links if each not in silent and now >= falls_at(each)]
                assert peers.fall_silent(now) == fallen
                silent |= set(fallen)
                has_changed = bool(fallen)
                due = [each for each in links if now >= beat_at(each)]
                sent = peers.heartbeats(now)
                assert [each.peer for each in sent] == due
                for each in sent:
                    check_sent(each)
            case "send" if peer in links:
                check_sent(peers.wrap(peer, Heartbeat(), now))
            case "send":
                assert peers.wrap(peer, Heartbeat(), now).message == Envelope(Heartbeat())
            case "stood" if peer in links:
                peers.stood_still(peer, now)
                rest_s = min(max(2 * rests.get(peer, (0.0, 0.0))[1], timeout_s), 16 * timeout_s)
                rests[peer], has_changed = (now + rest_s, rest_s), True
            case "step":
                progress.add(1)
                for each in links:
                    check_sent(peers.wrap(each, Heartbeat(), now))
            case "work":
                progress.merge_all([ProgressEntry(2, 72, number, number)], now)
            case "news":
                membership.merge(Member(1, number, 70))
            case "urgent":
                peers.say_all_at_once()
                urgent = membership.version
            case "slept":
                peers.slept(now)
                awake, has_changed = now, True
        assert peers.has_changed == has_changed
        assert peers.silent == silent
        assert peers.live == links.keys() - silent
        for each in (1, 2, 9):
            assert (each in peers, peers.is_silent(each)) == (each in links, each in silent)
            assert peers.last_heard(each) == heard.get(each, -math.inf)
            assert peers.waits_since(each) == max(heard.get(each, -math.inf), awake)
        deadlines = [beat_at(each) for each in links]
        deadlines += [falls_at(each) for each in links.keys() - silent]
        deadlines += [until for until, _ in rests.values() if until > now]
        assert peers.quiet_until(now) == min(deadlines, default=math.inf)
        able = [each for each in (1, 2, 9) if each in links and each not in silent]
        rested = [each for each in able if rests.get(each, (now, 0.0))[0] <= now]
        others = rested or [each for each in able if each not in rests]
        assert peers.can_exchange((1, 2, 9), now) == others
    for each in links:  # then rests alone remain
        peers.drop(each)
    rests.pop(9 if 9 in links else 0, None)
    ends = [until for until, _ in rests.values() if until > now]
    assert peers.quiet_until(now) == min(ends, default=math.inf)
