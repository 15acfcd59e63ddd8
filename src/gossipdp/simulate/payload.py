"""What the workers of a simulated network hold and exchange: the seam to their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from gossipdp.protocol.actions import Begin, Rebuilt
from gossipdp.protocol.messages import ExchangeId


class Payload(ABC):
    """Is told of the few moments at which a worker's parameters matter.

    For each rank the calls alternate: a step starts, ends, and the next starts at once; an
    exchange begins, the peer's data may arrive, and it ends before the next one begins.
    """

    @abstractmethod
    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        """A gradient step of ``rank`` begins, and will end at ``end_s``."""

    @abstractmethod
    def step_ended(self, rank: int, now_s: float) -> None:
        """The gradient step of ``rank`` ends: its step boundary."""

    @abstractmethod
    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> object:
        """An exchange begins at ``rank``; return the data that travel to its peer."""

    @abstractmethod
    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        """The peer's data have arrived at ``rank``, whole, in the exchange that it is in."""

    @abstractmethod
    def exchange_ended(self, rank: int, id: ExchangeId, now_s: float) -> None:
        """The exchange is over at ``rank``: finished, or stopped before or after data arrived."""

    @abstractmethod
    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        """``rank`` follows a new graph, with another speed of its phase."""

    @abstractmethod
    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        """``rank``, in no exchange, holds x + c/2 of ``peer`` now, with c = 0."""


@final
class NoParameters(Payload):
    """The protocol alone: exchanges of nothing, which take their time all the same."""

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        pass

    def step_ended(self, rank: int, now_s: float) -> None:
        pass

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> object:
        return None

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        pass

    def exchange_ended(self, rank: int, id: ExchangeId, now_s: float) -> None:
        pass

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        pass

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        pass
