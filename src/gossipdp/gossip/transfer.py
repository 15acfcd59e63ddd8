"""Whole states that workers give to each other. Driven by the gossip loop.

There are two kinds. *Parameters*: z = x + pending + c/2 of every exchanged chunk, then integer
buffers and frozen parameters, each read under its chunk's lock. *The optimizers' state*: a small
layout that describes it, then its tensors as they lie, in chunks that are copied between two steps.
So the donor trains on, its main thread is not asked, and a transfer takes ``SLOTS`` chunks of
memory, whatever the state's size. The taker lands the optimizers' state where it will stay.

A worker takes one state at a time. A fetch is answered exactly once, by ``on_end``: with None, or
with an error. It ends when nothing of it has come for its time-out, however long the whole takes. A
worker gives one state to each peer at a time: a new request replaces the one before. Exchanges on
the same link go first: a transfer sends only if fewer than ``SLOTS`` chunks are queued, and an
exchange queues more.

Races:

- The giver dies in the middle: its link goes down, it is dialled again, its address refuses
  (:meth:`Transfers.gone`), the fetch fails. If it does not refuse, the time-out ends the fetch.
- The giver stops: the time-out ends the fetch and the link, so that no more is sent, and the taker
  asks another.
- The link alone is replaced (crossing dials): the fetch asks again, under another counter, and
  chunks that still arrive under the old one are dropped. Parameters go on where they were. The
  optimizers' state starts again from its beginning, so a link that breaks ``MAX_BREAKS`` times ends
  the fetch.
- The taker dies in the middle: its link goes down, and the rest is not sent.
- All was sent, and the link is replaced before the taker has read it: the taker asks again. So a
  giver that must not train before counts a state as taken only when the taker says so, by a request
  for what comes after the last chunk. If that is lost with its link, it is said again.
- A request comes while this worker has no state to give (it joins, is poisoned, consolidates): it
  refuses.
- Consolidation begins while this worker's parameters are under way: they go on. Each chunk holds
  this worker's z before the commit and the average after it, and either will do.
"""

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk
from gossipdp.dynamics.update import is_finite
from gossipdp.errors import PeerLostError
from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.logs import OnceLog
from gossipdp.protocol.messages import OfferTraining, RequestState, RequestTraining, StateRefused

logger = logging.getLogger("gossipdp")

SLOTS = 2
CHUNK_BYTES = 1 << 20  # of the optimizers' state
# A layout takes about 60 bytes a tensor, so this is enough for 60,000 parameters under AdamW. It
# bounds the memory that a layout of nothing but brackets can make decoding allocate, 70 times this.
MAX_LAYOUT_BYTES = 16 << 20
MAX_BREAKS = 5
CONFIRMS_FOR_S = 60.0
"""A taker says again, for so long, that it has all, if a link to the giver ends."""

TransferMessage: TypeAlias = RequestState | StateRefused | RequestTraining | OfferTraining
OnEnd: TypeAlias = Callable[[Exception | None], None]
Unfold: TypeAlias = Callable[[bytes], Sequence[Tensor]]
_Piece: TypeAlias = tuple[int, Callable[[Tensor], bool]]


class TurnedAwayError(PeerLostError):
    """The peer answers, but it gives no state, or a bad one."""


@dataclass(frozen=True)
class Offer:
    """The optimizers' state of this worker, for another.

    Attributes:
        layout: describes it; see :mod:`gossipdp.parallel.state_layout`.
        tensors: the bytes of its tensors, flat, where the optimizers keep them.
        copy: copies some of these bytes to host memory; returns False if it cannot now: ask again.
    """

    layout: bytes
    tensors: Sequence[Tensor]
    copy: Callable[[Tensor, Tensor], bool]


