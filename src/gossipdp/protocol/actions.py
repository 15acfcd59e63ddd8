"""The requests of a protocol state machine to its driver.

Every input of a state machine returns a list of actions; the driver performs them in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from gossipdp.protocol.members import Rank
from gossipdp.protocol.messages import Epoch, ExchangeId

Body = TypeVar("Body")
NoticeKind: TypeAlias = Literal["joined", "silent", "lost", "answered", "restarted", "stopped"]


@dataclass(frozen=True)
class Send(Generic[Body]):
    """Send ``message`` to ``peer``.

    If there is no link to ``peer``, the driver dials for the types of ``DIALLED_MESSAGES`` (in
    ``messages``) and drops all others.
    """

    peer: int
    message: Body


@dataclass(frozen=True)
class Begin:
    """Start an exchange with ``peer``; end it with ``finished(id)``.

    ``moments`` are the periods of the optimizer's moments that travel with the parameters.
    The end that was asked sends and applies nothing before the first chunk of ``id.initiator``
    begins to arrive: that chunk confirms the exchange.
    Say ``progressed`` whenever any of its bytes came or left: an exchange without progress ends.
    """

    peer: int
    id: ExchangeId
    alpha_tilde: float
    moments: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stop:
    """Stop the exchange ``id`` with ``peer`` at once and close their link.

    The state machine has forgotten the exchange already: no ``finished`` is expected. The link is
    closed because half a chunk may be on its way on it.
    """

    peer: int
    id: ExchangeId
    reason: str


@dataclass(frozen=True)
class Withdrawn:
    """Forget the exchange ``id`` with ``peer``, which this worker was to answer.

    The peer had withdrawn its proposal before ACCEPT reached it, so neither end has sent a chunk,
    and the link stays. As after ``Stop``, no ``finished`` is expected.
    """

    peer: int
    id: ExchangeId


@dataclass(frozen=True)
class Unlink:
    """Close the link to ``peer``, which is silent or broke the rules; it may be dialled again.

    The state machine has forgotten the link already; ``link_down`` may still be reported.
    """

    peer: int
    reason: str


class Notice(msgspec.Struct, frozen=True):
    """A change in a worker's life, as this worker noticed it; logs and status answers hold it.

    Attributes:
        rank: of the worker concerned.
        kind: ``joined``: it takes part, and was not one of the run's first workers; ``silent``: its
            link has been silent for the time-out, though it is open; ``lost``: no worker, here or
            elsewhere, hears it any more, and the others go on without it; ``answered``: the same
            process answers again after it was silent or lost; ``restarted``: a new process takes
            part under its rank; ``stopped``: this worker itself did not run for the time-out.
        at_s: by this worker's clock, of which a machine has one
            (:func:`~gossipdp.links.clock.since_boot_s`).
        number: of this worker's notices so far, this one included.
        silent_s: how long nothing had been heard of the worker, or of its former process; if
            ``stopped``, how long this worker did not run. None if it is not known.
    """

    rank: Rank
    kind: str
    at_s: float
    number: int = 0
    silent_s: float | None = None


@dataclass(frozen=True)
class Reach:
    """Dial ``peer`` at ``host:port`` at once, neighbour or not.

    Answer with the outcome: ``link_up``, ``reached`` (it turned us away, so it lives) or
    ``dial_failed``. ``peer`` may be this worker's own rank, when another process claims it.
    """

    peer: int
    host: str
    port: int


@dataclass(frozen=True)
class Rebuilt:
    """Use the new graph over the live workers from now on.

    Set the speed of the phase, link to ``neighbours`` (links to others may stay), and go on
    dialling ``dead``, with back-off: a partition may heal.

    Args:
        eta: mixing speed at comm rate 1; 0 where the method has no momentum.
        worker_rate: the sum of this worker's rates at comm rate 1.
    """

    eta: float
    worker_rate: float
    neighbours: frozenset[int]
    dead: frozenset[int]


@dataclass(frozen=True)
class Superseded:
    """End this worker: for ``reason`` it can no longer have its rank.

    A joiner that chose its rank itself may start again under another one instead.
    """

    reason: str


@dataclass(frozen=True)
class LeftBehind:
    """End this worker: it stood still for ``stood_still_s``, and finds nobody in the run any more.

    The others have ended, or have died. Its parameters are older than theirs.
    """

    stood_still_s: float


LifeAction: TypeAlias = Notice | Unlink | Reach | Rebuilt | Superseded | LeftBehind
"""The actions that keep a run alive through failures."""

# --- sums over a tree: actions on the parameters ----------------------------------------------
# The machines do no arithmetic and hold no payload: chunks are numbers to them. Data frames go on
# the present link; the driver drops them when it is lost, since the machines ask for them again.


@dataclass(frozen=True)
class SendPartial:
    """Send the sum of ``chunk`` to ``peer`` as a Partial frame of ``epoch``."""

    peer: int
    epoch: Epoch
    chunk: int


@dataclass(frozen=True)
class FinishChunk:
    """Divide the sum of ``chunk``, which is complete, by ``divisor``: it is the result.

    Answer with ``chunk_finished(epoch, chunk, squared_distance)``.
    """

    epoch: Epoch
    chunk: int
    divisor: int


@dataclass(frozen=True)
class SendResult:
    """Send ``chunk`` of the result ``origin`` to ``peer`` as a Result frame."""

    peer: int
    origin: Epoch
    chunk: int


@dataclass(frozen=True)
class Forget:
    """Drop the sums and results of ``epoch``: of chunks below ``before``, or of all (None)."""

    epoch: Epoch
    before: int | None = None


@dataclass(frozen=True)
class Commit:
    """Keep the result ``origin``, which all end with; it is final once ``Finished`` follows."""

    origin: Epoch
    consensus_distance: float
    num_members: int


@dataclass(frozen=True)
class Finished:
    """Let this worker leave: all live workers have committed."""


@dataclass(frozen=True)
class AverageEnded:
    """Hand over the average that this worker asked for, or say that there is none.

    Args:
        epoch: names the sum that holds it.
        count: the number of workers in it; 0: there is none.
        without: the live workers that are not in it, and why; this one itself may be among them.
    """

    epoch: Epoch
    count: int
    without: Mapping[int, str]


DataAction: TypeAlias = (
    SendPartial | FinishChunk | SendResult | Forget | Commit | Finished | AverageEnded
)
"""The actions on the parameters."""
