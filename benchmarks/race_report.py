"""The report of the race: a table a condition, and a picture of the calm and the last condition.

By itself: ``python race_report.py RESULTS.json PICTURE.png`` draws what is in a results' file.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from race_run import NUM_BINS, NUM_MARKS, RaceResult, median
from support.conditions import SHARES
from support.quality_rows import KINDS, RowName
from support.race_settings import RaceSettings
from support.report import Provenance, Spread, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALM, OURS = "calm", "gossipdp"


class Run(msgspec.Struct, frozen=True):
    """A finished run, as it is stored."""

    settings: RaceSettings
    result: RaceResult
    provenance: Provenance | None = None

    @property
    def samples(self) -> int:
        return self.result.samples

    @property
    def loss(self) -> float:
        """Return the loss of the final model, bits a byte; infinity if it had diverged."""
        return math.inf if self.result.loss is None else self.result.loss

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


def share_of_calm(run: Run, calm: Sequence[Run], _: Sequence[Run] = ()) -> float:
    """Return the samples kept over those of the row's own calm in the same time; NaN without it."""
    rates = [each.samples / each.trained_s for each in calm if each.trained_s]
    expected = median(rates) * run.trained_s
    return run.samples / expected if expected else math.nan


def ours_over(figure: str, run: Run, calm: Sequence[Run], ours: Sequence[Run]) -> float:
    """Return gossipdp's figure over a rival's, of the same round; NaN for want of either."""
    same = [getattr(each, figure) for each in ours if each.settings.seed == run.settings.seed]
    own = getattr(run, figure) if run.settings.row != OURS else 0
    return float(same[0] / own) if same and own else math.nan


class Column(NamedTuple):
    """A column of the table.

    best: chooses the best of the medians; None: there is no best.
    value: of a run, given the calm runs of its row, and gossipdp's under its condition.
    """

    name: str
    key: str
    form: str
    best: Callable[[Sequence[float]], float] | None
    value: Callable[[Run, Sequence[Run], Sequence[Run]], float]


COLUMNS = (
    Column("samples kept", "samples", ",.0f", max, lambda run, *_: run.samples),
    Column("gossipdp's over these", "samples_ratio", ".2f", None, partial(ours_over, "samples")),
    Column("of its own calm", "share_of_calm", ".0%", max, share_of_calm),
    Column("final loss", "loss", ".3f", min, lambda run, *_: run.loss),
    Column("gossipdp's over this", "loss_ratio", ".3f", None, partial(ours_over, "loss")),
    Column("MB in all", "megabytes", ",.0f", min, lambda run, *_: run.result.sent_bytes / 1e6),
    Column("faults", "faults", ".0f", None, lambda run, *_: run.num_done),
    Column("restart (s)", "restart_s", ".1f", None, lambda run, *_: median(run.result.restarts_s)),
)


def spreads(
    runs: Runs, calm: Runs, columns: Sequence[Column] = COLUMNS
) -> dict[str, dict[str, Spread]]:
    """Return each figure of each row that ran, over its runs."""
    ours = runs.get(OURS, ())
    return {
        row: {
            column.key: Spread.of(column.value(run, calm.get(row, ()), ours) for run in found)
            for column in columns
        }
        for row, found in runs.items()
        if found
    }


