"""The speed of sharded replicas over gossip, beside HSDP's.

    python benchmarks/shards.py [--rounds 3] [--quick]
    python benchmarks/shards.py link                each replica behind 100 Mbit/s (root)

Two replicas of two processes each train a small GPT over gloo on this machine. HSDP is torch's own:
``fully_shard`` with both dimensions of the mesh, which averages gradients over the replicas at each
step. Computing is a timed wait before each forward pass, SLOW_FACTOR times as long on the processes
of the slow replica, where there is one. It is long beside the work of the model, so that it is as
on a machine with a core for every process. Rows take turns, each in processes of its own. Memory is
what a process takes beyond its imports.

With ``link`` each replica is a host (a network namespace, on a switch by a cable of that rate, no
delay added), with both of its processes. Bytes are what leaves the host, headers included. The
model has a million parameters there, so that it takes a third of a second to send.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.hosts import Hosts, ShapedHosts, bytes_sent, missing
from support.network_probe import measure as measure_network
from support.quality_worker import GOSSIP_NETWORK, Network
from support.report import Missing, Report, Spread, Table, interleaved, run_script
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gossipdp import GossipDataParallel, launch

NUM_REPLICAS, NUM_SHARDS, BATCH, LENGTH = 2, 2, 8, 32
SLOW_FACTOR = 4.0
LINK_MBITS_PER_S, LINK_WIDTH = 100.0, 256
METHODS = ("HSDP", "gossip")
LINK_METHODS = ("HSDP", "HSDP in bfloat16", "gossip", "gossip in bfloat16")


@dataclass(frozen=True)
class Case:
    """One row."""

    method: str
    where: str = ""
    is_one_slow: bool = False

    def __str__(self) -> str:
        """As tables show it."""
        return f"{self.method}, {self.where}" if self.where else self.method

    @property
    def is_hsdp(self) -> bool:
        """Return whether torch averages gradients, in place of gossip."""
        return self.method.startswith("HSDP")

    @property
    def sends_half(self) -> bool:
        """Return whether what crosses between replicas has 16 bits."""
        return self.method.endswith("bfloat16")


@dataclass(frozen=True)
class Task:
    """Train in every process; network: the hosts of the processes, by rank, if not this one."""

    case: Case
    wait_s: float
    num_steps: int
    width: int
    num_layers: int
    network: Network | None


@dataclass(frozen=True)
class Measured:
    """The results of one process: samples, time from the first step to the last, memory.

    sent_bytes: what its host sent meanwhile, if it is on one of its own.
    """

    samples: int
    began_s: float
    ended_s: float
    memory_mb: float
    exchanges: int
    sent_bytes: int


class Gpt(nn.Module):
    """Transformer layers over bytes."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) to logits of shape (batch * length, 256)."""
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def peak_mb() -> float:
    """Return the most memory that this process has had at once."""
    with open("/proc/self/status", encoding="ascii") as status:
        lines = dict(line.split(":", 1) for line in status)
    return int(lines["VmHWM"].split()[0]) / 1024


