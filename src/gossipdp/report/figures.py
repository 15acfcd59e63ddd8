"""Pictures of a run, drawn from its logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.observe.log import RunLog

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Series = tuple[list[float], list[float]]

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Colours that people with any common colour blindness can tell apart; yellow left out."""


def draw_run(run_log: RunLog, path: Path, *, title: str) -> None:
    """Write a PNG: loss and edge distance over time for each worker, and who exchanged with whom.

    A panel for which the run has no values says so.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    loss, distance, exchanges = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    _draw_over_time(loss, run_log, _losses, "training loss", "Loss")
    _draw_over_time(distance, run_log, _edge_distances, "edge distance (½ mean ‖Δ‖²)", "Distance")
    _draw_exchanges(figure, exchanges, exchange_counts(run_log))
    distance.set_title("Distance between exchanging neighbours")
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
    figure, axes = _square()
    _draw_exchanges(figure, axes, counts)
    return _pixels(figure)


def draw_graph(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The workers in a circle, lines as wide as exchanges are many; shape (height, width, 3)."""
    import numpy as np

    figure, axes = _square()
    num_workers = len(counts)
    angles = 2 * np.pi * np.arange(num_workers) / num_workers
    x, y = np.sin(angles), np.cos(angles)
    most = max(1, int(counts.max()))
    for row, column in zip(*np.nonzero(np.triu(counts)), strict=True):
        width = 0.3 + 4.7 * counts[row, column] / most
        axes.plot(x[[row, column]], y[[row, column]], color=OKABE_ITO[0], linewidth=width)
    axes.scatter(
        x, y, s=220 if num_workers <= 32 else 20, color="white", edgecolors="black", zorder=2
    )
    if num_workers <= 32:
        for rank in range(num_workers):
            axes.text(x[rank], y[rank], str(rank), ha="center", va="center")
    axes.set_title("Exchanges on the graph of the workers")
    axes.set_aspect("equal")
    axes.set_axis_off()
    return _pixels(figure)


def _square() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _pixels(figure: Figure) -> NDArray[np.uint8]:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return pixels[:, :, :3].copy()


def _losses(run_log: RunLog, rank: int) -> Series:
    records = [step for step in run_log.workers[rank].steps if step.loss is not None]
    return [record.time_s for record in records], [record.loss or 0.0 for record in records]


def _edge_distances(run_log: RunLog, rank: int) -> Series:
    records = [one for one in run_log.workers[rank].exchanges if one.edge_distance is not None]
    return [record.time_s for record in records], [
        record.edge_distance or 0.0 for record in records
    ]


def _draw_over_time(
    axes: Axes,
    run_log: RunLog,
    series_of: Callable[[RunLog, int], Series],
    label: str,
    title: str,
) -> None:
    """One line per worker on a logarithmic scale; time from the start of the first worker."""
    axes.set_title(title)
    drawn = 0
    ranks = list(run_log.workers)
    for rank, colour in zip(ranks, worker_colours(len(ranks)), strict=True):
        times, values = series_of(run_log, rank)
        offset_s = run_log.workers[rank].start.started_at - run_log.started_at
        points = [(offset_s + time, value) for time, value in zip(times, values, strict=True)]
        positive = [(time, value) for time, value in points if value > 0]
        if positive:
            drawn += 1
            axes.plot(*zip(*positive, strict=True), color=colour, linewidth=1.2, label=str(rank))
    if not drawn:
        _say_empty(axes, "no exchanges" if series_of is _edge_distances else "no values")
        return
    axes.set_yscale("log")
    axes.set_xlabel("time (s)")
    axes.set_ylabel(label)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    if drawn <= 16:
        axes.legend(title="worker", ncols=1 + drawn // 9, fontsize="small")


def _draw_exchanges(figure: Figure, axes: Axes, counts: NDArray[np.int64]) -> None:
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
        for row in range(num_workers):
            for column in range(num_workers):
                count = int(counts[row, column])
                colour = "black" if count > 0.5 * counts.max() else "white"
                axes.text(column, row, str(count), ha="center", va="center", color=colour)


def worker_colours(num_workers: int) -> list[str]:
    """One colour per worker: all told apart up to seven, along one scale beyond."""
    if num_workers <= len(OKABE_ITO):
        return list(OKABE_ITO[:num_workers])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["cividis"]
    return [to_hex(scale(index / (num_workers - 1))) for index in range(num_workers)]


def _say_empty(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
