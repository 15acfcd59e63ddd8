"""Shared parts of the page's sections: effort, jobs, fits and estimates, the look of figures."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from joblib import Parallel, delayed
from support.report import markdown_table as table

from gossipdp_lab.simulate.figures import OKABE_ITO as COLOURS
from gossipdp_lab.simulate.trace import TAIL_HIGHEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "table"]

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH_INCHES = 10.0
"""The width of a page, at which the letters of a figure are as large as those of the text."""

TAIL = (TAIL_HIGHEST, 1e-12)
"""The part of a run whose slope is its decay, as shares of the first consensus distance."""

FIGURE = "<figure>"
"""Stands in a section's paragraphs where its figure goes."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Effort:
    """The extent of the measurements.

    quick: tiny settings, to see that everything works; the page says so.
    """

    quick: bool = False


def run_jobs(function: Callable[..., Answer], jobs: Sequence[dict[str, Any]]) -> list[Answer]:
    """``[function(**job) for job in jobs]``, a process a core, saying how far."""
    pool = Parallel(n_jobs=len(os.sched_getaffinity(0)), verbose=1)
    answers: list[Answer] = pool(delayed(function)(**job) for job in jobs)
    return answers


class PowerLaw(NamedTuple):
    """y = factor * x ** exponent."""

    exponent: float
    standard_error: float
    """The exponent's, from the residuals; NaN for two points, which leave none."""
    factor: float


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Fit the exponent of y over x, by least squares of log y on log x.

    Raises:
        ValueError: fewer than two points, all at the same x, or one that is not positive.
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


class Estimate(NamedTuple):
    """A mean over seeds and their standard deviation (0 for one seed)."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value for each seed."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    @property
    def text(self) -> str:
        """Such as ``0.059 ± 0.0012``; a deviation below a thousandth of the mean is left out."""
        mean = f"{self.mean:,.0f}" if abs(self.mean) >= 1000 else f"{self.mean:.3g}"
        if self.deviation < 1e-3 * abs(self.mean):
            return mean
        wide = abs(self.deviation) >= 100
        return f"{mean} ± {self.deviation:,.0f}" if wide else f"{mean} ± {self.deviation:.2g}"


REPRODUCED = ("reproduced", "not reproduced")
CONSISTENT = ("consistent with the paper", "not consistent with the paper")
HOLDS = ("holds", "does not hold")


def verdict(holds: bool, words: tuple[str, str] = REPRODUCED) -> str:
    """`REPRODUCED` of a claim of the paper, `CONSISTENT` of a fit, `HOLDS` of a claim of ours."""
    return f"**{words[0] if holds else words[1]}**"


def new_figure(height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure as wide as the page, and its panels; height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, grids behind every panel."""
    for axes in figure.axes:
        axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