def train(task: Task) -> Measured:
    """One process of one row."""
    torch.set_num_threads(1)
    before_mb = peak_mb()
    case, network = task.case, task.network
    if network is not None:
        network.enter(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (NUM_REPLICAS, NUM_SHARDS), mesh_dim_names=("replicate", "shard")
    )
    is_slow = case.is_one_slow and mesh.get_local_rank("replicate") == 1
    wait_s = task.wait_s * (SLOW_FACTOR if is_slow else 1.0)
    torch.manual_seed(0)
    net = Gpt(task.width, task.num_layers)
    texts = [torch.randint(256, (BATCH, LENGTH + 1)) for _ in range(16)]
    of: DeviceMesh = mesh if case.is_hsdp else mesh["shard"]
    sums = torch.bfloat16 if case.is_hsdp and case.sends_half else None
    policy = MixedPrecisionPolicy(reduce_dtype=sums)
    for layer in net.layers:
        fully_shard(layer, mesh=of, mp_policy=policy)
    fully_shard(net, mesh=of, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    samples = 0

    def step(text: torch.Tensor) -> None:
        nonlocal samples
        time.sleep(wait_s)
        nn.functional.cross_entropy(net(text[:, :-1]), text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += BATCH

    def count_bytes() -> int:
        return 0 if network is None else bytes_sent(network.interface)

    step(texts[0])  # FSDP makes its buffers
    samples, exchanges = 0, 0
    num_samples = task.num_steps * BATCH * NUM_REPLICAS * NUM_SHARDS
    dist.barrier()
    if case.is_hsdp:
        began_s, before_bytes = time.monotonic(), count_bytes()
        for number in range(task.num_steps):
            step(texts[number % len(texts)])
        ended_s, after_bytes = time.monotonic(), count_bytes()
    else:
        model = GossipDataParallel(
            net,
            optimizer,
            mesh=mesh["replicate"],
            comm_rate=1,
            budget_samples=num_samples,
            wire_format="bfloat16" if case.sends_half else "full",
            network=None if network is None else GOSSIP_NETWORK,
        )
        dist.barrier()
        began_s, before_bytes = time.monotonic(), count_bytes()
        for text in model.batches(texts):
            step(text)
        ended_s, after_bytes = time.monotonic(), count_bytes()
        exchanges = model.stats().exchanges
        model.consolidate()
    memory_mb = peak_mb() - before_mb
    dist.barrier()
    dist.destroy_process_group()
    return Measured(samples, began_s, ended_s, memory_mb, exchanges, after_bytes - before_bytes)


def measure(case: Case, task: dict[str, Any]) -> dict[str, Any]:
    """Run one row; samples/s over all processes, from the first's first step to the last's end."""
    processes = launch(train, NUM_REPLICAS * NUM_SHARDS, (Task(case, **task),), timeout_s=600)
    seconds = max(one.ended_s for one in processes) - min(one.began_s for one in processes)
    return {
        "samples_per_s": sum(one.samples for one in processes) / seconds,
        "memory_mb": [one.memory_mb for one in processes],
        "exchanges": [one.exchanges for one in processes],
        # Of a replica, by its first process: the other sees the same interface.
        "mb_per_step": [
            1e-6 * one.sent_bytes / (one.samples / BATCH) for one in processes[::NUM_SHARDS]
        ],
        "processes": [asdict(one) for one in processes],
    }


def spread(found: Sequence[dict[str, Any]], name: str, form: str) -> str:
    """Return the spread over all rounds, and all processes or replicas."""
    values = [each[name] for each in found]
    flat = [v for each in values for v in (each if isinstance(each, list) else [each])]
    return Spread.of(flat).text(form)


def ratios(found: dict[Case, list[dict[str, Any]]], mine: Case, other: Case) -> list[float]:
    """Samples/s beside another row's, round by round."""
    pairs = zip(found[mine], found[other], strict=True)
    return [one["samples_per_s"] / two["samples_per_s"] for one, two in pairs]


def on_one_machine(report: Report, num_rounds: int, task: dict[str, Any]) -> dict[str, Any]:
    """Replicas of equal speed, and with one that is slow."""
    where = {True: "one replica 4 times slower", False: "equal"}
    cases = [Case(method, where[is_slow], is_slow) for is_slow in where for method in METHODS]
    found = interleaved(cases, num_rounds, lambda case: measure(case, task))
    columns = (("samples_per_s", ".0f"), ("memory_mb", ".0f"), ("exchanges", ".0f"))
    rows = [(str(case), *(spread(found[case], *column) for column in columns)) for case in cases]
    head = ("method and replicas", "samples/s", "MB a process", "exchanges a process")
    report.tables.append(Table("Two replicas of two processes", head, rows, note(num_rounds, task)))
    hsdp, gossip = cases[:2]
    of_rounds = ratios(found, gossip, hsdp)
    return {str(case): found[case] for case in cases} | {"ratios": of_rounds}


def behind_links(
    report: Report, num_rounds: int, task: dict[str, Any], hosts: Hosts
) -> dict[str, Any]:
    """Equal replicas, each on a host of its own."""
    cases = [Case(method) for method in LINK_METHODS]
    with hosts:
        seen = measure_network(hosts)
        found = interleaved(cases, num_rounds, lambda case: measure(case, task))
    columns = (("samples_per_s", ".1f"), ("mb_per_step", ".2f"), ("exchanges", ".0f"))
    rows = [(str(case), *(spread(found[case], *column) for column in columns)) for case in cases]
    head = ("method", "samples/s", "MB a replica sends in a step", "exchanges a process")
    title = f"Each replica behind {LINK_MBITS_PER_S:g} Mbit/s"
    link = (
        f"One TCP connection between the hosts: {seen.mbits_per_s:.3g} Mbit/s, round trip "
        f"{seen.round_trip_ms:.2f} ms."
    )
    report.tables.append(Table(title, head, rows, f"{note(num_rounds, task)} {link}"))
    facts = {
        f"{gossip} over {hsdp}": ratios(found, Case(gossip), Case(hsdp))
        for hsdp, gossip in zip(LINK_METHODS[:2], LINK_METHODS[2:], strict=True)
    }
    return {str(case): found[case] for case in cases} | {"ratios": facts, "network": asdict(seen)}


def note(num_rounds: int, task: dict[str, Any]) -> str:
    """Return the conditions that a table was measured with."""
    size = sum(each.numel() for each in Gpt(task["width"], task["num_layers"]).parameters())
    return (
        f"Rounds: {num_rounds}. Each process under HSDP: {task['num_steps']} steps of "
        f"{task['wait_s']:g} s, batch {BATCH}. Width {task['width']}, layers "
        f"{task['num_layers']}: {size:,} parameters."
    )


def main() -> None:
    """Run all rows of a table in turn and write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("where", nargs="?", choices=("here", "link"), default="here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="of each process, under HSDP")
    parser.add_argument("--wait", type=float, default=0.4, help="seconds a step computes")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    options = parser.parse_args()
    is_link = options.where == "link"
    # A namespace has no names for addresses, of which torch would warn in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    name = "shards_link" if is_link else "shards"
    report = Report(name, __doc__.split("\n", 1)[0], options.quick)
    width = LINK_WIDTH if is_link else 64
    task = {"wait_s": options.wait, "num_steps": options.steps, "width": width, "num_layers": 1}
    num_rounds = options.rounds
    if options.quick:
        task, num_rounds = task | {"num_steps": 5, "width": 32, "wait_s": 0.01}, 1
    if not is_link:
        data = on_one_machine(report, num_rounds, task | {"network": None})
    elif (why_not := missing("tc")) is not None:
        report.missing.append(Missing("all rows", why_not))
        data = {}
    else:
        hosts = ShapedHosts(NUM_REPLICAS, LINK_MBITS_PER_S)
        names = tuple(name for name in hosts.names for _ in range(NUM_SHARDS))
        network = Network(names, hosts.addresses[0], hosts.interface)
        data = behind_links(report, num_rounds, task | {"network": network}, hosts)
    report.write(data | {"task": task})


if __name__ == "__main__":
    run_script(main)
