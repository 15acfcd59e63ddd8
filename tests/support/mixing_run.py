"""Worker processes that only mix: each begins with a vector of its own and never learns."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from waiting import wait_until

from gossipdp import Counting, Exchange, GossipDataParallel

NUM_OBSERVED = 1_000


@dataclass(frozen=True)
class MixingTask:
    """One run, the same for all workers; a "gradient step" is a wait that changes nothing."""

    method: Literal["a2cid2", "gossip"]
    graph: str = "ring"
    comm_rate: float = 2.0
    step_s: float = 0.01
    num_steps: int = 80
    num_floats: int = 3_000


@dataclass(frozen=True)
class Mixed:
    """The observations of one worker at its start and after each of its steps.

    Attributes:
        times_s: ``time.monotonic``, which all processes share; (num_steps + 1,).
        values: observed coordinates of its parameters; (num_steps + 1, observed) float32.
        initiated: exchanges that it asked for and completed; (num_steps + 1,).
        num_initiated, num_answered: in the whole run.
    """

    rank: int
    times_s: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float32]]
    initiated: np.ndarray[Any, np.dtype[np.int64]]
    num_initiated: int
    num_answered: int
    num_failed: int
    kernels: str


def start_vector(task: MixingTask, rank: int) -> torch.Tensor:
    """Return the standard normal vector with which a worker begins."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(task.num_floats, generator=generator)


def observed(task: MixingTask, values: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return some coordinates, from all chunks."""
    return values[:: max(1, task.num_floats // NUM_OBSERVED)][:NUM_OBSERVED].numpy()


def mix(task: MixingTask, meeting: Path) -> Mixed:
    """Exchange with the others while waiting; return what was seen.

    ``meeting`` is an empty directory, in which the workers wait for one another.
    """
    torch.set_num_threads(1)
    vector = nn.ParameterDict({"vector": nn.Parameter(torch.zeros(task.num_floats))})
    optimizer = torch.optim.SGD(vector.parameters(), lr=0.0)  # no gradient: it changes nothing
    model = GossipDataParallel(
        vector,
        optimizer,
        graph=task.graph,
        comm_rate=task.comm_rate,
        method=task.method,
        exchange=Exchange(
            pace="strict"
        ),  # so that each step brings its exchanges, however busy the machine is
        counting=Counting(samples_per_step=1),
    )
    # Wrapping gave all of them rank 0's vector. No worker asks before its fifth step, and none
    # steps before all have vectors of their own.
    model.load_state_dict({"vector": start_vector(task, model.rank)})
    (meeting / str(model.rank)).touch()
    wait_until(
        lambda: len(list(meeting.iterdir())) == model.world_size, "all workers come to the start"
    )
    values = vector["vector"].detach()
    seen, initiated, times_s = [observed(task, values).copy()], [0], [time.monotonic()]
    for _ in range(task.num_steps):
        time.sleep(task.step_s)
        optimizer.step()
        times_s.append(time.monotonic())
        seen.append(observed(task, values).copy())
        initiated.append(model.stats().exchanges_initiated)
    num_failed = model.stats().exchanges_failed
    model.consolidate()  # all have ended their exchanges when it returns
    stats = model.stats()
    return Mixed(
        model.rank,
        np.array(times_s),
        np.stack(seen),
        np.array(initiated),
        stats.exchanges_initiated,
        stats.exchanges_answered,
        num_failed,
        stats.kernels,
    )
