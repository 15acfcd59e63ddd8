"""What each worker process of ``gossipdp demo`` does: a plain training loop, and its log."""

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gossipdp import logs
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.report.run_log import ExchangeRecord, RunLogWriter, worker_file
from gossipdp.workloads import BatchLoader, Workload, learning_rate_factor, make_workload


@dataclass(frozen=True)
class DemoTask:
    """What to train, the same for all workers; slow_worker: (rank, factor)."""

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


@dataclass(frozen=True)
class WorkerResult:
    """What one worker measured; metric_of_average: on rank 0 alone."""

    rank: int
    metric_before_average: float
    metric_of_average: float | None
    gradient_steps: int
    samples: int
    train_seconds: float
    exchanges_initiated: int
    exchanges_answered: int
    waited_seconds: float
    consensus_distance: float

    @property
    def samples_per_second(self) -> float:
        """Over this worker's own training time."""
        return self.samples / self.train_seconds


def average_file(directory: Path) -> Path:
    """Where the averaged model's ``state_dict`` is saved."""
    return directory / "averaged_model.pt"


def train_worker(task: DemoTask) -> WorkerResult:
    """Train in this process together with the other workers, then average."""
    logs.configure()
    rank = int(os.environ["RANK"])
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
    )
    with RunLogWriter(worker_file(task.directory, rank)) as log:
        log.start(rank=rank, num_workers=model.num_workers, configuration=task.configuration)
        train_seconds = _train(
            model, optimizer, workload, loader, log=log, slowdown=_slowdown(task, rank)
        )
        stats = model.stats()
        # The worker's own model, without what exchanges have brought since its last step.
        metric_before_average = workload.evaluate(net)
        consolidated = model.consolidate()
        log.end(
            metric_name=workload.metric_name,
            metric_before_average=metric_before_average,
            consensus_distance=consolidated.consensus_distance,
        )
    metric_of_average = None
    if rank == 0:
        metric_of_average = workload.evaluate(net)
        torch.save(net.state_dict(), average_file(task.directory))
    return WorkerResult(
        rank=rank,
        metric_before_average=metric_before_average,
        metric_of_average=metric_of_average,
        gradient_steps=stats.gradient_steps,
        samples=stats.samples,
        train_seconds=train_seconds,
        exchanges_initiated=stats.exchanges_initiated,
        exchanges_answered=stats.exchanges_answered,
        waited_seconds=stats.waited_seconds,
        consensus_distance=consolidated.consensus_distance,
    )


def _train(
    model: GossipDataParallel,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    loader: BatchLoader[Any],
    *,
    log: RunLogWriter,
    slowdown: float,
) -> float:
    """Train until the workers together have used up the budget; this worker's seconds."""
    peak_rates = [group["lr"] for group in optimizer.param_groups]

    def count_exchanges(time_s: float) -> ExchangeRecord:
        return exchange_record(time_s, model)

    started = time.monotonic()
    for batch in model.batches(loader):
        step_started = time.monotonic()
        factor = learning_rate_factor(model.progress())
        for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
            group["lr"] = peak * factor
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if slowdown > 1:
            # Slow as a slow device is: its gradient comes late. The other cores stay free.
            time.sleep((slowdown - 1) * (time.monotonic() - step_started))
        optimizer.step()
        log.step(loss.detach(), samples=workload.batch_size, exchanges=count_exchanges)
    train_seconds = time.monotonic() - started
    log.flush(count_exchanges)
    return train_seconds


def exchange_record(time_s: float, model: GossipDataParallel) -> ExchangeRecord:
    """The log's exchange record from the wrapper's statistics."""
    stats = model.stats()
    return ExchangeRecord(
        time_s=time_s,
        exchanges_initiated=stats.exchanges_initiated,
        exchanges_answered=stats.exchanges_answered,
        exchanges_failed=stats.exchanges_failed,
        exchanges_by_neighbour=stats.exchanges_by_neighbour,
        edge_distance=None if math.isnan(stats.edge_distance) else stats.edge_distance,
        exchange_seconds=stats.exchange_seconds,
        waited_seconds=stats.waited_seconds,
        bytes_sent=stats.bytes_sent,
        bytes_received=stats.bytes_received,
    )


def _slowdown(task: DemoTask, rank: int) -> float:
    if task.slow_worker is None or task.slow_worker[0] != rank:
        return 1.0
    return task.slow_worker[1]
