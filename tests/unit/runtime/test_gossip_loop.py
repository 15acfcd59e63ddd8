"""How the loop performs what the protocol asks when something goes wrong, without a network."""

from random import Random

import pytest
import torch

from gossipdp.dynamics.phase import MAX_PERIODS, Phase
from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.errors import PeerLostError, SupersededError
from gossipdp.graph import build_graph
from gossipdp.graph.constants import Constants
from gossipdp.protocol.actions import Begin, Reach, Refresh, Superseded
from gossipdp.protocol.membership import Member, Status
from gossipdp.protocol.messages import (
    Envelope,
    ExchangeId,
    Heartbeat,
    RequestState,
    StateRefused,
    decode,
    encode,
)
from gossipdp.protocol.worker import WorkerProtocol
from gossipdp.runtime import plain_exchange
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.gossip_loop import GossipLoop
from gossipdp.runtime.identity import Identity, Refusal
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.transfer import SLOTS
from gossipdp.runtime.transport import Transport

TIMEOUT_S = 5.0
X = torch.arange(8.0)


class NoTransport(Transport):
    def __init__(self, handler) -> None: ...
    def allocate(self, num_bytes):
        return memoryview(bytearray(num_bytes))

    def dial(self, peer, host, port): ...
    def poll(self, timeout_s): ...
    def wake(self): ...
    def close(self): ...


class FakeLink(Link):
    def __init__(self, peer: int) -> None:
        self.peer_identity = Identity(peer, 0, 1, "run", "", "", "", "", "")
        self.said: list[object] = []
        self.closed_for: str | None = None
        self.chunks: list[memoryview] = []

    def send_control(self, data):
        self.said.append(decode(data).message)

    def send_chunk(self, frame_type, key, payload):
        self.chunks.append(payload)

    def close(self, reason):
        self.closed_for = reason

    queued_chunks = queued_bytes = bytes_sent = bytes_received = 0
    last_heard_s = 0.0
    closed = False


class NarrowLink(FakeLink):
    """Chunks stay queued until the test says how many have left."""

    num_left = 0

    @property
    def queued_chunks(self):
        return len(self.chunks) - self.num_left


class Worker:
    """Worker 0 of a ring of three, linked to 1 and 2, on a clock of the test's own."""

    def __init__(self, chunk_bytes: int = X.nbytes) -> None:
        self.now = 0.0
        self.segment = Segment(X.clone(), Role.TRAINED, chunk_bytes=chunk_bytes)
        shared = SharedState(State([self.segment]), Phase(0.4, 1.0), lambda: self.now)
        protocol = WorkerProtocol(
            rank=0,
            incarnation=0,
            process_id=5,
            host="127.0.0.1",
            port=1,
            constants=Constants.of(build_graph("ring", 3)),
            method="a2cid2",
            policy_name="fresh",
            timeout_s=TIMEOUT_S,
            random=Random(0),
            num_chunks=len(self.segment.chunks),
        )
        protocol.membership.merge_all(
            Member(rank, 0, 7, Status.ALIVE, *self.address(rank)) for rank in (1, 2)
        )
        self.loop = GossipLoop(protocol, shared, NoTransport, lambda: self.now)
        self.links = {peer: FakeLink(peer) for peer in (1, 2)}
        for link in self.links.values():
            self.loop.link_up(link)
        self.loop.release()

    @staticmethod
    def address(rank: int) -> tuple[str, int]:
        return "127.0.0.1", 1 + rank

    def stall(self) -> FakeLink:
        """Stand still for longer than the time-out; whom the loop asks for parameters."""
        self.now += TIMEOUT_S + 1
        self.loop.turn(0.0)
        asked = [link for link in self.links.values() if self.request(link)]
        assert len(asked) == 1
        return asked[0]

    def request(self, link: FakeLink) -> RequestState | None:
        return next((each for each in link.said if isinstance(each, RequestState)), None)

    def give(self, link: FakeLink, values: torch.Tensor) -> None:
        request = self.request(link)
        assert request is not None
        key = ChunkKey(0, 0, request.counter, 0)
        room = self.loop.chunk_buffer(link, FrameType.STATE_CHUNK, key, values.nbytes)
        if room is not None:
            room[:] = memoryview(values.numpy()).cast("B")
        self.loop.chunk(link, FrameType.STATE_CHUNK, key, room)

    @property
    def parameters(self) -> torch.Tensor:
        return self.segment.x + self.segment.pending


def test_a_refresh_leaves_x_to_the_main_thread_and_ends_the_momentum():
    worker = Worker()
    worker.segment.c.fill_(3.0)
    link = worker.stall()
    assert not worker.loop.pause(), "no checkpoint of half a refresh"
    # The main thread is in the middle of a step meanwhile.
    worker.segment.x[:4] += 0.5
    worker.give(link, 10 * X)
    worker.segment.x[4:] += 0.5
    assert worker.loop.pause()
    assert [notice.kind for notice in worker.loop.noticed.notices] == ["refreshed"]
    # What the step had done before is lost, as all that this worker did; the rest is kept.
    assert torch.equal(worker.parameters[:4], 10 * X[:4])
    assert torch.equal(worker.parameters[4:], 10 * X[4:] + 0.5)
    assert not worker.segment.c.any()
    assert not worker.loop.protocol.refresher.is_needed


def test_one_that_gives_nothing_is_followed_by_another():
    worker = Worker()
    first = worker.stall()
    (other,) = set(worker.links.values()) - {first}
    worker.loop.link_down(first, "lost")
    worker.loop.dial_failed(first.peer, worker.address(first.peer), refused_connection=True)
    worker.loop.turn(0.0)
    worker.give(other, 2 * X)
    assert torch.equal(worker.parameters, 2 * X)


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
    worker.loop.dial_failed(1, new, refused_connection=True)
    assert worker.loop.protocol.membership.get(1).status is Status.DEAD


