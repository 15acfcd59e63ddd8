"""TensorBoard files from the logs of a run, where tensorboard is installed."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from gossipdp.observe.log import EndRecord, RunLog, StepRecord, Value, ValuesRecord, WorkerLog
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