@dataclass(eq=False)
class _Sender:
    """A state on its way over one link, piece by piece: no call looks at all pieces.

    Attributes:
        pieces: for each its number of bytes, at most ``most_bytes``, and a function that writes it
            to a slot of that size, or returns False if it cannot now.
        num_sent: pieces so far, with those that the peer has from before.
    """

    link: Link
    counter: int
    pieces: Iterator[_Piece]
    most_bytes: int
    is_training: bool
    num_sent: int = 0

    def __post_init__(self) -> None:
        # Rows that begin where numbers of any type may.
        self._slots = torch.empty(SLOTS, -(-self.most_bytes // 64) * 64, dtype=torch.uint8)
        self._next = next(self.pieces, None)

    @property
    def has_read_all(self) -> bool:
        """Return whether every piece was copied and handed to the link."""
        return self._next is None

    def pump(self) -> None:
        """Send pieces as long as a slot is free: its last one has left, and fewer are queued."""
        frame_type = FrameType.TRAINING_CHUNK if self.is_training else FrameType.STATE_CHUNK
        link = self.link
        while self._next is not None and link.queued_chunks < SLOTS:
            num_bytes, read = self._next
            slot = self._slots[self.num_sent % SLOTS][:num_bytes]
            if not read(slot):
                return
            incarnation = link.peer_identity.incarnation
            key = ChunkKey(link.peer, incarnation, self.counter, self.num_sent)
            self.num_sent += 1
            self._next = next(self.pieces, None)
            link.send_chunk(frame_type, key, tensor_bytes(slot))


@dataclass(eq=False)
class _Fetch:
    """A state on its way to this worker.

    Attributes:
        rooms: yields the room of each chunk, and takes the filled one when it is asked for the
            next; it raises ValueError to refuse a chunk. None: the state has not been offered.
        unfold: for the optimizers' state; see :meth:`Transfers.fetch_training`. None: parameters.
        room: where the next chunk goes; None: no chunk is awaited.
    """

    peer: int
    on_end: OnEnd
    timeout_s: float
    rooms: Iterator[Tensor] | None = None
    unfold: Unfold | None = None
    room: Tensor | None = None
    deadline_s: float = 0.0
    counter: int = 0
    num_received: int = 0
    num_breaks: int = 0


def _parameters(chunks: Sequence[Chunk], most_bytes: int) -> Iterator[Tensor]:
    """Yield rooms for another worker's parameters, laid out as this one's (equal fingerprints)."""
    slot = torch.empty(most_bytes, dtype=torch.uint8)
    for chunk in chunks:
        room = slot[: chunk.x.nbytes]
        yield room
        values = room.view(chunk.x.dtype)
        if chunk.role.is_averaged and not is_finite(values):
            raise ValueError("its parameters or buffers hold NaN or infinity")
        chunk.replace(values)


def _training(num_layout_bytes: int, unfold: Unfold) -> Iterator[Tensor]:
    """Yield rooms for the layout of an optimizers' state, then for its tensors."""
    if not 0 < num_layout_bytes <= MAX_LAYOUT_BYTES:
        raise ValueError(f"the layout of its optimizers' state takes {num_layout_bytes} bytes")
    layout = torch.empty(num_layout_bytes, dtype=torch.uint8)
    yield from _pieces([layout])
    yield from _pieces(unfold(layout.numpy().tobytes()))


class Transfers:
    """All transfers of one worker.

    ``chunks`` are in the order in which every worker has them. ``links`` is the loop's own table,
    by peer, which it keeps up to date. ``send`` dials if there is no link. ``refusal`` returns why
    this worker gives no state now, or None.

    Attributes:
        offer: returns the optimizers' state for one request, which a key names; None: not yet, ask
            again. It raises ValueError if the state can never be given.
        num_chunks_sent, num_chunks_received: of all states so far; they show progress.
        num_given: optimizers' states given whole.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        links: Mapping[int, Link],
        send: Callable[[int, TransferMessage], None],
        refusal: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self.offer: Callable[[Hashable], Offer | None] = lambda key: None
        self.num_chunks_sent = 0
        self.num_chunks_received = 0
        self.num_given = 0
        self._chunks = chunks
        self._most_bytes = max((chunk.x.nbytes for chunk in chunks), default=0)
        self._links = links
        self._send = send
        self._refusal = refusal
        self._clock = clock
        # By peer: one at most for each, so that no peer can make this worker hold more.
        self._senders: dict[int, _Sender] = {}
        self._early_requests: dict[int, RequestState] = {}
        self._training_requests: dict[int, RequestTraining] = {}
        self._serves = False
        self._unserved: set[int] = set()
        self._on_served: Callable[[], None] | None = None
        self._fetch: _Fetch | None = None
        self._counter = 0
        self._taken_from, self._confirms_until_s = -1, -math.inf
        self._log = OnceLog(logger)

    # Giving.

    def serve(self, first: Iterable[int], on_served: Callable[[], None]) -> None:
        """Answer requests; call ``on_served`` when all of ``first`` have the state or are gone."""
        self._serves = True
        self._unserved = set(first)
        self._on_served = on_served
        for peer, request in self._early_requests.items():
            self._give(peer, request)
        self._early_requests.clear()
        self._count_served()

    def _give(self, peer: int, request: RequestState) -> None:
        if request.start >= len(self._chunks):  # it has all
            self._unserved.discard(peer)
            self._count_served()
            return
        link = self._links.get(peer)
        if link is None or not self._may_give(peer, request.counter):
            return
        start = request.start
        chunks = map(self._chunks.__getitem__, range(start, len(self._chunks)))
        pieces = ((chunk.x.nbytes, partial(_read, chunk)) for chunk in chunks)
        self._senders[peer] = _Sender(
            link, request.counter, pieces, self._most_bytes, is_training=False, num_sent=start
        )

    def _give_training(self, peer: int, request: RequestTraining) -> bool:
        """Begin to send the optimizers' state, or refuse; return False if it cannot answer now."""
        link = self._links.get(peer)
        if link is None or not self._may_give(peer, request.counter):
            return True
        try:
            offer = self.offer((peer, request.counter))
        except ValueError as error:
            self._log.warn_once(
                "refused", str(peer), "worker %d cannot join by this one's state: %s", peer, error
            )
            self._send(peer, StateRefused(request.counter, str(error)[:200]))
            return True
        if offer is None:
            return False
        layout = torch.frombuffer(bytearray(offer.layout), dtype=torch.uint8)
        pieces = (
            (piece.numel(), partial(offer.copy, piece))
            for piece in _pieces(chain([layout], offer.tensors))
        )
        self._senders[peer] = _Sender(link, request.counter, pieces, CHUNK_BYTES, is_training=True)
        self._send(peer, OfferTraining(request.counter, len(offer.layout)))
        return True

    def _may_give(self, peer: int, counter: int) -> bool:
        reason = self._refusal()
        if reason is not None:
            self._send(peer, StateRefused(counter, reason))
        return reason is None

    def _count_served(self) -> None:
        if self._on_served is not None and not self._unserved:
            on_served, self._on_served = self._on_served, None
            on_served()

    # Taking.

    def fetch(self, peer: int, on_end: OnEnd, timeout_s: float) -> None:
        """Ask ``peer`` for its parameters, and take them over chunk by chunk.

        ``on_end`` is called once, in the loop's thread, with None or an error. ``timeout_s`` is the
        longest time without progress.
        """
        rooms = _parameters(self._chunks, self._most_bytes)
        self._begin(_Fetch(peer, on_end, timeout_s, rooms, room=next(rooms, None)))

    def fetch_training(self, peer: int, unfold: Unfold, on_end: OnEnd, timeout_s: float) -> None:
        """Ask ``peer`` for its optimizers' state; see also :meth:`fetch`.

        ``unfold`` makes room, as bytes, for the tensors that the layout describes; a ValueError
        refuses them.
        """
        self._begin(_Fetch(peer, on_end, timeout_s, unfold=unfold))

    def end(self, error: Exception | None) -> None:
        """End the fetch, if there is one."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.on_end(error)

    def gone(self, peer: int, error: Exception) -> None:
        """End the fetch from ``peer``, which gives nothing more."""
        if self._fetch is not None and self._fetch.peer == peer:
            self.end(error)

    def _begin(self, fetch: _Fetch) -> None:
        assert self._fetch is None, "a worker takes one state at a time"
        self._fetch = fetch
        fetch.deadline_s = self._clock() + fetch.timeout_s
        self._request(fetch)

    def _request(self, fetch: _Fetch) -> None:
        self._counter += 1
        fetch.counter = self._counter
        if fetch.unfold is None:
            self._send(fetch.peer, RequestState(fetch.counter, fetch.num_received))
        else:  # of another moment than the part that came on the lost link
            fetch.num_received, fetch.rooms, fetch.room = 0, None, None
            self._send(fetch.peer, RequestTraining(fetch.counter))

    # What the loop reports.

    def receive(self, link: Link, message: TransferMessage) -> None:
        """Deal with one message."""
        match message:
            case RequestState():
                if self._serves:
                    self._give(link.peer, message)
                else:
                    self._early_requests[link.peer] = message
            case RequestTraining():
                self._training_requests[link.peer] = message
            case StateRefused(counter=counter, reason=reason):
                if self._awaited(link, counter) is not None:
                    self.end(TurnedAwayError(f"worker {link.peer} cannot give its state: {reason}"))
            case OfferTraining(counter=counter, num_bytes=num_bytes):
                fetch = self._awaited(link, counter)
                if fetch is not None and fetch.unfold is not None and fetch.rooms is None:
                    fetch.rooms = _training(num_bytes, fetch.unfold)
                    self._advance(fetch)

    def link_down(self, link: Link) -> None:
        """Drop what was to be sent on ``link``, and ask again for what was to come."""
        sender = self._senders.get(link.peer)
        if sender is not None and sender.link is link:
            del self._senders[link.peer]
        self._early_requests.pop(link.peer, None)
        self._training_requests.pop(link.peer, None)
        if link.peer == self._taken_from and self._clock() < self._confirms_until_s:
            self._confirm()
        fetch = self._fetch
        if fetch is None or fetch.peer != link.peer:
            return
        fetch.num_breaks += fetch.unfold is not None
        if fetch.num_breaks < MAX_BREAKS:
            self._request(fetch)
        else:
            reason = f"worker {fetch.peer} cannot give its state: its link broke {MAX_BREAKS} times"
            self.end(TurnedAwayError(reason))

    def dead(self, peer: int) -> None:
        """Give up ``peer``, whose address refuses connections."""
        self._unserved.discard(peer)
        self._count_served()
        self.gone(peer, PeerLostError(f"worker {peer} is gone: its address refuses us"))

    def landing(self, link: Link, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Return the room for a chunk, or None if it is not awaited."""
        fetch = self._awaited(link, key.counter)
        if fetch is None or fetch.room is None or key.index != fetch.num_received:
            return None
        is_training = frame_type is FrameType.TRAINING_CHUNK
        return tensor_bytes(fetch.room) if is_training == (fetch.unfold is not None) else None

    def landed(self, link: Link, frame_type: FrameType, key: ChunkKey) -> None:
        """Take the chunk that has landed."""
        fetch = self._awaited(link, key.counter)
        if fetch is not None:  # else the fetch ended while it was arriving
            self.num_chunks_received += 1
            fetch.num_received += 1
            self._advance(fetch)

    def _awaited(self, link: Link, counter: int) -> _Fetch | None:
        """Return the fetch if a frame with this counter belongs to it."""
        fetch = self._fetch
        if fetch is None or (fetch.peer, fetch.counter) != (link.peer, counter):
            return None
        return fetch

    def _advance(self, fetch: _Fetch) -> None:
        """Take the chunk that has come; an error in the state ends the fetch."""
        fetch.deadline_s = self._clock() + fetch.timeout_s
        try:
            assert fetch.rooms is not None
            fetch.room = next(fetch.rooms, None)
        except ValueError as error:
            self.end(TurnedAwayError(f"worker {fetch.peer} cannot give its state: {error}"))
            return
        if fetch.room is None:
            if fetch.unfold is None:
                self._taken_from = fetch.peer
                self._confirms_until_s = self._clock() + CONFIRMS_FOR_S
                self._confirm()
            self.end(None)

    def _confirm(self) -> None:
        """Say that all of the parameters have come."""
        self._counter += 1
        self._send(self._taken_from, RequestState(self._counter, len(self._chunks)))

    def pump(self) -> None:
        """Send as much as there is room for; end a fetch without progress.

        On a closed link there is always room, and nothing is sent: ``link_down`` is on its way.
        """
        for peer, request in list(self._training_requests.items()):
            if self._give_training(peer, request):
                self._training_requests.pop(peer, None)
        for peer, sender in list(self._senders.items()):
            if sender.link.closed:
                continue
            before = sender.num_sent
            sender.pump()
            self.num_chunks_sent += sender.num_sent - before
            if sender.is_training and sender.has_read_all and sender.num_sent > before:
                self.num_given += 1
                logger.info("worker %d has been sent this worker's optimizers' state", peer)
            if sender.has_read_all and sender.link.queued_chunks == 0:  # the kernel has it all
                del self._senders[peer]
        fetch = self._fetch
        if fetch is not None and self._clock() > fetch.deadline_s:
            reason = f"worker {fetch.peer} sent nothing of its state for {fetch.timeout_s:g} s"
            self.end(PeerLostError(reason))
            if (link := self._links.get(fetch.peer)) is not None:
                link.close(reason)


def _read(chunk: Chunk, slot: Tensor) -> bool:
    chunk.read_z(slot.view(chunk.x.dtype))
    return True


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cut flat tensors of bytes into chunks; an empty one has none."""
    for tensor in tensors:
        for start in range(0, tensor.numel(), CHUNK_BYTES):
            yield tensor[start : start + CHUNK_BYTES]
