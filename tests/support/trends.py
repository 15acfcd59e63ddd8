"""Is a series flat: its least-squares slope with the slope's standard error, and the verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    """Fit a line through four points or more."""
    (slope, _), covariance = np.polyfit(times, values, 1, cov=True)
    return Trend(float(slope), math.sqrt(covariance[0, 0]), values[0], values[-1], max(values))
