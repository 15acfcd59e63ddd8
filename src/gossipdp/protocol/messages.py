"""What workers say to one another: control messages, and the envelope that carries them.

Every message travels in an :class:`Envelope` together with news of membership and progress.
The wire format is msgpack, strictly typed: whatever does not decode to exactly these types is a
:class:`ProtocolError`, and nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gossipdp.protocol.consolidation_messages import ConsolidationMessage
from gossipdp.protocol.membership import Member
from gossipdp.protocol.progress import ProgressEntry

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Gain = Annotated[float, Meta(gt=0.0, le=1e9)]
Reason = Annotated[str, Meta(max_length=1000)]


class ProtocolError(ValueError):
    """Bytes from another worker that are no message of ours."""


class ExchangeId(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One exchange, named by the life of its initiator and a counter within that life."""

    initiator: Natural
    incarnation: Natural
    counter: Natural


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of the control messages: a msgpack array whose first item is the class's name."""


class Propose(_Message, frozen=True):
    """Exchange with me? ``alpha_tilde`` is the proposer's."""

    id: ExchangeId
    alpha_tilde: Gain


class Accept(_Message, frozen=True):
    """Yes, from this moment; ``alpha_tilde``, the smaller of the two, binds both ends."""

    id: ExchangeId
    alpha_tilde: Gain


class Busy(_Message, frozen=True):
    """Not now; I may send FREE later."""

    id: ExchangeId


class Free(_Message, frozen=True):
    """I told you BUSY and am idle now: answer PROPOSE or PASS."""


class Pass(_Message, frozen=True):
    """The answer to FREE of one who does not want to exchange now."""


class Cancel(_Message, frozen=True):
    """You accepted a proposal that I no longer hold: forget the exchange."""

    id: ExchangeId


class Abort(_Message, frozen=True):
    """I stop this exchange, which had begun."""

    id: ExchangeId
    reason: Reason


class RequestState(_Message, frozen=True):
    """Send me your state from chunk ``start`` on; ``counter`` tells my requests apart."""

    counter: Natural
    start: Natural


class StateRefused(_Message, frozen=True):
    """I cannot send the state, or the optimizers' state, that you asked for."""

    counter: Natural
    reason: Reason


class RequestTraining(_Message, frozen=True):
    """Send me your optimizers' state; ``counter`` as in ``RequestState``."""

    counter: Natural


class OfferTraining(_Message, frozen=True):
    """The state that was asked for takes ``num_bytes``; it follows in chunks."""

    counter: Natural
    num_bytes: Natural


class AskLife(_Message, frozen=True):
    """Do you hear from ``suspect``? Answer once you hear from it anew, or have given it up."""

    suspect: Natural
    counter: Natural


class TellLife(_Message, frozen=True):
    """The answer to the question ``counter``: whether ``suspect`` was heard."""

    suspect: Natural
    counter: Natural
    is_heard: bool


class AskMembers(_Message, frozen=True):
    """From a worker that is about to join: what must I know?"""

    counter: Natural


class Members(_Message, frozen=True):
    """The answer to the question ``counter`` of one who is about to join.

    ``num_workers`` is the number of workers that the run began with, whose graph the joiner
    builds too. ``is_ending``: consolidation has begun here, and the run takes in nobody.
    """

    counter: Natural
    num_workers: Natural
    is_ending: bool
    members: tuple[Member, ...]
    progress: tuple[ProgressEntry, ...]


class Heartbeat(_Message, frozen=True):
    """I live; the news in the envelope is all there is."""


ExchangeMessage: TypeAlias = Propose | Accept | Busy | Free | Pass | Cancel | Abort
LifeMessage: TypeAlias = AskLife | TellLife
Message: TypeAlias = (
    ExchangeMessage
    | RequestState
    | StateRefused
    | RequestTraining
    | OfferTraining
    | LifeMessage
    | AskMembers
    | Members
    | Heartbeat
    | ConsolidationMessage
)
DIALLED_MESSAGES = ConsolidationMessage | AskLife
"""Those for which the driver dials where there is no link."""


class Envelope(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with the news that travels with it."""

    message: Message
    members: tuple[Member, ...] = ()
    progress: tuple[ProgressEntry, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """The bytes of an envelope."""
    return _encoder.encode(envelope)


def decode(data: bytes | bytearray | memoryview) -> Envelope:
    """The envelope in ``data``.

    Raises:
        ProtocolError: ``data`` is not exactly one well-typed envelope.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"a control message of {len(data)} bytes is malformed: {error}"
        ) from error
