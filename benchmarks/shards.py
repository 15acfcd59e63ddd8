"""The speed of sharded replicas over gossip, beside HSDP's.

    python benchmarks/shards.py [--rounds 3] [--quick]

Two replicas of two processes each train a small GPT over gloo on this machine. HSDP is torch's own:
``fully_shard`` with both dimensions of the mesh, which averages gradients over the replicas at each
step. Computing is a timed wait before each forward pass, long beside the work of the model, so that
it is as on a machine with a core for every process. Memory is what a process takes beyond its
imports.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.report import Report, Spread, Table, asked, interleaved, run_script
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gossipdp import GossipDataParallel, launch

NUM_REPLICAS, NUM_SHARDS, BATCH, LENGTH = 2, 2, 8, 32
SLOW_FACTOR = 4.0
METHODS = ("HSDP", "gossip")


@dataclass(frozen=True)
class Case:
    method: str
    is_one_slow: bool

    def __str__(self) -> str:
        return f"{self.method}, {'one replica 4 times slower' if self.is_one_slow else 'equal'}"


@dataclass(frozen=True)
class Task:
    """Train in every process: so many steps under HSDP, of so many seconds, of such a model."""

    num_steps: int = 15
    wait_s: float = 0.4
    width: int = 64


@dataclass(frozen=True)
class Measured:
    """The results of one process: samples, time from the first step to the last, memory."""

    samples: int
    began_s: float
    ended_s: float
    memory_mb: float
    exchanges: int


def make_net(width: int) -> nn.Sequential:
    """Return a transformer layer over bytes: (batch, length) to logits (batch, length, 256)."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(256, width), layer, nn.Linear(width, 256))


def peak_mb() -> float:
    """Return the most memory that this process has had at once."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) / 1024


def train(case: Case, task: Task) -> Measured:
    torch.set_num_threads(1)
    before_mb = peak_mb()
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (NUM_REPLICAS, NUM_SHARDS), mesh_dim_names=("replicate", "shard")
    )
    is_slow = case.is_one_slow and mesh.get_local_rank("replicate") == 1
    wait_s = task.wait_s * (SLOW_FACTOR if is_slow else 1.0)
    torch.manual_seed(0)
    net = make_net(task.width)
    texts = [torch.randint(256, (BATCH, LENGTH + 1)) for _ in range(16)]
    of: DeviceMesh = mesh if case.method == "HSDP" else mesh["shard"]
    fully_shard(net[1], mesh=of)
    fully_shard(net, mesh=of)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    samples = 0

    def step(text: torch.Tensor) -> None:
        nonlocal samples
        time.sleep(wait_s)
        logits = net(text[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += BATCH

    step(texts[0])  # FSDP makes its buffers
    samples, model = 0, None
    batches: Iterable[torch.Tensor] = itertools.islice(itertools.cycle(texts), task.num_steps)
    if case.method == "gossip":
        budget = task.num_steps * BATCH * NUM_REPLICAS * NUM_SHARDS
        model = GossipDataParallel(
            net, optimizer, mesh=mesh["replicate"], comm_rate=1, budget_samples=budget
        )
        batches = model.batches(texts)
    dist.barrier()
    began_s = time.monotonic()
    for text in batches:
        step(text)
    ended_s = time.monotonic()
    exchanges = 0
    if model is not None:
        exchanges = model.stats().exchanges
        model.consolidate()
    memory_mb = peak_mb() - before_mb
    dist.barrier()
    dist.destroy_process_group()
    return Measured(samples, began_s, ended_s, memory_mb, exchanges)


def measure(case: Case, task: Task) -> dict[str, Any]:
    """Run one row; samples/s over all processes, from the first's first step to the last's end."""
    processes = launch(train, NUM_REPLICAS * NUM_SHARDS, (case, task), timeout_s=600)
    seconds = max(one.ended_s for one in processes) - min(one.began_s for one in processes)
    return {
        "samples_per_s": [sum(one.samples for one in processes) / seconds],
        "memory_mb": [one.memory_mb for one in processes],
        "exchanges": [one.exchanges for one in processes],
        "processes": [asdict(one) for one in processes],
    }


def main() -> None:
    quick, rounds = asked(__doc__, rounds=3)
    report = Report("shards", __doc__.split("\n", 1)[0], quick)
    task = Task(num_steps=5, width=32, wait_s=0.01) if quick else Task()
    cases = [Case(method, is_slow) for is_slow in (True, False) for method in METHODS]
    found = interleaved(cases, rounds, lambda case: measure(case, task))
    rows = [
        (
            str(case),
            *(
                Spread.of(value for each in found[case] for value in each[name]).text(".0f")
                for name in ("samples_per_s", "memory_mb", "exchanges")
            ),
        )
        for case in cases
    ]
    head = ("method and replicas", "samples/s", "MB a process", "exchanges a process")
    size = sum(each.numel() for each in make_net(task.width).parameters())
    note = (
        f"Rounds: {rounds}. Each process under HSDP: {task.num_steps} steps of "
        f"{task.wait_s:g} s, batch {BATCH}. Width {task.width}: "
        f"{size:,} parameters."
    )
    report.tables.append(Table("Two replicas of two processes", head, rows, note))
    report.write({str(case): found[case] for case in cases} | {"task": task})


if __name__ == "__main__":
    run_script(main)
