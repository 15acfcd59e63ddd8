"""Whole states that workers give to each other. Driven by the gossip loop.

A state is one stream of chunks. First the optimizers' state, if it is wanted: a small layout that
describes it, then its tensors as they lie, copied between two steps. Then the parameters:
z = x + pending + c/2 of every averaged chunk, and the other buffers, each read under its chunk's
lock. So the donor trains on, its main thread is not asked, and a transfer takes ``SLOTS`` chunks of
memory. The taker lands all where it will stay.

A worker takes one state at a time; a fetch is answered exactly once, by ``on_end``. It gives one to
each peer at a time: a new request replaces the one before. Exchanges on the same link go first: a
transfer sends only if fewer than ``SLOTS`` chunks are queued, and an exchange queues more.

- If the giver dies, its address refuses the next dial and the fetch fails (:meth:`Transfers.gone`).
  If it stops, or its host is gone, the time-out without progress ends the fetch and the link, and
  the taker asks another.
- A state is asked for on a link that is up: what waited for one might be sent to nobody. If the
  link alone is replaced (crossing dials), the fetch asks again, under another counter, and chunks
  that still arrive under the old one are dropped. Parameters go on where they were. The
  optimizers' state starts again from its beginning, so a link that breaks ``MAX_BREAKS`` times
  before that is whole ends the fetch.
- If consolidation begins while parameters are under way, they go on: each chunk holds this worker's
  z before the commit or the average after it, and either will do.
"""

import logging
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
from gossipdp.protocol.messages import OfferState, RequestState, StateRefused

logger = logging.getLogger("gossipdp")

SLOTS = 2
CHUNK_BYTES = 1 << 20  # of the optimizers' state
# A layout takes about 60 bytes a tensor, so this is enough for 60,000 parameters under AdamW. It
# bounds the memory that a layout of nothing but brackets can make decoding allocate, 70 times this.
MAX_LAYOUT_BYTES = 16 << 20
MAX_BREAKS = 5

TransferMessage: TypeAlias = RequestState | OfferState | StateRefused
OnEnd: TypeAlias = Callable[[Exception | None], None]
Unfold: TypeAlias = Callable[[bytes], Sequence[Tensor]]
_Piece: TypeAlias = tuple[int, Callable[[Tensor], bool]]


class TurnedAwayError(PeerLostError):
    """The peer answers, but it gives no state, or a bad one."""


class NoStateYetError(TurnedAwayError):
    """The peer has no state yet: it has not started itself."""


@dataclass(frozen=True)
class Offer:
    """The optimizers' state of this worker, for another.

    Attributes:
        layout: describes it; see :mod:`gossipdp.parallel.packing`.
        tensors: the bytes of its tensors, flat, where the optimizers keep them.
        copy: copies some of these bytes to host memory; returns False if it cannot now: ask again.
    """

    layout: bytes
    tensors: Sequence[Tensor]
    copy: Callable[[Tensor, Tensor], bool]


@dataclass(eq=False)
class _Fetch:
    """A state on its way to this worker.

    Attributes:
        unfold: see :meth:`Transfers.fetch`. None: the optimizers' state has come, or is not wanted.
        rooms: yields the room of each chunk, and takes the filled one when it is asked for the
            next; it raises ValueError to refuse a chunk. None: the state has not been offered.
        room: where the next chunk goes; None: no chunk is awaited.
        counter, num_received: of the latest request, and the chunks that it has brought.
        num_bytes: of chunks of states on the giver's link, at the latest progress.
        num_parameter_chunks: taken over, by all requests.
    """

    peer: int
    unfold: Unfold | None
    on_end: OnEnd
    timeout_s: float
    rooms: Iterator[Tensor] | None = None
    room: Tensor | None = None
    deadline_s: float = 0.0
    counter: int = 0
    num_received: int = 0
    num_bytes: int = 0
    num_parameter_chunks: int = 0
    num_breaks: int = 0


