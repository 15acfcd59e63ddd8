"""One run of one row in time_to_loss: four processes, started and collected.

What the validation needs is out of band. A worker copies its parameters at fixed times (a
millisecond for 4 MB, the same for every row) and gives the copies back when all is over; the
parent then averages the workers' copies of one time and scores the average. So a curve says what a
row would have delivered if it had ended then, and no row's clock contains an evaluation.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from networks.namespaces import Hosts, bytes_sent, enter
from support.rows import Row, RowPlan
from time_to_loss_rows import ROWS
from time_to_loss_task import BATCH_SIZE, PEAK_RATE, Clusters, TimedCompute, loss, make_model
from torch import Tensor, nn

from gossipdp.simulate.scenario import ComputeTime
from gossipdp.tasks.workload import BatchLoader, learning_rate_factor

FIRST_MARK_S, NEXT_MARK = 0.5, 1.12  # copies are taken at 0.5 s, and then 12% later each time
START_IN_S = 0.5
PORT_IN_NAMESPACE = 29_400
PRELOADED = ["torch", "torch._dynamo", "torch.nn.parallel", "gossipdp.parallel.module"]

Mark = tuple[int, float, Tensor]


@dataclass(frozen=True)
class RunPlan:
    """One run. compute: how long each worker's steps take. pins: a worker to one core, in turn."""

    row: RowPlan
    compute: ComputeTime
    timeout_s: float
    pins: bool = False


@dataclass
class WorkerResult:
    """What one worker did. Times are seconds from the common start.

    marks: (number, time, parameters) as they were taken. parameters: before averaging at the end.
    computed_s: of the trained time, the device's. cpu_s: meanwhile, of this machine's cores.
    sent_bytes: meanwhile, by the namespace's interface; None on the machine's own.
    """

    rank: int
    steps: int
    trained_s: float
    ended_s: float
    computed_s: float
    cpu_s: float
    account: dict[str, float]
    parameters: Tensor
    average: Tensor | None
    sent_bytes: int | None
    marks: list[Mark] = field(repr=False)

    @property
    def samples(self) -> int:
        """That this worker trained on."""
        return self.steps * BATCH_SIZE

    @property
    def samples_per_s(self) -> float:
        """By this worker alone, over its own training time."""
        return self.samples / self.trained_s


class RunFailedError(RuntimeError):
    """A worker of a run raised, died or did not end; the message says what."""


def prepare() -> None:
    """Let the server that forks workers import what they need, once."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def run(plan: RunPlan, hosts: Hosts | None) -> list[WorkerResult]:
    """Train once; the workers' results by rank. hosts: where they run; None for this machine.

    Raises:
        RunFailedError: a worker failed, or the run took longer than ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")
    meetings = _meetings(plan.row.num_workers, hosts)
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(plan.row.num_workers):
                ours, theirs = context.Pipe()
                file = Path(folder) / f"{rank}.pt"
                processes.append(
                    context.Process(target=_work, args=(rank, plan, meetings[rank], theirs, file))
                )
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            deadline_s = time.monotonic() + plan.timeout_s
            for message in ("ready", "done"):
                for rank, pipe in enumerate(pipes):
                    _expect(message, rank, pipe, deadline_s)
                if message == "ready":
                    start_s = time.monotonic() + START_IN_S
                    for pipe in pipes:
                        pipe.send(start_s)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [
            WorkerResult(**torch.load(Path(folder) / f"{rank}.pt", weights_only=True))
            for rank in range(plan.row.num_workers)
        ]


def _expect(message: str, rank: int, pipe: Connection, deadline_s: float) -> None:
    try:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            raise RunFailedError(f"worker {rank} was not {message} in time")
        said = pipe.recv()
    except EOFError:
        raise RunFailedError(f"worker {rank} ended before it was {message}") from None
    if said != message:
        raise RunFailedError(f"worker {rank}: {said}")


@dataclass(frozen=True)
class _Meeting:
    """Where a worker runs, None for no namespace of its own, and where it meets the others."""

    namespace: str | None
    address: str
    port: int
    interface: str


def _meetings(num_workers: int, hosts: Hosts | None) -> list[_Meeting]:
    if hosts is not None:
        at = (hosts.addresses[0], PORT_IN_NAMESPACE, hosts.interface)
        return [_Meeting(name, *at) for name in hosts.names]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [_Meeting(None, "127.0.0.1", port, "lo")] * num_workers


