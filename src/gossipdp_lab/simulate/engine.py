"""A discrete-event engine: a heap of events and the virtual clock that they move.

Events are ordered by (time, priority, order of scheduling), so that ties are never random and
the same seed gives the same trace.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable


class Event:
    """A callback that will run at ``time``, unless cancelled."""

    __slots__ = ("callback", "time")

    def __init__(self, time: float, callback: Callable[[], None]) -> None:
        self.time = time
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Let the time pass without the callback."""
        self.callback = None


class Engine:
    """Runs callbacks in the order of their virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Event]] = []  # the counter ends every comparison
        self._counter = 0

    def at(self, time: float, callback: Callable[[], None], *, priority: int = 0) -> Event:
        """Run ``callback`` at ``time``; among events of one time the lowest priority is first."""
        if not (math.isfinite(time) and time >= self.now):
            raise ValueError(f"an event at {time} cannot be scheduled at {self.now}")
        event = Event(time, callback)
        heapq.heappush(self._heap, (time, priority, self._counter, event))
        self._counter += 1
        return event

    def run(self, until: float) -> None:
        """Run every event up to and including time ``until``, and set the clock there."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, _, event = heapq.heappop(heap)
            if event.callback is None:
                continue
            self.now = time
            self.num_events += 1
            event.callback()
        self.now = max(self.now, until)
