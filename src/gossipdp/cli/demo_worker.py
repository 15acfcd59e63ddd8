"""What each worker process of ``gossipdp demo`` does: a plain training loop, and its log.

All that a worker measures is in its log, so that what one that was killed did is known too.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gossipdp import logs
from gossipdp.observe.run_log import ExchangeRecord, RunLog, RunLogWriter, WorkerLog, worker_file
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.runtime.clock import since_boot_s
from gossipdp.workloads import BatchLoader, Workload, learning_rate_factor, make_workload

LOOK_FOR_NOTICES_EVERY_S = 0.1


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
    end = worker.end
    return WorkerResult(
        rank=rank,
        gradient_steps=step.gradient_steps if step else 0,
        samples=step.samples if step else 0,
        train_seconds=step.time_s if step else 0.0,
        exchanges_initiated=exchange.exchanges_initiated if exchange else 0,
        exchanges_answered=exchange.exchanges_answered if exchange else 0,
        waited_seconds=exchange.waited_seconds if exchange else 0.0,
        metric_before_average=end.metric_before_average if end else None,
        consensus_distance=end.consensus_distance if end else None,
        num_averaged=end.num_averaged if end else None,
        average_digest=end.average_digest if end else None,
    )


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
    )
    with RunLogWriter(worker_file(task.directory, rank), goes_on=is_restart) as log:
        log.start(rank=rank, num_workers=model.num_workers, configuration=task.configuration)
        notices = _Notices(model, log)
        _train(model, optimizer, workload, loader, log=log, notices=notices, task=task)
        # The worker's own model, without what exchanges have brought since its last step.
        metric_before_average = workload.evaluate(net)
        consolidated = model.consolidate()
        notices.write()
        torch.save(net.state_dict(), own_average_file(task.directory, rank))
        log.end(
            metric_name=workload.metric_name,
            metric_before_average=metric_before_average,
            consensus_distance=consolidated.consensus_distance,
            num_averaged=consolidated.num_workers,
            average_digest=_digest(net),
        )


class _Notices:
    """Passes on to the log what the worker notices of the others."""

    def __init__(self, model: GossipDataParallel, log: RunLogWriter) -> None:
        self._model = model
        self._log = log
        self._num_written = 0
        self._next_look_s = 0.0

    def look(self, now_s: float) -> None:
        """Write what is new, now and then."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_FOR_NOTICES_EVERY_S
            self.write()

    def write(self) -> None:
        """Write what is new."""
        noticed = self._model.stats().noticed
        for notice in noticed[self._num_written :]:
            self._log.notice(notice.rank, notice.kind, notice.at_s)
        self._num_written = len(noticed)


def _digest(net: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _train(
    model: GossipDataParallel,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    loader: BatchLoader[Any],
    *,
    log: RunLogWriter,
    notices: _Notices,
    task: DemoTask,
) -> None:
    """Train until the workers together have used up the budget and ``least_s`` is over."""
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    slowdown = _slowdown(task, model.rank)
    first_step_s = log.first_began_s
    has_begun = False

    def progress() -> float:
        if not task.least_s:
            return model.progress()
        elapsed_s = 0.0 if first_step_s is None else since_boot_s() - first_step_s
        return min(model.progress(), elapsed_s / task.least_s)

    def count_exchanges(time_s: float) -> ExchangeRecord:
        return exchange_record(time_s, model)

    def batches() -> Iterable[Any]:
        return _until(lambda: progress() >= 1, loader) if task.least_s else model.batches(loader)

    for batch in batches():
        step_started = time.monotonic()
        factor = learning_rate_factor(progress())
        for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
            group["lr"] = peak * factor
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if slowdown > 1:
            # Slow as a slow device is: its gradient comes late. The other cores stay free.
            time.sleep((slowdown - 1) * (time.monotonic() - step_started))
        optimizer.step()
        if not has_begun:
            began_s = log.began()
            has_begun, first_step_s = True, first_step_s or began_s
        log.step(loss.detach(), samples=workload.batch_size, exchanges=count_exchanges)
        notices.look(step_started)
    log.flush(count_exchanges)


def _until(is_over: Callable[[], bool], loader: BatchLoader[Any]) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while not is_over():
        for batch in loader:
            yield batch
            if is_over():
                return


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
