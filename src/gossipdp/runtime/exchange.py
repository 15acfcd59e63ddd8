"""One exchange, as the gossip loop sees it; how the parameters travel is the wire format's matter.

Full duplex and in order, a window of chunks at a time, so the extra memory is the window's. Nothing
is applied before the peer's first frame, which confirms the exchange at the end that was asked.
Driven by the gossip thread alone. :mod:`~gossipdp.runtime.plain_exchange` sends values,
:mod:`~gossipdp.runtime.lattice_exchange` a code of 8 bits.
"""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch import Tensor

from gossipdp.dynamics.state import Chunk, Role
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.wire_buffers import WireBuffers


class ExchangeBuffers(WireBuffers):
    """The slots of the window, and one more, the last, for the chunk that is arriving.

    To be :meth:`renewed <renew>` before each exchange: see ``Transport.allocate``.
    """

    def __init__(
        self,
        shared: SharedState,
        window: int,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        super().__init__(shared.state, window + 1, allocate)


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
        asked_s: when this end sent the proposal that was accepted; None where the peer asked.
        started_s, ended_s: from the agreement to the last chunk applied here, by
            :func:`~gossipdp.runtime.clock.since_boot_s`.
        half_squared_distance: half the squared distance to the peer, over trained parameters.
    """

    peer: int
    initiated: bool
    asked_s: float | None
    started_s: float
    ended_s: float
    half_squared_distance: float


class Exchange(abc.ABC):
    """The data side of one exchange that the pairing has agreed on.

    Construction freezes the phase; :meth:`end` must be called once, however it ends.

    Args:
        shared: the state and its locks.
        link: to the peer.
        id: travels with every chunk; chunks with another are not ours.
        alpha_tilde: the gain both ends agreed on.

    Attributes:
        num_applied, num_repeated: chunks, so far; those that were sent a second time, in bfloat16.
        squared_distance: to the peer, over the trained parameters applied so far.
    """

    def __init__(self, shared: SharedState, link: Link, id: ExchangeId, alpha_tilde: float) -> None:
        self.link = link
        self.id = id
        self.squared_distance = 0.0
        self.num_applied = 0
        self.num_repeated = 0
        self._shared = shared
        self._alpha_tilde = alpha_tilde
        self._chunks = shared.state.chunks
        self._theta = shared.start_exchange()

    @property
    @abc.abstractmethod
    def is_finished(self) -> bool:
        """Whether every chunk was applied here and all the peer needs was handed to the kernel."""

    @abc.abstractmethod
    def pump(self) -> None:
        """Take and send snapshots as far as the window and the link's queue allow.

        Raises:
            PoisonFound: a snapshot holds NaN or infinity; it was not sent.
        """

    @abc.abstractmethod
    def landing(self, frame_type: FrameType, key: ChunkKey, length: int) -> memoryview | None:
        """Return where a frame of the peer's goes, or None if it is not one expected now."""

    @abc.abstractmethod
    def landed(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """Deal with a frame that is :meth:`expected <expects>` and has arrived whole.

        ``payload`` may be the landing place or the peer's own memory; it is read before this
        returns.

        Raises:
            PoisonFound: the difference is not finite; nothing was applied.
        """

    @abc.abstractmethod
    def expects(self, frame_type: FrameType, key: ChunkKey) -> bool:
        """Whether a frame belongs to this exchange and may come now."""

    @final
    def end(self) -> None:
        """Let the phase go on: the exchange finished or was stopped."""
        self._shared.end_exchange()

    @final
    def _is_ours(self, key: ChunkKey) -> bool:
        return key.id == (self.id.initiator, self.id.incarnation, self.id.counter)

    @final
    def _send(self, frame_type: FrameType, index: int, payload: memoryview) -> None:
        key = ChunkKey(self.id.initiator, self.id.incarnation, self.id.counter, index)
        self.link.send_chunk(frame_type, key, payload)

    @final
    def _apply(self, chunk: Chunk, mine: Tensor, peers: Tensor) -> None:
        """Apply the difference of two snapshots, or of what both ends take for them."""
        self._applied(chunk, self._shared.exchange(chunk, mine, peers, self._alpha_tilde))

    @final
    def _applied(self, chunk: Chunk, squared_norm: float) -> None:
        """Take note of a chunk that was applied, unless its difference was not finite."""
        if not math.isfinite(squared_norm):
            raise PoisonFound(ours=False)
        if chunk.role is Role.TRAINED:
            self.squared_distance += squared_norm
        self.num_applied += 1
