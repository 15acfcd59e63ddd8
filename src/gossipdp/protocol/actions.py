"""What a protocol state machine asks its driver to do.

Every input of a state machine returns a list of actions; the driver performs them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from gossipdp.protocol.messages import ExchangeId

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
    """Close the link to ``peer``, which is silent, so that it is dialled anew.

    The state machine has forgotten the link already; ``link_down`` may still be reported.
    """

    peer: int
    reason: str


@dataclass(frozen=True)
class Reach:
    """Dial ``peer`` at ``host:port`` at once, whether or not it was to be linked to.

    Answer with what comes of it: ``link_up``, ``reached`` (it turned us away, so it lives),
    ``peer_dead`` (its address refuses connections) or ``peer_unreachable``. ``peer`` may be this
    worker's own rank, when another process claims it.
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
class Refresh:
    """Take over the parameters of ``peer``: x + c/2 of its own, with c = 0.

    Answer with ``refreshed`` or ``refresh_failed``; until then nothing is exchanged.
    """

    peer: int


@dataclass(frozen=True)
class Superseded:
    """Another live process has this worker's rank and stands: end this worker.

    A joiner that chose its rank itself may instead start anew under another one.
    """


LifeAction: TypeAlias = Unlink | Reach | Rebuilt | Refresh | Superseded
"""What keeps a run alive through failures."""
