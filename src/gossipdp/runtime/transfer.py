"""A worker's whole state, sent to one that asks: at the start of a run, and for an average.

The sender streams x + pending + c/2 of every exchanged chunk, then integer buffers and frozen
parameters, each under its chunk's lock as it goes: its training does not stop.
Driven by the gossip threads of both ends.
"""

from collections.abc import Callable

from torch import Tensor

from gossipdp.dynamics.kernels import is_finite
from gossipdp.dynamics.state import Chunk
from gossipdp.protocol.messages import RequestState
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.wire_buffers import WireBuffers

SLOTS = 2


class StateSender:
    """Streams this worker's state over one link.

    Args:
        shared: the state and its locks.
        link: to the worker that asked.
        request: echoed in every chunk; its ``start`` is the first chunk sent.

    Attributes:
        counter: of the request.
    """

    def __init__(self, shared: SharedState, link: Link, request: RequestState) -> None:
        self.link = link
        self.counter = request.counter
        self._request = (link.peer, link.peer_incarnation, request.counter)
        self._shared = shared
        self._num_exchanged = len(shared.state.chunks)
        self._chunks = shared.state.all_chunks
        self._buffers = WireBuffers(shared.state, SLOTS)
        self._num_sent = min(request.start, len(self._chunks))

    @property
    def num_sent(self) -> int:
        """Chunks handed to the link; those count too that an earlier request was served."""
        return self._num_sent

    @property
    def has_read_all(self) -> bool:
        """Whether every chunk was copied and handed to the link."""
        return self._num_sent == len(self._chunks)

    @property
    def is_finished(self) -> bool:
        """Whether every chunk was handed to the link, and by the link to the kernel."""
        return self.has_read_all and self.link.queued_chunks == 0

    def pump(self) -> None:
        """Send chunks as long as a slot is free."""
        while self._num_sent < len(self._chunks) and self.link.queued_chunks < SLOTS:
            index = self._num_sent
            chunk = self._chunks[index]
            slot = index % SLOTS
            room = self._buffers.tensor(slot, chunk)
            if index < self._num_exchanged:
                self._shared.read_flowed(chunk, room)
            else:
                self._shared.read_as_it_is(chunk, room)
            self._num_sent += 1
            key = ChunkKey(*self._request, index)
            self.link.send_chunk(FrameType.STATE_CHUNK, key, self._buffers.bytes(slot, chunk))


class StateReceiver:
    """Receives another worker's state, chunk by chunk.

    Args:
        shared: this worker's state, whose layout is the sender's (the fingerprints agree).
        peer: whom we ask.
        sink: called with each chunk of *this* worker and the values received for it.
    """

    def __init__(
        self,
        shared: SharedState,
        peer: int,
        sink: Callable[[Chunk, Tensor], None],
    ) -> None:
        self.peer = peer
        self.counter = 0
        self.num_received = 0
        self._chunks = shared.state.all_chunks
        self._buffers = WireBuffers(shared.state, 1)
        self._sink = sink

    def request(self, counter: int) -> RequestState:
        """Ask, or ask again on a new link, from where the lost one broke off."""
        self.counter = counter
        return RequestState(counter, self.num_received)

    @property
    def is_finished(self) -> bool:
        """Whether everything is here."""
        return self.num_received == len(self._chunks)

    def landing(self, frame_type: FrameType, key: ChunkKey, length: int) -> memoryview | None:
        """Return where a chunk of our request goes, or None for any other chunk."""
        if frame_type is not FrameType.STATE_CHUNK:
            return None
        if key.counter != self.counter or key.index != self.num_received or self.is_finished:
            return None
        room = self._buffers.bytes(0, self._chunks[key.index])
        return room if len(room) == length else None

    def landed(self) -> None:
        """Pass on the chunk that has just arrived; raises ValueError if it is poisoned."""
        chunk = self._chunks[self.num_received]
        values = self._buffers.tensor(0, chunk)
        if chunk.role.is_exchanged and not is_finite(values):
            raise ValueError("its parameters or buffers hold NaN or infinity")
        self._sink(chunk, values)
        self.num_received += 1
