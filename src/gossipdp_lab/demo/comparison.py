"""A picture of several trainings of one task: timelines of the workers, and their losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gossipdp_lab.report.run_log import RunLog, WorkerLog
from gossipdp_lab.report.view import Points
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

LINE_COLOURS = (OKABE_ITO[6], OKABE_ITO[3], OKABE_ITO[2])
"""Colours that no timeline has."""

NUM_PIECES = 80
"""Pieces of the time of the longest training, for rows."""

NUM_POINTS = 40
"""Points of a line, each of as many samples, so that none is noisier than the others."""

MARKS = {
    "slow": ("v", "becomes slow"),
    "kill": ("X", "killed"),
    "stop": ("s", "stopped"),
}
"""By kind of fault: its mark in the worker's row, and its name."""

SHOWN_LOSSES = 1.6
"""The largest loss shown, over the least: above it the loss falls steeply."""


BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
"""The place of a legend: to the right of its panel, where no curve runs."""


@dataclass(frozen=True)
class Compared:
    """One training in a picture.

    final_loss: of the averaged model on held-out data, in the unit of the picture.
    faults: as :func:`~gossipdp_lab.demo.watch.fault_results` has them.
    """

    label: str
    run_log: RunLog
    final_loss: float
    faults: Sequence[Mapping[str, Any]] = ()

    @property
    def faults_from_s(self) -> float:
        """Return when the faults' clock starts: all workers have made a step."""
        return max(
            (worker.lives[0].time_s for worker in self.run_log.workers.values() if worker.lives),
            default=0.0,
        )

    @property
    def train_seconds(self) -> float:
        """Return the seconds from the start to the last gradient step of the last worker."""
        return max(worker.trained_s for worker in self.run_log.workers.values())

    @property
    def waiting(self) -> float:
        """Return the share of all workers' time that they waited."""
        workers = self.run_log.workers.values()
        waited_s = sum(each.counts[-1].waited_seconds for each in workers if each.counts)
        return waited_s / len(workers) / self.train_seconds


