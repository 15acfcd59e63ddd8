"""The control messages between workers, and the envelope that carries them.

Every message travels in an :class:`Envelope` together with news of membership and progress. The
wire format is msgpack, strictly typed and bounded: bytes that do not decode to exactly these types,
or hold a number or a list beyond its bound, are a :class:`ProtocolError`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gossipdp.protocol.members import Incarnation, Member, ProcessId, ProgressEntry, Rank

MAX_NEWS = 256
"""Records of membership, and as many of progress, in one envelope."""
MAX_PERIODS = 64
"""Different periods of an optimizer's moments."""
MAX_RECORDS = 1024
"""Records of membership, and as many of progress, in the answer to a joiner."""

Counter = Annotated[int, Meta(ge=0, le=2**62)]
Gain = Annotated[float, Meta(ge=0.5, le=1e9)]
MAX_DISTANCE2 = 1e300
Distance2 = Annotated[float, Meta(ge=0.0, le=MAX_DISTANCE2)]
Reason = Annotated[str, Meta(max_length=200)]
Process: TypeAlias = tuple[Rank, ProcessId]
"""(rank, process id): the holder of inputs and promises, whatever its incarnation."""


class ProtocolError(ValueError):
    """A message that is none of ours, or breaks the rules: the link that brought it is closed."""


class _Value(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the values inside messages."""


class _Message(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of the control messages: a msgpack array whose first item is the class's name."""


# --- exchanges -------------------------------------------------------------------------------


class ExchangeId(_Value, frozen=True):
    """One exchange, named by the life of its initiator and a counter within that life."""

    initiator: Rank
    incarnation: Incarnation
    counter: Counter


class Propose(_Message, frozen=True):
    """Exchange with me? ``alpha_tilde`` is the proposer's.

    ``moments``: the periods of the optimizer's moments that are to travel too.
    """

    id: ExchangeId
    alpha_tilde: Gain
    moments: Annotated[tuple[Counter, ...], Meta(max_length=MAX_PERIODS)] = ()


class Accept(_Message, frozen=True):
    """Yes, from this moment; ``alpha_tilde``, the smaller of the two, binds both ends."""

    id: ExchangeId
    alpha_tilde: Gain


class Busy(_Message, frozen=True):
    """Not now; I may send FREE later.

    ``is_closed``: I accept nobody's proposal; do not ask again before you hear otherwise from me.
    """

    id: ExchangeId
    is_closed: bool = False


class Free(_Message, frozen=True):
    """I answered BUSY to you and am idle now: answer PROPOSE or PASS."""


class Pass(_Message, frozen=True):
    """The answer to FREE of a worker that does not want to exchange now."""


class Cancel(_Message, frozen=True):
    """You accepted a proposal that I no longer hold: forget the exchange."""

    id: ExchangeId


class Abort(_Message, frozen=True):
    """I stop this exchange, which had begun."""

    id: ExchangeId
    reason: Reason


ExchangeMessage: TypeAlias = Propose | Accept | Busy | Free | Pass | Cancel | Abort

# --- states ----------------------------------------------------------------------------------


class RequestState(_Message, frozen=True):
    """Send me your optimizers' state, if I want it, and then your parameters from ``start`` on.

    ``counter`` tells my requests apart; ``start`` counts chunks.
    """

    counter: Counter
    start: Counter
    wants_optimizers: bool


class OfferState(_Message, frozen=True):
    """The requested state follows: a layout of so many bytes, and what it describes."""

    counter: Counter
    layout_bytes: Counter


class StateRefused(_Message, frozen=True):
    """I cannot send the state for which you asked; ``is_early``: I have none yet, so ask again."""

    counter: Counter
    reason: Reason
    is_early: bool


# --- sums over a tree; `reduction` says when -------------------------------------------------


class Epoch(_Value, frozen=True):
    """The name of one sum over a tree: its root, the root's process, and a number.

    In consolidation it is an epoch, led by its root. ``process_tag`` is the low 32 bits of the
    root's process id. An incarnation would not do: two lives that did not know of each other may
    share one.
    """

    number: Counter
    leader: Rank
    process_tag: Annotated[int, Meta(ge=0, lt=2**32)]

    @property
    def order(self) -> tuple[int, int, int]:
        """Return the key that sorts epochs, a total order; the greatest wins."""
        return (self.number, -self.leader, self.process_tag)


class PullPartials(_Message, frozen=True):
    """To a child: send your partial sums of the chunks up to before ``stop``.

    ``start`` is the first chunk that has not arrived here. A new link goes on there.
    """

    epoch: Epoch
    start: Counter
    stop: Counter


class Progressed(_Message, frozen=True):
    """To parent and children: payload of this sum has moved in ``count`` ticks.

    Up the tree it counts ticks with movement in the subtree, down the tree those in the whole. So
    others can tell a chunk on a slow link elsewhere from a worker that gives nothing.
    """

    epoch: Epoch
    count: Counter


class Stalled(_Message, frozen=True):
    """To the root: worker ``rank`` gives nothing to this sum, for this reason.

    Its parent says so, or the worker itself. ``is_heard``: the link between the two shows life.
    """

    epoch: Epoch
    rank: Rank
    is_heard: bool
    reason: Reason


ReductionMessage: TypeAlias = PullPartials | Progressed | Stalled


class AskAverage(_Message, frozen=True):
    """Down the tree over ``members``, the first of which asks: sum your parameters.

    A caller has one request at a time.
    """

    epoch: Epoch
    members: Annotated[tuple[Rank, ...], Meta(max_length=2**15)]
    has_suspects: bool = False


class TellAverage(_Message, frozen=True):
    """Up the tree: the sums are over ``count`` workers; those in ``without`` have none to give."""

    epoch: Epoch
    count: Annotated[int, Meta(ge=0, le=2**15)]
    without: Annotated[tuple[Rank, ...], Meta(max_length=2**15)] = ()


AverageMessage: TypeAlias = AskAverage | TellAverage

# --- life ------------------------------------------------------------------------------------


class AskLife(_Message, frozen=True):
    """Do you hear ``suspect``? Answer once you have heard it again, or have given it up."""

    suspect: Rank
    counter: Counter


class TellLife(_Message, frozen=True):
    """The answer to the question ``counter``: whether ``suspect`` was heard."""

    suspect: Rank
    counter: Counter
    is_heard: bool


class AskMembers(_Message, frozen=True):
    """From a worker that is about to join: tell me about the run."""


class Members(_Message, frozen=True):
    """The answer to a worker that is about to join.

    The run began with ``num_workers`` workers; the joiner builds their graph too. ``is_ending``:
    consolidation has begun here, and the run takes in no worker. In a large run the live workers
    and the last joiners come first, and the progress of the latest lives; links bring the rest.
    """

    num_workers: Annotated[int, Meta(ge=1, le=2**20)]
    is_ending: bool
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_RECORDS)]
    progress: Annotated[tuple[ProgressEntry, ...], Meta(max_length=MAX_RECORDS)]


