"""WorkerProtocol beyond its parts: links, silence, news, the end of training."""

import pytest
from driven_worker import ask, make_worker, member, of_type, run, said, tell
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import build_graph
from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import Send, Stop, Unlink
from gossipdp.protocol.members import Status
from gossipdp.protocol.pairing import Idle, Proposing
from gossipdp.protocol.peers import FIRST_WAIT_S
from gossipdp.protocol.worker import MOST_OWED, Action, WorkerProtocol


def ask_others(worker: WorkerProtocol, now: float) -> Proposing:
    """Give the worker a demand, and return the proposal that it makes."""
    worker._settle(worker.pairing.tick(), now)
    state = worker.pairing.state
    assert isinstance(state, Proposing)
    return state


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_timeouts_are_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        make_worker(timeout_s=timeout_s)


def test_gain_follows_the_method():
    constants = Constants.of(build_graph("ring", 6))
    gains = {"a2cid2": (constants.eta, constants.alpha_tilde), "gossip": (0.0, 0.5)}
    for method, (eta, alpha_tilde) in gains.items():
        worker = make_worker(method=method)
        assert worker.neighbourhood.place[2:] == (eta, alpha_tilde)
        assert worker.pairing.alpha_tilde == alpha_tilde


def test_only_linked_neighbours_are_available_and_others_are_answered_too():
    worker = make_worker()
    worker.link_up(0, 0.0)
    worker.link_up(3, 0.0)  # a link, but no neighbour
    assert worker.pairing.available.keys() == {0}
    assert worker.peers.live == {0, 3}
    worker.link_down(0, 1.0)
    assert worker.pairing.available == {}
    actions = worker.receive(3, ask(3), 1.0)
    assert isinstance(said(actions, 3)[0], say.Accept)


def test_exchanges_are_counted_and_a_failed_link_is_not_chosen_until_it_is_made_anew():
    worker = make_worker(0, 2)
    worker.receive(0, ask(0), 0.1)
    worker.finished(say.ExchangeId(0, 0, 1), 0.2)
    worker.receive(2, ask(2), 0.3)
    worker.abort("it broke", 0.4)
    worker.abort("it broke", 0.4)
    assert worker.exchanges_failed == 1
    assert worker.pairing.available.keys() == {0}
    actions = worker.receive(2, ask(2, 2), 0.5)
    assert 2 not in [action.peer for action in of_type(actions, Send)]
    assert worker.pairing.state == Idle(), "nothing from an old link is acted on"
    worker.link_down(2, 0.6)
    worker.link_up(2, 0.7)
    assert worker.pairing.available.keys() == {0, 2}
    worker.receive(0, ask(0, 2), 0.8)
    assert isinstance(worker.link_up(0, 0.9)[0], Stop), "the exchange of the old one ends"
    assert worker.pairing.state == Idle()


def test_who_does_not_answer_is_left_out_until_it_does_and_keeps_its_link():
    worker = make_worker(0, 2, timeout_s=10.0)  # no heartbeat is due within the wait
    first = ask_others(worker, 0.1)
    other = 2 - first.peer
    assert said(run(worker, 0.1, 0.1 + 0.99 * FIRST_WAIT_S, {other})) == []
    assert isinstance(said(run(worker, 0.1, 0.11 + FIRST_WAIT_S, {other}), other)[0], say.Propose)
    assert worker.proposals_unanswered == 1
    assert worker.pairing.available.keys() == {other}
    worker.receive(other, say.Envelope(say.Busy(worker.pairing.state.id)), 0.15 + FIRST_WAIT_S)
    late = worker.receive(first.peer, say.Envelope(say.Accept(first.id, 0.5)), 0.2 + FIRST_WAIT_S)
    cancel, again = said(late, first.peer)
    assert cancel == say.Cancel(first.id), "before it asks again"
    assert isinstance(again, say.Propose)
    assert [worker.peers.wait_s(each) for each in (other, first.peer)] == pytest.approx([0.2, 4.8])
    assert worker.pairing.available.keys() == {0, 2}


def test_a_proposal_waits_from_when_it_leaves_however_long_ago_its_step_ended():
    """Else a gossip thread that comes late withdraws it at once, and leaves out a healthy peer."""
    worker, now, actions = make_worker(0, 2), 0.0, list[Action]()
    while not any(isinstance(message, say.Propose) for message in said(actions)):
        now += 1.0
        for peer in (0, 2):
            worker.heard(peer, now)
        actions = worker.step(1, now, now - FIRST_WAIT_S)
    for waited, num_unanswered in ((0.0, 0), (0.99, 0), (1.01, 1)):
        worker.poll(now + waited * FIRST_WAIT_S)
        assert worker.proposals_unanswered == num_unanswered


def test_a_free_that_is_not_answered_keeps_nobody_else_waiting():
    worker = make_worker(0, 2, timeout_s=10.0)  # no heartbeat is due within the wait
    for peer in (3, 5):
        worker.link_up(peer, 0.2)
    for peer in (0, 2, 5):
        worker.receive(peer, ask(peer), 0.29)
    assert said(worker.finished(ask(0).message.id, 0.3)) == [say.Free()]
    worker.receive(3, ask(3), 0.4)
    stops = of_type(run(worker, 0.4, 0.66, {0, 3, 5}), Stop)
    assert [stop.peer for stop in stops] == [3], "an exchange that stands still ends meanwhile"
    assert said(run(worker, 0.66, 0.29 + FIRST_WAIT_S, {0, 5}), 5) == []
    assert said(run(worker, 0.66, 0.31 + FIRST_WAIT_S, {0, 5}), 5) == [say.Free()]
    assert worker.pairing.available.keys() == {0}


