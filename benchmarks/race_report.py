"""The report of the race: a table and a panel a condition."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from race_run import NUM_MARKS, RaceResult
from support.byte_task import BATCH_SIZE
from support.conditions import RaceCondition
from support.quality_rows import KINDS, RowName
from support.race_settings import RaceSettings, num_parameters
from support.report import Provenance, Spread, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALM = "calm"


class Run(msgspec.Struct, frozen=True):
    """A finished run, as it is stored."""

    settings: RaceSettings
    result: RaceResult
    provenance: Provenance

    @property
    def loss(self) -> float:
        """Of the final model, bits a byte; infinity if it had diverged."""
        return math.inf if self.result.loss is None else self.result.loss

    @property
    def bytes_per_parameter_step(self) -> float:
        """Bytes that were sent, over parameters and the batches that were kept."""
        steps = self.result.samples / BATCH_SIZE
        return self.result.sent_bytes / (steps * num_parameters()) if steps else math.inf

    @property
    def num_done(self) -> int:
        """Faults that were done."""
        return sum(fault.at_s is not None for fault in self.result.faults)

    @property
    def trained_s(self) -> float:
        """Seconds of the run after the first start."""
        return max(0.0, self.settings.seconds - self.result.start_s)


Runs = Mapping[str, Sequence[Run]]
"""By row, of one condition."""


def calm_rate(calm: Sequence[Run]) -> float:
    """Return the samples a second of a row's own calm runs, after the start; NaN without any."""
    rates = [run.result.samples / run.trained_s for run in calm if run.trained_s]
    return statistics.median(rates) if rates else math.nan


def share_of_calm(run: Run, calm: Sequence[Run]) -> float:
    """Return the samples kept over those that the row keeps in the calm in the same time."""
    expected = calm_rate(calm) * run.trained_s
    return run.result.samples / expected if expected else math.nan


def lost_seconds(run: Run, calm: Sequence[Run]) -> float:
    """Return the seconds of the whole job that a fault cost; NaN if there was none."""
    if not run.num_done:
        return math.nan
    return (1 - share_of_calm(run, calm)) * run.trained_s / run.num_done


@dataclass(frozen=True)
class Column:
    """A column of the table; ``best`` chooses the best of the medians, None has no best."""

    name: str
    key: str
    form: str
    value: Callable[[Run, Sequence[Run]], float]
    best: Callable[[Sequence[float]], float] | None = None


COLUMNS = (
    Column("samples kept", "samples", ",.0f", lambda run, _: run.result.samples, max),
    Column("of its own calm", "share_of_calm", ".0%", share_of_calm, max),
    Column("final loss", "loss", ".3f", lambda run, _: run.loss, min),
    Column("s lost a fault", "lost_s", ".1f", lost_seconds, min),
    Column("bytes", "bytes", ".2f", lambda run, _: run.bytes_per_parameter_step, min),
    Column("faults", "faults", ".0f", lambda run, _: run.num_done),
    Column(
        "restart (s)",
        "restart_s",
        ".1f",
        lambda run, _: statistics.median(run.result.restarts_s or [math.nan]),
    ),
)


def spreads(runs: Runs, calm: Runs) -> dict[str, dict[str, Spread]]:
    """Return each figure of each row that ran, over its runs."""
    return {
        row: {
            column.key: Spread.of(column.value(run, calm.get(row, ())) for run in found)
            for column in COLUMNS
        }
        for row, found in runs.items()
        if found
    }


def table(title: str, runs: Runs, calm: Runs) -> Table:
    """Return the table of a condition: medians over the rounds, the best of each column bold."""
    found = spreads(runs, calm)
    best = {
        column.key: column.best(values)
        for column in COLUMNS
        if column.best is not None
        and (values := [v for one in found.values() if math.isfinite(v := one[column.key].median)])
    }
    lines = []
    for row, figures in found.items():
        cells = [RowName.parse(row).label, f"{runs[row][0].settings.learning_rate:g}"]
        for column in COLUMNS:
            spread = figures[column.key]
            is_known = math.isfinite(spread.median)
            text = spread.text(column.form) if is_known else "-"
            is_best = is_known and spread.median == best.get(column.key)
            cells.append(f"**{text}**" if is_best else text)
        lines.append((*cells, str(len(runs[row]))))
    head = ("row", "rate", *(column.name for column in COLUMNS), "runs")
    return Table(title, head, lines)


NOTE = (
    "Medians over the runs (least to greatest); the best median of a column is bold. Samples "
    "kept: in the final model; work since a checkpoint, an average or an exchange that died is "
    "not. Its own calm: the same row, the same time after its start. Final loss: at equal wall "
    "time, of the model of all on held-out text, bits a byte. Seconds lost a fault: of the whole "
    "job. Bytes: sent by all workers' sockets, over parameters and batches kept. Restart: from the "
    "start of a process, or from when a spare one becomes a worker, to the end of its first step."
)


def unequal(found: Mapping[str, Runs]) -> str:
    """Return what was not equal, with the measured times of a start."""
    every = [run for runs in found.values() for one in runs.values() for run in one]
    imported_anew = [run for run in every if not run.settings.keeps_spare] or every
    imported = Spread.of(run.result.imported_s for run in imported_anew)
    started = Spread.of(run.result.start_s for run in every)
    late = {
        RowName.parse(row).label: Spread.of(
            run.result.ended_s - run.settings.seconds
            for runs in found.values()
            for run in runs.get(row, ())
        )
        for row in {row for runs in found.values() for row in runs}
    }
    ends = "; ".join(f"{label} {spread.text('.2f')}" for label, spread in sorted(late.items()))
    return (
        f"A process needs {imported.text('.1f')} s for its imports (Python, torch, the row's own) "
        f"and {started.text('.1f')} s to the end of its first step: scale the kill period by that. "
        f"The final model was there so many seconds after the end of the time: {ends}. "
        f"{_spares(every)}What else is not equal: benchmarks/README.md."
    )


