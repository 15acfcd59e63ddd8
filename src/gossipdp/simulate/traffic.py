"""What a simulated network carries: how long it takes, when it arrives, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gossipdp.protocol.actions import Begin, Rebuilt
from gossipdp.protocol.messages import ExchangeId

Seconds: TypeAlias = Callable[[int, int], float]
"""A duration for something that goes from one rank to another."""


@dataclass(frozen=True)
class Conditions:
    """How long everything takes, in seconds of virtual time.

    Args:
        latency_s: how long a message travels from one rank to another.
        transfer_s: how long the data of one exchange need to get onto the link. Asked once for
            each exchange: chunk by chunk each end waits for the other (the runtime's window), so
            the two directions take equally long.
        step_s: how long the next gradient step of a rank takes.
        detection_s: how long until the second rank learns that its link to the first was cut.
    """

    latency_s: Seconds
    transfer_s: Seconds
    step_s: Callable[[int], float]
    detection_s: Seconds = lambda sender, receiver: 0.01


class Payload:
    """What the workers hold; here it is nothing, and exchanges take their time all the same.

    For each rank the calls alternate: a step starts, ends, and the next starts at once; an
    exchange begins, the peer's data may arrive, and it ends before the next one begins.
    """

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        """A gradient step of ``rank`` begins, and will end at ``end_s``."""

    def step_ended(self, rank: int, now_s: float) -> None:
        """The gradient step of ``rank`` ends: its step boundary."""

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> object:
        """An exchange begins at ``rank``; return the data that travel to its peer."""
        return None

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        """The peer's data have arrived at ``rank``, whole, in the exchange that it is in."""

    def exchange_ended(self, rank: int, id: ExchangeId, now_s: float) -> None:
        """The exchange is over at ``rank``: finished, or stopped before or after data arrived."""

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        """``rank`` follows a new graph, with another speed of its phase."""

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        """``rank``, in no exchange, holds x + c/2 of ``peer`` now, with c = 0."""


@dataclass(slots=True)
class End:
    """One end of an exchange: when it began and ended, and how."""

    began: float
    alpha_tilde: float
    own_leave: float
    """When its own data have left."""
    ended: float | None = None
    outcome: Literal["running", "finished", "stopped", "crashed"] = "running"


@dataclass(slots=True)
class Exchange:
    """An exchange, with the ends that have begun it."""

    id: ExchangeId
    transfer_s: float
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether both ends finished it."""
        return [end.outcome for end in self.ends.values()] == ["finished", "finished"]


@dataclass
class _Direction:
    """One way along a link: what keeps its order."""

    last_arrival: float = 0.0
    data_leave: float = 0.0
    data_arrive: float = 0.0


class Wire:
    """A link in one of its lives; both ends drop what an earlier life carries.

    Messages arrive in the order in which they were sent. The data of an exchange travel in chunks:
    a message goes between two of them, behind all of them only once all have left.
    """

    def __init__(self, first: int, second: int) -> None:
        self.is_up = True
        self._directions = {first: _Direction(), second: _Direction()}

    def carry_message(self, sender: int, now: float, latency_s: float) -> float:
        """Send a message; return when it arrives."""
        way = self._directions[sender]
        arrives = max(now + latency_s, way.last_arrival)
        if now >= way.data_leave:
            arrives = max(arrives, way.data_arrive)
        way.last_arrival = arrives
        return arrives

    def carry_data(
        self, sender: int, now: float, transfer_s: float, latency_s: float
    ) -> tuple[float, float]:
        """Send one end's data of an exchange; return when all have left and when all arrive."""
        way = self._directions[sender]
        way.data_leave = now + transfer_s
        way.data_arrive = max(way.data_leave + latency_s, way.last_arrival)
        return way.data_leave, way.data_arrive
