"""Whole states and optimizers' states between two workers, in one thread and on a fake clock."""

from collections import deque

import pytest
import torch

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import Role, Segment, State
from gossipdp.errors import PeerLostError
from gossipdp.protocol.messages import OfferTraining, RequestTraining, StateRefused
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.training_transfer import CHUNK_BYTES
from gossipdp.runtime.transfers import StateRefusedError, Transfers

TIMEOUT_S = 5.0


class QueueLink(Link):
    """What one end says to the other, in order, until the test delivers it."""

    def __init__(self, peer: int) -> None:
        self.peer_identity = Identity(peer, 0, 1, "run", "", "", "", "", "")
        self.queue: deque[tuple] = deque()

    def send_chunk(self, frame_type, key, payload):
        if not self.closed:
            self.queue.append((frame_type, key, payload))

    @property
    def queued_chunks(self):
        return sum(len(item) == 3 for item in self.queue)

    def send_control(self, data): ...
    def close(self, reason): ...

    queued_bytes = bytes_sent = bytes_received = 0
    last_heard_s = 0.0
    closed = False


class End:
    """One worker."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        segments = [
            Segment(torch.randn(1000, generator=generator), Role.TRAINED, chunk_bytes=1024),
            Segment(torch.full((7,), float(rank)), Role.BUFFER),
            Segment(torch.arange(5) + rank, Role.COPIED),
        ]
        self.shared = SharedState(State(segments), Phase(0.4, 1.0), lambda: 0.0)
        self.rank = rank
        self.links: dict[int, Link] = {}
        self.now = 0.0
        self.refusal: str | None = None
        self.unsent: list[tuple[int, object]] = []
        self.transfers = Transfers(
            self.shared, self.links, self.send, lambda: self.refusal, lambda: self.now
        )
        self.ended: list[object] = []

    def send(self, peer, message):
        if peer in self.links:
            self.links[peer].queue.append((message,))
        else:  # to be dialled for
            self.unsent.append((peer, message))

    def fetch(self, peer):
        self.transfers.fetch(peer, self.shared.replace, self.ended.append, TIMEOUT_S)

    def fetch_training(self, peer, max_bytes=1 << 30):
        self.transfers.fetch_training(peer, max_bytes, self.ended.append, TIMEOUT_S)

    @property
    def values(self):
        return [segment.x for segment in self.shared.state.segments]


def linked(a: End, b: End) -> None:
    for one, other in ((a, b), (b, a)):
        one.links[other.rank] = QueueLink(other.rank)
        for item in [item for item in one.unsent if item[0] == other.rank]:
            one.unsent.remove(item)
            one.links[other.rank].queue.append((item[1],))


def unlink(a: End, b: End) -> None:
    for one, other in ((a, b), (b, a)):
        link = one.links.pop(other.rank)
        one.transfers.link_down(link)


def deliver(a: End, b: End, at_most: int = 10_000) -> int:
    """Deliver what is queued between the two, and pump, until nothing happens; how many items."""
    num_delivered = 0
    while True:
        for end in (a, b):
            end.transfers.pump()
        queues = [(a, b), (b, a)]
        found = next(((s, r) for s, r in queues if s.links[r.rank].queue), None)
        if found is None or num_delivered == at_most:
            return num_delivered
        sender, receiver = found
        item = sender.links[receiver.rank].queue.popleft()
        num_delivered += 1
        link = receiver.links[sender.rank]
        if len(item) == 1:
            receiver.transfers.receive(link, item[0])
            continue
        frame_type, key, payload = item
        room = receiver.transfers.landing(link, frame_type, key, payload.nbytes)
        if room is not None:
            room[:] = payload.cast("B")
            receiver.transfers.landed(link, key)


@pytest.fixture
def ends() -> tuple[End, End]:
    giver, taker = End(0), End(1)
    linked(giver, taker)
    return giver, taker


def test_a_state_is_taken_over_and_a_request_may_come_before_there_is_one(ends):
    giver, taker = ends
    taker.fetch(0)
    deliver(giver, taker)
    assert taker.ended == []
    served = []
    giver.transfers.serve([1], lambda: served.append(True))
    deliver(giver, taker)
    assert taker.ended == [None]
    assert served == [True]
    assert all(torch.equal(x, y) for x, y in zip(giver.values, taker.values, strict=True))


def test_what_a_closed_link_swallows_does_not_count_as_served(ends):
    giver, taker = ends
    served = []
    giver.transfers.serve([1], lambda: served.append(True))
    taker.fetch(0)
    deliver(giver, taker, at_most=1)
    giver.links[1].closed = True
    giver.links[1].queue.clear()
    giver.transfers.pump()
    assert served == []
    unlink(giver, taker)
    linked(giver, taker)
    deliver(giver, taker)
    assert served == [True]
    assert taker.ended == [None]


@pytest.mark.parametrize("at", range(1, 6))
def test_a_lost_link_costs_nothing_but_time(ends, at):
    giver, taker = ends
    giver.transfers.serve([], lambda: None)
    taker.fetch(0)
    deliver(giver, taker, at_most=at)
    unlink(giver, taker)
    linked(giver, taker)
    deliver(giver, taker)
    assert taker.ended == [None]
    assert all(torch.equal(x, y) for x, y in zip(giver.values, taker.values, strict=True))


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("at", [None, 2, 3, 4])
def test_the_optimizers_state_comes_whole_whatever_its_size_and_its_links(ends, num_bytes, at):
    giver, taker = ends
    taker.fetch_training(0)
    assert not giver.transfers.training_wanted
    deliver(giver, taker)
    assert giver.transfers.training_wanted
    assert taker.ended == []
    giver.transfers.give_training(b"a" * num_bytes)
    assert not giver.transfers.training_wanted
    data = b"a" * num_bytes
    if at is not None:
        deliver(giver, taker, at_most=at)
        if not taker.ended:
            unlink(giver, taker)
            linked(giver, taker)
            deliver(giver, taker)
            assert giver.transfers.training_wanted, "of another moment, so asked for anew"
            data = b"b" * num_bytes
            giver.transfers.give_training(data)
    deliver(giver, taker)
    assert taker.ended == [data]


def test_more_than_the_own_model_could_need_is_not_made_room_for(ends):
    giver, taker = ends
    taker.fetch_training(0, max_bytes=99)
    deliver(giver, taker)
    giver.transfers.give_training(bytes(100))
    deliver(giver, taker)
    (error,) = taker.ended
    assert isinstance(error, PeerLostError)
    assert "100 bytes" in str(error)
    # Unasked for.
    taker.transfers.receive(taker.links[0], OfferTraining(1, 50))
    assert len(taker.ended) == 1


def test_who_has_nothing_to_give_says_so(ends):
    giver, taker = ends
    giver.transfers.serve([], lambda: None)
    giver.refusal = "it is poisoned"
    taker.fetch(0)
    taker.fetch_training(0)
    deliver(giver, taker)
    assert ["it is poisoned" in str(error) for error in taker.ended] == [True, True]
    giver.refusal = None
    taker.fetch_training(0)
    deliver(giver, taker)
    giver.transfers.refuse_training("its state cannot be encoded")
    deliver(giver, taker)
    assert "encoded" in str(taker.ended[-1])


def consolidates(end: End) -> None:
    """Pending lends its memory to the sums."""
    end.transfers.refuse_parameters("it consolidates")
    end.refusal = "it consolidates"
    end.shared.flow_to_the_end()
    end.shared.start_sums()


@pytest.mark.parametrize("overtakes", [False, True])
def test_no_chunk_is_read_once_consolidation_has_begun(ends, overtakes):
    giver, taker = ends
    given = giver.values[0].clone()
    before = taker.values[0].clone()
    giver.transfers.serve([], lambda: None)
    taker.fetch(0)
    deliver(giver, taker, at_most=2)
    consolidates(giver)
    if overtakes:  # as control frames do
        giver.links[1].queue.rotate(1)
    taker.fetch(0)
    deliver(giver, taker)
    assert [type(error) for error in taker.ended] == [StateRefusedError, StateRefusedError]
    assert all("it consolidates" in str(error) for error in taker.ended)
    # One chunk of 256 was there, and two more were on their way.
    num_taken = 256 if overtakes else 3 * 256
    assert torch.equal(taker.values[0][:num_taken], given[:num_taken])
    assert torch.equal(taker.values[0][num_taken:], before[num_taken:])


def test_what_was_read_whole_before_consolidation_is_taken(ends):
    giver, taker = ends
    given = [values.clone() for values in giver.values]
    giver.transfers.serve([], lambda: None)
    taker.fetch(0)
    deliver(giver, taker, at_most=5)
    assert giver.links[1].queued_chunks == 2
    consolidates(giver)
    deliver(giver, taker)
    assert taker.ended == [None]
    assert all(torch.equal(x, y) for x, y in zip(given, taker.values, strict=True))


def test_the_optimizers_state_goes_on_while_consolidation_begins(ends):
    giver, taker = ends
    taker.fetch_training(0)
    deliver(giver, taker)
    data = b"a" * (3 * CHUNK_BYTES)
    giver.transfers.give_training(data)
    deliver(giver, taker, at_most=2)
    consolidates(giver)
    deliver(giver, taker)
    assert taker.ended == [data]


@pytest.mark.parametrize("segment", [0, 1])
def test_poisoned_parameters_and_buffers_are_not_taken(ends, segment):
    giver, taker = ends
    giver.transfers.serve([], lambda: None)
    giver.values[segment][-1] = torch.inf
    before = taker.values[segment][-5:].clone()
    taker.fetch(0)
    deliver(giver, taker)
    (error,) = taker.ended
    assert "NaN or infinity" in str(error)
    assert torch.equal(taker.values[segment][-5:], before)


def test_one_after_the_other(ends):
    giver, taker = ends
    giver.transfers.serve([], lambda: None)
    taker.fetch(0)
    taker.fetch(7)
    taker.fetch(0)
    assert taker.unsent == []
    deliver(giver, taker)
    assert taker.ended == [None]
    assert [peer for peer, _ in taker.unsent] == [7]
    taker.transfers.dead(7)
    deliver(giver, taker)
    assert [type(each) for each in taker.ended] == [type(None), PeerLostError, type(None)]


def test_silence_ends_a_fetch_and_each_chunk_defers_that(ends):
    giver, taker = ends
    taker.fetch(0)
    taker.now = 0.9 * TIMEOUT_S
    deliver(giver, taker)
    giver.transfers.serve([], lambda: None)
    deliver(giver, taker, at_most=1)
    assert taker.transfers.num_chunks_received == 1
    taker.now = 1.8 * TIMEOUT_S
    taker.transfers.pump()
    assert taker.ended == []
    taker.now = 2 * TIMEOUT_S
    taker.transfers.pump()
    assert "sent nothing" in str(taker.ended[0])


def test_a_cancelled_fetch_is_forgotten_and_the_next_goes_on(ends):
    giver, taker = ends
    giver.transfers.serve([], lambda: None)
    cancelled: list[object] = []
    on_end = cancelled.append
    taker.transfers.fetch(0, lambda chunk, values: None, on_end, TIMEOUT_S)
    taker.fetch(0)
    deliver(giver, taker, at_most=2)
    assert taker.transfers.cancel(on_end)
    assert not taker.transfers.cancel(on_end)
    deliver(giver, taker)
    assert cancelled == []
    assert taker.ended == [None]


def test_what_answers_an_older_request_is_dropped(ends):
    giver, taker = ends
    taker.fetch(0)
    taker.transfers.receive(taker.links[0], StateRefused(99, "of another request"))
    assert taker.ended == []
    giver.transfers.receive(giver.links[1], RequestTraining(1))
    unlink(giver, taker)
    linked(giver, taker)
    giver.transfers.give_training(b"x")  # the one who asked is gone
    giver.transfers.serve([], lambda: None)
    deliver(giver, taker)
    assert taker.ended == [None]