def _spares(runs: Sequence[Run]) -> str:
    """Return who has a spare interpreter for a restart."""
    with_spare = {RowName.parse(r.settings.row).label for r in runs if r.settings.keeps_spare}
    if not with_spare:
        return ""
    return (
        f"{', '.join(sorted(with_spare))}: a worker that is started again has a spare interpreter "
        "that has imported torch, as gossipdp run keeps one; the others' launchers have none. "
    )


def as_json(found: Mapping[str, Runs]) -> dict[str, Any]:
    """Return what is stored: by condition and row the medians, and every run."""
    calm = found.get(CALM, {})
    return {
        name: {
            row: {key: spread.median for key, spread in figures.items()}
            | {"runs": [{"settings": r.settings, "result": r.result} for r in runs[row]]}
            for row, figures in spreads(runs, calm).items()
        }
        for name, runs in found.items()
    }


MARKS = {"kill": "X", "stop": "s", "slow": "v"}


def draw(path: Path, found: Mapping[str, Runs], conditions: Mapping[str, RaceCondition]) -> None:
    """Write a PNG: loss against wall time, a panel a condition."""
    from matplotlib.lines import Line2D

    from gossipdp_lab.simulate.figures import OKABE_ITO, new_figure

    shown = [name for name in conditions if any(found.get(name, {}).values())]
    num_panels = len(shown)
    rows = list(dict.fromkeys(row for name in shown for row in found[name]))
    colours = dict(zip(rows, [*OKABE_ITO[1:], OKABE_ITO[0]] * 2, strict=False))
    # The legend takes the place of one panel more.
    columns = min(3, num_panels + 1)
    lines = math.ceil((num_panels + 1) / columns)
    figure = new_figure(4.6 * columns, 3.6 * lines)
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in places[num_panels:]:
        axes.axis("off")
    losses = [run.loss for name in shown for runs in found[name].values() for run in runs]
    least = min(filter(math.isfinite, losses), default=2.0)
    for axes, name in zip(places, shown, strict=False):
        _draw_condition(axes, found[name], colours, least)
        title = f"{name}: {conditions[name].text}"
        axes.set_title(textwrap.fill(title, 52), fontsize="small")
    done = {
        fault.kind
        for name in shown
        for runs in found[name].values()
        for run in runs
        for fault in run.result.faults
    }
    handles = [Line2D([], [], color=colours[row], label=RowName.parse(row).label) for row in rows]
    handles += [
        Line2D([], [], color="grey", linestyle="", marker=mark, label=kind)
        for kind, mark in MARKS.items()
        if kind in done
    ]
    places[num_panels].legend(handles=handles, loc="center left", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def median_curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return the median loss over the median time of each mark.

    The loss is NaN where half of the runs or more had no model, as while a job starts again.
    """
    marks: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for point in run.result.curve:
            if point.loss is not None:
                share = min(1.0, point.seconds / run.settings.seconds)
                number = round(NUM_MARKS * share)
                marks.setdefault(number, []).append((point.seconds, point.loss))
    had_model = {number: each for number, each in marks.items() if 2 * len(each) > len(runs)}
    if not had_model:
        return []
    mark_s = runs[0].settings.seconds / NUM_MARKS
    return [
        (statistics.median(s for s, _ in each), statistics.median(loss for _, loss in each))
        if (each := had_model.get(number))
        else (mark_s * number, math.nan)
        for number in range(min(had_model), max(had_model) + 1)
    ]


def _draw_condition(axes: Axes, runs: Runs, colours: Mapping[str, str], least: float) -> None:
    import numpy as np
    from matplotlib.ticker import FixedLocator, NullLocator

    for row, each in runs.items():
        curve = median_curve(each)
        if not curve:
            continue
        times, losses = zip(*curve, strict=True)
        known = [point for point in curve if math.isfinite(point[1])]
        is_ours = KINDS[RowName.parse(row).kind].is_ours
        axes.plot(times, losses, color=colours[row], linewidth=2.2 if is_ours else 1.3)
        axes.plot(*known[-1], "o", color=colours[row], markersize=3)
        for fault in each[0].result.faults:
            if fault.at_s is not None and fault.at_s <= each[0].settings.seconds:
                loss = float(np.interp(fault.at_s, *zip(*known, strict=True)))
                axes.plot(
                    fault.at_s, loss, MARKS[fault.kind], color=colours[row], markersize=5,
                    markeredgecolor="white", markeredgewidth=0.5,
                )  # fmt: skip
    axes.set(yscale="log", xlabel="wall time (s)", ylabel="loss (bits a byte)")
    # All begin at 8 bits, within seconds; the differences lie below.
    axes.set_ylim(0.98 * least, most := max(1.5 * least, 3.0))
    ticks = [
        tick for tick in (2, 2.2, 2.4, 2.6, 2.8, 3, 3.5, 4, 5, 6) if 0.98 * least <= tick <= most
    ]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.grid(True, linewidth=0.4, alpha=0.6)
