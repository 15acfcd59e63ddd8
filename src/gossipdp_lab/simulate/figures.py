"""Pictures of simulated runs: loss and consensus distance, and the timelines of workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gossipdp_lab.simulate.trace import Activity, Interval, Series, Trace

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Colours that people with any common colour blindness can tell apart; yellow left out."""

METHODS = ("a2cid2", "gossip", "allreduce", "released", "none")
METHOD_COLOURS = dict(zip(METHODS, OKABE_ITO, strict=False))
CASE_STYLES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (8, 3)), (0, (8, 2, 1, 2, 1, 2)))

LEAST_SHOWN = {"without gradients": 1e-27, "with gradients": 1e-4}
"""Shares of the largest consensus distance: smaller values are rounding errors."""

MOST_SHOWN = 1e100
"""A larger value has diverged, and a logarithmic scale cannot show it."""

ACTIVITY_COLOURS: dict[Activity, str] = {
    "computing": OKABE_ITO[0],
    "exchanging": OKABE_ITO[1],
    "waiting": "#d9d9d9",
}
MOST_ROWS, LEAST_WORKERS = 36, 6
"""Rows of a timeline: all its methods share them, but each shows so many workers at least."""

NUM_TIMELINE_STEPS = 10


AXES = {
    "time_s": "virtual time (s)",
    "exchanges": "exchanges per worker",
    "gradient_steps": "gradient steps per worker",
}
"""The columns that others are drawn against."""


class Line(NamedTuple):
    """A run in a picture; those of one ``case``, a graph and a rate, have one style."""

    label: str
    case: int
    trace: Trace


def draw_simulation(lines: Sequence[Line], path: Path, *, title: str) -> None:
    """Write a PNG: loss and consensus distance over time, exchanges and gradient steps.

    Without gradients there is no loss, and steps would show the same as time.
    """
    has_loss = any(np.isfinite(line.trace.column("loss")).any() for line in lines)
    rows = ["loss", "consensus_distance"] if has_loss else ["consensus_distance"]
    columns = list(AXES) if has_loss else list(AXES)[:2]
    figure = new_figure(5.0 + 4.2 * (len(columns) - 1), 1.3 + 3.2 * len(rows))
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row", sharex="col")
    for row, name in zip(panels, rows, strict=True):
        for axes, column in zip(row, columns, strict=True):
            for line in lines:
                _draw_line(axes, line, column, name)
            shown = np.concatenate([line.trace.column(name) for line in lines])
            _scale(axes, shown, name, has_loss=has_loss)
            axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
            if name == rows[-1]:
                axes.set_xlabel(AXES[column])
        row[0].set_ylabel("loss of the mean model" if name == "loss" else "consensus distance")
    handles, labels = panels[-1][0].get_legend_handles_labels()
    figure.suptitle(title)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
    figure.savefig(path, dpi=120)


def _draw_line(axes: Axes, line: Line, column: str, name: str) -> None:
    label, case, trace = line
    ends = {"time_s": float(trace.num_workers), "exchanges": 2.0}.get(column, 1.0)
    values = trace.column(name)
    axes.plot(
        trace.column(column) * ends / trace.num_workers,
        np.where((values > 0) & (values < MOST_SHOWN), values, np.nan),
        color=METHOD_COLOURS[trace.method],
        linestyle=CASE_STYLES[case % len(CASE_STYLES)],
        linewidth=1.6,
        label=label,
    )


def _scale(axes: Axes, values: Series, name: str, *, has_loss: bool) -> None:
    """Set a logarithmic scale if there are values for it, without those that are rounding."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    positive = values[(values > 0) & (values < MOST_SHOWN)]
    if not len(positive):
        return
    axes.set_yscale("log")
    if name == "consensus_distance":
        share = LEAST_SHOWN["with gradients" if has_loss else "without gradients"]
        floor = share * positive.max()
        if positive.min() < floor:
            axes.set_ylim(bottom=floor)
    if positive.max() < 100 * positive.min():  # else the powers of ten do
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_timeline(traces: Sequence[Trace], path: Path, *, title: str) -> None:
    """Write a PNG: the workers in the last ten steps of each run, one method above another.

    Workers of the asynchronous methods compute without pause; a bar below shows when they exchange.
    Workers of the synchronous methods do one thing at a time.

    Raises:
        ValueError: a trace kept no timeline.
    """
    from matplotlib.patches import Patch

    for trace in traces:
        if not trace.intervals:
            raise ValueError(f"{trace.method} kept no timeline: simulate with keep_timeline=True")
    most = max(LEAST_WORKERS, MOST_ROWS // len(traces))
    ranks = list(range(min(traces[0].num_workers, most)))
    figure = new_figure(8.0, 1.2 + len(traces) * (0.6 + 0.24 * len(ranks)))
    panels = figure.subplots(len(traces), 1, squeeze=False, sharex=True)[:, 0]
    for axes, trace in zip(panels, traces, strict=True):
        _draw_workers(axes, trace, ranks)
    panels[-1].set_xlabel("time (s)")
    if traces[0].num_workers > len(ranks):
        title += f"; {len(ranks)} of them are shown"
    figure.suptitle(title)
    handles = [Patch(color=colour, label=name) for name, colour in ACTIVITY_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=200)


def _draw_workers(axes: Axes, trace: Trace, ranks: Sequence[int]) -> None:
    from gossipdp_lab.simulate.study import ROUNDS

    # At the end a worker that was ahead of others was in a round that is not over.
    last_s = {one.rank: one.end_s for one in trace.intervals}
    end_s = min(trace.records[-1].time_s, *last_s.values())
    begin_s = max(0.0, end_s - NUM_TIMELINE_STEPS * trace.unit_s)
    is_synchronous = trace.method in ROUNDS
    for activity, colour in ACTIVITY_COLOURS.items():
        shown = [one for one in trace.intervals if one.activity == activity]
        for row, rank in enumerate(ranks):
            spans = [
                span for one in shown if one.rank == rank and (span := _clip(one, begin_s, end_s))
            ]
            # Asynchronous: computing fills the upper part of a row, exchanges the lower.
            below, height = row - 0.4, 0.8
            if not is_synchronous:
                below, height = (row + 0.15, 0.25) if activity == "exchanging" else (below, 0.5)
            # Lines between steps; those between short exchanges would hide them.
            width = 0.5 if activity == "computing" else 0.0
            axes.broken_barh(
                spans, (below, height), facecolor=colour, edgecolor="white", linewidth=width
            )
    axes.set_xlim(0.0, end_s - begin_s)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.set_ylabel("worker")
    text = "asynchronous: computing all the time"
    if trace.records[-1].exchanges and not any(
        one.activity == "exchanging" for one in trace.intervals
    ):
        text += "; exchanges take no time at fidelity ideal"
    if is_synchronous:
        idle_share = trace.records[-1].idle_share
        text = f"synchronous: {idle_share:.0%} of the time not computing"
    axes.set_title(f"{trace.method}, {text}", loc="left")


def _clip(interval: Interval, begin_s: float, end_s: float) -> tuple[float, float] | None:
    """Return (start, duration) of the part that is shown; None for nothing."""
    start_s, until_s = max(interval.start_s, begin_s), min(interval.end_s, end_s)
    return (start_s - begin_s, until_s - start_s) if until_s > start_s else None


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of this size in inches, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
