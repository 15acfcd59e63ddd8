"""One exchange: chunks out and in, a window at a time, applied as soon as both halves are here.

PROPOSE says which moments travel beside the parameters. A chunk is copied to a slot at the
exchange's phase and sent. When the peer's chunk of the same index has arrived whole, the difference
of the two snapshots is applied. The end that was asked sends and applies nothing before the
initiator's first frame, which confirms the exchange: until then the initiator may withdraw.

Frames: ``EXCHANGE_STEPS`` (if the exchange is coded: the initiator chooses, and its first frame
shows it), then for each chunk ``EXCHANGE_CHUNK``. If the codec cannot be certain that the peer can
read it, the peer answers with a byte in ``EXCHANGE_VERDICT``; if either verdict is no, both send
the same snapshot again in bfloat16, ``EXCHANGE_REPEAT``. :mod:`~gossipdp.protocol.confirmation`
says when a chunk is applied, and why no slot is needed twice.
"""

import math
from dataclasses import dataclass
from typing import final

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.state import State
from gossipdp.gossip.codec import Codec, PoisonFound
from gossipdp.links.frames import EXCHANGE_TYPES, SHARED_TYPES, ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.protocol.confirmation import Confirmation, Decision
from gossipdp.protocol.messages import ExchangeId

_YES, _NO = memoryview(b"\x01"), memoryview(b"\x00")


@dataclass(frozen=True)
class CompletedExchange:
    """One exchange that ended well, as this end of it saw it.

    Attributes:
        peer: the other end.
        initiated: whether this end asked for it.
        started_s, ended_s: from the agreement to the last chunk applied here, by
            :func:`~gossipdp.links.clock.since_boot_s`.
        half_squared_distance: half the squared distance to the peer, over trained parameters.
        wire_format: full, bfloat16 or lattice8.
    """

    peer: int
    initiated: bool
    started_s: float
    ended_s: float
    half_squared_distance: float
    wire_format: str = "full"


