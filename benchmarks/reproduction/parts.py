"""Shared parts of the page's sections: jobs, fits and estimates, the look of figures."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from joblib import Parallel, delayed
from scipy.stats import linregress
from support.report import markdown_table as table

from gossipdp_lab.simulate.figures import OKABE_ITO as COLOURS
from gossipdp_lab.simulate.figures import new_figure
from gossipdp_lab.simulate.trace import TAIL_HIGHEST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "table"]

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH_INCHES = 10.0
"""The width of a page, at which the letters of a figure are as large as those of the text."""

TAIL = (TAIL_HIGHEST, 1e-12)
"""The part of a run whose slope is its decay, as shares of the first consensus distance."""

Answer = TypeVar("Answer")


def run_jobs(function: Callable[..., Answer], jobs: Sequence[dict[str, Any]]) -> list[Answer]:
    """``[function(**job) for job in jobs]``, a process a core, saying how far."""
    pool = Parallel(n_jobs=len(os.sched_getaffinity(0)), verbose=1)
    answers: list[Answer] = pool(delayed(function)(**job) for job in jobs)
    return answers


class PowerLaw(NamedTuple):
    """y = factor * x ** exponent."""

    exponent: float
    standard_error: float
    """The exponent's, from the residuals; 0 for two points, which leave none."""
    factor: float


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """Fit the exponent of y over x, by least squares of log y on log x."""
    line = linregress(np.log(x), np.log(y))
    return PowerLaw(line.slope, line.stderr, math.exp(line.intercept))


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


def figure_of_page_width(height: float, *shape: int, **options: Any) -> tuple[Figure, Any]:
    """Return a figure, and its panels in rows and columns; height in inches."""
    figure = new_figure(WIDTH_INCHES, height)
    return figure, figure.subplots(*shape, **options)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, grids behind every panel."""
    for axes in figure.axes:
        axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
