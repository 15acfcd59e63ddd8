"""A limit on the bytes that all links of a worker send."""

import math
from typing import Any, final

# Chunks leave in portions: smaller ones would wake the gossip thread, and the peer's, too often. A
# portion is 10 ms' worth or 32 KiB, whichever is more, but no more than a quarter of a second's.
PORTION_S, LONGEST_PORTION_S = 0.01, 0.25
PORTION_BYTES = 32 << 10
LEAST_PORTION_BYTES = 1500
# The portions that may be saved up, so that a thread that wakes late loses little.
MOST_SAVED = 2


def portion_of(bytes_per_s: float) -> float:
    """Return the least number of bytes that leave at a time."""
    small = min(PORTION_BYTES, LONGEST_PORTION_S * bytes_per_s)
    return max(small, PORTION_S * bytes_per_s, LEAST_PORTION_BYTES)


@final
class SendLimit:
    """Bytes that may be sent: they come in at a steady rate, and a few portions can be saved.

    Chunks take what is there. Other frames always leave, and chunks then wait longer.

    Attributes:
        held: links whose chunk waits for a portion; who has waited longest comes first.
        held_s: seconds, so far, for which there was one.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._portion = portion_of(bytes_per_s)
        self._saved = MOST_SAVED * self._portion
        self._at_s = -math.inf
        self.held: dict[Any, None] = {}
        self.held_s = 0.0
        self._looked_s = math.nan

    def take(self, most: int, now_s: float) -> int:
        """Take up to ``most`` bytes and return their number; 0 if less than a portion is there."""
        if self.opens_at(now_s) > now_s and self._saved < most:
            return 0
        taken = min(most, int(self._saved))
        self._saved -= taken
        return taken

    def spend(self, num_bytes: int) -> None:
        """Note bytes that left without asking."""
        self._saved -= num_bytes

    def next_held(self, now_s: float) -> Any | None:
        """Return, and hold no longer, the link that has waited longest, if a portion is there."""
        if self.held:
            self.held_s += now_s - self._looked_s
        self._looked_s = now_s
        if not self.held or self.opens_at(now_s) > now_s:
            return None
        link = next(iter(self.held))
        del self.held[link]
        return link

    def opens_at(self, now_s: float) -> float:
        """Return when a portion is there: now, or later."""
        if now_s > self._at_s:
            earned = (now_s - self._at_s) * self._bytes_per_s
            self._saved = min(MOST_SAVED * self._portion, self._saved + earned)
            self._at_s = now_s
        missing = self._portion - self._saved
        return now_s if missing < 1.0 else now_s + missing / self._bytes_per_s