class Transfers:
    """All transfers of one worker.

    ``chunks`` are in the order in which every worker has them. ``links`` is the loop's own table,
    by peer, which it keeps up to date. ``send`` needs a link, for which ``dial`` asks. ``refusal``
    returns why this worker gives no state now, or None.

    Attributes:
        has_state: whether this worker has a state of its run, and is not loading another.
        offer: returns the optimizers' state for one request, which a key names; None: not yet, ask
            again. It raises ValueError if the state can never be given.
        num_chunks_received: of all states so far; it shows progress.
        num_given: states given whole, with that of the optimizers.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        links: Mapping[int, Link],
        send: Callable[[int, TransferMessage], None],
        dial: Callable[[int], None],
        refusal: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self.has_state = False
        self.offer: Callable[[Hashable], Offer | None] = lambda key: None
        self.num_chunks_received = self.num_given = 0
        self._chunks = chunks
        self._most_bytes = max((chunk.x.nbytes for chunk in chunks), default=0)
        self._links, self._clock = links, clock
        self._send, self._dial, self._refusal = send, dial, refusal
        # By peer: one at most for each, so that no peer can make this worker hold more.
        self._gifts: dict[int, tuple[Link, Iterator[None]]] = {}
        self._fetch: _Fetch | None = None
        self._counter = 0
        self._log = OnceLog(logger)

    # Giving.

    def _giving(self, link: Link, request: RequestState) -> Iterator[None]:
        """Give the state, or refuse; yield where it must wait. No turn looks at all pieces."""
        peer, counter = link.peer, request.counter
        offer: Offer | None = None
        while True:
            reason = self._refusal() if self.has_state else "it has none yet"
            if reason is None and request.wants_optimizers:
                try:
                    offer = self.offer((peer, counter))
                except ValueError as error:
                    reason = str(error)[:200]
                    text = "worker %d cannot start from this worker's optimizer state: %s"
                    self._log.warn_once("refused", str(peer), text, peer, error)
            if reason is not None:
                self._send(peer, StateRefused(counter, reason, is_early=not self.has_state))
                return
            if offer is not None or not request.wants_optimizers:
                break
            yield
        chunks = map(self._chunks.__getitem__, range(request.start, len(self._chunks)))
        pieces: Iterator[_Piece] = ((chunk.x.nbytes, partial(_read, chunk)) for chunk in chunks)
        most_bytes = self._most_bytes
        if offer is not None:
            layout = torch.frombuffer(bytearray(offer.layout), dtype=torch.uint8)
            first = _pieces(chain([layout], offer.tensors))
            pieces = chain(((each.numel(), partial(offer.copy, each)) for each in first), pieces)
            most_bytes = max(most_bytes, CHUNK_BYTES)
            self._send(peer, OfferState(counter, len(offer.layout)))
        # Rows that begin where numbers of any type may.
        slots = torch.empty((SLOTS, -(-most_bytes // 64) * 64), dtype=torch.uint8, device="cpu")
        for number, (num_bytes, read) in enumerate(pieces):
            slot = slots[number % SLOTS][:num_bytes]
            while link.queued_chunks >= SLOTS or not read(slot):
                yield
            key = ChunkKey(peer, link.peer_identity.incarnation, counter, number)
            link.send_chunk(FrameType.STATE_CHUNK, key, tensor_bytes(slot))
        if offer is not None:
            self.num_given += 1
            logger.info("worker %d has been sent this worker's state", peer)
        while link.queued_chunks > 0:
            yield

    # Taking.

    def fetch(self, peer: int, unfold: Unfold | None, on_end: OnEnd, timeout_s: float) -> None:
        """Ask ``peer`` for its state, and take it over chunk by chunk.

        Args:
            unfold: makes room, as bytes, for the tensors of the optimizers' state that a layout
                describes; a ValueError refuses them. None: the parameters alone are wanted.
            on_end: called once, in the loop's thread, with None or an error.
            timeout_s: the longest time in which no byte of it comes.
        """
        assert self._fetch is None, "a worker takes one state at a time"
        self._fetch = fetch = _Fetch(peer, unfold, on_end, timeout_s)
        fetch.deadline_s = self._clock() + timeout_s
        if peer in self._links:
            self._request(fetch)
        else:
            self._dial(peer)

    def end(self, error: Exception | None) -> None:
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.on_end(error)

    def gone(self, peer: int, error: Exception) -> None:
        """End the fetch from ``peer``, which gives nothing more."""
        if self._fetch is not None and self._fetch.peer == peer:
            self.end(error)

    def _request(self, fetch: _Fetch) -> None:
        self._counter += 1
        fetch.counter, fetch.num_received = self._counter, 0
        if fetch.unfold is not None:  # of another moment than the part that came on a lost link
            fetch.rooms = fetch.room = None
        elif fetch.rooms is None:
            fetch.rooms = self._rooms(fetch, 0)
            fetch.room = next(fetch.rooms, None)
            if fetch.room is None:  # a process of a replica may hold no value
                self.end(None)
                return
        start, wants_optimizers = fetch.num_parameter_chunks, fetch.unfold is not None
        self._send(fetch.peer, RequestState(fetch.counter, start, wants_optimizers))

    def _rooms(self, fetch: _Fetch, layout_bytes: int) -> Iterator[Tensor]:
        """Yield rooms for the optimizers' state, and for parameters laid out as this worker's."""
        if fetch.unfold is not None:
            if not 0 < layout_bytes <= MAX_LAYOUT_BYTES:
                raise ValueError(f"the layout of its optimizers' state takes {layout_bytes} bytes")
            layout = torch.empty(layout_bytes, dtype=torch.uint8, device="cpu")
            yield from _pieces([layout])
            yield from _pieces(fetch.unfold(layout.numpy().tobytes()))
            fetch.unfold = None
        slot = torch.empty(self._most_bytes, dtype=torch.uint8, device="cpu")
        for chunk in self._chunks:
            room = slot[: chunk.x.nbytes]
            yield room
            values = room.view(chunk.x.dtype)
            if chunk.role.is_averaged and not is_finite(values):
                raise ValueError("its parameters or buffers hold NaN or infinity")
            chunk.replace(values)
            fetch.num_parameter_chunks += 1

    # What the loop reports.

    def receive(self, link: Link, message: TransferMessage) -> None:
        if isinstance(message, RequestState):
            self._gifts[link.peer] = link, self._giving(link, message)
        elif (fetch := self._awaited(link, message.counter)) is None:
            pass  # it answers an older request
        elif isinstance(message, StateRefused):
            self._turned_away(
                fetch, message.reason, NoStateYetError if message.is_early else TurnedAwayError
            )
        elif fetch.rooms is None:
            fetch.deadline_s = self._clock() + fetch.timeout_s
            fetch.rooms = self._rooms(fetch, message.layout_bytes)
            self._advance(fetch)

    def link_up(self, link: Link) -> None:
        """Ask for the state that is to come over ``link``, if one is."""
        if self._fetch is not None and self._fetch.peer == link.peer:
            self._request(self._fetch)

    def link_down(self, link: Link) -> None:
        """Drop what was to be sent on ``link``, and dial again for what was to come."""
        if link.peer in self._gifts and self._gifts[link.peer][0] is link:
            del self._gifts[link.peer]
        fetch = self._fetch
        if fetch is None or fetch.peer != link.peer:
            return
        fetch.num_breaks += fetch.unfold is not None
        if fetch.num_breaks < MAX_BREAKS:
            self._dial(fetch.peer)
        else:
            self._turned_away(fetch, f"its link broke {MAX_BREAKS} times")

    def landing(self, link: Link, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Return the room for a chunk, or None if it is not awaited."""
        fetch = self._awaited(link, key.counter)
        if fetch is None or fetch.room is None or key.index != fetch.num_received:
            return None
        return tensor_bytes(fetch.room)

    def landed(self, link: Link, frame_type: FrameType, key: ChunkKey) -> None:
        fetch = self._awaited(link, key.counter)
        if fetch is not None:  # else the fetch ended while it was arriving
            self.num_chunks_received += 1
            fetch.num_received += 1
            self._advance(fetch)

    def _awaited(self, link: Link, counter: int) -> _Fetch | None:
        fetch = self._fetch
        if fetch is None or (fetch.peer, fetch.counter) != (link.peer, counter):
            return None
        return fetch

    def _advance(self, fetch: _Fetch) -> None:
        """Take the chunk that has come; an error in the state ends the fetch and the link."""
        try:
            assert fetch.rooms is not None
            fetch.room = next(fetch.rooms, None)
        except ValueError as error:
            self._turned_away(fetch, str(error))
            self._hang_up(fetch, str(error))
            return
        if fetch.room is None:
            self.end(None)

    def _turned_away(
        self, fetch: _Fetch, reason: str, kind: type[TurnedAwayError] = TurnedAwayError
    ) -> None:
        self.end(kind(f"worker {fetch.peer} cannot give its state: {reason}"))

    def pump(self) -> None:
        """Send as much as there is room for; end a fetch without progress.

        On a closed link there is always room, and nothing is sent: ``link_down`` is on its way.
        """
        for peer, (link, giving) in list(self._gifts.items()):
            if not link.closed and next(giving, True):  # True: the kernel has it all
                del self._gifts[peer]
        fetch = self._fetch
        if fetch is None:
            return
        # Bytes count, not chunks: on a slow link one chunk may take longer than the time-out.
        giver = self._links.get(fetch.peer)
        num_bytes = 0 if giver is None else giver.chunk_bytes_received[FrameType.STATE_CHUNK]
        if num_bytes != fetch.num_bytes:
            fetch.num_bytes, fetch.deadline_s = num_bytes, self._clock() + fetch.timeout_s
        if self._clock() > fetch.deadline_s:
            reason = f"worker {fetch.peer} sent nothing of its state for {fetch.timeout_s:g} s"
            self.end(PeerLostError(reason))
            self._hang_up(fetch, reason)

    def _hang_up(self, fetch: _Fetch, reason: str) -> None:
        """Close the giver's link: it would send the rest to nobody."""
        if (giver := self._links.get(fetch.peer)) is not None:
            giver.close(reason)


def _read(chunk: Chunk, slot: Tensor) -> bool:
    chunk.read_z(slot.view(chunk.x.dtype))
    return True


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Cut flat tensors of bytes into chunks; an empty one has none."""
    for tensor in tensors:
        for start in range(0, tensor.numel(), CHUNK_BYTES):
            yield tensor[start : start + CHUNK_BYTES]
