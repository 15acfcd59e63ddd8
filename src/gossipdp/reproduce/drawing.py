"""The look of all figures of the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.report.figures import OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = OKABE_ITO
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH_INCHES = 10.0
"""The width of a page, at which the letters of a figure are as large as those of the text."""


def new_figure(height_inches: float) -> Figure:
    """An empty figure, as wide as the page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG, grids behind every panel."""
    for axes in figure.axes:
        axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