@final
class Exchange:
    """The data side of one exchange that the pairing has agreed on. Driven by the gossip thread.

    The exchange before it, with the same ``codec``, has ended. Chunks with another ``id`` are
    dropped. ``alpha_tilde`` is the gain on which both ends agreed; the phase ``theta`` stands still
    until the exchange has ended. The moments of the periods in ``moments`` travel too.

    Attributes:
        num_repeated: chunks that were sent a second time, in bfloat16.
        squared_distance: to the peer, over the trained parameters applied so far.
    """

    def __init__(
        self,
        state: State,
        codec: Codec,
        link: Link,
        id: ExchangeId,
        *,
        alpha_tilde: float,
        theta: float,
        moments: tuple[int, ...] = (),
    ) -> None:
        self.link, self.id = link, id
        self.squared_distance = 0.0
        self.num_applied = self.num_repeated = 0
        self._chunks = state.carried(moments)
        self.num_chunks = len(self._chunks)
        self._codec = codec
        self._phase_and_gain = theta, alpha_tilde
        self._is_confirmed = id.initiator != link.peer
        self._num_encoded = 0
        # The number of slot frames handed to the link, and that number at each slot's last frame.
        self._num_handed = 0
        self._start(codec.chooses_code(link.is_shared))

    def _start(self, is_coded: bool) -> None:
        """Take this form; the end that was asked takes the initiator's at the first frame."""
        codec = self._codec
        self._preface = codec.start(self._chunks, *self._phase_and_gain, is_coded=is_coded)
        self._has_agreed = not is_coded
        certain = [codec.is_certain(chunk) for chunk in self._chunks]
        self._confirmation = Confirmation(certain, codec.form.window)
        self._handed_of_slot = [0] * codec.form.window

    @property
    def is_finished(self) -> bool:
        """Return whether all was applied here and all that the peer needs went to the kernel.

        Other chunks on the link (a state on its way) count neither here nor in :meth:`pump`.
        """
        return self._confirmation.is_finished and self.link.queued_of(*EXCHANGE_TYPES) == 0

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of this exchange and earlier ones that its link has moved, either way.

        Messages and heartbeats do not count, nor do headers.
        """
        counts = self.link.chunk_bytes_sent, self.link.chunk_bytes_received
        return sum(count[frame_type] for count in counts for frame_type in EXCHANGE_TYPES)

    def pump(self) -> None:
        """Send snapshots as far as window and queue allow; raise PoisonFound if one is poisoned."""
        if not self._is_confirmed:
            return
        if self._preface is not None:
            self._hand(FrameType.EXCHANGE_STEPS, 0, self._preface)
            self._preface = None
        confirmation = self._confirmation
        while (
            self._has_agreed
            and confirmation.may_send
            and self.link.queued_of(*EXCHANGE_TYPES) < self._codec.form.most_queued
            and self._has_left(confirmation.num_sent % self._codec.form.window)
        ):
            index = confirmation.num_sent
            self._encode(index)
            confirmation.sent()
            self._hand(FrameType.EXCHANGE_CHUNK, index, self._codec.room(self._chunks[index]))

    def _encode(self, index: int) -> None:
        """Take the snapshot of chunk ``index`` unless there is one already.

        Its slot is free: ``pump`` has checked that, and a peer that is ahead of us has closed chunk
        ``index - window``, so it has read our slot.
        """
        if index == self._num_encoded:
            self._codec.encode(self._chunks[index])
            self._num_encoded += 1

    def _has_left(self, slot: int) -> bool:
        """Return whether all of a slot has left; the repeat of a closed chunk may still wait."""
        num_left = self._num_handed - self.link.queued_of(*SHARED_TYPES)
        return num_left >= self._handed_of_slot[slot]

    def _hand(self, frame_type: FrameType, index: int, payload: memoryview) -> None:
        if frame_type in SHARED_TYPES:
            self._num_handed += 1
            self._handed_of_slot[index % self._codec.form.window] = self._num_handed
        key = ChunkKey(self.id.initiator, self.id.incarnation, self.id.counter, index)
        self.link.send_chunk(frame_type, key, payload)

    # Frames that arrive.

    def expects(self, frame_type: FrameType, key: ChunkKey) -> bool:
        """Return whether a frame belongs to this exchange and may come now."""
        if key.id != (self.id.initiator, self.id.incarnation, self.id.counter):
            return False
        if not self._is_confirmed:
            is_coded = frame_type is FrameType.EXCHANGE_STEPS
            is_first = is_coded or frame_type is FrameType.EXCHANGE_CHUNK
            return is_first and key.index == 0 and is_coded in self._codec.forms
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

    def landing(self, frame_type: FrameType, key: ChunkKey) -> memoryview | None:
        """Return where a frame of the peer goes, or None if it is not expected now.

        The link ends itself if the frame has another length.
        """
        if not self.expects(frame_type, key):
            return None
        is_coded = frame_type is FrameType.EXCHANGE_STEPS
        if not self._is_confirmed and is_coded != self._codec.form.is_coded:
            self._start(is_coded)
        self._is_confirmed = True
        if frame_type is FrameType.EXCHANGE_STEPS:
            return self._codec.preface_landing
        is_repeat = frame_type is FrameType.EXCHANGE_REPEAT
        room = self._codec.room(self._chunks[key.index], lands=True, repeats=is_repeat)
        return room[:1] if frame_type is FrameType.EXCHANGE_VERDICT else room

    def landed(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """Deal with a frame that is :meth:`expected <expects>` and has arrived whole.

        ``payload`` may be the landing place or the peer's own memory; it is read before the call
        returns.

        Raises:
            PoisonFound: the difference is not finite; nothing was applied.
        """
        index, codec, confirmation = key.index, self._codec, self._confirmation
        match frame_type:
            case FrameType.EXCHANGE_STEPS:
                codec.agree(payload)
                self._has_agreed = True
            case FrameType.EXCHANGE_CHUNK:
                self._encode(index)  # our own may have yet to be taken
                chunk = self._chunks[index]
                is_certain = codec.is_certain(chunk)
                decoded = is_certain or codec.decode(chunk, payload)
                decision = confirmation.code(index, decoded)
                if not is_certain:
                    self._hand(FrameType.EXCHANGE_VERDICT, index, _YES if decoded else _NO)
                self._follow(index, decision, payload)
            case FrameType.EXCHANGE_VERDICT:
                self._follow(index, confirmation.verdict(index, payload == _YES), payload)
            case FrameType.EXCHANGE_REPEAT:
                confirmation.repeat(index)
                self._apply(index, payload, is_repeat=True)

    def _follow(self, index: int, decision: Decision, payload: memoryview) -> None:
        match decision:
            case Decision.APPLY:
                self._apply(index, payload)
            case Decision.REPEAT:
                self.num_repeated += 1
                repeat = self._codec.repeat(self._chunks[index])
                self._hand(FrameType.EXCHANGE_REPEAT, index, repeat)

    def _apply(self, index: int, payload: memoryview, *, is_repeat: bool = False) -> None:
        """Apply and count a chunk; raise PoisonFound if the difference is not finite."""
        squared_norm = self._codec.exchange(self._chunks[index], payload, is_repeat=is_repeat)
        if not math.isfinite(squared_norm):
            raise PoisonFound(ours=False)
        if self._chunks[index].role is Role.TRAINED:
            self.squared_distance += squared_norm
        self.num_applied += 1
