"""What a protocol state machine asks its driver to do.

Every input of a state machine returns a list of actions; the driver performs them in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from gossipdp.protocol.messages import ExchangeId

Body = TypeVar("Body")


@dataclass(frozen=True)
class Send(Generic[Body]):
    """Send ``message`` to ``peer``.

    Without a link to ``peer`` the driver drops it, except for a consolidation message, for which
    it dials.
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