class Heartbeat(_Message, frozen=True):
    """I live; there is nothing but the news in the envelope."""


LifeMessage: TypeAlias = AskLife | TellLife

# --- consolidation; `consolidate` says when -------------------------------------------------


class Average(_Value, frozen=True):
    """A result: the mean over the ``num_members`` members of epoch ``origin``, which names it.

    ``consensus_distance`` is None until it is committed. If there are two results, the one with the
    greater ``order`` survives: a committed one, or else the one computed later.
    """

    origin: Epoch
    num_members: Annotated[int, Meta(ge=1, le=2**20)]
    consensus_distance: Distance2 | None

    @property
    def is_committed(self) -> bool:
        return self.consensus_distance is not None

    @property
    def order(self) -> tuple[bool, tuple[int, int, int]]:
        return (self.is_committed, self.origin.order)


class LeftOut(_Value, frozen=True):
    """A live worker that is not in the average, and why."""

    process: Process
    reason: Reason


class BeginEpoch(_Message, frozen=True):
    """Down the tree: join this epoch. Spread ``average``; if it is None, compute one.

    ``members`` are in the order of the tree, suspects last. Those in ``left_out`` are done, but
    gave nothing to earlier epochs: no worker waits for them. Unless ``waits_for_all``, the leader
    has waited long enough for those that still train, and no member waits longer.
    """

    epoch: Epoch
    members: Annotated[tuple[Process, ...], Meta(max_length=2**15)]
    average: Average | None
    has_suspects: bool = False
    left_out: Annotated[tuple[LeftOut, ...], Meta(max_length=2**15)] = ()
    waits_for_all: bool = True

    def __post_init__(self) -> None:
        ranks = [rank for rank, _ in self.members]
        if not ranks or len(ranks) != len(set(ranks)) or ranks[0] != self.epoch.leader:
            raise ValueError(
                "the members of an epoch are named once each, its leader first: leader "
                f"{self.epoch.leader} does not lead these {len(ranks)}"
            )


class NewerEpoch(_Message, frozen=True):
    """To the worker that leads, or should: I am in this epoch and follow none below it."""

    epoch: Epoch


class Held(_Message, frozen=True):
    """To the leader of ``epoch``: I do not join, since I hold this result; spread it instead."""

    epoch: Epoch
    average: Average


class PullResults(_Message, frozen=True):
    """To the parent or a holder: send the chunks of this result from ``start`` up to ``stop``.

    It is repeated with a higher ``start`` while they arrive, so the sender knows that they do. In
    another ``epoch`` of the worker that asks, and on a new link, sending restarts at ``start``.
    """

    epoch: Epoch
    origin: Epoch
    start: Counter
    stop: Counter


class Distance(_Message, frozen=True):
    """Up the tree: all below hold the result; the sum of their squared distances to it."""

    epoch: Epoch
    squared_distance: Distance2


class CommitEpoch(_Message, frozen=True):
    """Down the tree: every member holds the result; commit to it."""

    epoch: Epoch
    consensus_distance: Distance2


class Committed(_Message, frozen=True):
    """Up the tree: all below have committed."""

    epoch: Epoch


class Release(_Message, frozen=True):
    """Down the tree: all have committed; leave."""

    epoch: Epoch


ConsolidationMessage: TypeAlias = (
    BeginEpoch | NewerEpoch | Held | PullResults | Distance | CommitEpoch | Committed | Release
)

# --- on the wire -----------------------------------------------------------------------------

Message: TypeAlias = (
    ExchangeMessage
    | RequestState
    | OfferState
    | StateRefused
    | ReductionMessage
    | AverageMessage
    | LifeMessage
    | AskMembers
    | Members
    | Heartbeat
    | ConsolidationMessage
)
DIALLED_MESSAGES = ConsolidationMessage | ReductionMessage | AverageMessage | AskLife
"""The messages for which the driver dials if there is no link."""


class Envelope(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message with the news that travels with it."""

    message: Message
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_NEWS)] = ()
    progress: Annotated[tuple[ProgressEntry, ...], Meta(max_length=MAX_NEWS)] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(data: bytes | bytearray | memoryview) -> Envelope:
    """Return the one well-typed envelope within all bounds in ``data``, or raise ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(
            f"a control message of {len(data)} bytes is malformed: {error}"
        ) from error
