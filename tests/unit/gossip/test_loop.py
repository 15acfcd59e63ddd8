"""The loop's part when something goes wrong, without a network."""

import gc
import itertools
import math
import sys
import weakref
from collections.abc import Collection

import pytest
import torch
from driven_worker import TIMEOUT_S, protocol_of
from links import MemoryLink, NoNetwork
from reference import MomentumState

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PeerLostError, RefusedError, SupersededError
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.loop import GossipLoop
from gossipdp.graph import build_graph
from gossipdp.graph.constants import Constants
from gossipdp.launcher import reports
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Refusal
from gossipdp.links.link import BETWEEN_LINKS_S
from gossipdp.protocol import messages as say
from gossipdp.protocol.actions import (
    Begin,
    LeftBehind,
    Notice,
    Reach,
    Rebuilt,
    Send,
    Unlink,
    Withdrawn,
)
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.members import Member, Status

X = torch.arange(8.0)


class FakeLink(MemoryLink):
    """A link on which all leaves at once, or when the test calls :meth:`drain`."""

    is_aging = False

    def __init__(self, peer: int, leaves_at_once: bool = True) -> None:
        super().__init__(peer)
        self.leaves_at_once = leaves_at_once
        self.chunks: list[memoryview] = []

    @property
    def said(self) -> list[object]:
        return [say.decode(data).message for data in self.controls]

    def send_chunk(self, frame_type, key, payload):
        super().send_chunk(frame_type, key, payload)
        self.chunks.append(payload)
        if self.leaves_at_once:
            self.drain()

    def drain(self):
        while self.queue:
            self.take()


class Worker:
    """Worker 0 of a ring of three, linked to 1 and 2, on a clock of the test's own."""

    def __init__(self, chunk_bytes: int = X.nbytes, x: torch.Tensor = X) -> None:
        self.now = 0.0
        self.segment = Segment(x.clone(), Role.TRAINED, chunk_bytes=chunk_bytes)
        state, self.phase = State([self.segment]), Phase(0.4, 1.0)
        constants = Constants.of(build_graph("ring", 3))
        num_chunks = len(self.segment.chunks)
        protocol = protocol_of(0, process_id=5, constants=constants, num_chunks=num_chunks)
        others = (Member(rank, 0, 7, Status.ALIVE, *self.address(rank)) for rank in (1, 2))
        protocol.membership.merge_all(others)
        self.loop = GossipLoop(
            protocol, state, self.phase, NoNetwork, lambda: self.now, wire_format="full"
        )
        self.links = {peer: FakeLink(peer) for peer in (1, 2)}
        for link in self.links.values():
            self.loop.link_up(link)
        self.is_held_at_first = say.Busy in self.answers_to_a_proposal(2)
        self.loop.release()

    @staticmethod
    def address(rank: int) -> tuple[str, int]:
        return "127.0.0.1", 1 + rank

    def beat(
        self, times: int, moving: Collection[FakeLink], kind: FrameType = FrameType.EXCHANGE_CHUNK
    ) -> None:
        """Pass tenths of a time-out: words on every link, chunk bytes on those ``moving``."""
        for _ in range(times):
            self.now += TIMEOUT_S / 10
            for link in self.links.values():
                link.bytes_received += 10_100 if link in moving else 100
                link.chunk_bytes_received[kind] += 10 * (link in moving)
                link.last_heard_s = self.now
            self.loop.turn(0.0)

    def answers_to_a_proposal(self, peer: int) -> list[type]:
        """Return the messages sent to ``peer`` at once when it asks for an exchange."""
        link = self.links[peer]
        link.controls.clear()
        proposal = say.Propose(say.ExchangeId(peer, 0, 99), 0.6)
        self.loop.control(link, say.encode(say.Envelope(proposal)))
        return [type(each) for each in link.said]


