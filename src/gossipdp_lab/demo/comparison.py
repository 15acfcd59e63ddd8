"""A picture of several trainings of one task: timelines of the workers, and their losses."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gossipdp_lab.report.view import Points, RunView, Span, merged
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

LINE_COLOURS = (OKABE_ITO[6], OKABE_ITO[3], OKABE_ITO[2])
"""Colours that no timeline has."""

NUM_PIECES = 80
"""The most pieces of time in a row."""

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
    view: RunView
    final_loss: float
    faults: Sequence[Mapping[str, Any]] = ()

    @property
    def train_seconds(self) -> float:
        """Return the seconds from the start to the last gradient step of the last worker."""
        return max(self.view.trained.values())


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
    rows = [len(training.view.ranks) for training in trainings]
    figure = new_figure(10.0, 4.2 + 0.3 * sum(rows) + 0.4 * len(rows))
    ratios = [*(0.3 * count for count in rows), 3.0]
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    for axes, training in zip(panels, trainings, strict=False):
        _draw_workers(axes, training)
    kinds = {fault["kind"] for training in trainings for fault in training.faults}
    panels[0].legend(handles=_signs(kinds), **BESIDE)
    axes = panels[-1]
    least = min(training.final_loss for training in trainings)
    for training, colour in zip(trainings, LINE_COLOURS, strict=False):
        curve = loss_curve(training.view)
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


def _draw_workers(axes: Axes, training: Compared) -> None:
    view = training.view
    waited_s = sum(last.waited_seconds for last in view.last.values())
    waiting = waited_s / len(view.ranks) / training.train_seconds
    axes.set_title(f"{training.label}: workers waited {waiting:.0%} of the time", loc="left")
    for row, rank in enumerate(view.ranks):
        spans = [span for span in view.spans(rank) if span.start_s < view.trained[rank]]
        pieces = np.array(merged(spans, NUM_PIECES)).reshape(-1, len(Span._fields)).T
        starts, ends, computes, waits, *_ = pieces
        # The y axis points down: in a row, waiting is at the top and computing at the bottom.
        for heights, y, colour in (
            (-0.8 * computes, row + 0.4, ACTIVITY_COLOURS["computing"]),
            (0.8 * waits, row - 0.4, ACTIVITY_COLOURS["waiting"]),
        ):
            axes.bar(starts, heights, ends - starts, y, align="edge", color=colour)
    # The faults' clock starts once all workers have made a step.
    lives = [(rank, life) for rank, each in view.workers.items() for life in each.lives[:1]]
    from_s = max((view.at(rank, life.time_s) for rank, life in lives), default=0.0)
    for fault in training.faults:
        if "missed" not in fault and fault["rank"] in view.ranks:
            at_s, (mark, _) = from_s + fault["at_s"], MARKS[fault["kind"]]
            axes.plot(at_s, view.ranks.index(fault["rank"]), mark, color="black", markersize=7)
    axes.set_ylim(len(view.ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(view.ranks)), [str(rank) for rank in view.ranks])
    axes.set_ylabel("worker")


def loss_curve(view: RunView) -> Points:
    """Return the mean time and loss of the workers' batches, in parts of as many samples."""
    found: list[tuple[float, float, int]] = []
    for rank, worker in view.workers.items():
        samples = [0, *(each.samples for each in worker.counts)]
        for step, (before, after) in zip(worker.counts, pairwise(samples), strict=True):
            if not math.isnan(step.loss) and after > before:
                found.append((view.at(rank, step.time_s), step.loss, after - before))
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
