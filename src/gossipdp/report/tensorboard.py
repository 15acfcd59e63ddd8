"""TensorBoard files from the logs of a run, where tensorboard is installed; with two pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.observe.log import EndRecord, RunLog, StepRecord, Value, ValuesRecord, WorkerLog

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch.utils.tensorboard.writer import SummaryWriter

SIZE = (5.5, 5.0)
"""Of a picture, in inches of 100 dots."""


def tensorboard_is_installed() -> bool:
    """Whether ``write_tensorboard`` can write."""
    return importlib.util.find_spec("tensorboard") is not None


def write_tensorboard(run_log: RunLog, directory: Path) -> None:
    """Write the scalars of every worker as one TensorBoard run, ``directory/worker-RANK``.

    ``directory/run`` holds two pictures: the heat map of the exchanges, and the graph of the
    workers with lines as wide as their exchanges are many. The horizontal axis is the worker's
    gradient steps; wall time is kept beside it. Files that an earlier call wrote there go.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """
    if not tensorboard_is_installed():
        raise ModuleNotFoundError(
            "write_tensorboard needs TensorBoard: pip install 'gossipdp[tensorboard]'",
            name="tensorboard",
        )
    from torch.utils.tensorboard.writer import SummaryWriter

    for kind in ("worker-*", "run"):
        for old in directory.glob(f"{kind}/events.out.tfevents.*"):
            old.unlink()
    for rank, worker in run_log.workers.items():
        with SummaryWriter(str(directory / f"worker-{rank}")) as writer:
            _write_worker(worker, writer)
    counts = exchange_counts(run_log)
    with SummaryWriter(str(directory / "run")) as writer:
        time_s = run_log.started_at + max(worker.last_s for worker in run_log.workers.values())
        for name, draw in (("run/exchanges", draw_exchanges), ("run/graph", draw_graph)):
            writer.add_figure(name, draw(counts), walltime=time_s)


def _write_worker(worker: WorkerLog, writer: SummaryWriter) -> None:
    moments: list[tuple[StepRecord | ValuesRecord | EndRecord, dict[str, Value | None]]] = []
    for step, exchange in worker.pairs():
        values: dict[str, Value | None] = {
            "train/loss": step.loss,
            "speed/samples_per_second": step.samples_per_second,
            "speed/waited_seconds": exchange.waited_seconds,
            "exchanges/completed": exchange.exchanges,
            "exchanges/edge_distance": exchange.edge_distance,
            "exchanges/megabytes_sent": exchange.all_bytes_sent / 1e6,
        }
        moments.append((step, values))
    for record in worker.values:
        moments.append((record, {f"logged/{name}": each for name, each in record.values.items()}))
    if worker.end is not None:
        moments.append(
            (worker.end, {"exchanges/consensus_distance": worker.end.consensus_distance})
        )
    for moment, values in moments:
        walltime = worker.start.started_at + moment.time_s
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                writer.add_scalar(name, value, moment.gradient_steps, walltime=walltime)


# The pictures.


def exchange_counts(run_log: RunLog) -> NDArray[np.int64]:
    """Completed exchanges between every two workers; shape (n, n), symmetric."""
    import numpy as np

    counts = np.zeros((run_log.num_ranks, run_log.num_ranks), dtype=np.int64)
    for (one, other), count in run_log.exchange_counts().items():
        counts[one, other] = counts[other, one] = count
    return counts


def draw_exchanges(counts: NDArray[np.int64]) -> Figure:
    """The heat map of ``counts``."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes, num_workers = figure.subplots(), len(counts)
    axes.set_title("Who exchanged with whom")
    image = axes.imshow(counts, cmap="cividis", vmin=0, vmax=max(1, counts.max()))
    figure.colorbar(image, ax=axes, label="completed exchanges", shrink=0.8)
    axes.set_xlabel("worker")
    axes.set_ylabel("worker")
    if num_workers <= 16:
        axes.set_xticks(range(num_workers))
        axes.set_yticks(range(num_workers))
    if num_workers <= 8:
        for (row, column), count in np.ndenumerate(counts):
            colour = "black" if count > 0.5 * counts.max() else "white"
            axes.text(column, row, str(count), ha="center", va="center", color=colour)
    return figure


def draw_graph(counts: NDArray[np.int64]) -> Figure:
    """The workers in a circle, lines as wide as exchanges are many."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes, num_workers, most = figure.subplots(), len(counts), max(1, int(counts.max()))
    angles = 2 * np.pi * np.arange(num_workers) / num_workers
    x, y = np.sin(angles), np.cos(angles)
    for row, column in zip(*np.nonzero(np.triu(counts)), strict=True):
        width = 0.3 + 4.7 * counts[row, column] / most
        axes.plot(x[[row, column]], y[[row, column]], color="C0", linewidth=width)
    is_labelled = num_workers <= 32
    size = 220 if is_labelled else 20
    axes.scatter(x, y, s=size, color="white", edgecolors="black", zorder=2)
    for rank in range(num_workers if is_labelled else 0):
        axes.text(x[rank], y[rank], str(rank), ha="center", va="center")
    axes.set_title("Exchanges on the graph of the workers")
    axes.set_aspect("equal")
    axes.set_axis_off()
    return figure