def test_nobody_exchanges_before_it_has_parameters():
    worker = Worker()
    assert worker.is_held_at_first
    assert say.Accept in worker.answers_to_a_proposal(2)
    assert worker.loop.transfers.has_state
    worker.loop.hold()  # while others are loaded, as right after the start
    assert not worker.loop.transfers.has_state
    assert worker.links[2].closed_for == "the parameters are being loaded"


def test_an_exchange_is_that_of_the_reference_with_the_gain_that_was_agreed_on(monkeypatch):
    """The phase stands still meanwhile. Moments travel as agreed, and processor time counts."""
    worker, taken = Worker(), list[tuple[float, float]]()
    agreed, carried = list[tuple[int, ...]](), State.carried
    monkeypatch.setattr(
        State, "carried", lambda state, periods: agreed.append(periods) or carried(state, periods)
    )
    seconds = itertools.count(100.0, 0.25)
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    worker.loop.protocol.exchange_rate = rate = ExchangeRate()
    rate.took_processor = lambda *spent: taken.append(spent)
    worker.loop.codec.busy_s = 7.0  # on earlier exchanges
    link, flowed_to, gain, peers = worker.links[1], 0.0, 0.55, X.flip(0).contiguous()
    assert gain != worker.loop.protocol.neighbourhood.place.alpha_tilde
    state = MomentumState(X.double(), torch.zeros(8).double())
    for number in (1, 2, 3):
        worker.now, initiator = float(number), number % 2
        worker.loop.perform([Begin(1, say.ExchangeId(initiator, 0, number), gain, (4, 8))])
        worker.loop._exchange.num_repeated = number
        theta = worker.phase.at(worker.now + 0.5)
        state, flowed_to = state.flow(1.0, theta - flowed_to), theta
        key = ChunkKey(initiator, 0, number, 0)
        room = worker.loop.chunk_buffer(link, FrameType.EXCHANGE_CHUNK, key, peers.nbytes)
        room[:] = memoryview(peers.numpy()).cast("B")
        delta = state.x - peers.double()
        worker.loop.chunk(link, FrameType.EXCHANGE_CHUNK, key, room)
        worker.now += 0.25
        worker.loop.writable(link)
        state = state.exchange(delta, gain)
        x = worker.segment.x + worker.segment.pending
        torch.testing.assert_close(x.double(), state.x, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(worker.segment.c.double(), state.c, rtol=0.0, atol=1e-5)
        worker.loop.turn(0.0)
        done = worker.loop.snapshot.recent_exchanges[-1]
        assert (done.peer, done.initiated) == (1, initiator == 0)
        assert (done.started_s, done.ended_s) == (number, number + 0.25)
        assert done.half_squared_distance == pytest.approx(0.5 * float(delta.square().sum()))
    assert (taken, agreed) == ([(0.25, 0.0)] * 3, [(4, 8)] * 3)
    counters = worker.loop.snapshot.counters
    assert (counters.chunks_exchanged, counters.chunks_repeated) == (3, 6)
    assert (counters.exchange_seconds, counters.exchanges_by_neighbour) == (0.75, {1: 3})
    assert worker.phase.at(worker.now + 1.0) > theta > 0.0


def test_a_worker_that_finds_poison_in_itself_exchanges_no_more():
    worker = Worker(x=torch.full((8,), math.nan))
    worker.loop.perform([Begin(1, say.ExchangeId(0, 0, 1), 0.6)])
    worker.loop.writable(worker.links[1])
    assert "worker 0 hold NaN" in str(worker.loop.poisoned)
    assert not worker.links[1].chunks
    assert say.Busy in worker.answers_to_a_proposal(2)


def test_what_went_over_a_link_counts_when_it_has_ended():
    worker = Worker()
    worker.links[1].bytes_sent, worker.links[1].shared_bytes_received = 10, 1000
    worker.links[2].bytes_sent = 100
    worker.loop.perform([Unlink(1, "silent")])
    assert [worker.links[peer].closed_for for peer in (1, 2)] == ["silent", None]
    worker.loop.link_down(worker.links[1], "silent")
    worker.loop.link_up(FakeLink(1))
    worker.loop.turn(0.0)
    counters = worker.loop.snapshot.counters
    assert (counters.bytes_sent, counters.shared_bytes_received) == (110, 1000)


def test_a_snapshot_is_made_at_most_every_50_ms_and_none_is_missed(monkeypatch):
    worker, waits = Worker(), []
    monkeypatch.setattr(worker.loop.transport, "poll", waits.append)
    worker.loop.turn()
    first, worker.links[1].bytes_sent = worker.loop.snapshot, 10
    worker.now += 0.01
    worker.loop.turn()
    assert worker.loop.snapshot is first
    worker.loop.turn()
    assert waits[-1] == pytest.approx(0.04)  # though nothing else is due so soon
    worker.now += 0.04
    worker.loop.turn()
    assert worker.loop.snapshot.counters.bytes_sent == 10
    worker.loop.turn()
    assert waits[-1] > 0.04


def test_no_link_that_has_ended_is_kept():
    worker, ended = Worker(), []
    for counter in range(5):
        link = FakeLink(1, leaves_at_once=False)
        worker.loop.link_up(link)
        worker.loop.control(link, say.encode(say.Envelope(say.RequestState(counter, 0, False))))
        worker.beat(1, moving=[link])
        worker.loop.link_down(link, "lost")
        ended.append(weakref.ref(link))
        del link
    worker.links[1] = FakeLink(1)
    worker.loop.turn(0.0)
    gc.collect()
    assert [link() for link in ended] == [None] * 5


def test_what_an_old_address_refuses_is_not_laid_to_the_new_one():
    """A dial was under way when the peer came back elsewhere, and was asked for there."""
    worker = Worker()
    worker.loop.link_down(worker.links[1], "lost")
    old, new = worker.address(1), ("127.0.0.1", 4001)
    worker.loop.perform([Reach(1, *old)])
    back = Member(1, 1, 8, Status.ALIVE, *new)
    worker.loop.protocol.membership.merge(back)
    worker.loop.perform([Reach(1, *new)])
    worker.loop.dial_failed(1, old, refused_connection=True)
    assert worker.loop.protocol.membership.get(1) == back
    worker.loop.turn(0.0)
    assert not [each for each in worker.links[2].said if isinstance(each, say.AskLife)]
    ends: list[Exception | None] = []
    worker.loop.transfers.fetch(1, None, ends.append, TIMEOUT_S)
    worker.loop.perform([Send(1, say.Envelope(say.AskLife(2, 1)))])
    assert worker.loop._outbox
    worker.loop.dial_failed(1, new, refused_connection=True)
    assert not worker.loop._outbox
    assert [type(each) for each in ends] == [PeerLostError]
    worker.loop.turn(0.0)
    (question,) = (each for each in worker.links[2].said if isinstance(each, say.AskLife))
    no = say.Envelope(say.TellLife(1, question.counter, is_heard=False))
    worker.loop.control(worker.links[2], say.encode(no))
    worker.loop.turn(0.0)
    assert worker.loop.protocol.membership.get(1).status is Status.DEAD


def test_the_launcher_hears_where_the_live_are_five_times_a_second_at_most():
    worker, reports = Worker(), list[object]()
    worker.loop.report = lambda report: reports.append(report.addresses)
    live = {0: ("10.0.0.1", 4000), 1: worker.address(1), 2: worker.address(2)}
    news = Member(1, 0, 7, Status.DEAD, *worker.address(1)), Member(2, 1, 8)  # one has no port
    for tenths, num_reports in ((0, 1), (1, 1), (2, 2), (5, 2)):
        worker.loop._report_addresses(tenths / 10)
        assert len(reports) == num_reports
        joiner = Member(3 + tenths, 0, 7, Status.JOINING, "10.0.0.1", 9)
        worker.loop.protocol.membership.merge_all([*news, joiner])
    assert reports == [live, {0: live[0]}]


def test_what_nobody_says_ends_its_link_and_is_logged_once(caplog):
    worker = Worker()
    too_small = say.encode(say.Envelope(say.Propose(say.ExchangeId(1, 0, 1), 0.49999999999999994)))
    for _ in range(3):
        link = FakeLink(1)
        worker.loop.link_up(link)
        worker.loop.control(link, too_small)
        assert "0.5" in link.closed_for
        worker.loop.link_down(link, link.closed_for)
    (warning,) = caplog.messages
    assert warning.startswith("worker 0 closes its link to worker 1")
    assert worker.loop._dialer.next_due_s({1: worker.address(1)}) == BETWEEN_LINKS_S, "it pauses"


@pytest.mark.parametrize("moves", ["nothing", "bytes of a chunk"])
def test_an_exchange_ends_with_its_link_where_its_peer_only_beats(moves):
    """It held both ends for ever, and then the end of the whole run."""
    worker = Worker()
    link = worker.links[1]
    worker.loop.control(link, say.encode(say.Envelope(say.Propose(say.ExchangeId(1, 0, 1), 0.6))))
    for _ in range(12):
        link.bytes_received += 10_000  # news of many workers, on every heartbeat
        worker.beat(1, moving=[] if moves == "nothing" else [link])
    assert (link.closed_for is not None) == (moves == "nothing")
    assert worker.loop.protocol.exchanges_failed == (moves == "nothing")
    assert worker.loop.protocol.peers.last_heard(2) > worker.now - TIMEOUT_S / 2


@pytest.mark.parametrize("moves", ["nothing", "bytes of a chunk"])
def test_who_is_done_and_only_beats_is_left_out_of_the_average(moves):
    """On a slow link bytes of a chunk count; words do not, nor does a chunk that stands still."""
    worker, ends = Worker(), []
    protocol = worker.loop.protocol
    others = (Member(rank, 0, 7, Status.DONE, *worker.address(rank)) for rank in (1, 2))
    protocol.membership.merge_all(others)
    worker.loop.sums.on_end = ends.append
    worker.loop.perform(protocol.done(worker.now))
    epoch = protocol.consolidation.highest
    key = ChunkKey(epoch.leader, epoch.process_tag, epoch.number, 0)
    for link in worker.links.values():
        assert worker.loop.chunk_buffer(link, FrameType.PARTIAL_CHUNK, key, X.nbytes) is not None
    moving = [] if moves == "nothing" else worker.links.values()
    worker.beat(100, moving, FrameType.PARTIAL_CHUNK)
    assert [set(end.without) for end in ends] == ([{1, 2}] if moves == "nothing" else [])


def test_for_a_peer_that_is_dialled_for_ever_the_last_messages_wait():
    """A firewall drops its packets, so that no dial is refused, and words are said again."""
    worker = Worker()
    worker.loop.perform(Send(7, say.Envelope(say.AskLife(2, n))) for n in range(100))
    worker.loop.dial_failed(7, worker.address(7), refused_connection=False)
    worker.loop.link_up(late := FakeLink(7))
    asked = [each.counter for each in late.said if isinstance(each, say.AskLife)]
    assert asked == list(range(84, 100))
    assert not worker.loop._outbox


def test_what_an_action_brings_about_comes_after_it_also_if_another_has_failed(monkeypatch):
    worker, dialled = Worker(), []

    def dial(peer: int, host: str, port: int) -> None:
        worker.loop.perform([Reach(peer - 1, host, port)] if peer else [])
        dialled.append(peer)

    worker.loop.transport.dial = dial
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(PeerLostError, match="worker 0 stood still for 12 s, and no other worker"):
        worker.loop.perform([LeftBehind(12.0)])
    assert sys.excepthook is reports._say, "the launcher prints it"
    worker.loop.perform([Reach(2, "10.0.0.1", 4000)])
    assert dialled == [2, 1, 0]


def test_the_first_graph_of_a_worker_that_comes_back_is_dialled_at_once():
    """Others may be backing off from the address of its earlier life."""
    worker = Worker()
    dialer = worker.loop._dialer
    dialer.want([7], 0.0)
    for is_first in (True, False):
        assert dialer.due({7: worker.address(7)}, 0.0) == [7]
        dialer.failed(7, 0.0)
        worker.loop.perform([Rebuilt(1.0, 1.0, frozenset({7}), frozenset())])
        assert dialer.due({7: worker.address(7)}, 0.0) == [7] * is_first
        dialer.unlinked(7, 0.0)


def test_a_worker_whose_successor_is_linked_everywhere_is_told_so_by_refusals():
    """It slept while it was replaced: no news reaches it, since no worker lets it in."""
    worker, dialled = Worker(), []
    worker.loop.transport.dial = lambda *dial: dialled.append(dial)
    for link in worker.links.values():
        worker.loop.link_down(link, "closed by the peer")
    worker.now = BETWEEN_LINKS_S
    worker.loop.turn(0.0)
    assert sorted(dialled) == [(peer, *worker.address(peer)) for peer in (1, 2)]
    ends: list[Exception | None] = []
    for field, kind in (("model", RefusedError), ("own_rank", PeerLostError)):
        worker.loop.transfers.fetch(1, None, ends.append, TIMEOUT_S)
        worker.loop.refused(1, Refusal(field))
        assert type(ends[-1]) is kind
        is_alive = worker.loop.protocol.peers.last_heard(1) == worker.now
        assert is_alive == (field == "own_rank")
    refusal = Refusal("incarnation", "1", "0")
    worker.loop.refused(1, refusal)
    worker.loop.refused(2, refusal)
    worker.now += TIMEOUT_S
    with pytest.raises(SupersededError):
        worker.loop.refused(1, refusal)


def test_nothing_is_written_where_a_lost_peer_may_still_read():
    """The link ends in mid-turn: nothing is queued any more, and link_down is yet to come."""
    worker = Worker(chunk_bytes=4)
    link = worker.links[1]
    link.leaves_at_once = False
    worker.loop.perform([Begin(1, say.ExchangeId(0, 0, 1), 0.5)])
    worker.loop.writable(link)
    slots = link.chunks[:]
    assert len(slots) == 4
    for index in range(2):
        # The peer's chunks come while ours stay unread.
        key = ChunkKey(0, 0, 1, index)
        room = worker.loop.chunk_buffer(link, FrameType.EXCHANGE_CHUNK, key, 4)
        worker.loop.chunk(link, FrameType.EXCHANGE_CHUNK, key, room)
    unread = [bytes(slot) for slot in slots]
    link.close("lost")
    worker.loop.writable(worker.links[2])
    assert [bytes(slot) for slot in slots] == unread


def test_the_end_that_was_asked_sends_nothing_before_the_initiator_s_first_byte():
    """Else a proposal that was withdrawn would cost the link, with half a chunk on it."""
    worker = Worker()
    link, id = worker.links[1], say.ExchangeId(1, 0, 1)
    for worker.now in (0.0, 10.0):
        worker.phase.start_exchange(worker.now)
        worker.phase.end_exchange(worker.now)
    worker.now = 11.0
    worker.loop.perform([Begin(1, id, 0.5)])
    worker.loop.writable(link)
    assert not link.chunks
    worker.loop.perform([Withdrawn(1, id)])
    assert not link.closed
    assert worker.phase.at(20.0) == pytest.approx(0.4), "the clock of the phase has counted it"
    worker.loop.perform([Begin(1, id, 0.5)])
    worker.loop.chunk_buffer(link, FrameType.EXCHANGE_CHUNK, ChunkKey(1, 0, 1, 0), X.nbytes)
    worker.loop.writable(link)
    assert link.chunks


def test_a_link_whose_key_is_old_ends_when_its_peer_asks_and_nothing_is_under_way():
    """Closed in the middle, it has brought one end chunks that the other never gets."""
    worker = Worker()
    link, key = worker.links[1], ChunkKey(1, 0, 99, 0)
    assert say.Accept in worker.answers_to_a_proposal(1)
    worker.loop.protocol.hold(worker.now)
    worker.loop.writable(link)
    link.is_aging = True
    assert worker.answers_to_a_proposal(1) == [say.Busy], "the peer's chunk is yet to come"
    room = worker.loop.chunk_buffer(link, FrameType.EXCHANGE_CHUNK, key, X.nbytes)
    worker.loop.chunk(link, FrameType.EXCHANGE_CHUNK, key, room)
    worker.loop.writable(link)
    link.leaves_at_once = False
    link.send_chunk(FrameType.STATE_CHUNK, key, memoryview(b"state"))
    assert worker.answers_to_a_proposal(1) == [say.Busy], "the peer has yet to read it"
    link.drain()
    worker.answers_to_a_proposal(1)
    assert link.closed_for.startswith("its TLS key has protected half of what one may")


def test_a_turn_waits_no_longer_than_what_it_flushed_allows():
    worker, waits = Worker(), []
    worker.loop.transport.poll = waits.append
    worker.loop.perform(worker.loop.protocol.poll(worker.now))  # what is due at once
    worker.loop.turn(100.0)
    worker.loop.transport.flush = lambda: worker.loop.link_down(worker.links[1], "lost")
    worker.loop.turn(100.0)
    assert waits[1] < waits[0]


def test_a_loss_is_not_forgotten_whatever_happens_to_others():
    publisher = Worker().loop._publisher
    publisher.noticed(Notice(0, "lost", 1.0, 1))
    for number in range(2000):
        publisher.noticed(Notice(1, ("lost", "answered")[number % 2], 2.0, 2 + number))
    notices = publisher.snapshot(3.0).counters.noticed
    assert (notices[0].rank, notices[0].kind) == (0, "lost")
    assert [notice.number for notice in notices[1:]] == list(range(1003, 2002))


def test_the_distance_that_is_shown_is_that_of_the_last_sixteen_exchanges():
    publisher = Worker().loop._publisher
    for number in range(20):
        done = CompletedExchange(1, True, number, number + 0.5, half_squared_distance=number)
        publisher.exchanged(done, 1, 0)
    shown = publisher.snapshot(20.0)
    assert [each.started_s for each in shown.recent_exchanges] == list(range(4, 20))
    assert (shown.counters.edge_distance, shown.counters.exchange_seconds) == (11.5, 10.0)


@pytest.mark.parametrize(
    ("is_finished", "leaves_after", "num_polls"), [(False, 3, 0), (True, 3, 3), (True, 100, 8)]
)
def test_only_at_the_end_of_a_run_closing_waits_for_the_last_words(
    monkeypatch, is_finished, leaves_after, num_polls
):
    """And at most a second; after an error nothing more is done with links. All else ends."""
    worker, polls, ended = Worker(), [], []
    worker.loop.transfers.fetch(1, None, ended.append, TIMEOUT_S)
    asked, before = worker.loop.sums.ask(), worker.loop.snapshot
    worker.loop.perform([Begin(1, say.ExchangeId(1, 0, 1), 0.5)])

    def poll(longest_s: float) -> None:
        worker.now += 0.125
        polls.append(longest_s)
        if len(polls) == leaves_after:
            for link in worker.links.values():
                link.controls.clear()

    monkeypatch.setattr(worker.loop.transport, "poll", poll)
    monkeypatch.setattr(worker.loop.transport, "close", lambda: polls.append("closed"))
    monkeypatch.setattr(worker.loop.protocol.consolidation, "is_finished", is_finished)
    assert any(link.has_unsent for link in worker.links.values())
    worker.loop.close()
    assert polls == [*[0.1] * num_polls, "closed"]
    errors = [str(each) for each in (*ended, asked.exception(timeout=0))]
    assert errors == ["this worker is closing"] * 2
    assert worker.loop._exchange is None
    assert worker.loop.snapshot is not before
