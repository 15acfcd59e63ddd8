"""The report of time_to_loss: a table, the comparisons that count, JSON and a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality_report import EASY, LATE, reached
from quality_rows import KINDS, RowName
from quality_worker import RunResult
from support.report import Spread, Table, Target


def _or_inf(loss: float | None) -> float:
    """Return a loss; infinity if the run had diverged."""
    return math.inf if loss is None else loss


@dataclass(frozen=True)
class Round:
    """One row of one round. tokens: its run on the table's tokens. time: in the table's time.

    Both are the same run where the first took no longer.
    """

    tokens: RunResult
    time: RunResult

    @property
    def loss(self) -> float:
        """At equal tokens, bits a byte; infinity where it diverged."""
        return _or_inf(self.tokens.loss)

    @property
    def loss_in_time(self) -> float:
        """At equal time."""
        return _or_inf(self.time.loss)

    @property
    def waiting(self) -> float:
        """Share of the training time that is not compute: others, and everything else."""
        return math.nan if self.tokens.computing is None else 1 - self.tokens.computing

    def seconds_to(self, loss: float) -> float:
        """By the run that came there sooner; infinity where none did."""
        return min(reached(one.curve, loss)[1] for one in (self.tokens, self.time))

    def line(self) -> str:
        """For progress."""
        return (
            f"{self.tokens.samples_per_s:.0f} samples/s, {self.loss:.3f} bits a byte after "
            f"{self.tokens.curve[-1].seconds:.1f} s, {self.loss_in_time:.3f} at equal time, "
            f"{100 * self.waiting:.0f}% not computing"
        )


Results = Mapping[str, Sequence[Round]]


def timed_losses(results: Results) -> dict[str, float]:
    """Return the easy and the late loss: over that of the row that is best at equal time."""
    best = min(
        statistics.median(one.loss_in_time for one in rounds)
        for rounds in results.values()
        if rounds
    )
    return {"easy": EASY * best, "late": LATE * best}


def figures(timed: Mapping[str, float]) -> dict[str, Callable[[Round], float]]:
    """Return the figures of each round, by their names in JSON."""
    return {
        "samples_per_s": lambda one: one.tokens.samples_per_s,
        "seconds_to_easy_loss": lambda one: one.seconds_to(timed["easy"]),
        "seconds_to_late_loss": lambda one: one.seconds_to(timed["late"]),
        "loss": lambda one: one.loss,
        "loss_at_equal_time": lambda one: one.loss_in_time,
        "bytes_per_parameter_step": lambda one: one.tokens.bytes_per_parameter_step,
        "comm_rate": lambda one: one.tokens.comm_rate,
        "not_computing": lambda one: one.waiting,
    }


FORMS = (".0f", ".1f", ".1f", ".3f", ".3f", ".3g", ".3g", ".1%")


def measured_table(results: Results, rates: Mapping[str, float], ideal_s: float) -> Table:
    """Medians over the rounds, with the least and the most; one line a row."""
    timed = timed_losses(results)
    values = figures(timed).values()
    lines = [
        (
            RowName.parse(row).label,
            f"{rates[row]:g}",
            *(_text(map(value, rounds), form) for value, form in zip(values, FORMS, strict=True)),
        )
        for row, rounds in results.items()
        if rounds
    ]
    return Table(
        "Time to loss",
        (
            "row",
            "learning rate",
            "samples/s",
            f"s to {timed['easy']:.3f}",
            f"s to {timed['late']:.3f}",
            "loss at equal tokens",
            "loss at equal time",
            "bytes/(parameter, step)",
            "comm rate",
            "not computing",
        ),
        lines,
        "Losses: of the workers' average on held-out text, in bits a byte; the two that are timed "
        f"are {EASY:g} and {LATE:g} times what the best row reaches at equal time. Equal time: "
        f"{ideal_s:.1f} s, what the tokens take if nobody waits for anybody; a row that needs "
        "longer trains once more, on fewer tokens, so that it ends then. Seconds: of the sooner of "
        "both runs, from copies that are scored afterwards, as in the chart, on fewer windows of "
        "the text than the losses of this table. samples/s: the sum of the workers' own "
        "speeds. Bytes: sent by a worker's sockets, or, where it has a network, by its interface, "
        "with headers; a step is a full batch. Comm rate: exchanges, all-reduces or averages per "
        "worker and step of its own. Not computing: the rest of the training time.",
    )


def _text(values: Any, form: str) -> str:
    spread = Spread.of(values)
    if math.isfinite(spread.greatest):
        return spread.text(form)
    there = sum(math.isfinite(value) for value in spread.values)
    return f"in {there} of {len(spread.values)}" if there else "never"


def rows_as_json(results: Results, rates: Mapping[str, float], ideal_s: float) -> dict[str, Any]:
    """Return the content of ``--json``: by row the medians, and every run; null: never reached."""
    if not any(results.values()):
        return {"rows": {}}
    timed = timed_losses(results)
    rows = {
        row: {"learning_rate": rates[row]}
        | {name: Spread.of(map(value, rounds)).median for name, value in figures(timed).items()}
        | {"runs": [{"tokens": one.tokens, "time": one.time} for one in rounds]}
        for row, rounds in results.items()
        if rounds
    }
    return {"timed_losses": timed, "equal_time_s": ideal_s, "rows": rows}


def targets(results: Results) -> list[Target]:
    """Hold the best of gossipdp's rows against the best other; NaN, not met, without either."""
    timed = timed_losses(results)
    found = []
    for name in ("seconds_to_late_loss", "loss_at_equal_time"):
        value = figures(timed)[name]
        best = {True: math.inf, False: math.inf}
        for row, rounds in results.items():
            is_ours = KINDS[RowName.parse(row).kind].is_ours
            best[is_ours] = min(best[is_ours], Spread.of(map(value, rounds)).median)
        if math.isfinite(best[True]) or math.isfinite(best[False]):
            ratio = best[True] / best[False]
            text = f"{name.replace('_', ' ')}: the best of gossipdp over the best of the others"
            found.append(Target(text, ratio, 1.0))
    return found


def draw(path: Path, condition: str, results: Results) -> None:
    """Write a PNG: median loss over median time, a colour a row, dashed the runs of equal time."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (row, rounds), colour in zip(results.items(), colormaps["tab20"].colors, strict=False):
        name = RowName.parse(row)
        styles = {
            "-": [one.tokens for one in rounds],
            "--": [one.time for one in rounds if one.time != one.tokens],
        }
        for style, runs in styles.items():
            # Not the untrained model, which would take most of both axes.
            curves = zip(*(run.curve for run in runs), strict=True)
            marks = [points for points in curves if points[0].share]
            axes.plot(
                [statistics.median(point.seconds for point in points) for points in marks],
                [statistics.median(_or_inf(point.loss) for point in points) for points in marks],
                style,
                color=colour,
                linewidth=1.8 if KINDS[name.kind].is_ours else 1.0,
                label=name.label if style == "-" else None,
            )
    for loss in timed_losses(results).values():
        axes.axhline(loss, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", xlabel="time (s)")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("validation loss of the workers' average (bits a byte)")
    axes.set_title(condition, fontsize="medium", wrap=True)
    axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    axes.legend(fontsize="x-small", title="medians; solid: equal tokens; dashed: equal time")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