def test_a_closed_worker_is_left_out_until_it_frees():
    """What it refuses is asked of another at once, also of one that the policy had left out."""
    worker = make_worker(0, 2)
    worker.receive(0, ask(0), 0.1)
    worker.finished(ask(0).message.id, 0.1)  # so that the policy leaves it out
    first = ask_others(worker, 0.1)
    assert first.peer == 2
    refusal = say.Envelope(say.Busy(first.id, is_closed=True))
    (again,) = said(worker.receive(2, refusal, 0.11), 0)
    assert isinstance(again, say.Propose)
    assert worker.pairing.available.keys() == {0}
    worker.heard(2, 1.0)
    assert worker.pairing.available.keys() == {0}
    worker.receive(2, say.Envelope(say.Free()), 1.1)
    assert worker.pairing.available.keys() == {0, 2}


def test_a_peer_that_breaks_the_rules_loses_its_link():
    worker = make_worker(0, 2)
    state = ask_others(worker, 0.1)
    accept = say.Accept(state.id, 2.0 * state.proposal.alpha_tilde)
    actions = worker.receive(state.peer, say.Envelope(accept), 0.2)
    (unlink,) = of_type(actions, Unlink)
    assert unlink.peer == state.peer
    assert "gain" in unlink.reason
    other = 2 - state.peer
    assert worker.pairing.available.keys() == {other}
    actions = worker.receive(other, say.Envelope(say.NewerEpoch(say.Epoch(2**40, 0, 7))), 0.3)
    assert [each.peer for each in of_type(actions, Unlink)] == [other], "out of all order"
    assert of_type(worker.poll(0.4), Unlink) == [], "it is judged once"


@given(st.lists(st.lists(st.floats(0.0, 0.5), max_size=4), min_size=1, max_size=4))
def test_each_exchange_is_measured_from_its_own_begin_and_by_its_own_gaps(exchanges):
    worker, now, measured = make_worker(0, 2), 10.0, []
    worker.clock.step_seconds = 0.25
    worker.peers.exchanged = lambda peer, now, **values: measured.append((peer, now, values))  # type: ignore[method-assign]
    for number, waits_s in enumerate(exchanges, start=1):
        (accept,) = said(worker.receive(0, ask(0, number), now), 0)
        assert isinstance(accept, say.Accept)
        began = now
        for wait_s in waits_s:
            now += wait_s
            worker.progressed(now)
        worker.finished(accept.id, now + 0.1)
        now += 0.1
        longest_s = max([*waits_s, 0.1])
        peer, at, values = measured[-1]
        assert (peer, at, len(measured)) == (0, now, number)
        assert values["gap_s"] == pytest.approx(longest_s)
        assert values["duration_s"] == pytest.approx(now - began - longest_s, abs=1e-9)
        assert values["demands_per_s"] == worker.neighbourhood.place.worker_rate / 0.25 > 0.0


def test_who_is_asked_less_than_its_half_asks_more():
    """Its neighbours asked before, and make no step now: they ask no more, and answer at once."""
    worker, counts = make_worker(0, 2), list[int]()
    for number in range(100):
        worker.receive(0, ask(0, number), 0.0)
        worker.finished(ask(0, number).message.id, 0.0)
    for step in range(1, 201):
        now = float(step)
        counts.append(0)
        actions = worker.step(1, now)
        while any(isinstance(message, say.Propose) for message in said(actions)):
            state = worker.pairing.state
            worker.receive(state.peer, say.Envelope(say.Accept(state.id, 0.5)), now)
            actions = worker.finished(state.id, now)
            counts[-1] += 1
    assert sum(counts[50:]) == pytest.approx(150, abs=8), "it begins with the most ahead"
    assert max(counts) == 2, "at a tick"
    assert (worker.exchanges_initiated, worker.exchanges_answered) == (sum(counts), 100)
    for step in range(201, 221):  # nobody answers
        worker.step(1, float(step))
    assert worker._owed == MOST_OWED


def test_method_none_answers_busy_and_never_asks():
    worker = make_worker(0, 2, method="none")
    for step in range(100):
        worker.step(1, step * 0.01)
    assert worker.pairing.backlog == 0
    assert isinstance(said(worker.receive(0, ask(0), 1.1))[0], say.Busy)
    worker.hold(1.2)
    worker.release(1.3)
    assert isinstance(said(worker.receive(0, ask(0, 2), 1.4))[0], say.Busy)


def test_hold_and_release():
    worker = make_worker(0, 2)
    ask_others(worker, 0.1)
    worker.hold(0.2)
    assert worker.pairing.state == Idle(), "its proposal is withdrawn"
    assert isinstance(said(worker.receive(0, ask(0), 0.4))[0], say.Busy)
    assert worker.clock.is_paused
    (propose,) = said(worker.release(0.5))
    assert isinstance(propose, say.Propose)
    assert not worker.clock.is_paused


def test_done_is_announced_once_its_own_proposal_is_settled_and_then_it_only_answers():
    worker = make_worker(0, 2)
    worker.receive(0, tell(member(0)), 0.1)  # who trains, and is waited for
    state = ask_others(worker, 0.1)
    worker.done(0.2)
    worker.receive(state.peer, say.Envelope(say.Accept(state.id, 0.5)), 0.3)
    assert worker.membership.own.status is Status.ALIVE
    worker.finished(state.id, 0.4)
    assert worker.membership.own.status is Status.DONE
    worker.hold(0.4)
    worker.release(0.4)
    assert worker.clock.is_paused
    assert isinstance(said(worker.receive(0, ask(0), 0.5))[0], say.Accept)
