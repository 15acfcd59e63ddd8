"""Who stands still and who is cut off from whom in a simulated network, and until when."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gossipdp.simulate.engine import Engine


class Outages:
    """Stalls and partitions. What they hold up is not lost: it goes on when they end.

    Args:
        engine: the clock.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stalled_until: dict[int, float] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._sides: dict[int, int] = {}
        self._parted_until = 0.0

    def stall(self, rank: int, until: float) -> bool:
        """Let ``rank`` stand still; return whether that is longer than it does already."""
        if until <= self._stalled_until.get(rank, self._engine.now):
            return False
        self._stalled_until[rank] = until
        return True

    def is_stalled(self, rank: int) -> bool:
        """Whether ``rank`` stands still."""
        return rank in self._stalled_until

    def wait(self, rank: int, callback: Callable[[], None]) -> bool:
        """Keep ``callback`` for the end of the stall of ``rank``; return whether there is one."""
        if rank not in self._stalled_until:
            return False
        self._waiting.setdefault(rank, []).append(callback)
        return True

    def wake(self, rank: int) -> list[Callable[[], None]]:
        """End the stall of ``rank``, if it is over; return what waited for that, in order."""
        if self._stalled_until.get(rank, 0.0) > self._engine.now:
            return []
        self._stalled_until.pop(rank, None)
        return self._waiting.pop(rank, [])

    def forget(self, rank: int) -> None:
        """End the stall of ``rank``, and drop what waited for that: its process is gone."""
        self._stalled_until.pop(rank, None)
        self._waiting.pop(rank, None)

    def part(self, groups: Collection[Collection[int]], until: float) -> None:
        """Part the network into ``groups``; it replaces an older partition."""
        self._sides = {rank: side for side, group in enumerate(groups) for rank in group}
        self._parted_until = until

    def is_apart(self, first: int, second: int) -> bool:
        """Whether nothing passes between two ranks."""
        if self._engine.now >= self._parted_until:
            return False
        sides = self._sides
        return first in sides and second in sides and sides[first] != sides[second]

    @property
    def heals_at(self) -> float:
        """When the partition ends."""
        return self._parted_until
