"""``gossipdp demo --compare``: all-reduce and gossip train for as long, on machines that misbehave.

In both trainings one worker at a time is four times slower, three in turn. Gossip's loses a worker
besides: under all-reduce a death ends the run. A picture has the workers' timelines and the losses.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.console import Console

from gossipdp.launcher.faults import FaultPlan
from gossipdp_lab.console import say, table_of
from gossipdp_lab.demo import DemoArguments
from gossipdp_lab.demo.training import Training, shown, train, write_reports
from gossipdp_lab.report.view import Points, RunView, Span, merged
from gossipdp_lab.simulate.figures import ACTIVITY_COLOURS, OKABE_ITO, new_figure
from gossipdp_lab.tasks import MethodName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

WORKLOAD: Final = "pystdlib-small"
SECONDS: Final = 40.0

ALLREDUCE_RATE: Final = 0.008
"""All-reduce makes so few steps here that half of the workload's rate suits it better: 3.39 bits a
byte in place of 3.58, one run each on two cores. Gossip keeps the workload's, 0.016. In 2,048 steps
of equally fast workers that is the best for both, on a grid of factors of two (quality.py)."""

AS_GOOD = 0.03
"""Losses that differ by at most this share count as equally good: with three seeds, 2,048 steps and
equally fast workers DDP ended at 2.168, 2.217 and 2.231, which differ by 2.9%."""

AS_MANY = 0.05
"""Numbers of samples that differ by at most this share count as equal."""

PICTURE_FILE = "comparison.png"


def check_compare(arguments: DemoArguments) -> None:
    """Raise ValueError for options that exclude ``--compare``."""
    tuned = f"it trains {WORKLOAD} at a learning rate that is tuned for it"
    reasons = {
        "restart": (arguments.restart, "killed workers are started again anyway"),
        "samples": (arguments.samples is not None, "both train for as long, see --seconds"),
        "workload": (arguments.workload not in (None, WORKLOAD), tuned),
        "learning-rate": (arguments.learning_rate is not None, tuned),
    }
    for option, (is_given, reason) in reasons.items():
        if is_given:
            raise ValueError(f"--compare does not go with --{option}: {reason}; leave one out")
    if arguments.method not in ("a2cid2", "gossip"):
        raise ValueError(
            f"--compare compares all-reduce with gossip, not with --method {arguments.method}; "
            "choose a2cid2 or gossip"
        )
    if arguments.workers < 2:
        raise ValueError("--compare needs workers that wait for one another: --workers 2 or more")


def default_faults(num_workers: int, seconds: float) -> str:
    """Return a plan with one slow worker after the other, and worker 0 killed half-way."""
    turn_s = round(seconds / 3, 1)
    slow = [
        f"slow 4x {(1 + turn) % num_workers} at {round(turn * turn_s, 1)}s for {turn_s}s"
        for turn in range(3)
    ]
    return "; ".join([*slow, f"kill 0 at {round(seconds / 2, 1)}s"])


def both(arguments: DemoArguments) -> dict[str, DemoArguments]:
    """Return the two trainings, all-reduce first; only gossip's has kills."""
    seconds = arguments.seconds or SECONDS
    text = arguments.faults or default_faults(arguments.workers, seconds)
    plan = FaultPlan.parse(text, arguments.workers)
    survivable = FaultPlan(tuple(each for each in plan.clauses if each.kind != "kill"))

    def training(method: MethodName, faults: FaultPlan) -> DemoArguments:
        return replace(
            arguments,
            compare=False,
            workload=WORKLOAD,
            seconds=seconds,
            method=method,
            learning_rate=ALLREDUCE_RATE if method == "allreduce" else None,
            faults=str(faults) or None,
            restart=faults.kills,
            output=arguments.directory / method,
        )

    return {
        "allreduce": training("allreduce", survivable),
        arguments.method: training(arguments.method, plan),
    }


@dataclass(frozen=True)
class Verdict:
    """The results of two trainings of the same length, all-reduce's and gossip's.

    The losses are those of the averaged models, in bits per byte of held-out text.
    """

    method: str
    seconds: float
    num_kills: int
    allreduce_samples: int
    gossip_samples: int
    allreduce_loss: float
    gossip_loss: float

    @property
    def times_the_samples(self) -> float:
        """Return how many times as many samples gossip trained on."""
        return self.gossip_samples / self.allreduce_samples

    @property
    def worse_by(self) -> float:
        """Return the share by which gossip's loss is higher; negative if it is lower."""
        return self.gossip_loss / self.allreduce_loss - 1

    def __str__(self) -> str:
        gain, gap = self.times_the_samples, self.worse_by
        many = f"{gain:.1f} times as many" if abs(gain - 1) > AS_MANY else "as many"
        if abs(gap) <= AS_GOOD:
            quality = "both models are as good"
        else:
            quality = f"its model is {abs(gap):.1%} {'worse' if gap > 0 else 'better'}"
        but = "but" if (gain > 1) == (gap > AS_GOOD) else "and"
        killed = "1 worker was" if self.num_kills == 1 else f"{self.num_kills} workers were"
        hurt = f"although {killed} killed in its run alone, " if self.num_kills else ""
        return (
            f"In {self.seconds:g} s {self.method} trained on {self.gossip_samples:,} samples, "
            f"{hurt}{many} as all-reduce ({self.allreduce_samples:,}), {but} {quality}: "
            f"{self.gossip_loss:.3f} and {self.allreduce_loss:.3f} bits per byte (lower is better)."
        )


