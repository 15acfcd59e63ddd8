"""Numbers from numbers: exponents, means and their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class PowerLaw(NamedTuple):
    """y = factor * x ** exponent."""

    exponent: float
    standard_error: float
    """Of the exponent, from the residuals; NaN for two points, which leave none."""
    factor: float


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The exponent of y over x, by least squares of log y on log x.

    Raises:
        ValueError: fewer than two points, all at the same x, or one that is not positive.

    Example:
        >>> fit = fit_power_law([1, 2, 4, 8], [3, 12, 48, 192])
        >>> round(fit.exponent, 6), round(fit.factor, 6)
        (2.0, 3.0)
    """
    if len(set(x)) < 2 or len(x) != len(y) or min(*x, *y) <= 0:
        raise ValueError(
            f"a power law needs positive points at two or more x; got x = {list(x)}, y = {list(y)}"
        )
    log_x, log_y = np.log(x), np.log(y)
    centred = log_x - log_x.mean()
    exponent = float(centred @ log_y / (centred @ centred))
    offset = float(log_y.mean() - exponent * log_x.mean())
    residuals = log_y - offset - exponent * log_x
    freedom = len(x) - 2
    variance = float(residuals @ residuals) / freedom if freedom else math.nan
    standard_error = math.sqrt(variance / float(centred @ centred))
    return PowerLaw(exponent, standard_error, math.exp(offset))


class Spread(NamedTuple):
    """A mean over seeds and their standard deviation (0 for one seed)."""

    mean: float
    deviation: float

    @property
    def text(self) -> str:
        """Such as ``0.059 ± 0.0012``; a deviation below a thousandth of the mean is left out."""
        if self.deviation < 1e-3 * abs(self.mean):
            return _three_digits(self.mean)
        return f"{_three_digits(self.mean)} ± {_two_digits(self.deviation)}"


def spread(values: Sequence[float]) -> Spread:
    """The mean of ``values`` and their standard deviation."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"
