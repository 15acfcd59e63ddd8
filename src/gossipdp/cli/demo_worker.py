"""What each worker process of ``gossipdp demo`` does: a plain training loop, and its log.

All that a worker measures is in its log, so that what one that was killed did is known too.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gossipdp import logs
from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import RunLog, WorkerLog, read_worker, worker_file
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.parallel.options import Monitor
from gossipdp.tasks import make_workload
from gossipdp.tasks.workload import Workload

METRIC, DIGEST = "metric_before_average", "average_digest"
"""Logged by each worker that comes to the end."""


@dataclass(frozen=True)
class DemoTask:
    """What to train, the same for all workers; slow_worker: (rank, factor).

    The run trains on ``samples`` samples, and for at least ``least_s`` seconds.
    """

    workload: str
    graph: str
    method: Literal["a2cid2", "gossip", "allreduce", "none"]
    comm_rate: float
    samples: int
    seed: int
    disjoint: bool
    slow_worker: tuple[int, float] | None
    directory: Path
    configuration: dict[str, Any]
    least_s: float = 0.0


@dataclass(frozen=True)
class WorkerResult:
    """What one worker measured; the last five are None of one that was killed.

    num_averaged: over how many workers the average was taken.
    average_digest: of the bits of the average.
    """

    rank: int
    gradient_steps: int
    samples: int
    train_seconds: float
    exchanges_initiated: int
    exchanges_answered: int
    waited_seconds: float
    metric_before_average: float | None = None
    consensus_distance: float | None = None
    num_averaged: int | None = None
    average_digest: str | None = None

    @property
    def samples_per_second(self) -> float:
        """Over this worker's own training time."""
        return self.samples / self.train_seconds if self.train_seconds else 0.0

    @property
    def ended(self) -> bool:
        """Whether it took part in an average at the end."""
        return self.average_digest is not None


def average_file(directory: Path) -> Path:
    """Where the averaged model's ``state_dict`` is saved."""
    return directory / "averaged_model.pt"


def own_average_file(directory: Path, rank: int) -> Path:
    """Where one worker saves what it holds after averaging; the parent keeps one of them."""
    return directory / f"averaged_model-{rank}.pt"


def read_results(run_log: RunLog) -> list[WorkerResult]:
    """What the workers measured, by rank, those that were killed included."""
    return [_read_result(rank, worker) for rank, worker in run_log.workers.items()]


def _read_result(rank: int, worker: WorkerLog) -> WorkerResult:
    step = worker.steps[-1] if worker.steps else None
    exchange = worker.exchanges[-1] if worker.exchanges else None
    end, values = worker.end, worker.last_values() if worker.end else {}
    return WorkerResult(
        rank=rank,
        gradient_steps=step.gradient_steps if step else 0,
        samples=step.samples if step else 0,
        train_seconds=step.time_s if step else 0.0,
        exchanges_initiated=exchange.exchanges_initiated if exchange else 0,
        exchanges_answered=exchange.exchanges_answered if exchange else 0,
        waited_seconds=exchange.waited_seconds if exchange else 0.0,
        metric_before_average=_float(values.get(METRIC)),
        consensus_distance=end.consensus_distance if end else None,
        num_averaged=end.num_averaged if end else None,
        average_digest=None if DIGEST not in values else str(values[DIGEST]),
    )


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def train_worker(task: DemoTask) -> None:
    """Train in this process together with the other workers, then average."""
    logs.configure()
    rank = int(os.environ["RANK"])
    is_restart = int(os.environ.get("GOSSIPDP_RESTARTS") or 0) > 0
    # Different on purpose: the wrapper gives every worker rank 0's initial parameters.
    torch.manual_seed(task.seed * 1_000_003 + rank)
    workload = make_workload(task.workload, disjoint=task.disjoint)
    net = workload.make_model()
    optimizer = workload.make_optimizer(net)
    loader = workload.train_loader(rank, int(os.environ["WORLD_SIZE"]), task.seed)
    model = GossipDataParallel(
        net,
        optimizer,
        graph=task.graph,
        comm_rate=task.comm_rate,
        method=task.method,
        budget_samples=task.samples,
        seed=task.seed,
        samples_per_step=workload.batch_size,
        monitor=Monitor(log_dir=task.directory),
    )
    model.log(**task.configuration)
    _train(model, optimizer, workload, loader, task=task, is_restart=is_restart)
    # The worker's own model, without what exchanges have brought since its last step.
    model.log(metric_before_average=workload.evaluate(net))
    model.consolidate()
    torch.save(net.state_dict(), own_average_file(task.directory, rank))
    model.log(average_digest=_digest(net))


def _digest(net: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _train(
    model: GossipDataParallel,
    optimizer: torch.optim.Optimizer,
    workload: Workload[Any],
    loader: Iterable[Any],
    *,
    task: DemoTask,
    is_restart: bool,
) -> None:
    """Train until the workers together have used up the budget and ``least_s`` is over."""
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    slowdown = _slowdown(task, model.rank)
    before = read_worker(worker_file(task.directory, model.rank)) if is_restart else None
    first_step_s = before.lives[0].at_s if before and before.lives else None

    def progress() -> float:
        if not task.least_s:
            return model.progress()
        elapsed_s = 0.0 if first_step_s is None else since_boot_s() - first_step_s
        return min(model.progress(), elapsed_s / task.least_s)

    def batches() -> Iterable[Any]:
        return _until(lambda: progress() >= 1, loader) if task.least_s else model.batches(loader)

    for batch in batches():
        step_started = time.monotonic()
        factor = workload.rate_factor(progress(), model.world_size)
        for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
            group["lr"] = peak * factor
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if slowdown > 1:
            # Slow as a slow device is: its gradient comes late. The other cores stay free.
            time.sleep((slowdown - 1) * (time.monotonic() - step_started))
        optimizer.step()
        first_step_s = first_step_s or since_boot_s()
        model.log(loss=loss)


def _until(is_over: Callable[[], bool], loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while not is_over():
        for batch in loader:
            yield batch
            if is_over():
                return


def _slowdown(task: DemoTask, rank: int) -> float:
    if task.slow_worker is None or task.slow_worker[0] != rank:
        return 1.0
    return task.slow_worker[1]
