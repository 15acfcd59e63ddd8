"""Loss and consensus distance on rings of 4 to 64 workers: does A2CiD2 act like a doubled rate?"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from reproduction import parts
from reproduction.parts import COLOURS, Estimate, verdict

from gossipdp_lab.simulate import (
    ConstantTime,
    Link,
    LinkModel,
    LognormalTime,
    Objective,
    Quadratic,
    Scenario,
    digits_objective,
    simulate,
)
from gossipdp_lab.tasks.workload import learning_rate_factor

DATA_NAMES = {"iid": "same data", "dirichlet": "uneven classes", "noise": "white noise"}
KINDS = {
    ("allreduce", 1.0): "all-reduce",
    ("gossip", 1.0): "gossip, rate 1",
    ("gossip", 2.0): "gossip, rate 2",
    ("a2cid2", 1.0): "A2CiD2, rate 1",
}
GOSSIP_KINDS = list(KINDS)[1:]
DOUBLED, ACCELERATED = ("gossip", 2.0), ("a2cid2", 1.0)


class Settings(msgspec.Struct, frozen=True):
    total_steps: float = 19_200
    """Gradient steps of all workers together, whatever their number."""
    batch_size: int = 32
    largest_learning_rate: float = 0.2
    """At the largest number of workers; in proportion below."""
    largest: int = 64
    momentum: float = 0.9
    weight_decay: float = 5e-4
    dirichlet_alpha: float = 0.1
    step_spread: float = 0.1
    noise_steps: float = 800.0
    noise_learning_rate: float = 0.1
    num_records: int = 40


QUICK = Settings(total_steps=160, largest=8, noise_steps=40.0, num_records=8)


CELL = ("data", "graph", "num_workers", "method", "comm_rate", "seed")
"""The fields in which runs differ; data: "iid", "dirichlet" or "noise" (a flat quadratic)."""


class Run(msgspec.Struct, frozen=True):
    """One run. The late distance is the mean over its second half."""

    data: str
    graph: str
    num_workers: int
    method: str
    comm_rate: float
    seed: int
    loss: float
    accuracy: float | None
    late_distance: float
    distances: list[float]


class Result(msgspec.Struct, frozen=True):
    runs: list[Run]
    settings: Settings
    seeds: list[int]

    def of(self, data: str, graph: str, n: int, kind: tuple[str, float]) -> list[Run]:
        """Return the runs of one cell, one a seed. All-reduce has no graph: a ring's runs serve."""
        method, rate = kind
        if method == "allreduce":
            graph = "ring"
        return [
            run
            for run in self.runs
            if (run.data, run.graph, run.num_workers) == (data, graph, n)
            and (run.method, run.comm_rate) == (method, rate)
        ]

    @property
    def sizes(self) -> list[int]:
        return sorted({run.num_workers for run in self.runs if run.graph == "ring"})

    def ratios(self, data: str, graph: str, n: int) -> list[float]:
        """A2CiD2 at rate 1 over gossip at rate 2: late consensus distance, seed by seed."""
        both = [self.of(data, graph, n, kind) for kind in (ACCELERATED, DOUBLED)]
        return [a.late_distance / b.late_distance for a, b in zip(*both, strict=True)]

    def ahead_from(self, data: str, n: int) -> float:
        """Return the share of the run after which A2CiD2 stays ahead of gossip at rate 2."""
        ours, theirs = (
            np.array([run.distances for run in self.of(data, "ring", n, kind)]).mean(axis=0)
            for kind in (ACCELERATED, DOUBLED)
        )
        behind = np.flatnonzero(ours > theirs)
        return float(behind[-1] + 1) / (len(ours) - 1) if len(behind) else 0.0


def measure(quick: bool) -> Result:
    """Train on digits, alike and not; then keep white noise in check."""
    settings = QUICK if quick else Settings()
    sizes = (4, 8) if quick else (4, 8, 16, 32, 64)
    seeds = range(1 if quick else 3)
    largest = settings.largest
    rings = [("ring", n) for n in sizes]
    networks = [*rings, ("exponential", largest), ("complete", largest)]
    both = ("iid", "dirichlet")
    cells = [
        *product(both, networks, GOSSIP_KINDS, seeds),
        *product(both, rings, [("allreduce", 1.0)], seeds),
        *product(["noise"], [("ring", largest)], GOSSIP_KINDS, seeds),
    ]
    jobs = [
        dict(zip(CELL, (data, *network, *kind, seed), strict=True))
        for data, network, kind, seed in cells
    ]
    measure_one = partial(measure_run, settings)
    runs = parts.run_jobs(measure_one, jobs)
    return Result(runs=runs, settings=settings, seeds=list(seeds))


