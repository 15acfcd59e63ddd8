"""An exchange in an 8-bit code of what the peer does not know, confirmed chunk by chunk.

First each end sends the step of every block that it needs (``EXCHANGE_STEPS``); the larger of the
two is used. Then, for each chunk of trained parameters:

- ``EXCHANGE_CHUNK``: its code;
- ``EXCHANGE_VERDICT``: a byte, whether this end could code its snapshot and decode the peer's;
- ``EXCHANGE_REPEAT``, where either verdict is no: the same snapshot in bfloat16.

:mod:`~gossipdp.protocol.confirmation` says when a chunk is applied, and why no slot is needed
twice. Buffers, whose values differ too much in size to share a step (a variance must not turn
negative), are sent as they are and applied as they arrive.
"""

from typing import final

import torch

from gossipdp.dynamics.kernels import is_finite
from gossipdp.protocol.confirmation import Confirmation, Decision
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.exchange import Exchange, ExchangeBuffers, PoisonFound
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.lattice_codec import LatticeCodec, code_bytes, is_coded
from gossipdp.runtime.link import Link
from gossipdp.runtime.shared_state import SharedState

WINDOW = 6
"""More than plain exchanges have: a chunk closes after the way there and back."""
MOST_QUEUED = 2
"""Codes wait here rather than in the link's queue, where verdicts would wait behind them."""

_YES, _NO = memoryview(b"\x01"), memoryview(b"\x00")


