"""The paper's experiment on real images, from the runs that benchmarks/paper_images.py has made."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from paper_images import (
    ACCELERATED,
    ALL_REDUCE,
    CLOCKED,
    DEFAULTS,
    DOUBLED,
    GOSSIP,
    NUM_RECORDS,
    PAPER,
    ROWS,
    STEP_S,
    Runs,
    Setting,
    percent,
)
from reproduction import parts
from reproduction.parts import COLOURS, table

RING = Setting(workers=16, epochs=24, batch_size=32, num_samples=60_000)
MANY = replace(RING, workers=64, batch_size=8, epochs=4)
SHORT = replace(RING, epochs=4)
"""Of simulated workers and of real processes alike."""
FEW = replace(SHORT, workers=4, batch_size=128)
GRID = replace(RING, epochs=6)
RATES = (0.5, 1.0, 2.0)
COLUMNS = (
    ("16, 24 epochs", "simulated", RING),
    ("64, 4 epochs", "simulated", MANY),
    ("16, 4 epochs", "simulated", SHORT),
    ("16 processes, 4 epochs", "real", SHORT),
)
SHOWN = dict(zip((ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED, DEFAULTS), COLOURS, strict=False))
KINDS = ("alike", "straggler")


def gains(
    runs: Runs, first: str, second: str, setting: Setting, kind: str = "simulated"
) -> list[float]:
    """Return by how much the first row ends above the second, in points, for each common seed."""
    theirs = {run["seed"]: run["accuracy"] for run in runs.of_row(kind, second, setting)}
    return [
        100 * (run["accuracy"] - theirs[run["seed"]])
        for run in runs.of_row(kind, first, setting)
        if run["seed"] in theirs
    ]


def points(found: Sequence[float]) -> str:
    """Return the mean of gains, and each."""
    if not found:
        return "not run"
    each = ", ".join(f"{difference:+.2f}" for difference in found)
    mean = f"{statistics.fmean(found):+.2f} points"
    return f"{mean} (by seed {each})" if len(found) > 1 else f"{mean} (one seed)"


def best_rates(runs: Runs) -> str:
    """Return each row's best factor of the paper's rate, and by how much it beats the rate itself.

    Of the rows that have run at all of :data:`RATES`.
    """
    found = []
    for name in ROWS:
        by_rate = {
            times: [run["accuracy"] for run in runs.of_row("simulated", name, each)]
            for times in RATES
            if runs.of_row("simulated", name, each := replace(GRID, times=times))
        }
        if len(by_rate) == len(RATES):
            mean = {times: statistics.fmean(values) for times, values in by_rate.items()}
            best = max(mean, key=lambda times: mean[times])
            gain = f" ({100 * (mean[best] - mean[1.0]):+.2f} points)" if best != 1 else ""
            found.append(f"{name}: {best:g}{gain}")
    return "; ".join(found)


def _clocked(runs: Runs, kind: str, name: str) -> list[dict[str, float]]:
    """Return the times of the paper's run, by workers."""
    return [runs.of_row(kind, name, replace(PAPER, workers=n))[0] for n in CLOCKED]


def claims(runs: Runs) -> list[tuple[str, str]]:
    """Return the rows of the page's first table."""
    shares, found = [], list[float]()
    for kind in KINDS:
        both = [_clocked(runs, kind, name) for name in (ACCELERATED, ALL_REDUCE)]
        these = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(*both, strict=True)]
        shares.append(f"{min(these):.2f} to {max(these):.2f}")
        found += these
    most = _clocked(runs, "alike", ACCELERATED)[-1]
    over = [
        gains(runs, ACCELERATED, GOSSIP, setting, kind)
        for setting, kind in ((RING, "simulated"), (MANY, "simulated"), (SHORT, "real"))
    ]
    few = gains(runs, ACCELERATED, GOSSIP, FEW, "real")
    is_better = all(each and statistics.fmean(each) > 0 for each in over)
    return [
        (
            "the accuracy of all-reduce, without waiting",
            "**differs** after 24 epochs of Fashion-MNIST, 16 workers: A2CiD2 on the ring "
            f"{points(gains(runs, ACCELERATED, ALL_REDUCE, RING))} against AR-SGD; our defaults, "
            f"with four times the exchanges, {points(gains(runs, DEFAULTS, ALL_REDUCE, RING))}. 64 "
            "workers on their ring, after 4 epochs: "
            f"{points(gains(runs, ACCELERATED, ALL_REDUCE, MANY))}",
        ),
        (
            "A2CiD2 is more accurate than gossip at its rate",
            f"{parts.verdict(is_better, parts.HOLDS)} on average. 16 workers: "
            f"{points(over[0])}; 64, after 4 epochs: {points(over[1])}; 16 processes, after 4 "
            f"epochs: {points(over[2])}; 4 processes, after 4 epochs: {points(few)}",
        ),
        (
            "table 2: less time to train than AR-SGD, on 4 to 64 workers",
            f"{parts.verdict(max(found) < 1, parts.HOLDS)} by the simulator's clock: {shares[0]} "
            f"of its time, with a straggler {shares[1]}",
        ),
        (
            "table 3: the slowest and the fastest of 64 take nearly as many steps",
            f"{parts.verdict(most['slowest'] > 0.9 * most['fastest'], parts.HOLDS)} by the "
            f"simulator's clock: {most['slowest']:,.0f} and "
            f"{most['fastest']:,.0f}; a straggler takes half",
        ),
    ]


