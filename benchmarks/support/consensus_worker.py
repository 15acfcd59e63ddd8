"""A worker process of consensus.py: it mixes, and never learns."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from support.meeting import Meeting
from torch import nn

from gossipdp import Counting, logs
from gossipdp.parallel.module import GossipDataParallel
from gossipdp.parallel.options import Network

NUM_OBSERVED = 1_000


@dataclass(frozen=True)
class ConsensusTask:
    """One run, the same for all workers.

    num_steps: "gradient steps" of each worker, each a wait of ``step_s`` that changes nothing.
    num_floats: length of the vector that each worker holds.
    max_megabits_per_s: what each worker sends at most; None for no limit.
    """

    graph: str
    method: Literal["a2cid2", "gossip"]
    comm_rate: float
    step_s: float
    num_steps: int
    num_floats: int
    seed: int
    max_megabits_per_s: float | None
    meeting: Path


@dataclass(frozen=True)
class WorkerSeries:
    """The values of one worker at its start and after each step, ``time.monotonic`` seconds.

    times_s, initiated: (num_steps + 1,); exchanges that it asked for and completed.
    values: the observed coordinates of its parameters; (num_steps + 1, observed) float32.
    exchange_s: the durations of its exchanges, asked for or answered.
    """

    rank: int
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    initiated: np.ndarray[Any, np.dtype[np.int64]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    exchange_s: list[float]
    num_failed: int


class _Vector(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)


def run_worker(task: ConsensusTask) -> WorkerSeries:
    """Exchange with the others while waiting; return what was seen."""
    logs.configure()
    torch.set_num_threads(1)
    vector = _Vector(torch.zeros(task.num_floats))
    optimizer = torch.optim.SGD(vector.parameters(), lr=0.0)  # no gradient: it changes nothing
    model = GossipDataParallel(
        vector,
        optimizer,
        graph=task.graph,
        comm_rate=task.comm_rate,
        method=task.method,
        seed=task.seed,
        counting=Counting(samples_per_step=1),
        network=Network(max_megabits_per_s=task.max_megabits_per_s),
    )
    # Wrapping gave all of them rank 0's vector. No worker asks for an exchange before its fifth
    # step, and none steps before all have met again: so all begin from vectors of their own.
    model.load_state_dict({"values": start_vector(task, model.rank)})
    meeting = Meeting(task.meeting, model.rank)
    meeting.meet()
    # Spread over a step, so that the workers of one machine do not all wake at once.
    start_s = time.monotonic() + task.step_s * model.rank / model.world_size
    series = _run(task, model, optimizer, vector.values.detach(), start_s)
    model.consolidate()
    return series


def start_vector(task: ConsensusTask, rank: int) -> torch.Tensor:
    """Return the standard normal vector with which a worker begins."""
    generator = torch.Generator().manual_seed(task.seed * 1_000_003 + rank)
    return torch.randn(task.num_floats, generator=generator)


def _run(
    task: ConsensusTask,
    model: GossipDataParallel,
    optimizer: torch.optim.Optimizer,
    values: torch.Tensor,
    start_s: float,
) -> WorkerSeries:
    """Take the steps; ``values`` is written at each step's end, by the wrapper alone."""
    observed = values[:: max(1, task.num_floats // NUM_OBSERVED)][:NUM_OBSERVED]
    num_records = task.num_steps + 1
    seen = np.empty((num_records, len(observed)), dtype=np.float32)
    times_s, initiated = np.empty(num_records), np.zeros(num_records, dtype=np.int64)
    exchange_s: list[float] = []
    last_ended_s = 0.0
    time.sleep(max(0.0, start_s - time.monotonic()))
    times_s[0], seen[0] = time.monotonic(), observed.numpy()
    for step in range(1, num_records):
        time.sleep(task.step_s)
        optimizer.step()
        stats = model.stats()
        times_s[step], initiated[step] = time.monotonic(), stats.exchanges_initiated
        seen[step] = observed.numpy()
        for exchange in stats.recent_exchanges:
            if exchange.ended_s > last_ended_s:
                last_ended_s = exchange.ended_s
                exchange_s.append(exchange.ended_s - exchange.started_s)
    failed = model.stats().exchanges_failed
    return WorkerSeries(model.rank, times_s, initiated, seen, exchange_s, failed)