@final
class LatticeExchange(Exchange):
    """See the module.

    Args:
        shared, link, id, alpha_tilde: see :class:`Exchange`.
        buffers: ``WINDOW`` slots and one, reused from exchange to exchange, as is ``codec``.
        codec: of the same window.
    """

    def __init__(
        self,
        shared: SharedState,
        link: Link,
        id: ExchangeId,
        alpha_tilde: float,
        *,
        buffers: ExchangeBuffers,
        codec: LatticeCodec,
    ) -> None:
        super().__init__(shared, link, id, alpha_tilde)
        self._buffers = buffers
        self._codec = codec
        self._is_coded = [is_coded(chunk) for chunk in self._chunks]
        self._confirmation = Confirmation([not coded for coded in self._is_coded], WINDOW)
        self._num_taken = 0
        # Frames handed to the link, in all and up to the last one that uses a slot's memory.
        self._num_handed = 0
        self._handed_of_slot = [0] * WINDOW
        self._steps_to_send: memoryview | None = codec.start()
        self._has_agreed = False

    @property
    def is_finished(self) -> bool:
        """See :class:`Exchange`."""
        return self._confirmation.is_finished and self.link.queued_chunks == 0

    def pump(self) -> None:
        """See :class:`Exchange`."""
        if self._steps_to_send is not None:
            self._hand(FrameType.EXCHANGE_STEPS, 0, self._steps_to_send)
            self._steps_to_send = None
        confirmation = self._confirmation
        while (
            self._has_agreed
            and confirmation.may_send
            and self.link.queued_chunks < MOST_QUEUED
            and self._has_left(confirmation.num_sent % WINDOW)
        ):
            index = confirmation.num_sent
            self._take(index)
            confirmation.sent()
            self._hand(FrameType.EXCHANGE_CHUNK, index, self._room(index % WINDOW, index))

    def _has_left(self, slot: int) -> bool:
        """Whether nothing in a slot is still to be sent: our repeat may be, of a closed chunk."""
        return self._num_handed - self.link.queued_chunks >= self._handed_of_slot[slot]

    def _hand(self, frame_type: FrameType, index: int, payload: memoryview) -> None:
        self._num_handed += 1
        if frame_type in (FrameType.EXCHANGE_CHUNK, FrameType.EXCHANGE_REPEAT):
            self._handed_of_slot[index % WINDOW] = self._num_handed
        self._send(frame_type, index, payload)

    def _room(self, slot: int, index: int, *, repeat: bool = False) -> memoryview:
        """Return where a chunk's code or repeat stands."""
        chunk = self._chunks[index]
        if repeat:
            return self._buffers.bytes(slot, chunk, torch.bfloat16)
        room = self._buffers.bytes(slot, chunk, chunk.pending.dtype)
        return room[: code_bytes(chunk)] if self._is_coded[index] else room[: chunk.x.nbytes]

    def _take(self, index: int) -> None:
        """Take the snapshot of chunk ``index``, and code it, unless that was done already.

        Its slot is free: for our own code ``pump`` has looked, and a peer that is ahead of us has
        closed chunk ``index - WINDOW``, for which it needed all that we sent of it.
        """
        if index < self._num_taken:
            return
        chunk = self._chunks[index]
        if self._is_coded[index]:
            self._shared.snapshot(chunk, self._theta, self._codec.snapshot_room(chunk))
            is_sound = self._codec.encode(chunk, self._room(index % WINDOW, index))
        else:
            snapshot = self._buffers.tensor(index % WINDOW, chunk)
            self._shared.snapshot(chunk, self._theta, snapshot)
            is_sound = is_finite(snapshot)
        if not is_sound:
            raise PoisonFound(ours=True)
        self._num_taken += 1

    def landing(self, frame_type: FrameType, key: ChunkKey, length: int) -> memoryview | None:
        """See :class:`Exchange`."""
        if not self.expects(frame_type, key):
            return None
        match frame_type:
            case FrameType.EXCHANGE_STEPS:
                room = self._codec.steps_landing
            case FrameType.EXCHANGE_VERDICT:
                room = self._buffers.bytes(WINDOW, self._chunks[key.index])[:1]
            case _:
                is_repeat = frame_type is FrameType.EXCHANGE_REPEAT
                room = self._room(WINDOW, key.index, repeat=is_repeat)
        return room if len(room) == length else None

    def expects(self, frame_type: FrameType, key: ChunkKey) -> bool:
        """See :class:`Exchange`."""
        if not self._is_ours(key):
            return False
        match frame_type:
            case FrameType.EXCHANGE_STEPS:
                return not self._has_agreed
            case FrameType.EXCHANGE_CHUNK:
                return self._has_agreed and self._confirmation.expects_code(key.index)
            case FrameType.EXCHANGE_VERDICT:
                return self._confirmation.expects_verdict(key.index)
            case FrameType.EXCHANGE_REPEAT:
                return self._confirmation.expects_repeat(key.index)
        return False

    def landed(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """See :class:`Exchange`."""
        index = key.index
        match frame_type:
            case FrameType.EXCHANGE_STEPS:
                self._codec.agree(payload)
                self._has_agreed = True
            case FrameType.EXCHANGE_CHUNK:
                self._code_landed(index, payload)
            case FrameType.EXCHANGE_VERDICT:
                self._follow(index, self._confirmation.verdict(index, payload == _YES))
            case FrameType.EXCHANGE_REPEAT:
                self._repeat_landed(index, payload)

    def _code_landed(self, index: int, payload: memoryview) -> None:
        self._take(index)
        chunk = self._chunks[index]
        if not self._is_coded[index]:
            self._confirmation.code(index, decoded=True)
            mine = self._buffers.tensor(index % WINDOW, chunk)
            self._apply(chunk, mine, torch.frombuffer(payload, dtype=chunk.x.dtype))
            return
        decoded = self._codec.decode(chunk, payload)
        decision = self._confirmation.code(index, decoded)
        self._hand(FrameType.EXCHANGE_VERDICT, index, _YES if decoded else _NO)
        self._follow(index, decision)

    def _follow(self, index: int, decision: Decision) -> None:
        chunk = self._chunks[index]
        match decision:
            case Decision.APPLY:
                self._apply(chunk, *self._codec.difference(chunk))
            case Decision.REPEAT:
                mine = self._buffers.tensor(index % WINDOW, chunk, torch.bfloat16)
                mine.copy_(self._codec.snapshot_room(chunk))
                if not is_finite(mine):
                    raise PoisonFound(ours=True)
                self.num_repeated += 1
                self._hand(
                    FrameType.EXCHANGE_REPEAT,
                    index,
                    self._room(index % WINDOW, index, repeat=True),
                )

    def _repeat_landed(self, index: int, payload: memoryview) -> None:
        chunk = self._chunks[index]
        mine = self._buffers.tensor(index % WINDOW, chunk, torch.bfloat16)
        peers = torch.frombuffer(payload, dtype=torch.bfloat16)
        self._confirmation.repeat(index)
        self._apply(chunk, mine, peers)
        self._codec.repeated(chunk, mine, peers)
