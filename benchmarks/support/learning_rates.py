"""The search for the best learning rate, on a grid of factors of two that is widened as needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

RATE_STEP = 2.0
MOST_WIDENINGS = 7


class NoBestRateError(RuntimeError):
    """The grid of learning rates was widened as far as it may be, and the best is still at its end.

    A row that diverges at every rate ends so too.
    """


def next_rate(tried: Mapping[float, float], start: Sequence[float]) -> float | None:
    """Return the learning rate to try next; None when the best one has a neighbour on both sides.

    tried: rate → loss, infinity where it diverged. start: the written grid, of factors of two.

    Raises:
        NoBestRateError: no end was found after :data:`MOST_WIDENINGS` rates beyond the grid.

    >>> next_rate({0.002: 3.1, 0.004: 3.0}, [0.002, 0.004])
    0.008
    >>> next_rate({0.002: 3.1, 0.004: 3.0, 0.008: 3.2}, [0.002, 0.004])
    """
    for rate in start:
        if rate not in tried:
            return rate
    best, rates = best_rate(tried), sorted(tried)
    if best not in (rates[0], rates[-1]):
        return None
    if len(tried) >= len(start) + MOST_WIDENINGS:
        raise NoBestRateError(
            f"the best of the learning rates {rates} is still at the end of them: start elsewhere"
        )
    return best * RATE_STEP if best == rates[-1] else best / RATE_STEP


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the rate of the least loss; the smaller of two equal ones."""
    return min(sorted(tried), key=lambda rate: tried[rate])
