"""Pictures of a run, drawn from its logs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.observe.log import RunLog
from gossipdp.report.view import RunView

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from gossipdp.report.view import Points

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Colours that people with any common colour blindness can tell apart; yellow left out."""


def draw_run(run_log: RunLog, path: Path, *, title: str) -> None:
    """Write a PNG: loss and edge distance over time for each worker, and who exchanged with whom.

    A panel for which the run has no values says so.
    """
    view, figure = RunView(run_log), _figure(13, 4.2)
    figure.suptitle(textwrap.fill(title, 130))
    loss, distance, exchanges = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    loss.set_title("Loss")
    losses = view.over_time(lambda step, _: step.loss)
    _draw_over_time(loss, view.ranks, losses, "training loss", "no values")
    distance.set_title("Distance between exchanging neighbours")
    distances = view.over_time(lambda _, exchange: exchange.edge_distance)
    label = "edge distance (½ mean ‖Δ‖²)"
    _draw_over_time(distance, view.ranks, distances, label, "no exchanges")
    _draw_exchanges(figure, exchanges, exchange_counts(run_log))
    figure.savefig(path, dpi=120)


def exchange_counts(run_log: RunLog) -> NDArray[np.int64]:
    """Completed exchanges between every two workers; shape (n, n), symmetric."""
    import numpy as np

    counts = np.zeros((run_log.num_ranks, run_log.num_ranks), dtype=np.int64)
    for (one, other), count in run_log.exchange_counts().items():
        counts[one, other] = counts[other, one] = count
    return counts


def draw_exchanges(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The heat map of ``counts`` as a picture; shape (height, width, 3)."""
    figure = _figure(5.5, 5)
    _draw_exchanges(figure, figure.subplots(), counts)
    return _pixels(figure)


def draw_graph(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The workers in a circle, lines as wide as exchanges are many; shape (height, width, 3)."""
    import numpy as np

    figure = _figure(5.5, 5)
    axes, num_workers, most = figure.subplots(), len(counts), max(1, int(counts.max()))
    angles = 2 * np.pi * np.arange(num_workers) / num_workers
    x, y = np.sin(angles), np.cos(angles)
    for row, column in zip(*np.nonzero(np.triu(counts)), strict=True):
        width = 0.3 + 4.7 * counts[row, column] / most
        axes.plot(x[[row, column]], y[[row, column]], color=OKABE_ITO[0], linewidth=width)
    is_labelled = num_workers <= 32
    size = 220 if is_labelled else 20
    axes.scatter(x, y, s=size, color="white", edgecolors="black", zorder=2)
    for rank in range(num_workers if is_labelled else 0):
        axes.text(x[rank], y[rank], str(rank), ha="center", va="center")
    axes.set_title("Exchanges on the graph of the workers")
    axes.set_aspect("equal")
    axes.set_axis_off()
    return _pixels(figure)


def worker_colours(num_workers: int) -> list[str]:
    """One colour per worker: all told apart up to seven, along one scale beyond."""
    if num_workers <= len(OKABE_ITO):
        return list(OKABE_ITO[:num_workers])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["cividis"]
    return [to_hex(scale(index / (num_workers - 1))) for index in range(num_workers)]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    import numpy as np

    canvas = figure.canvas
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[attr-defined]
    return pixels[:, :, :3].copy()


def _draw_over_time(
    axes: Axes, ranks: Sequence[int], lines: Sequence[Points], label: str, nothing: str
) -> None:
    """One line per worker on a logarithmic scale; time from the start of the first worker."""
    drawn = 0
    for rank, colour, line in zip(ranks, worker_colours(len(ranks)), lines, strict=True):
        positive = [(time_s, value) for time_s, value in line if value > 0]
        if positive:
            drawn += 1
            axes.plot(*zip(*positive, strict=True), color=colour, linewidth=1.2, label=str(rank))
    if not drawn:
        _say_empty(axes, nothing)
        return
    axes.set_yscale("log")
    axes.set_xlabel("time (s)")
    axes.set_ylabel(label)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    if drawn <= 16:
        axes.legend(title="worker", ncols=1 + drawn // 9, fontsize="small")


def _draw_exchanges(figure: Figure, axes: Axes, counts: NDArray[np.int64]) -> None:
    import numpy as np

    axes.set_title("Who exchanged with whom")
    if not counts.any():
        _say_empty(axes, "no exchanges")
        return
    image = axes.imshow(counts, cmap="cividis", vmin=0)
    figure.colorbar(image, ax=axes, label="completed exchanges", shrink=0.8)
    axes.set_xlabel("worker")
    axes.set_ylabel("worker")
    num_workers = len(counts)
    if num_workers <= 16:
        axes.set_xticks(range(num_workers))
        axes.set_yticks(range(num_workers))
    if num_workers <= 8:
        for (row, column), count in np.ndenumerate(counts):
            colour = "black" if count > 0.5 * counts.max() else "white"
            axes.text(column, row, str(count), ha="center", va="center", color=colour)


def _say_empty(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
