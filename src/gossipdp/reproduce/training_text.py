"""What the section on training measured, its figure and its text."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec
import numpy as np

from gossipdp.reproduce.drawing import COLOURS, MARKERS, new_figure, save
from gossipdp.reproduce.fits import spread
from gossipdp.reproduce.markdown import table, verdict
from gossipdp.reproduce.section import FIGURE

DATA_NAMES = {"iid": "same data", "dirichlet": "uneven classes", "noise": "white noise"}
KINDS = (("allreduce", 1.0), ("gossip", 1.0), ("gossip", 2.0), ("a2cid2", 1.0))
KIND_NAMES = ("all-reduce", "gossip, rate 1", "gossip, rate 2", "A2CiD2, rate 1")
DOUBLED, ACCELERATED = KINDS[2], KINDS[3]


class TrainingSettings(msgspec.Struct, frozen=True):
    """What all runs have in common."""

    total_steps: float
    """Gradient steps of all workers together, whatever their number."""
    batch_size: int
    largest_learning_rate: float
    """At the largest number of workers; in proportion below."""
    largest: int
    momentum: float
    weight_decay: float
    dirichlet_alpha: float
    step_spread: float
    noise_steps: float
    noise_learning_rate: float
    num_records: int = 40


class TrainingRun(msgspec.Struct, frozen=True):
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


class TrainingResult(msgspec.Struct, frozen=True):
    """All runs, and how they were made."""

    runs: list[TrainingRun]
    settings: TrainingSettings
    seeds: list[int]

    def of(self, data: str, graph: str, n: int, kind: tuple[str, float]) -> list[TrainingRun]:
        """The runs of one cell, one a seed. All-reduce knows no graph: a ring's are everyone's."""
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
        """Of the rings."""
        return sorted({run.num_workers for run in self.runs if run.graph == "ring"})

    def ratios(self, data: str, graph: str, n: int) -> list[float]:
        """A2CiD2 at rate 1 over gossip at rate 2: late consensus distance, seed by seed."""
        both = [self.of(data, graph, n, kind) for kind in (ACCELERATED, DOUBLED)]
        return [a.late_distance / b.late_distance for a, b in zip(*both, strict=True)]


def draw(result: TrainingResult, path: Path) -> None:
    """A row a kind of data: distance over n, loss over n, distance over time on the largest."""
    figure = new_figure(6.2)
    panels = figure.subplots(2, 3)
    sizes, largest = result.sizes, result.settings.largest
    for row, data in zip(panels, ("iid", "dirichlet"), strict=True):
        distance, loss, course = row
        for place, kind in enumerate(KINDS):
            look = {"color": COLOURS[place], "lw": 1.5}
            name, marker = KIND_NAMES[place], MARKERS[place]
            cells = [result.of(data, "ring", n, kind) for n in sizes]
            losses = [statistics.fmean(run.loss for run in runs) for runs in cells]
            loss.plot(sizes, losses, marker=marker, markersize=5, label=name, **look)
            if kind[0] == "allreduce":
                continue  # which has no distance
            means = [statistics.fmean(run.late_distance for run in runs) for runs in cells]
            distance.plot(sizes, means, marker=marker, markersize=5, **look)
            courses = np.array([run.distances for run in cells[-1]]).mean(axis=0)
            share = np.linspace(0.0, 1.0, len(courses))
            course.plot(share[1:], courses[1:], **look)
        for axes in (distance, loss):
            axes.set_xscale("log")
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
        distance.set(yscale="log", ylabel=f"{DATA_NAMES[data]}\nconsensus distance")
        course.set_yscale("log")
        loss.set_ylim(bottom=0.0)
        loss.set_ylabel("training loss")
    for axes, title in zip(
        panels[0],
        ("Distance, second half", "Loss of the mean, at the end", f"Distance, ring of {largest}"),
        strict=True,
    ):
        axes.set_title(title, fontsize="medium")
    for axes, label in zip(panels[1], ("workers n", "workers n", "share of the run"), strict=True):
        axes.set_xlabel(label)
    handles = panels[0, 1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    save(figure, path)


def write(result: TrainingResult) -> list[str]:
    """The section's Markdown."""
    settings, largest = result.settings, result.settings.largest
    ratios = {data: spread(result.ratios(data, "ring", largest)) for data in DATA_NAMES}
    holds = all(ratio.mean <= 1.0 for ratio in ratios.values())
    found = "; ".join(f"{DATA_NAMES[data]} {ratio.text}" for data, ratio in ratios.items())
    return [
        "Claim: on a ring, A2CiD2 acts like doubling the comm rate: at rate 1 it keeps the workers "
        "as close together as plain gossip does at rate 2.",
        f"Verdict: {verdict(holds)} on the ring of {largest}. Consensus distance of A2CiD2 at rate "
        f"1 over that of gossip at rate 2 (paper: about 1; at most 1 is asked for): {found}. "
        f"{_other_sizes(result)}",
        FIGURE,
        "**Rings.** Loss: training loss of the mean of the workers at the end. Distance: "
        "consensus distance, mean over the second half of the run. All over the seeds.",
        table(_HEAD, _rows(result, [("ring", n) for n in result.sizes]), num_left=2),
        f"**Other graphs**, {largest} workers:",
        table(
            _HEAD,
            _rows(result, [(graph, largest) for graph in ("ring", "exponential", "complete")]),
            num_left=2,
        ),
        f"**White noise alone**, ring of {largest}: a flat quadratic, SGD with momentum "
        f"{settings.momentum:g} and a constant learning rate {settings.noise_learning_rate:g}, "
        "gradients of independent normal values with variance 1 in sum. Consensus distance, "
        f"second half of {settings.noise_steps:g} steps: "
        + ", ".join(
            f"{name} {_mean(result.of('noise', 'ring', largest, kind), 'late_distance')}"
            for kind, name in zip(KINDS[1:], KIND_NAMES[1:], strict=True)
        )
        + ".",
        f"How it is measured: digits, a perceptron with one hidden layer, batches of "
        f"{settings.batch_size}, SGD with momentum {settings.momentum:g}, weight decay "
        f"{settings.weight_decay:g}; {settings.total_steps:,.0f} gradient steps of all workers "
        "together, so that all sizes see the same number of samples. The learning rate is "
        f"proportional to n, {settings.largest_learning_rate:g} at {largest} workers, with linear "
        "warm-up over the first 5% and half a cosine down to 1%. Ideal network (Poisson edges, "
        f"exchanges that take no time), gradient steps with spread {settings.step_spread:g}. "
        f"Uneven classes: each worker's class shares are drawn from Dirichlet("
        f"{settings.dirichlet_alpha:g}); among four workers whole classes may be missing. "
        f"Seeds {result.seeds[0]} to {result.seeds[-1]}.",
        "What differs from the paper: a small network on small images, in place of ResNets on "
        "CIFAR-10 and ImageNet, so that losses and accuracies cannot be compared with its tables; "
        "the claim on the consensus distance can. Uneven classes and white noise are our "
        "additions. All-reduce does as many rounds here as the others do steps: time is another "
        "section. Its loss differs from theirs also because one momentum sees the mean gradient, "
        "at one point, where theirs see single ones at many.",
    ]