def test_parameters_that_are_loaded_meanwhile_stay():
    worker = Worker()
    link = worker.stall()
    worker.loop.hold()
    worker.segment.x.copy_(-X)
    worker.give(link, 10 * X)
    worker.loop.release()
    assert torch.equal(worker.parameters, -X)
    assert not worker.loop.protocol.refresher.is_needed, "what was loaded will do"
    assert worker.loop.protocol.can_donate


def test_what_is_loaded_while_nobody_gives_a_refresh_stays_too():
    worker = Worker()
    asked = worker.stall()
    (other,) = set(worker.links.values()) - {asked}
    for link in (asked, other):
        worker.loop.transfers.gone(link.peer, PeerLostError("gone"))
    assert worker.loop.protocol.refresher.is_needed
    worker.loop.hold()
    worker.segment.x.copy_(-X)
    # A link comes up while the main thread loads: somebody to ask.
    worker.loop.protocol.membership.merge(Member(3, 0, 7, Status.ALIVE, "127.0.0.1", 4))
    worker.loop.link_up(newcomer := FakeLink(3))
    worker.loop.turn(0.0)
    assert worker.request(newcomer) is None
    worker.loop.release()
    worker.loop.turn(0.0)
    assert worker.request(newcomer) is None
    assert torch.equal(worker.parameters, -X)
    assert worker.loop.protocol.can_donate


def test_a_poisoned_x_is_written_over_for_nothing_can_be_added_to_it():
    worker = Worker()
    worker.segment.x[3] = torch.nan
    worker.loop.poison(RuntimeError("NaN"))
    worker.loop.refresh()
    (link,) = (link for link in worker.links.values() if worker.request(link))
    worker.give(link, 10 * X)
    assert torch.equal(worker.segment.x, 10 * X)
    assert worker.loop.poisoned is None
    assert worker.loop.protocol.can_donate


def test_a_state_under_way_is_refused_where_consolidation_begins():
    """From then on pending holds sums, and x + pending is nobody's parameters."""
    worker = Worker(chunk_bytes=4)
    worker.loop.serve_state((), lambda: None)
    worker.loop.link_up(joiner := NarrowLink(3))
    worker.loop.control(joiner, encode(Envelope(RequestState(7, 0))))
    worker.loop.writable(joiner)
    assert len(joiner.chunks) == SLOTS
    worker.loop.consolidate(lambda outcome: None)
    done = tuple(Member(rank, 0, 7, Status.DONE, *worker.address(rank)) for rank in (1, 2))
    worker.loop.control(worker.links[1], encode(Envelope(Heartbeat(), done)))
    assert worker.loop.averaging.has_begun
    joiner.num_left = SLOTS
    worker.loop.writable(joiner)
    assert len(joiner.chunks) == SLOTS
    refusals = [each for each in joiner.said if isinstance(each, StateRefused)]
    assert [refusal.counter for refusal in refusals] == [7]


def test_a_superseded_worker_ends_with_one_error():
    worker = Worker()
    with pytest.raises(SupersededError, match="rank 0"):
        worker.loop.perform([Superseded()])


def test_a_refresh_waits_for_a_transfer_that_is_under_way():
    worker = Worker()
    ended: list[object] = []
    worker.loop.fetch_state(1, lambda chunk, values: None, ended.append, TIMEOUT_S)
    worker.loop.perform([Refresh(2)])
    assert worker.request(worker.links[2]) is None
    worker.give(worker.links[1], X)
    assert ended == [None]
    assert worker.request(worker.links[2]) is not None


def test_a_night_in_suspend_moves_the_phase_by_few_periods():
    worker = Worker()
    shared = worker.loop._shared
    for _ in range(20):
        worker.now += 1.0
        shared.start_exchange()
        shared.end_exchange()
    before = shared.start_exchange()
    shared.end_exchange()
    worker.now += 8 * 3600.0
    # eta 0.4, one mean gap a period
    assert before < shared.start_exchange() <= before + 0.4 * MAX_PERIODS + 1e-9


def test_a_worker_whose_successor_is_linked_everywhere_is_told_so_by_refusals():
    """It slept while it was replaced: no news reaches it, since nobody lets it in."""
    worker = Worker()
    for link in worker.links.values():
        worker.loop.link_down(link, "closed by the peer")
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
    worker.loop.perform([Begin(1, ExchangeId(1, 0, 1), 0.5, False)])
    worker.loop.writable(link)
    slots = link.chunks[:]
    assert len(slots) == plain_exchange.WINDOW
    link.queued_chunks = len(slots)
    for index in range(2):
        # The peer's chunks come while ours stay unread.
        key = ChunkKey(1, 0, 1, index)
        room = worker.loop.chunk_buffer(link, FrameType.EXCHANGE_CHUNK, key, 4)
        worker.loop.chunk(link, FrameType.EXCHANGE_CHUNK, key, room)
    unread = [bytes(slot) for slot in slots]
    link.closed, link.queued_chunks = True, 0
    worker.loop.writable(worker.links[2])
    assert [bytes(slot) for slot in slots] == unread


def test_the_answer_to_a_proposal_leaves_before_snapshots_are_taken():
    """They take longer than the answer: the peer would wait for what it has no need of yet."""
    worker = Worker()
    worker.loop.perform([Begin(1, ExchangeId(1, 0, 1), 0.5, False)])
    assert not worker.links[1].chunks
    worker.loop.writable(worker.links[1])
    assert worker.links[1].chunks
