"""A picture of several trainings of one task: timelines of the workers, and their losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gossipdp_lab.report.run_log import RunLog, WorkerLog
from gossipdp_lab.report.view import Points
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, OKABE_ITO, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_COLOURS = (OKABE_ITO[6], OKABE_ITO[3], OKABE_ITO[2])
"""Colours that no timeline has."""

NUM_PIECES = 80
"""Pieces of the time of the longest training, for rows and for lines."""

SHOWN_LOSSES = 1.6
"""The largest loss shown, over the least: above it the loss falls steeply."""


@dataclass(frozen=True)
class Compared:
    """One training in a picture.

    final_loss: of the averaged model on held-out data, in the unit of the picture.
    """

    label: str
    run_log: RunLog
    final_loss: float

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
    time. In the panel of losses a line is the mean over the workers' batches, and a dot the loss of
    the averaged model.

    loss_unit: divides the logged losses, such as log(2) to show nats as bits.
    """
    from matplotlib.patches import Patch

    longest_s = max(training.train_seconds for training in trainings)
    rows = [len(training.run_log.workers) for training in trainings]
    figure = new_figure(9.0, 4.2 + 0.3 * sum(rows) + 0.4 * len(rows))
    ratios = [*(0.3 * count for count in rows), 3.0]
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    for axes, training in zip(panels, trainings, strict=False):
        _draw_workers(axes, training, longest_s / NUM_PIECES)
    handles = [Patch(color=colour, label=kind) for kind, colour in ACTIVITY_COLOURS.items()]
    panels[0].legend(
        handles=[handles[0], handles[-1]], loc="lower right", bbox_to_anchor=(1, 1), ncols=2
    )
    axes = panels[-1]
    least = min(training.final_loss for training in trainings)
    for training, colour in zip(trainings, LINE_COLOURS, strict=False):
        curve = loss_curve(training.run_log, longest_s / NUM_PIECES)
        losses = [loss / loss_unit for _, loss in curve]
        least = min(least, *losses)
        axes.plot([time_s for time_s, _ in curve], losses, color=colour, label=training.label)
        axes.plot(
            training.train_seconds,
            training.final_loss,
            "o",
            color=colour,
            label=f"its averaged model, on held-out data: {training.final_loss:.3f}",
        )
    axes.set_xlim(0.0, 1.01 * longest_s)
    axes.set_ylim(0.97 * least, SHOWN_LOSSES * least)
    axes.set_xlabel("time (s)")
    axes.set_ylabel(loss_label)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.legend(loc="upper right")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def _draw_workers(axes: Axes, training: Compared, piece_s: float) -> None:
    axes.set_title(
        f"{training.label}: workers waited {training.waiting:.0%} of the time", loc="left"
    )
    ranks = list(training.run_log.workers)
    for row, worker in enumerate(training.run_log.workers.values()):
        edges, waiting = waiting_shares(worker, piece_s)
        widths = np.diff(edges)
        computing, grey = ACTIVITY_COLOURS["computing"], ACTIVITY_COLOURS["waiting"]
        # The y axis points down: in a row, waiting is at the top and computing at the bottom.
        axes.bar(edges[:-1], 0.8 * waiting, widths, row - 0.4, align="edge", color=grey)
        axes.bar(edges[:-1], 0.8 * (waiting - 1), widths, row + 0.4, align="edge", color=computing)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_ylabel("worker")


def waiting_shares(worker: WorkerLog, piece_s: float) -> tuple[NDArray[np.float64], ...]:
    """Return edges of pieces of time until the last gradient step, and the share waited in each.

    A wait is logged when it is over, so pieces should be longer than steps.
    """
    trained = [each for each in worker.counts if each.time_s <= worker.trained_s]
    edges = np.append(np.arange(0.0, worker.trained_s, piece_s), worker.trained_s)
    times = [0.0, *(each.time_s for each in trained)]
    waited = [0.0, *(each.waited_seconds for each in trained)]
    return edges, np.clip(np.diff(np.interp(edges, times, waited)) / np.diff(edges), 0.0, 1.0)


def loss_curve(run_log: RunLog, piece_s: float) -> Points:
    """Return the mean loss of all workers' batches in each piece of time that has any."""
    sums: dict[int, tuple[float, float]] = {}
    for worker in run_log.workers.values():
        samples = [0, *(each.samples for each in worker.counts)]
        for step, (before, after) in zip(worker.counts, pairwise(samples), strict=True):
            if not math.isnan(step.loss) and after > before:
                index = int(step.time_s / piece_s)
                total, weight = sums.get(index, (0.0, 0.0))
                sums[index] = (total + step.loss * (after - before), weight + after - before)
    return [
        ((index + 0.5) * piece_s, total / weight) for index, (total, weight) in sorted(sums.items())
    ]