def cells(
    runs: Runs, calm: Runs, columns: Sequence[Column], bare: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the texts of each row: medians, with ranges unless ``bare``, the best bold."""
    found = spreads(runs, calm, columns)
    best = {
        column.key: column.best(values)
        for column in columns
        if column.best is not None
        and (values := [v for one in found.values() if math.isfinite(v := one[column.key].median)])
    }

    def text(spread: Spread, column: Column) -> str:
        if not math.isfinite(spread.median):
            return "-"
        shown = f"{spread.median:{column.form}}" if column.key in bare else spread.text(column.form)
        return f"**{shown}**" if spread.median == best.get(column.key) else shown

    return {
        row: [text(figures[column.key], column) for column in columns]
        for row, figures in found.items()
    }


def table(title: str, runs: Runs, calm: Runs) -> Table:
    head = ("row", "rate", *(column.name for column in COLUMNS), "runs")
    lines = [
        (
            RowName.parse(row).label,
            f"{runs[row][0].settings.learning_rate:g}",
            *texts,
            str(len(runs[row])),
        )
        for row, texts in cells(runs, calm, COLUMNS).items()
    ]
    return Table(title, head, lines)


NOTE = (
    "Medians over the runs (least to greatest); the best median of a column is bold. Samples "
    "kept: in the final model; work since a checkpoint, an average or an exchange that died is "
    "not. Gossipdp's over these: round by round. Its own calm: the same row, the same time after "
    "its start. Final loss: at equal wall time, of the model of all on held-out text, bits a byte. "
    "MB: sent by all workers' sockets. Restart: from the start of a process, or from when a spare "
    "one becomes a worker, to the end of its first step."
)


def notes(found: Mapping[str, Runs]) -> list[str]:
    """Return what the columns mean, and what was not equal."""
    rows: dict[str, list[Run]] = {}
    for condition in found.values():
        for row, runs in condition.items():
            rows.setdefault(RowName.parse(row).label, []).extend(runs)
    every = [run for runs in rows.values() for run in runs]

    def by_row(form: str, figure: Callable[[Run], float]) -> str:
        return "; ".join(
            f"{row} {Spread.of(map(figure, runs)).text(form)}" for row, runs in rows.items() if runs
        )

    imported = Spread.of(run.result.imported_s for run in every)
    started = Spread.of(run.result.start_s for run in every)
    settings = [run.settings for run in every]
    text = (
        f"Not equal: a process needs {imported.text('.1f')} s for its imports, and "
        f"{started.text('.1f')} s to the end of its first step: scale the kill period by that. The "
        "final model was there so many seconds after the end of the time: "
        f"{by_row('.2f', lambda run: run.result.ended_s - run.settings.seconds)}. The launcher "
        "took so much of a core: "
        f"{by_row('.1%', lambda run: run.result.launcher_s / run.settings.seconds)}. Spare "
        "interpreters, with torch and the row's own package imported, where workers are killed: "
        f"{by_row('.0f', lambda run: run.settings.num_spares)}; a vanished host takes its own. "
    )
    if not all(each.waits for each in settings):
        limited = any(each.quota_s for each in settings)
        how = "a control group's quota" if limited else "SIGSTOP and SIGCONT, 50 ms a turn"
        text += f"A worker has a core of its own; a smaller share of it is {how}. "
    return [NOTE, f"{text}What else is not equal: benchmarks/README.md."]


def as_json(found: Mapping[str, Runs]) -> dict[str, Any]:
    """Return what is stored: by condition and row the medians, and every run."""
    return {
        name: {
            row: {key: spread.median for key, spread in figures.items()}
            | {"runs": [{"settings": r.settings, "result": r.result} for r in runs[row]]}
            for row, figures in spreads(runs, found.get(CALM, {})).items()
        }
        for name, runs in found.items()
    }


PANELS = {
    CALM: "Nothing happens",
    "kills10_moving": "A slow worker that changes, and kills",
    "starved": "One worker has half or a quarter of its core, and kills",
}


def short(row: str) -> str:
    """Return a row's name for a picture."""
    return RowName.parse(row).label.partition(", H = ")[0].removesuffix(", defaults")


def final_losses(runs: Runs) -> dict[str, float]:
    """Return the median of each row's final losses, the least first."""
    losses = {row: median([run.loss for run in each]) for row, each in runs.items() if each}
    return dict(sorted(losses.items(), key=lambda each: each[1]))


def conclusion(condition: str, runs: Runs) -> str:
    """Return the title of a panel: which row ends lowest, and how far below the next, by rounds.

    If a round has it the other way round, the two end level.
    """
    first, *others = final_losses(runs)
    text = f"{short(first)} ends lowest"
    if others:
        second = others[0]
        losses = {run.settings.seed: run.loss for run in runs[second]}
        same = [run for run in runs[first] if run.settings.seed in losses]
        ratios = [run.loss / losses[run.settings.seed] for run in same]
        if ratios and max(ratios) < 1:
            text += f", {1 - median(ratios):.1%} below {short(second)}"
        elif ratios:
            text = f"{short(first)} and {short(second)} end level"
    return textwrap.fill(f"{PANELS.get(condition, condition)}: {text}", 58)


def draw(path: Path, found: Mapping[str, Runs]) -> None:
    """Write a PNG: loss over time in the calm and in the last condition, and there the steps."""
    from gossipdp_lab.simulate.figures import OKABE_ITO, new_figure

    named = [name for name, runs in found.items() if any(runs.values())]
    shown = list(dict.fromkeys([named[0], named[-1]]))
    rows = list(dict.fromkeys(row for name in shown for row in found[name]))
    colours = dict(zip(rows, [*OKABE_ITO[1:], OKABE_ITO[0]] * 2, strict=False))
    last, calm = found[shown[-1]], found.get(CALM, {})
    timed = [
        row
        for row in (OURS, "ddp")
        if last.get(row) and calm.get(row) and last[row][0].result.steps
    ]
    columns = len(shown) + bool(timed)
    figure = new_figure(5.2 * columns, 3.9)
    grid = figure.add_gridspec(max(1, len(timed)), columns)
    losses = [run.loss for name in shown for runs in found[name].values() for run in runs]
    least = min(filter(math.isfinite, losses), default=2.0)
    for number, name in enumerate(shown):
        axes = figure.add_subplot(grid[:, number])
        axes.set_title(conclusion(name, found[name]), fontsize="medium")
        _draw_losses(axes, found[name], colours, least)
    for number, row in enumerate(timed):
        axes = figure.add_subplot(grid[number, -1])
        _draw_steps(axes, last[row][0], calm[row][0], colours[row])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def curve(runs: Sequence[Run]) -> list[tuple[float, Spread]]:
    """Return the median time and the losses of each mark at which most of the runs had a model."""
    marks: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for point in run.result.curve:
            if point.loss is not None:
                number = round(NUM_MARKS * min(1.0, point.seconds / run.settings.seconds))
                marks.setdefault(number, []).append((point.seconds, point.loss))
    return [
        (median([seconds for seconds, _ in each]), Spread.of(loss for _, loss in each))
        for _, each in sorted(marks.items())
        if 2 * len(each) > len(runs)
    ]


def _draw_losses(axes: Axes, runs: Runs, colours: Mapping[str, str], least: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    least, most = 0.98 * least, max(1.4 * least, 3.0)  # all begin at 8 bits, within seconds
    height = 0.0
    for row, final in final_losses(runs).items():
        if not (points := curve(runs[row])):
            continue
        times, spread = [at_s for at_s, _ in points], [each for _, each in points]
        is_ours, colour = KINDS[RowName.parse(row).kind].is_ours, colours[row]
        width = 2.2 if is_ours else 1.3
        axes.plot(times, [each.median for each in spread], color=colour, linewidth=width)
        axes.plot(times[-1], final, "o", color=colour, markersize=3)
        limits = [each.least for each in spread], [each.greatest for each in spread]
        axes.fill_between(times, *limits, color=colour, alpha=0.15, linewidth=0)
        # Its label stands at the line's end, or above the one below it.
        at = math.log(final / least) / math.log(most / least)
        height = min(max(at, height + 0.055), 1.2)
        text, weight = f"{short(row)} {final:.2f}", "bold" if is_ours else "normal"
        place: dict[str, Any] = {"transform": axes.transAxes, "va": "center", "fontsize": "small"}
        axes.text(1.02, height, text, color=colour, weight=weight, **place)
    axes.set(yscale="log", xlabel="wall time (s)", ylabel="loss (bits a byte)")
    ticks = [tick for tick in (2, 2.2, 2.4, 2.6, 2.8, 3, 3.5, 4, 5, 6) if least < tick <= most]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(least, most)
    axes.set_xlim(left=0)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Axes, run: Run, calm: Run, colour: str) -> None:
    """Draw a strip a worker: its steps over time, where it is slow, and its deaths."""
    seconds, steps = run.settings.seconds, np.array(run.result.steps)
    scale = seconds / calm.settings.seconds  # both have as many bins
    usual = scale * max(1.0, median([n for each in calm.result.steps for n in each if n]))
    times = seconds * np.arange(NUM_BINS) / NUM_BINS
    for rank, counts in enumerate(steps):
        heights = rank + 0.85 * np.minimum(1, counts / usual)
        axes.fill_between(times, rank, heights, step="post", color=colour, linewidth=0)
    slow = [each for each in run.result.faults if each.kind == "slow"]
    # The next one of the plan ends it, also if that is missed itself.
    ends_s = [*(each.planned_s for each in slow[1:]), math.inf]
    bars = [
        (each.at_s, min(seconds, each.at_s + end_s - each.planned_s), each.rank)
        for each, end_s in zip(slow, ends_s, strict=False)
        if each.at_s is not None
    ]
    quota_s, last = run.settings.quota_s, len(steps) - 1
    turns = range(int(seconds / quota_s) + 1 if quota_s else 0)
    bars += [(n * quota_s, (n + 1) * quota_s, last) for n in turns if n % len(SHARES)]
    for at_s, end_s, rank in bars:
        axes.plot([at_s, end_s], [rank - 0.07] * 2, color="black", linewidth=2)
    for each in run.result.faults:
        if each.kind == "kill" and each.at_s is not None:
            axes.plot(each.at_s, each.rank + 0.4, "X", color="black", markeredgecolor="white")
    made = steps.sum() / max(1, scale * np.sum(calm.result.steps))
    title = f"{short(run.settings.row)}, one run: {made:.0%} of its calm's steps, worker by worker"
    axes.set_title(title, fontsize="small")
    axes.set(xlim=(0, seconds), ylim=(-0.15, len(steps)), yticks=[])
    axes.set_xlabel("wall time (s); bar: slow, X: killed", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)


def read(path: Path) -> dict[str, dict[str, list[Run]]]:
    """Return the runs of a results file, by condition and row."""
    stored = json.loads(path.read_bytes())["result"]
    return {
        condition: {row: msgspec.convert(one["runs"], list[Run]) for row, one in rows.items()}
        for condition, rows in stored.items()
    }


if __name__ == "__main__":
    draw(Path(sys.argv[2]), read(Path(sys.argv[1])))
