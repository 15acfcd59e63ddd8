"""A worker process of scale.py: steps that are timed waits, and real exchanges."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from support.meeting import Meeting
from support.report import busy_cpu_s
from torch import nn

from gossipdp import Counting, GossipDataParallel

WARM_UP_STEPS = 8
"""The clock of a worker asks nothing before its fifth step."""


@dataclass(frozen=True)
class ScaleTask:
    """One run, the same for all workers; step_s: the wait that stands for a step's compute."""

    graph: str
    step_s: float
    num_steps: int
    num_hidden: int
    meeting: Path


@dataclass(frozen=True)
class WorkerScale:
    """The measurements of one worker after its warm-up.

    num_ticks: demands for an exchange that its clock made; initiated: those that were served.
    handshake_s: of exchanges it asked for, from its proposal to the exchange's begin.
    exchange_s: from there to its end, of all its exchanges.
    cpu_s, gossip_cpu_s: of the whole process, and of all but its main thread.
    busy_cores: of the whole machine meanwhile.
    """

    wall_s: float
    num_steps: int
    num_ticks: int
    initiated: int
    num_failed: int
    handshake_s: list[float]
    exchange_s: list[float]
    cpu_s: float
    gossip_cpu_s: float
    busy_cores: float
    num_parameters: int


def run_worker(task: ScaleTask) -> WorkerScale:
    """Take the steps; return what was seen."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    meeting = Meeting(task.meeting, rank, poll_s=0.02)
    net = nn.Sequential(nn.Linear(64, task.num_hidden), nn.ReLU(), nn.Linear(task.num_hidden, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = GossipDataParallel(
        net, optimizer, graph=task.graph, comm_rate=1, counting=Counting(samples_per_step=1)
    )
    protocol = model._engine._protocol  # type: ignore[attr-defined]
    meeting.meet()
    # Spread over a step, so that not all workers of one machine wake at once.
    time.sleep(task.step_s * rank / model.world_size)
    for _ in range(WARM_UP_STEPS):
        time.sleep(task.step_s)
        optimizer.step()
    began = model.stats()
    began_ticks = protocol.clock.num_ticks
    # The machine's CPU time first and last, so that this process's own lies within.
    busy_s, wall_s = busy_cpu_s(), time.perf_counter()
    cpu_s, main_cpu_s = time.process_time(), time.thread_time()
    last_ended_s = time.monotonic()
    handshake_s: list[float] = []
    exchange_s: list[float] = []
    for _ in range(task.num_steps):
        time.sleep(task.step_s)
        optimizer.step()
        for exchange in model.stats().recent_exchanges:
            if exchange.ended_s > last_ended_s:
                last_ended_s = exchange.ended_s
                exchange_s.append(exchange.ended_s - exchange.started_s)
                if exchange.asked_s is not None:
                    handshake_s.append(exchange.started_s - exchange.asked_s)
    cpu_s, main_cpu_s = time.process_time() - cpu_s, time.thread_time() - main_cpu_s
    wall_s, busy_s = time.perf_counter() - wall_s, busy_cpu_s() - busy_s
    ended = model.stats()
    num_ticks = protocol.clock.num_ticks - began_ticks
    meeting.meet()
    model.close()
    return WorkerScale(
        wall_s=wall_s,
        num_steps=task.num_steps,
        num_ticks=num_ticks,
        initiated=ended.exchanges_initiated - began.exchanges_initiated,
        num_failed=ended.exchanges_failed - began.exchanges_failed,
        handshake_s=handshake_s,
        exchange_s=exchange_s,
        cpu_s=cpu_s,
        gossip_cpu_s=cpu_s - main_cpu_s,
        busy_cores=busy_s / wall_s,
        num_parameters=sum(parameter.numel() for parameter in net.parameters()),
    )
