"""How often, and how soon, workers that died are started again."""

from __future__ import annotations

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
# A worker that lived this long did not die of what killed it before.
LONG_LIFE_S = 60.0


class Restarts:
    """The budget of one run, and each worker's back-off.

    The k-th restart in a row of a worker whose lives were all short comes min(0.1·2^(k−1), 10)
    seconds after its death. The budget is for all workers together, as torchrun's
    ``--max-restarts`` is for the whole job.

    Args:
        max_restarts: how many restarts, of all workers together.

    Raises:
        ValueError: it is negative.

    Example:
        >>> restarts = Restarts(2)
        >>> restarts.started(3, 0.0)
        >>> restarts.due_after_death(3, 5.0)
        5.1
        >>> restarts.count(3), restarts.num_left
        (1, 1)
    """

    def __init__(self, max_restarts: int) -> None:
        if max_restarts < 0:
            raise ValueError(f"--max-restarts is {max_restarts}; it must be 0 or more")
        self.max_restarts = max_restarts
        self.num_left = max_restarts
        self._counts: dict[int, int] = {}
        self._in_a_row: dict[int, int] = {}
        self._started_at: dict[int, float] = {}

    def count(self, rank: int) -> int:
        """How many times this worker has been, or is about to be, started again."""
        return self._counts.get(rank, 0)

    def started(self, rank: int, now: float) -> None:
        """A life of this worker begins."""
        self._started_at[rank] = now

    def due_after_death(self, rank: int, now: float) -> float | None:
        """When to start it again, for which one restart is taken; None if none is left."""
        if self.num_left == 0:
            return None
        self.num_left -= 1
        self._counts[rank] = self.count(rank) + 1
        lived_s = now - self._started_at.get(rank, now)
        in_a_row = 0 if lived_s >= LONG_LIFE_S else self._in_a_row.get(rank, 0)
        self._in_a_row[rank] = in_a_row + 1
        # 2**7 · 0.1 exceeds the cap; a larger power would only overflow one day.
        return now + min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(in_a_row, 7))
