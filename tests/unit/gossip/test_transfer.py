"""Whole states and optimizers' states between two workers, in one thread and on a fake clock."""

from dataclasses import replace

import pytest
import torch
from links import MemoryLink

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.errors import PeerLostError
from gossipdp.gossip import transfer
from gossipdp.links.frames import FrameType
from gossipdp.links.link import Link
from gossipdp.protocol.messages import OfferState, RequestState, StateRefused

TIMEOUT_S = 5.0


class QueueLink(MemoryLink):
    """Messages lie between the chunks in its ``queue``, so that a test delivers all in order."""

    @property
    def queued_chunks(self):
        return sum(len(item) == 3 for item in self.queue)


class End:
    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        segments = [
            Segment(torch.randn(1000, generator=generator), Role.TRAINED, chunk_bytes=1024),
            Segment(torch.full((7,), float(rank)), Role.BUFFER),
            Segment(torch.arange(5) + rank, Role.COPIED),
        ]
        self.state = State(segments)
        self.rank = rank
        self.links: dict[int, Link] = {}
        self.now = 0.0
        self.refusal: str | None = None
        self.dialled: list[int] = []
        ways = {"links": self.links, "send": self.send, "dial": self.dialled.append}
        ways |= {"refusal": lambda: self.refusal, "clock": lambda: self.now}
        self.transfers = transfer.Transfers(self.state.all_chunks, **ways)
        self.transfers.has_state = True
        self.transfers.offer = lambda key: self.optimizers
        self.optimizers: transfer.Offer | None = None
        self.ended: list[object] = []
        self.rooms: list[torch.Tensor] = []
        self.is_stepping = False

    def send(self, peer, message):
        self.links[peer].queue.append((message,))

    def keep(self, *sizes: int, text: bytes = b"some text", fill: int = 1) -> list[torch.Tensor]:
        """Have optimizers whose tensors take so many bytes, each filled with another number."""

        def copy(source: torch.Tensor, room: torch.Tensor) -> bool:
            if not self.is_stepping:
                room.copy_(source)
            return not self.is_stepping

        tensors = [
            torch.full((size,), fill + index, dtype=torch.uint8) for index, size in enumerate(sizes)
        ]
        self.optimizers = transfer.Offer(text, tensors, copy)
        return tensors

    def fetch(self, peer, *, is_whole=False):
        """Ask for the optimizers' state too, or not; its layout holds the sizes of its tensors."""

        def unfold(text: bytes) -> list[torch.Tensor]:
            if text == b"no text":
                raise ValueError("this is no text")
            sizes = text.decode().split(",") if text[:1].isdigit() else []
            self.rooms = [torch.zeros(int(size), dtype=torch.uint8) for size in sizes]
            return self.rooms

        self.transfers.fetch(peer, unfold if is_whole else None, self.ended.append, TIMEOUT_S)

    @property
    def values(self):
        return [segment.x for segment in self.state.segments]


def linked(a: End, b: End) -> None:
    for one, other in ((a, b), (b, a)):
        one.links[other.rank] = QueueLink(other.rank)
    for one, other in ((a, b), (b, a)):
        one.transfers.link_up(one.links[other.rank])


def relink(a: End, b: End) -> None:
    for one, other in ((a, b), (b, a)):
        one.transfers.link_down(one.links.pop(other.rank))
    linked(a, b)


def deliver(a: End, b: End, at_most: int = 10_000) -> int:
    """Deliver what is queued between the two, and pump, until nothing happens; how many items."""
    num_delivered = 0
    while True:
        for end in (a, b):
            end.transfers.pump()
        found = next(((s, r) for s, r in ((a, b), (b, a)) if s.links[r.rank].queue), None)
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
        room = receiver.transfers.landing(link, frame_type, key)
        if room is not None:
            room[:] = payload.cast("B")
            link.chunk_bytes_received[frame_type] += len(room)
            receiver.transfers.landed(link, frame_type, key)


@pytest.fixture
def ends() -> tuple[End, End]:
    giver, taker = End(0), End(1)
    linked(giver, taker)
    return giver, taker


def given(giver: End, taker: End, *, is_whole: bool = False) -> object:
    """Let ``taker`` fetch a state; return how that has ended."""
    taker.fetch(0, is_whole=is_whole)
    deliver(giver, taker)
    return taker.ended[-1]


def has_taken(giver: End, taker: End) -> bool:
    return all(torch.equal(x, y) for x, y in zip(giver.values, taker.values, strict=True))


class Counted(list):
    """Counts how many of its items are looked at."""

    num_seen = 0

    def __getitem__(self, index):
        self.num_seen += 1
        return super().__getitem__(index)

    def __iter__(self):
        return map(self.__getitem__, range(len(self)))


