"""Is a series flat: its least-squares slope with the slope's standard error, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 5


@dataclass(frozen=True)
class Trend:
    """A straight line through a series; the slope and its standard error are per unit of time."""

    slope: float
    error: float
    first: float
    last: float
    largest: float

    def is_flat(self, most: float) -> bool:
        """Return whether the slope cannot be told, at two standard errors, from ``most`` or less.

        A slope that is not a number is not flat.
        """
        return self.slope - 2.0 * self.error <= most


def averaged_over(
    times: Sequence[float], values: Sequence[float], width: float
) -> tuple[list[float], list[float]]:
    """Return mean time and mean value of each stretch of ``width`` that has points.

    Neighbouring samples resemble each other, so the error of a line through all of them would come
    out too small.
    """
    stretches: dict[int, list[tuple[float, float]]] = {}
    for time, value in zip(times, values, strict=True):
        stretches.setdefault(math.floor((time - times[0]) / width), []).append((time, value))
    means = [
        [sum(part) / len(points) for part in zip(*points, strict=True)]
        for points in stretches.values()
    ]
    return [time for time, _ in means], [value for _, value in means]


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Fit a line; raises ValueError for fewer points than ``LEAST_POINTS``, or all at one time."""
    n = len(times)
    if n < LEAST_POINTS:
        raise ValueError(f"{n} points; a trend takes at least {LEAST_POINTS}")
    mean_time, mean = sum(times) / n, sum(values) / n
    spread = sum((time - mean_time) ** 2 for time in times)
    if not spread:
        raise ValueError(f"all {n} points are of the time {times[0]}; a trend takes several")
    pairs = list(zip(times, values, strict=True))
    slope = sum((time - mean_time) * (value - mean) for time, value in pairs) / spread
    rests = (value - mean - slope * (time - mean_time) for time, value in pairs)
    error = math.sqrt(sum(rest**2 for rest in rests) / (n - 2) / spread)
    return Trend(slope, error, values[0], values[-1], max(values))