def _other_sizes(result: TrainingResult) -> str:
    """Where A2CiD2 is worth a doubled rate, and where it is not."""
    by_size = {n: spread(result.ratios("iid", "ring", n)).mean for n in result.sizes}
    less = [str(n) for n, ratio in by_size.items() if ratio > 1.0]
    if not less:
        return "So it is on every ring here, with the same data for all."
    return (
        "It is worth less than a doubled rate on small rings, where there is little to accelerate: "
        f"with the same data for all at n = {', '.join(less)}."
    )


_HEAD = (
    "data", "graph", "all-reduce: loss", "gossip 1: loss", "distance", "gossip 2: loss", "distance",
    "A2CiD2: loss", "distance", "test accuracy, all-reduce / gossip 1 / gossip 2 / A2CiD2",
    "distance, A2CiD2 / gossip 2",
)  # fmt: skip


def _rows(result: TrainingResult, networks: list[tuple[str, int]]) -> list[list[str]]:
    rows = []
    for data in ("iid", "dirichlet"):
        for graph, n in networks:
            cells = {kind: result.of(data, graph, n, kind) for kind in KINDS}
            row = [DATA_NAMES[data], f"{graph} {n}", _mean(cells[KINDS[0]], "loss")]
            for kind in KINDS[1:]:
                row += [_mean(cells[kind], "loss"), _mean(cells[kind], "late_distance")]
            row.append(
                " / ".join(
                    f"{statistics.fmean(run.accuracy or 0.0 for run in runs):.3f}"
                    for runs in cells.values()
                )
            )
            row.append(spread(result.ratios(data, graph, n)).text)
            rows.append(row)
    return rows


def _mean(runs: list[TrainingRun], attribute: str) -> str:
    return spread([getattr(run, attribute) for run in runs]).text