def draw_comparison(
    trainings: Sequence[Compared],
    path: Path,
    *,
    title: str,
    loss_label: str,
    loss_unit: float = 1.0,
) -> None:
    """Write a PNG: the timelines of the trainings, one above the other, and below them all losses.

    All share one axis of time. In a row of a timeline the height of a colour is its share of the
    time, and a mark is a fault. A killed worker's row is empty until it is back. In the panel of
    losses a line is the mean over the workers' batches, and a dot the loss of the averaged model.

    loss_unit: divides the logged losses, such as log(2) to show nats as bits.
    """
    longest_s = max(training.train_seconds for training in trainings)
    rows = [len(training.run_log.workers) for training in trainings]
    figure = new_figure(10.0, 4.2 + 0.3 * sum(rows) + 0.4 * len(rows))
    ratios = [*(0.3 * count for count in rows), 3.0]
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    for axes, training in zip(panels, trainings, strict=False):
        _draw_workers(axes, training, longest_s / NUM_PIECES)
    kinds = {fault["kind"] for training in trainings for fault in training.faults}
    panels[0].legend(handles=_signs(kinds), **BESIDE)
    axes = panels[-1]
    least = min(training.final_loss for training in trainings)
    for training, colour in zip(trainings, LINE_COLOURS, strict=False):
        curve = loss_curve(training.run_log)
        losses = [loss / loss_unit for _, loss in curve]
        least = min(least, *losses)
        axes.plot([time_s for time_s, _ in curve], losses, color=colour, label=training.label)
        axes.plot(
            training.train_seconds,
            training.final_loss,
            "o",
            color=colour,
            label=f"averaged model,\nheld-out text: {training.final_loss:.3f}",
        )
    axes.set_xlim(0.0, 1.01 * longest_s)
    axes.set_ylim(0.97 * least, SHOWN_LOSSES * least)
    axes.set_xlabel("time (s)")
    axes.set_ylabel(loss_label)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.legend(**BESIDE)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _signs(kinds: Collection[str]) -> list[Patch | Line2D]:
    """Return the legend of the rows."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches = [Patch(color=ACTIVITY_COLOURS[kind], label=kind) for kind in ("computing", "waiting")]
    marks = [
        Line2D([], [], color="black", marker=mark, linestyle="", label=name)
        for kind, (mark, name) in MARKS.items()
        if kind in kinds
    ]
    return [*patches, *marks]


def _draw_workers(axes: Axes, training: Compared, piece_s: float) -> None:
    axes.set_title(
        f"{training.label}: workers waited {training.waiting:.0%} of the time", loc="left"
    )
    ranks = list(training.run_log.workers)
    computing, grey = ACTIVITY_COLOURS["computing"], ACTIVITY_COLOURS["waiting"]
    for row, worker in enumerate(training.run_log.workers.values()):
        edges, waiting = waiting_shares(worker, piece_s)
        is_there = present(worker, edges)
        starts, widths, waiting = edges[:-1][is_there], np.diff(edges)[is_there], waiting[is_there]
        # The y axis points down: in a row, waiting is at the top and computing at the bottom.
        axes.bar(starts, 0.8 * waiting, widths, row - 0.4, align="edge", color=grey)
        axes.bar(starts, 0.8 * (waiting - 1), widths, row + 0.4, align="edge", color=computing)
    for fault in training.faults:
        if "missed" not in fault and fault["rank"] in ranks:
            at_s = training.faults_from_s + fault["at_s"]
            mark, _ = MARKS[fault["kind"]]
            axes.plot(at_s, ranks.index(fault["rank"]), mark, color="black", markersize=7)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_ylabel("worker")


def present(worker: WorkerLog, edges: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return for each piece of time if the worker had a process at its middle that had trained."""
    if len(worker.processes) < 2:
        return np.ones(len(edges) - 1, dtype=bool)
    middles = (edges[:-1] + edges[1:]) / 2
    begun = [life.time_s for life in worker.lives]
    spans = [(0.0, worker.processes[0][1])]
    for _, last_s in worker.processes[1:]:
        spans.append((min((at for at in begun if at > spans[-1][1]), default=math.inf), last_s))
    is_there = np.zeros(len(middles), dtype=bool)
    for low, high in spans:
        is_there |= (low <= middles) & (middles <= high)
    return is_there


def waiting_shares(worker: WorkerLog, piece_s: float) -> tuple[NDArray[np.float64], ...]:
    """Return edges of pieces of time until the last gradient step, and the share waited in each.

    A wait is logged when it is over, so pieces should be longer than steps.
    """
    trained = [each for each in worker.counts if each.time_s <= worker.trained_s]
    edges = np.append(np.arange(0.0, worker.trained_s, piece_s), worker.trained_s)
    times = [0.0, *(each.time_s for each in trained)]
    waited = [0.0, *(each.waited_seconds for each in trained)]
    return edges, np.clip(np.diff(np.interp(edges, times, waited)) / np.diff(edges), 0.0, 1.0)


def loss_curve(run_log: RunLog) -> Points:
    """Return the mean time and loss of the workers' batches, in parts of as many samples."""
    found: list[tuple[float, float, int]] = []
    for worker in run_log.workers.values():
        samples = [0, *(each.samples for each in worker.counts)]
        for step, (before, after) in zip(worker.counts, pairwise(samples), strict=True):
            if not math.isnan(step.loss) and after > before:
                found.append((step.time_s, step.loss, after - before))
    if not found:
        return []
    times, losses, weights = np.array(sorted(found)).T
    done = np.cumsum(weights)
    part = np.minimum((done / done[-1] * NUM_POINTS - 1e-9).astype(int), NUM_POINTS - 1)
    total = np.bincount(part, weights)
    filled = total > 0
    return [
        (float(time_s), float(loss))
        for time_s, loss in zip(
            np.bincount(part, weights * times)[filled] / total[filled],
            np.bincount(part, weights * losses)[filled] / total[filled],
            strict=True,
        )
    ]