@pytest.mark.parametrize("what", ["parameters", "optimizers"])
def test_no_turn_of_a_donor_looks_at_more_than_a_few_chunks(ends, what):
    """However large the model: it would be silent for as long, and be taken for dead."""
    giver, _ = ends
    if what == "parameters":
        looked_at = giver.transfers._chunks = Counted(giver.state.all_chunks * 1000)
    else:
        looked_at = Counted(giver.keep(3) * 6000)
        giver.optimizers = replace(giver.optimizers, tensors=looked_at)
    link = giver.links[1]
    most, num_sent = 0, 0
    giver.transfers.receive(link, RequestState(1, 0, what == "optimizers"))
    while num_sent < len(looked_at):
        giver.transfers.pump()
        most, looked_at.num_seen = max(most, looked_at.num_seen), 0
        assert link.queued_chunks <= transfer.SLOTS
        num_sent += link.queued_chunks
        link.queue.clear()
    assert most <= transfer.SLOTS + 1


SIZES = (1, 1 << 20, 0, (2 << 20) + 5)
TEXT = ",".join(map(str, SIZES)).encode()


@pytest.mark.parametrize("at", [None, 1, 2, 4, 8, 11])
def test_a_whole_state_comes_whole_whatever_its_links(ends, at):
    """A request, an offer, the layout, tensors to item 8, and then parameters go over the link."""
    giver, taker = ends
    taker.fetch(0, is_whole=True)
    deliver(giver, taker)
    assert taker.ended == [], "the giver's optimizer steps"
    tensors = giver.keep(*SIZES, text=TEXT)
    if at is not None:
        deliver(giver, taker, at_most=at)
        relink(giver, taker)
        # Of another moment: what was not whole is sent from its beginning, and the rest not again.
        later = giver.keep(*SIZES, text=TEXT, fill=10)
        tensors = later if at < 8 else tensors
    deliver(giver, taker)
    assert taker.ended == [None]
    assert all(map(torch.equal, taker.rooms, tensors))
    assert has_taken(giver, taker)
    if at is None or at < 8:
        assert giver.transfers.num_given == 1
    # The layout, tensors in pieces of 1 MiB, and chunks of parameters.
    assert at is not None or taker.transfers.num_chunks_received == 1 + 5 + 6


def test_no_chunk_is_copied_while_the_optimizer_steps(ends):
    giver, taker = ends
    giver.keep(*SIZES, text=TEXT)
    taker.fetch(0, is_whole=True)
    deliver(giver, taker, at_most=2)

    def num_sent() -> int:
        return taker.transfers.num_chunks_received + giver.links[1].queued_chunks

    before = num_sent()
    giver.is_stepping = True
    deliver(giver, taker)
    assert num_sent() == before > 0
    giver.is_stepping = False
    deliver(giver, taker)
    assert taker.ended == [None]


def test_what_is_given_takes_two_chunks_of_memory(ends, monkeypatch):
    """Chunks of parameters may be larger than those of the optimizers' state."""
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 512)
    giver, taker = ends
    giver.keep(9 * transfer.CHUNK_BYTES, text=str(9 * transfer.CHUNK_BYTES).encode())
    taker.fetch(0, is_whole=True)
    places = set()
    while deliver(giver, taker, at_most=1):
        for item in giver.links[1].queue:
            if len(item) == 3:
                places.add(torch.frombuffer(item[2], dtype=torch.uint8).data_ptr())
    assert len(places) == 2
    assert has_taken(giver, taker)


@pytest.mark.parametrize(
    ("text", "message"), [(b"no text", "no text"), (bytes((16 << 20) + 1), "takes")]
)
def test_a_text_that_cannot_be_one_is_not_taken(ends, text, message):
    giver, taker = ends
    giver.keep(5, text=text)
    error = given(giver, taker, is_whole=True)
    assert isinstance(error, PeerLostError)
    assert message in str(error)
    # Unasked for.
    taker.transfers.receive(taker.links[0], OfferState(1, 50))
    assert len(taker.ended) == 1


def test_a_peer_that_asks_again_and_again_is_given_one_state(ends):
    giver, _ = ends
    giver.keep(5, text=b"5")
    for counter in range(100):
        giver.transfers.receive(giver.links[1], RequestState(counter, 0, counter % 2 == 0))
        giver.transfers.pump()
    assert giver.links[1].queued_chunks == 2
    assert len(giver.transfers._gifts) == 1
    giver.links[2] = QueueLink(2)
    giver.transfers.receive(giver.links[2], RequestState(0, 0, False))
    giver.transfers.pump()
    assert giver.links[2].queued_chunks == 2, "another has its turn meanwhile"


def test_a_chunk_lands_in_its_turn_and_in_its_own_state_alone(ends):
    giver, taker = ends
    taker.fetch(0)
    deliver(giver, taker, at_most=1)
    giver.transfers.pump()
    taker.transfers.link_up(QueueLink(5))
    taker.transfers.link_down(QueueLink(5))
    taker.transfers.gone(5, PeerLostError("it gives nothing here"))
    assert taker.dialled == taker.ended == [], "that link and that peer are others"
    link, landing = taker.links[0], taker.transfers.landing
    frame_type, key, payload = giver.links[1].queue[0]
    assert frame_type is FrameType.STATE_CHUNK
    assert landing(link, frame_type, replace(key, index=1)) is None
    assert landing(link, frame_type, replace(key, counter=key.counter + 1)) is None
    assert landing(QueueLink(5), frame_type, key) is None
    # A chunk of another length ends the link.
    assert len(landing(link, frame_type, key)) == payload.nbytes


