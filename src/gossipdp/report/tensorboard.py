"""TensorBoard files from the logs of a run, where tensorboard is installed."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.observe.log import RunLog, WorkerLog
from gossipdp.report.figures import draw_exchanges, draw_graph, exchange_counts

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


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
        pictures = {"run/exchanges": draw_exchanges(counts), "run/graph": draw_graph(counts)}
        for name, picture in pictures.items():
            writer.add_image(name, picture, walltime=time_s, dataformats="HWC")


def _write_worker(worker: WorkerLog, writer: "SummaryWriter") -> None:
    def write(name: str, value: float | None, gradient_steps: int, time_s: float) -> None:
        if value is not None:
            writer.add_scalar(
                name, value, gradient_steps, walltime=worker.start.started_at + time_s
            )

    for step, exchange in worker.pairs():
        at = (step.gradient_steps, step.time_s)
        num_exchanges = exchange.exchanges_initiated + exchange.exchanges_answered
        write("train/loss", step.loss, *at)
        write("speed/samples_per_second", step.samples_per_second, *at)
        write("speed/waited_seconds", exchange.waited_seconds, *at)
        write("exchanges/completed", num_exchanges, *at)
        write("exchanges/edge_distance", exchange.edge_distance, *at)
        num_bytes = exchange.bytes_sent + exchange.shared_bytes_sent
        write("exchanges/megabytes_sent", num_bytes / 1e6, *at)
    for record in worker.values:
        for name, value in record.values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                write(f"logged/{name}", value, record.gradient_steps, record.time_s)
    if worker.end is not None:
        end = worker.end
        write(
            "exchanges/consensus_distance", end.consensus_distance, end.gradient_steps, end.time_s
        )
