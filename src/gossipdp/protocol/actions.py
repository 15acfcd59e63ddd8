"""What a protocol state machine asks its driver to do.

Every input of a state machine returns a list of actions; the driver performs them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from gossipdp.protocol.messages import Epoch, ExchangeId

Body = TypeVar("Body")


@dataclass(frozen=True)
class Send(Generic[Body]):
    """Send ``message`` to ``peer``.

    Without a link to ``peer`` the driver drops it, except for a consolidation message or a
    question of life (``DIALLED_MESSAGES`` in ``messages``), for which it dials.
    """

    peer: int
    message: Body


@dataclass(frozen=True)
class Begin:
    """Start an exchange with ``peer``; end it with ``finished(id)`` or ``failed(id)``.

    Both ends may send chunks at once, but the one that was asked (``initiator`` False) applies
    nothing before the initiator's first chunk has arrived: that chunk confirms the exchange.
    Say ``progressed`` whenever any of its bytes came or left: it ends where that stops.
    """

    peer: int
    id: ExchangeId
    alpha_tilde: float
    initiator: bool


@dataclass(frozen=True)
class Stop:
    """Stop the exchange ``id`` with ``peer`` at once and close their link.

    The state machine has forgotten the exchange already: neither ``finished`` nor ``failed`` is
    expected. The link is closed because half a chunk may be on its way on it.
    """

    peer: int
    id: ExchangeId
    reason: str


@dataclass(frozen=True)
class Unlink:
    """Close the link to ``peer``, which is silent or broke the rules; it may be dialled anew.

    The state machine has forgotten the link already; ``link_down`` may still be reported.
    """

    peer: int
    reason: str


@dataclass(frozen=True)
class Reach:
    """Dial ``peer`` at ``host:port`` at once, whether or not it was to be linked to.

    Answer with what comes of it: ``link_up``, ``reached`` (it turned us away, so it lives),
    ``dial_refused`` (its address refuses connections) or ``peer_unreachable``. ``peer`` may be
    this worker's own rank, when another process claims it.
    """

    peer: int
    host: str
    port: int


@dataclass(frozen=True)
class Rebuilt:
    """The graph over the live workers is another one now: live by it from now on.

    Set the speed of the phase, link to ``neighbours`` (links to others may stay), and go on
    dialling ``dead``, with back-off: a partition may heal.

    Args:
        eta: mixing speed at comm rate 1; 0 where the method has no momentum.
        worker_rate: the sum of this worker's rates at comm rate 1.
        neighbours: the workers to exchange with.
        dead: workers declared dead.
    """

    eta: float
    worker_rate: float
    neighbours: frozenset[int]
    dead: frozenset[int]


@dataclass(frozen=True)
class Superseded:
    """End this worker: for ``reason`` it can no longer have its rank.

    A joiner that chose its rank itself may instead start anew under another one.
    """

    reason: str


LifeAction: TypeAlias = Unlink | Reach | Rebuilt | Superseded
"""What keeps a run alive through failures."""

# --- what a consolidation does to the parameters ---------------------------------------------
# The machine does no arithmetic and holds no payload: chunks are numbers to it. Data frames go on
# the link that is there; without one the driver drops them, for they are asked for again.


@dataclass(frozen=True)
class Prepare:
    """Set the sums of the float chunks to this worker's input, which stays where it is.

    The first time, flow to infinity before. Sums and results share one buffer: partial sums are
    added to it, results land in it. A frame that is being sent from it must be gone first:
    dropped if none of it was sent, else its link closed.
    """


@dataclass(frozen=True)
class SendPartial:
    """Send the sum of ``chunk`` to ``peer`` as a Partial frame of ``epoch``."""

    peer: int
    epoch: Epoch
    chunk: int


@dataclass(frozen=True)
class FinishChunk:
    """The sum of ``chunk`` is complete: divide it by ``num_members``; it is the result."""

    chunk: int
    num_members: int


@dataclass(frozen=True)
class SendResult:
    """Send ``chunk`` of the result ``origin`` to ``peer`` as a Result frame.

    After COMMIT too, when the result stands in the parameters.
    """

    peer: int
    origin: Epoch
    chunk: int


@dataclass(frozen=True)
class MeasureDistance:
    """Compute |input - result|² in float64; answer with ``distance_measured(origin, ...)``."""

    origin: Epoch


@dataclass(frozen=True)
class Commit:
    """Put the result in the place of the input; it is final once ``Finished`` follows."""

    origin: Epoch
    consensus_distance: float
    num_members: int


@dataclass(frozen=True)
class Finished:
    """All live workers have committed: this worker may leave."""


DataAction: TypeAlias = (
    Prepare | SendPartial | FinishChunk | SendResult | MeasureDistance | Commit | Finished
)
"""What the driver does to the parameters."""