def _work(rank: int, plan: RunPlan, meeting: _Meeting, pipe: Connection, file: Path) -> None:
    """A worker process, which says what it failed of."""
    try:
        if meeting.namespace is not None:
            enter(meeting.namespace)
        is_alone = meeting.namespace is not None
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(plan.row.num_workers),
            LOCAL_RANK=str(0 if is_alone else rank),
            LOCAL_WORLD_SIZE=str(1 if is_alone else plan.row.num_workers),
            MASTER_ADDR=meeting.address,
            MASTER_PORT=str(meeting.port),
            GLOO_SOCKET_IFNAME=meeting.interface,
        )
        torch.set_num_threads(1)
        if plan.pins:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
        result = _train(rank, plan, pipe, meeting.interface if is_alone else None)
        torch.save(vars(result), file)
        pipe.send("done")
    except BaseException as error:
        pipe.send("".join(traceback.format_exception(error)))  # the parent says it, once
        sys.exit(1)


def _train(rank: int, plan: RunPlan, pipe: Connection, interface: str | None) -> WorkerResult:
    compute = TimedCompute()
    net = make_model(plan.row.seed, compute)
    loader = Clusters(plan.row.num_workers).loader(rank, plan.row.seed)
    loss(make_model(1), next(iter(loader))).backward()  # what torch makes at the first call
    draw_s = plan.compute.begin(plan.row.seed)
    row = ROWS[plan.row.name][1](net, plan.row)
    try:
        pipe.send("ready")
        start_s = pipe.recv()
        sent_before = bytes_sent(interface) if interface else 0
        cpu_before_s = _cpu_s()
        time.sleep(max(0.0, start_s - time.monotonic()))
        steps, marks = _loop(row, loader, compute, lambda: draw_s(rank), start_s)
        trained_s = time.monotonic() - start_s
        cpu_s = _cpu_s() - cpu_before_s
        sent_bytes = bytes_sent(interface) - sent_before if interface else None
        account = row.account()
        parameters = _copy(net)
        row.finish()
        return WorkerResult(
            rank=rank,
            steps=steps,
            trained_s=trained_s,
            ended_s=time.monotonic() - start_s,
            computed_s=compute.computed_s,
            cpu_s=cpu_s,
            account=account,
            parameters=parameters,
            average=_copy(net) if rank == 0 else None,
            sent_bytes=sent_bytes,
            marks=marks,
        )
    finally:
        row.close()


def _loop(
    row: Row,
    loader: BatchLoader[Any],
    compute: TimedCompute,
    draw_s: Callable[[], float],
    start_s: float,
) -> tuple[int, list[Mark]]:
    """Train until the run has used up its samples: the loop that every row runs."""
    steps, marks, due = 0, [], 0
    while True:
        for batch in loader:
            progress = row.progress()
            if progress >= 1:
                return steps, marks
            now_s = time.monotonic() - start_s
            if now_s >= mark_s(due):
                while now_s >= mark_s(due + 1):
                    due += 1
                marks.append((due, now_s, _copy(row.net)))
                due += 1
            row.set_rate(PEAK_RATE * learning_rate_factor(progress))
            compute.begin(draw_s())
            row.step(loss(row.model, batch))
            steps += 1


def mark_s(number: int) -> float:
    """When parameters are copied for the ``number``-th time, from the common start."""
    return FIRST_MARK_S * NEXT_MARK**number


@torch.no_grad()
def _copy(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).clone()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def averages_at_marks(results: Sequence[WorkerResult]) -> list[tuple[float, Tensor]]:
    """The average of the workers' copies at each time at which all of them took one.

    A worker copies between two steps, so late by up to one; the latest copy's time counts.
    """
    by_worker = [{number: (at_s, copy) for number, at_s, copy in r.marks} for r in results]
    common = set.intersection(*[set(marks) for marks in by_worker])
    averages = []
    for number in sorted(common):
        copies = [marks[number] for marks in by_worker]
        mean = torch.stack([copy for _, copy in copies]).mean(dim=0)
        averages.append((max(at_s for at_s, _ in copies), mean))
    return averages