def test_a_link_that_breaks_again_and_again_ends_what_begins_anew_each_time():
    """Chunks arrive, so that no time-out ends it, and it would never be whole."""
    giver, taker = End(0), End(1)
    giver.keep(*SIZES, text=TEXT)
    taker.fetch(0, is_whole=True)
    assert taker.dialled == [0], "there is no link yet"
    linked(giver, taker)
    num_breaks = 0
    while not taker.ended:
        deliver(giver, taker, at_most=4)
        relink(giver, taker)
        num_breaks += 1
        assert num_breaks <= transfer.MAX_BREAKS
    assert num_breaks == transfer.MAX_BREAKS
    (error,) = taker.ended
    assert isinstance(error, transfer.TurnedAwayError)
    assert "its link broke 5 times" in str(error)


def test_who_has_nothing_to_give_says_so(ends, caplog):
    giver, taker = ends
    giver.transfers.has_state = False
    assert isinstance(given(giver, taker), transfer.NoStateYetError)
    giver.transfers.has_state = True
    giver.refusal = "it is poisoned"
    for is_whole in (False, True):
        assert "it is poisoned" in str(given(giver, taker, is_whole=is_whole))
    assert not giver.transfers._gifts, "it is refused once"
    giver.refusal = None

    def broken(key: object) -> transfer.Offer:
        raise ValueError("its state cannot be described")

    giver.transfers.offer = broken
    for _ in range(2):
        assert "described" in str(given(giver, taker, is_whole=True))
    (said,) = [each.getMessage() for each in caplog.records if "described" in each.getMessage()]
    assert said.startswith("worker 1 cannot start from this worker's optimizer state")
    assert given(giver, taker) is None, "its parameters"


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_state_that_is_under_way_goes_on_where_consolidation_begins(ends, at):
    giver, taker = ends
    giver.state.chunks[0].exchange(0.0, torch.zeros(256), torch.ones(256), 1.5)
    z = [segment.copy(torch.inf)[0] for segment in giver.state.segments]
    taker.fetch(0)
    deliver(giver, taker, at_most=at)
    giver.refusal = "it consolidates"
    giver.state.boundary(torch.inf, wait=True)  # which leaves z as it is
    deliver(giver, taker)
    assert taker.ended == [None]
    assert all(map(torch.equal, taker.values, z))
    error = given(giver, taker)
    assert isinstance(error, transfer.TurnedAwayError)
    assert "it consolidates" in str(error)


@pytest.mark.parametrize("segment", [0, 1])
def test_poisoned_parameters_and_buffers_are_not_taken(ends, segment):
    giver, taker = ends
    giver.values[segment][-1] = torch.inf
    before = taker.values[segment][-5:].clone()
    assert "NaN or infinity" in str(given(giver, taker))
    assert taker.links[0].closed, "so that the rest is not sent"
    assert torch.equal(taker.values[segment][-5:], before)


def test_a_process_that_holds_no_value_has_its_state_at_once(ends):
    _, taker = ends
    taker.transfers._chunks = ()
    taker.fetch(0)
    assert taker.ended == [None]
    assert not taker.links[0].queue


def test_silence_ends_a_fetch_and_bytes_of_a_chunk_defer_that(ends):
    """On a slow link a chunk may take longer than the time-out."""
    giver, taker = ends
    taker.fetch(0)
    for _ in range(5):
        taker.now += 0.9 * TIMEOUT_S
        taker.links[0].chunk_bytes_received[FrameType.STATE_CHUNK] += 1
        taker.transfers.pump()
        assert taker.ended == []
    taker.now += 1.1 * TIMEOUT_S
    taker.transfers.pump()
    assert "sent nothing" in str(taker.ended[0])
    assert taker.links[0].closed, "so that the rest is not sent"
    linked(giver, taker)
    assert not taker.links[0].queue, "nobody waits for it any more"


def test_what_answers_an_older_request_is_dropped(ends):
    giver, taker = ends
    taker.fetch(0)
    ((first,),) = taker.links[0].queue
    taker.transfers.receive(taker.links[0], StateRefused(99, "of another request", is_early=False))
    assert taker.ended == []
    giver.transfers.receive(giver.links[1], RequestState(1, 0, True))
    relink(giver, taker)
    taker.transfers.receive(
        taker.links[0], StateRefused(first.counter, "of the one before", is_early=False)
    )
    assert taker.ended == []
    giver.keep(5)  # the one who asked is gone
    deliver(giver, taker)
    assert taker.ended == [None]