def compare(arguments: DemoArguments) -> int:
    """Train by both methods, show the difference and draw it; return the exit status."""
    console = Console()
    runs = both(arguments)
    trainings = {}
    for number, (method, own) in enumerate(runs.items(), 1):
        say(console, f"{number} of {len(runs)}: {_name(method)}")
        trainings[method] = train(own, console)
    verdict = judge(runs[arguments.method], trainings)
    console.print(table_of([_row(*each) for each in trainings.items()]))
    console.print(str(verdict), style="bold", highlight=False)
    picture = arguments.directory / PICTURE_FILE
    draw_comparison(trainings, picture, title=textwrap.fill(str(verdict), 80))
    say(console, f"picture: {shown(picture)}")
    for method, own in runs.items():
        write_reports(own, trainings[method].run_log)
        say(console, f"report, logs and model of {_name(method)}: {shown(own.directory)}")
    problems = [
        f"{method}: {problem}"
        for method, training in trainings.items()
        for problem in training.problems
    ]
    say(console, *problems)
    if arguments.json is not None:
        results = {
            "verdict": str(verdict),
            "times_the_samples": verdict.times_the_samples,
            "worse_by": verdict.worse_by,
            **{method: training.summary for method, training in trainings.items()},
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        say(console, f"results: {arguments.json}")
    return 1 if problems else 0


def judge(gossip: DemoArguments, trainings: Mapping[str, Training]) -> Verdict:
    """Compare gossip's training with that by all-reduce."""
    both = [trainings[method] for method in ("allreduce", gossip.method)]
    faults = trainings[gossip.method].summary.get("faults", ())
    done = [each["kind"] for each in faults if "missed" not in each]
    return Verdict(
        gossip.method,
        gossip.least_s,
        done.count("kill"),
        *(each.summary["samples"] for each in both),
        *(each.summary[each.metric_name] for each in both),
    )


def _name(method: str) -> str:
    return "all-reduce" if method == "allreduce" else method


def _row(method: str, training: Training) -> dict[str, str]:
    summary = training.summary
    seconds, workers = summary["train_seconds"], summary["workers"]
    waited = sum(worker["waited_seconds"] for worker in workers) / len(workers) / seconds
    return {
        "method": _name(method),
        "samples": f"{summary['samples']:,}",
        "samples/s": f"{summary['samples'] / seconds:,.0f}",
        "waited": f"{waited:.0%}",
        "bits per byte": f"{summary[training.metric_name]:.3f}",
    }


# The picture.

LINE_COLOURS = (OKABE_ITO[6], OKABE_ITO[3])
"""Colours that no timeline has."""

NUM_PIECES = 80
"""The most pieces of time in a row."""

NUM_POINTS = 40
"""Points of a line, each of as many samples, so that none is noisier than the others."""

MARKS = {"slow": ("v", "becomes slow"), "kill": ("X", "killed"), "stop": ("s", "stopped")}
"""By kind of fault: its mark in the worker's row, and its name."""

SHOWN_LOSSES = 1.6
"""The largest loss shown, over the least: above it the loss falls steeply."""

BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}
"""The place of a legend: to the right of its panel, where no curve runs."""


def draw_comparison(trainings: Mapping[str, Training], path: Path, *, title: str) -> None:
    """Write a PNG: the timelines of the trainings, one above the other, and below them all losses.

    All share one axis of time. In a row of a timeline the height of a colour is its share of the
    time, and a mark is a fault. A killed worker's row is empty until it is back. In the panel of
    losses a line is the mean over the workers' batches, and a dot the loss of the averaged model.
    """
    views = {method: RunView(training.run_log) for method, training in trainings.items()}
    rows = [len(view.ranks) for view in views.values()]
    figure = new_figure(10.0, 4.2 + 0.3 * sum(rows) + 0.4 * len(rows))
    ratios = [*(0.3 * count for count in rows), 3.0]
    *timelines, losses = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios)
    kinds, ends_s, least = set[str](), [], math.inf
    for axes, colour, (method, training) in zip(
        timelines, LINE_COLOURS, trainings.items(), strict=True
    ):
        view, final_loss = views[method], training.summary[training.metric_name]
        faults = training.summary.get("faults", ())
        _draw_workers(axes, _name(method), view, faults)
        kinds |= {fault["kind"] for fault in faults}
        curve = [(time_s, loss / math.log(2)) for time_s, loss in loss_curve(view)]
        least = min(least, final_loss, *(loss for _, loss in curve))
        ends_s.append(max(view.trained.values()))
        losses.plot(*np.array(curve).reshape(-1, 2).T, color=colour, label=_name(method))
        label = f"averaged model,\nheld-out text: {final_loss:.3f}"
        losses.plot(ends_s[-1], final_loss, "o", color=colour, label=label)
    timelines[0].legend(handles=_signs(kinds), **BESIDE)
    losses.set_xlim(0.0, 1.01 * max(ends_s))
    losses.set_ylim(0.97 * least, SHOWN_LOSSES * least)
    losses.set_xlabel("time (s)")
    losses.set_ylabel("training loss (bits per byte)")
    losses.grid(True, linewidth=0.4, alpha=0.6)
    losses.legend(**BESIDE)
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


def _draw_workers(
    axes: Axes, label: str, view: RunView, faults: Sequence[Mapping[str, Any]]
) -> None:
    """Draw a timeline; ``faults`` as ``fault_results`` has them."""
    waited_s = sum(last.waited_seconds for last in view.last.values())
    waiting = waited_s / len(view.ranks) / max(view.trained.values())
    axes.set_title(f"{label}: workers waited {waiting:.0%} of the time", loc="left")
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
    for fault in faults:
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