def measure_run(settings: Settings, **cell: Any) -> Run:
    """Train one network; ``cell``: the fields of ``CELL``."""
    data, method, num_workers = cell["data"], cell["method"], cell["num_workers"]
    is_noise, is_synchronous = data == "noise", method == "allreduce"
    objective: Objective = Quadratic(mu=0.0, smoothness=0.0, noise_variance=1.0)
    sgd = partial(torch.optim.SGD, momentum=settings.momentum)
    optimizer = partial(sgd, lr=settings.noise_learning_rate)
    if not is_noise:
        alpha = settings.dirichlet_alpha if data == "dirichlet" else None
        objective = digits_objective(batch_size=settings.batch_size, dirichlet_alpha=alpha)
        learning_rate = settings.largest_learning_rate * num_workers / settings.largest
        optimizer = partial(sgd, lr=learning_rate, weight_decay=settings.weight_decay)
    # All-reduce does as many rounds as the others do steps: waiting is not looked at here.
    scenario = Scenario(
        graph=cell["graph"],
        num_workers=num_workers,
        objective=objective,
        optimizer=optimizer,
        comm_rate=cell["comm_rate"],
        compute_time=ConstantTime(1.0)
        if is_synchronous
        else LognormalTime(1.0, settings.step_spread),
        num_steps=settings.noise_steps if is_noise else settings.total_steps / num_workers,
        num_records=settings.num_records,
        schedule=None if is_noise else learning_rate_factor,
        seed=cell["seed"],
        links=LinkModel(Link(latency_s=0.0)),
    )
    trace = simulate(scenario, method)
    distances = trace.column("consensus_distance")
    last = trace.records[-1]
    return Run(
        **cell,
        loss=last.loss,
        accuracy=None if is_noise else last.metric,
        late_distance=float(distances[settings.num_records // 2 :].mean()),
        distances=[float(f"{distance:.5g}") for distance in distances],
    )


def draw(result: Result, path: Path) -> None:
    """Draw a row a kind of data: distance and loss over n, distance over time on the largest."""
    figure, panels = parts.figure_of_page_width(6.2, 2, 3)
    sizes, largest = result.sizes, result.settings.largest
    for row, data in zip(panels, ("iid", "dirichlet"), strict=True):
        distance, loss, course = row
        for place, (kind, name) in enumerate(KINDS.items()):
            look = {"color": COLOURS[place], "lw": 1.5}
            marked = {"marker": parts.MARKERS[place], "markersize": 5, **look}
            cells = [result.of(data, "ring", n, kind) for n in sizes]
            losses = [statistics.fmean(run.loss for run in runs) for runs in cells]
            loss.plot(sizes, losses, label=name, **marked)
            if kind[0] == "allreduce":
                continue  # which has no distance
            means = [statistics.fmean(run.late_distance for run in runs) for runs in cells]
            distance.plot(sizes, means, **marked)
            courses = np.array([run.distances for run in cells[-1]]).mean(axis=0)
            course.plot(np.linspace(0.0, 1.0, len(courses))[1:], courses[1:], **look)
        for axes in (distance, loss):
            axes.set_xscale("log")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
        distance.set(yscale="log", ylabel=f"{DATA_NAMES[data]}\nconsensus distance")
        course.set_yscale("log")
        loss.set_ylim(bottom=0.0)
        loss.set_ylabel("training loss")
    titles = (
        "Distance, second half",
        "Loss of the mean, at the end",
        f"Distance, ring of {largest}",
    )
    for axes, title in zip(panels[0], titles, strict=True):
        axes.set_title(title, fontsize="medium")
    for axes, label in zip(panels[1], ("workers n", "workers n", "share of the run"), strict=True):
        axes.set_xlabel(label)
    handles = panels[0, 1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    parts.save(figure, path)


def claims(result: Result) -> list[tuple[str, str]]:
    """Compare A2CiD2 with gossip at twice its rate: on the largest ring, then on smaller ones."""
    rings = [(data, n) for data in ("iid", "dirichlet") for n in result.sizes]
    ratios = {ring: Estimate.of(result.ratios(ring[0], "ring", ring[1])) for ring in rings}
    largest = [ring for ring in rings if ring[1] == result.settings.largest]
    smaller = [ring for ring in rings if ring not in largest]
    held = [ring for ring in smaller if ratios[ring].mean <= 1.0]
    shown = "; ".join(
        f"{DATA_NAMES[data]} {ratios[data, n].text}, ahead after {result.ahead_from(data, n):.0%}"
        for data, n in largest
    )
    return [
        (
            "figures 1 and 2: on a ring of 64 A2CiD2 keeps workers as close as gossip at twice the "
            "rate",
            f"{verdict(all(ratios[ring].mean <= 1.0 for ring in largest))}: distance over that of "
            f"gossip at rate 2: {shown}",
        ),
        (
            "the same on smaller rings (ours)",
            f"{verdict(len(held) == len(smaller), ('holds', 'differs'))}: it holds in {len(held)} "
            f"of {len(smaller)} cases from 4 to 32 workers",
        ),
    ]


def caption(result: Result) -> list[str]:
    settings, noise = result.settings, result.ratios("noise", "ring", result.settings.largest)
    return [
        f"Handwritten digits, a perceptron, {settings.total_steps:,.0f} steps of all workers "
        "together; a learning rate in proportion to the workers, untuned. Uneven classes: shares "
        f"drawn from Dirichlet({settings.dirichlet_alpha:g}). [Exchanges take no time]"
        "(simulator.md#the-simulator). On white noise alone the ratio is "
        f"{Estimate.of(noise).text}."
    ]
