"""An exchange of values: snapshots out, the peer's snapshots in, applied as soon as both exist.

A chunk is flowed to the exchange's phase, copied to a slot, sent; when the peer's chunk of the same
index has arrived whole, delta is computed from the two snapshots and applied. Where less than the
parameters' precision travels, the snapshots are rounded to it as they are taken, so both ends hold
the same two; the parameters themselves are not rounded.
"""

import math
from typing import final

import torch
from torch import Tensor

from gossipdp.dynamics import kernels
from gossipdp.dynamics.state import Chunk, Role
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.exchange import Exchange, ExchangeBuffers, PoisonFound
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState

WINDOW = 4


def as_it_is(chunk: Chunk) -> torch.dtype:
    """Return the precision in which a chunk is held."""
    return chunk.x.dtype


def in_bfloat16(chunk: Chunk) -> torch.dtype:
    """Return bfloat16 for trained parameters of more than 2 bytes, else the chunk's own."""
    is_wide = chunk.role is Role.TRAINED and chunk.x.dtype.itemsize > torch.bfloat16.itemsize
    return torch.bfloat16 if is_wide else chunk.x.dtype


@final
class PlainExchange(Exchange):
    """See the module; arguments as of :class:`Exchange`.

    Args:
        shared, link, id, alpha_tilde: see :class:`Exchange`.
        buffers: ``WINDOW`` slots and one, reused from exchange to exchange.
        dtypes: for each chunk, the precision in which it travels.
    """

    def __init__(
        self,
        shared: SharedState,
        link: Link,
        id: ExchangeId,
        alpha_tilde: float,
        *,
        buffers: ExchangeBuffers,
        dtypes: list[torch.dtype],
    ) -> None:
        super().__init__(shared, link, id, alpha_tilde)
        self._buffers = buffers
        self._dtypes = dtypes
        self._num_taken = 0
        self._num_sent = 0

    @property
    def is_finished(self) -> bool:
        """See :class:`Exchange`."""
        total = len(self._chunks)
        return self.num_applied == self._num_sent == total and self.link.queued_chunks == 0

    def pump(self) -> None:
        """See :class:`Exchange`."""
        limit = min(self.num_applied + WINDOW, len(self._chunks))
        while self._num_sent < limit and self.link.queued_chunks < WINDOW:
            index = self._num_sent
            self._take(index)
            payload = self._buffers.bytes(index % WINDOW, self._chunks[index], self._dtypes[index])
            self._num_sent += 1
            self._send(FrameType.EXCHANGE_CHUNK, index, payload)

    def _take(self, index: int) -> None:
        """Take the snapshot of chunk ``index`` unless it was taken already.

        Its slot is free. Chunk ``index - WINDOW`` was applied here, or ``index`` would be outside
        our window; and it has left for the peer: ``pump`` stops at a queue of ``WINDOW`` chunks,
        and a peer that is ahead of us has applied that chunk, or ``index`` would be outside its.
        """
        if index == self._num_taken:
            if not self._shared.snapshot(self._chunks[index], self._theta, self._slot(index)):
                raise PoisonFound(ours=True)
            self._num_taken += 1

    def _slot(self, index: int) -> Tensor:
        return self._buffers.tensor(index % WINDOW, self._chunks[index], self._dtypes[index])

    def landing(self, frame_type: FrameType, key: ChunkKey, length: int) -> memoryview | None:
        """See :class:`Exchange`."""
        if not self.expects(frame_type, key):
            return None
        room = self._buffers.bytes(WINDOW, self._chunks[key.index], self._dtypes[key.index])
        return room if len(room) == length else None

    def expects(self, frame_type: FrameType, key: ChunkKey) -> bool:
        """See :class:`Exchange`: chunks come in order, and are applied as they come."""
        is_next = key.index == self.num_applied < len(self._chunks)
        return is_next and frame_type is FrameType.EXCHANGE_CHUNK and self._is_ours(key)

    def landed(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """See :class:`Exchange`. A chunk of which there is no snapshot yet is passed over once."""
        chunk, mine = self._chunks[key.index], self._slot(key.index)
        peers = torch.frombuffer(payload, dtype=self._dtypes[key.index])
        if key.index < self._num_taken:
            self._apply(chunk, mine, peers)
            return
        squared_norm = self._shared.snapshot_and_exchange(chunk, mine, peers, self._alpha_tilde)
        if not math.isfinite(squared_norm) and not kernels.is_finite(mine):
            raise PoisonFound(ours=True)
        self._num_taken += 1
        self._applied(chunk, squared_norm)
