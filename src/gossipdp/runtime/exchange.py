"""One exchange: snapshots out, the peer's snapshots in, each chunk applied as soon as both exist.

Full duplex and in order. A chunk is flowed to the exchange's phase, copied to a slot, sent; when
the peer's chunk of the same index has arrived whole, delta is computed from the two snapshots and
applied. At most ``WINDOW`` chunks are between snapshot and application, so the extra memory is the
window's. Nothing is applied before the peer's first chunk, which confirms the exchange at the end
that was asked. Driven by the gossip thread alone.
"""

import math
from dataclasses import dataclass

from gossipdp.dynamics import kernels
from gossipdp.dynamics.state import Role
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.wire_buffers import WireBuffers

WINDOW = 4


class ExchangeBuffers(WireBuffers):
    """The slots of the window, and one more for the chunk that is arriving."""

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared.state, WINDOW + 1)


class PoisonFound(Exception):
    """A chunk holds NaN or infinity. ``ours`` says whose."""

    def __init__(self, ours: bool) -> None:
        super().__init__("our own parameters" if ours else "the peer's parameters")
        self.ours = ours


@dataclass(frozen=True)
class CompletedExchange:
    """One exchange that ended well, as this end of it saw it.

    Attributes:
        peer: with whom.
        initiated: whether this end asked for it.
        started_s, ended_s: from the agreement to the last chunk applied here, by
            :func:`~gossipdp.runtime.clock.since_boot_s`.
        half_squared_distance: half the squared distance to the peer, over trained parameters.
    """

    peer: int
    initiated: bool
    started_s: float
    ended_s: float
    half_squared_distance: float


class Exchange:
    """The data side of one exchange that the pairing has agreed on.

    Construction freezes the phase; :meth:`end` must be called once, however it ends.

    Args:
        shared: the state and its locks.
        link: to the peer.
        id: travels with every chunk; chunks with another are not ours.
        alpha_tilde: the gain both ends agreed on.
        buffers: reused from exchange to exchange.
    """

    def __init__(
        self,
        shared: SharedState,
        link: Link,
        id: ExchangeId,
        alpha_tilde: float,
        buffers: ExchangeBuffers,
    ) -> None:
        self.link = link
        self.id = id
        self.squared_distance = 0.0
        self.num_applied = 0
        self._shared = shared
        self._alpha_tilde = alpha_tilde
        self._buffers = buffers
        self._chunks = shared.state.chunks
        self._num_taken = 0
        self._num_sent = 0
        self._theta = shared.start_exchange()

    @property
    def is_finished(self) -> bool:
        """Whether every chunk was applied here and handed to the kernel for the peer."""
        total = len(self._chunks)
        return self.num_applied == self._num_sent == total and self.link.queued_chunks == 0

    def pump(self) -> None:
        """Take and send snapshots as far as the window and the link's queue allow.

        Raises:
            PoisonFound: a snapshot holds NaN or infinity; it was not sent.
        """
        limit = min(self.num_applied + WINDOW, len(self._chunks))
        while self._num_sent < limit and self.link.queued_chunks < WINDOW:
            index = self._num_sent
            self._take(index)
            chunk = self._chunks[index]
            key = ChunkKey(self.id.initiator, self.id.incarnation, self.id.counter, index)
            payload = self._buffers.bytes(index % WINDOW, chunk)
            self._num_sent += 1
            self.link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)

    def _take(self, index: int) -> None:
        """Take the snapshot of chunk ``index`` unless it was taken already.

        Its slot is free. Chunk ``index - WINDOW`` was applied here, or ``index`` would be outside
        our window; and it has left for the peer: ``pump`` stops at a queue of ``WINDOW`` chunks,
        and a peer that is ahead of us has applied that chunk, or ``index`` would be outside its.
        """
        if index < self._num_taken:
            return
        chunk = self._chunks[index]
        snapshot = self._buffers.tensor(index % WINDOW, chunk)
        self._shared.snapshot(chunk, self._theta, snapshot)
        if not kernels.is_finite(snapshot):
            raise PoisonFound(ours=True)
        self._num_taken = index + 1

    def landing(self, key: ChunkKey, length: int) -> memoryview | None:
        """Return where the peer's chunk goes, or None if it is not the one expected next."""
        if not self.expects(key) or key.index >= len(self._chunks):
            return None
        room = self._buffers.bytes(WINDOW, self._chunks[key.index])
        return room if len(room) == length else None

    def expects(self, key: ChunkKey) -> bool:
        """Whether a chunk that has landed is still the one expected next."""
        id = (self.id.initiator, self.id.incarnation, self.id.counter)
        return key.id == id and key.index == self.num_applied

    def landed(self) -> None:
        """Apply the peer's chunk that has just arrived whole in its landing place.

        Raises:
            PoisonFound: the difference is not finite; nothing was applied.
        """
        index = self.num_applied
        chunk = self._chunks[index]
        self._take(index)
        mine = self._buffers.tensor(index % WINDOW, chunk)
        peers = self._buffers.tensor(WINDOW, chunk)
        squared_norm = self._shared.exchange(chunk, mine, peers, self._alpha_tilde)
        if not math.isfinite(squared_norm):
            raise PoisonFound(ours=False)
        if chunk.role is Role.TRAINED:
            self.squared_distance += squared_norm
        self.num_applied += 1

    def end(self) -> None:
        """Let the phase go on: the exchange finished or was stopped."""
        self._shared.end_exchange()
