"""A link between two workers: in what order, and when, things that are sent arrive."""

from __future__ import annotations

from dataclasses import dataclass


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