def draw(runs: Runs, path: Path) -> None:
    """Accuracy over epochs, minutes over workers, and the distance of real processes."""
    figure, (course, clock, real) = parts.figure_of_page_width(4.0, 1, 3)
    for name, colour in SHOWN.items():
        found = [run for run in runs.of_row("simulated", name, RING) if run.get("accuracies")]
        # Runs of different days were judged after 2.4 or after 2 epochs.
        shares = np.linspace(0, 1, NUM_RECORDS + 1)
        series = [run["accuracies"] for run in found]
        courses = [np.interp(shares, np.linspace(0, 1, len(each)), each) for each in series]
        if courses:
            mean = 100 * np.mean(courses, axis=0)
            course.plot(RING.epochs * shares, mean, color=colour, lw=1.6, label=name)
        for run in runs.of_row("real", name, SHORT) if name != ALL_REDUCE else ():
            real.plot(*zip(*run["edge_distances"], strict=True), color=colour, lw=1.4)
    for kind, look in zip(KINDS, ("-o", "--o"), strict=True):
        for name in (ALL_REDUCE, ACCELERATED):
            minutes = [found["seconds"] / 60 for found in _clocked(runs, kind, name)]
            clock.plot(CLOCKED, minutes, look, color=SHOWN[name], ms=4, label=f"{name}, {kind}")
    course.set(ylim=(80, 92), xlabel="epoch")
    clock.set(xscale="log", yscale="log", xlabel="workers")
    clock.set_xticks(CLOCKED, [str(n) for n in CLOCKED])
    clock.set_yticks((1, 3, 10, 30), ("1", "3", "10", "30"))
    clock.minorticks_off()
    clock.legend(fontsize="x-small", handlelength=4)
    real.set(yscale="log", xlabel="share of the run")
    titles = ("16 workers: test accuracy, %", "Minutes of 300 epochs, by the clock",
              "16 processes: distance of partners")  # fmt: skip
    for axes, title in zip((course, clock, real), titles, strict=True):
        axes.set_title(title, fontsize="medium")
    figure.legend(*course.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    parts.save(figure, path)


def caption(runs: Runs) -> list[str]:
    """Return the table, how the runs were made, and what differs from the paper."""
    rows = []
    for name in ROWS:
        cells = [name]
        for _, kind, setting in COLUMNS:
            found = [run["accuracy"] for run in runs.of_row(kind, name, setting)]
            cells.append(f"{percent(found)} ({len(found)})" if found else "")
        if any(cells[1:]):
            rows.append(cells)
    head = ("test accuracy, % (seeds)", *(title for title, _, _ in COLUMNS))
    return [
        table(head, rows),
        "A ResNet-8 by the paper's settings, but 24 epochs, not 300, and batches of 32, with 64 "
        "workers of 8. All rows have one learning rate: 0.1 for each 128 samples of a step of all "
        "workers. The best factor of it after 6 epochs (one seed), of "
        f"{', '.join(f'{each:g}' for each in RATES)}: {best_rates(runs)}. The mean of the workers "
        "is judged, with BatchNorm's statistics computed anew. The clock: "
        f"{PAPER.epochs} epochs of CIFAR-10, steps of {1000 * STEP_S:g} ms, a straggler half as "
        "fast; AR-SGD sends after its gradients, which DDP does in part meanwhile. The last two "
        "columns differ only in the processes, which share two cores. All rows: "
        "`benchmarks/results/paper_images.md`.",
    ]
