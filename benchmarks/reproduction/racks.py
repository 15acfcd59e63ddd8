"""Sixty-four workers in eight racks: each reaches its own rack and one worker of the next or last.

Here a sparse graph is no choice: switches and firewalls set it. The data of a rack is its own too.
"""

from __future__ import annotations

from functools import partial
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import torch
from reproduction import parts
from reproduction.parts import COLOURS, Estimate

from gossipdp.graph import Graph
from gossipdp_lab.simulate import LognormalTime, Scenario, digits_objective, simulate
from gossipdp_lab.tasks.workload import learning_rate_factor

KINDS = {
    ("gossip", 1.0): "gossip, 1 exchange a step",
    ("gossip", 2.0): "gossip, 2 exchanges a step",
    ("a2cid2", 1.0): "A2CiD2, 1 exchange a step",
}
NUM_RECORDS = 40


class Run(msgspec.Struct, frozen=True):
    method: str
    comm_rate: float
    seed: int
    loss: float
    distances: list[float]


class Result(msgspec.Struct, frozen=True):
    runs: list[Run]
    racks: int
    size: int
    steps: float

    def of(self, kind: tuple[str, float]) -> list[Run]:
        return [run for run in self.runs if (run.method, run.comm_rate) == kind]

    def late(self, kind: tuple[str, float]) -> Estimate:
        """Return the consensus distance over the second half."""
        late = [float(np.mean(run.distances[NUM_RECORDS // 2 :])) for run in self.of(kind)]
        return Estimate.of(late)


def racks(number: int, size: int) -> Graph:
    """Return the graph: racks are complete, and half of each has a cable to half of the next."""
    graph = Graph(range(number * size), name=f"racks {number}x{size}")
    for rack in range(number):
        for left, right in combinations(range(size), 2):
            graph.join(rack * size + left, rack * size + right)
        for place in range(size // 2):
            after = (rack + 1) % number
            graph.join(rack * size + place, after * size + size // 2 + place)
    return graph


def measure(quick: bool) -> Result:
    """Train the digits, of which each worker has a share of the classes of its own."""
    number, size, steps = (4, 4, 20.0) if quick else (8, 8, 300.0)
    jobs = [
        {"number": number, "size": size, "steps": steps, "kind": kind, "seed": seed}
        for kind in KINDS
        for seed in range(1 if quick else 3)
    ]
    return Result(parts.run_jobs(measure_run, jobs), number, size, steps)


def measure_run(number: int, size: int, steps: float, kind: tuple[str, float], seed: int) -> Run:
    method, rate = kind
    scenario = Scenario(
        graph=racks(number, size),
        num_workers=number * size,
        objective=digits_objective(batch_size=32, dirichlet_alpha=0.1),
        optimizer=partial(torch.optim.SGD, momentum=0.9, lr=0.2, weight_decay=5e-4),
        comm_rate=rate,
        compute_time=LognormalTime(1.0, 0.1),
        num_steps=steps,
        num_records=NUM_RECORDS,
        schedule=learning_rate_factor,
        seed=seed,
    )
    trace = simulate(scenario, method)
    distances = [float(f"{each:.5g}") for each in trace.column("consensus_distance")]
    return Run(method, rate, seed, trace.records[-1].loss, distances)


def draw(result: Result, path: Path) -> None:
    """Consensus distance over the run, a line a kind."""
    figure, axes = parts.figure_of_page_width(3.4, 1, 1)
    for place, (kind, name) in enumerate(KINDS.items()):
        mean = np.array([run.distances for run in result.of(kind)]).mean(axis=0)
        shares = np.linspace(0.0, 1.0, len(mean))
        axes.plot(shares[1:], mean[1:], color=COLOURS[place + 1], lw=1.6, label=name)
    axes.set(yscale="log", xlabel="share of the run", ylabel="consensus distance")
    axes.legend()
    parts.save(figure, path)


def claims(result: Result) -> list[tuple[str, str]]:
    """Say what the momentum brings where the network is given."""
    late = {kind: result.late(kind) for kind in KINDS}
    plain, doubled, ours = late.values()
    losses = [Estimate.of([run.loss for run in result.of(kind)]).text for kind in KINDS]
    return [
        (
            "ours: in eight racks with few cables between them A2CiD2 acts like a doubled rate",
            f"{parts.verdict(ours.mean <= doubled.mean, parts.HOLDS)}: distance {ours.text}; "
            f"gossip {plain.text}, at twice the rate {doubled.text}; loss {losses[2]}, "
            f"{losses[0]}, {losses[1]}",
        )
    ]


def caption(result: Result) -> list[str]:
    return [
        f"{result.racks * result.size} simulated workers; each reaches its rack of {result.size} "
        "and one worker of a neighbouring rack. Digits, a perceptron, each worker with shares of "
        f"the classes of its own (Dirichlet 0.1), {result.steps:g} steps. Mean of the seeds."
    ]
