"""The report of quality.py: tables, the comparisons that count, JSON and a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.quality_rows import (
    BETAS,
    KINDS,
    OUTER_MOMENTUM,
    OUTER_RATE,
    POWER_SGD_AFTER,
    WEIGHT_DECAY,
    RowName,
)
from support.quality_runs import TUNING_SEED, Measured
from support.quality_worker import ONE_THREAD, DataName, RunSettings, Size, num_parameters
from support.report import Table

from gossipdp_lab.simulate.figures import OKABE_ITO

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[DataName, Mapping[str, Measured]]

BASELINE = "ddp"


def mean_loss(measured: Measured) -> float:
    """Over the seeds; infinity where one diverged, NaN without any."""
    losses = [math.inf if one.loss is None else one.loss for one in measured.results.values()]
    return statistics.fmean(losses) if losses else math.nan


def loss_std(measured: Measured) -> float | None:
    """Return the sample standard deviation over the seeds; None of fewer than two."""
    losses = [one.loss for one in measured.results.values() if one.loss is not None]
    return statistics.stdev(losses) if len(losses) > 1 else None


def row_as_json(measured: Measured) -> dict[str, Any]:
    """One row's figures; a loss of a seed that diverged is null."""
    results = list(measured.results.values())
    loss = mean_loss(measured)
    return {
        "loss": loss if math.isfinite(loss) else None,
        "loss_std": loss_std(measured),
        "learning_rate": measured.rate,
        "bytes_per_parameter_step": statistics.fmean(x.bytes_per_parameter_step for x in results),
        "samples_per_s": statistics.fmean(x.samples_per_s for x in results),
        "comm_rate": statistics.fmean(x.comm_rate for x in results),
        "samples": statistics.fmean(x.samples for x in results),
        "seeds": {seed: x.loss for seed, x in measured.results.items()},
        "tried": {f"{rate:g}": measured.tried[rate] for rate in sorted(measured.tried)},
    }


def rows_as_json(results: Results, size: Size) -> dict[str, Any]:
    """Return the content of ``--json``: the first data under ``rows``, others under ``other_data``.

    =========================  =================================================================
    loss, loss_std             final validation loss of the average, bits a byte: mean and sample
                               standard deviation over the seeds
    learning_rate, tried       the best one; the tuning seed's loss at each that was tried
    bytes_per_parameter_step   that a worker's sockets sent in training, without headers
    samples_per_s              the sum of the workers' own speeds
    =========================  =================================================================
    """
    by_data = {
        kind: {"rows": {name: row_as_json(row) for name, row in rows.items() if row.results}}
        for kind, rows in results.items()
    }
    first, *others = by_data
    return {
        "data": first,
        **by_data[first],
        "other_data": {kind: by_data[kind] for kind in others},
        "parameters": num_parameters(size),
        "steps": size.steps,
        "samples_per_step": size.batch_size,
        "context": size.context,
    }


def tables(results: Results, base: RunSettings, tuning: RunSettings, commits: str) -> list[Table]:
    """All that is shown; base and tuning: two of the runs, commits: of the source that made all."""
    shown = []
    for kind, rows in results.items():
        shown += [_outcome(kind, rows), _grid(kind, rows)]
    return [*shown, _settings(base, tuning, commits)]


def _outcome(kind: DataName, rows: Mapping[str, Measured]) -> Table:
    base = mean_loss(rows[BASELINE]) if BASELINE in rows else math.nan
    lines = []
    for name, measured in rows.items():
        if not measured.results:
            continue
        loss, std = mean_loss(measured), loss_std(measured)
        one = row_as_json(measured)
        lines.append(
            (
                RowName.parse(name).label,
                f"{loss:.3f}" + ("" if std is None else f" ± {std:.3f}"),
                f"{100 * (loss / base - 1):+.1f}%" if math.isfinite(loss / base) else "-",
                f"{len(measured.results)}",
                f"{measured.rate:g}",
                f"{one['bytes_per_parameter_step']:.3g}",
                f"{one['comm_rate']:.3g}",
                f"{one['samples_per_s']:.0f}",
            )
        )
    return Table(
        f"Final loss, {kind} data",
        (
            "row",
            "bits a byte",
            "over DDP",
            "seeds",
            "learning rate",
            "bytes/(parameter, step)",
            "comm rate",
            "samples/s",
        ),
        lines,
        "Validation loss of the workers' average at the end, mean ± standard deviation over the "
        "seeds. Bytes: payload that a worker's TCP sockets sent, by the kernel's count. Comm rate: "
        "exchanges, all-reduces or averages per worker and step.",
    )


def _grid(kind: DataName, rows: Mapping[str, Measured]) -> Table:
    return Table(
        f"Learning rates tried, {kind} data",
        ("row", "rate: loss"),
        [(RowName.parse(name).label, tried_text(row.tried)) for name, row in rows.items()],
        f"Of seed {TUNING_SEED}, which is in no table; the best in bold. The grid is widened by "
        "factors of two until the best has a neighbour on both sides.",
    )


def tried_text(tried: Mapping[float, float]) -> str:
    """Return the rates in their order, the best in bold."""
    best = min(tried.values(), default=math.nan)
    return ", ".join(
        f"**{rate:g}: {loss:.3f}**" if loss == best else f"{rate:g}: {loss:.3f}"
        for rate, loss in sorted(tried.items())
    )


def settings_facts(base: RunSettings) -> dict[str, str]:
    """Say in words what is the same in all runs like this one, and what cannot be."""
    size = base.size
    batch = f"{size.batch_size} windows of {size.context} bytes a worker"
    return {
        "model": f"a byte-level transformer of {num_parameters(size):,} parameters",
        "text": "the source of Python's standard library, a twentieth held out in ten pieces",
        "a run": f"{base.workers} workers, {size.steps:,} steps of each, {batch}",
        "equal in all rows": (
            "tokens, batch, initial parameters, AdamW with betas "
            f"{BETAS[0]} and {BETAS[1]}, weight decay {WEIGHT_DECAY:g}, warm-up of 5% and then "
            "half a cosine to 1% by the share of the run"
        ),
        "not equal": (
            f"PowerSGD sends plain gradients for the first {POWER_SGD_AFTER} steps. DDP refuses "
            "torch's bf16 hook under gloo by its name, so it is wrapped. Decent-DP has one "
            "optimizer a bucket."
        ),
        "outer steps": (
            f"Nesterov, momentum {OUTER_MOMENTUM:g} but where a row says so, rate {OUTER_RATE:g}"
        ),
        "each worker's processor": f"{base.processor.device}, {base.processor.threads} threads",
        "gossipdp": (
            f"graph {base.graph}, but for rows of its defaults; no shared memory: all goes "
            "through sockets"
        ),
    }


def _settings(base: RunSettings, tuning: RunSettings, commits: str) -> Table:
    steps = (
        "of each worker equally many. gossipdp's rows wait at most two exchanges for a neighbour "
        "(pace strict), so that a busy machine does not change the comm rate"
    )
    if base.processor != ONE_THREAD:
        steps = "that take what they take. gossipdp's rows wait for nobody (pace free)"
    if base.condition is not None:
        steps = (
            f"of {1000 * base.condition.step_s:.0f} ms, as on a processor of each worker's own. "
            "gossipdp's rows wait for nobody (pace free). In the runs that tuned learning rates "
            "they took what they took"
        )
    tuned = f"tuned by {tuning.size.steps:,} steps on {tuning.processor.device}"
    facts = settings_facts(base) | {
        "steps": steps,
        "learning rates": tuned,
        "source of the runs": commits,
    }
    return Table("Settings", ("", ""), list(facts.items()))


def draw(path: Path, results: Results) -> None:
    """Write a PNG: loss against bytes per parameter and step, a point a row, a panel a data."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 * len(results), 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (kind, rows) in zip(panels, results.items(), strict=True):
        points = list[tuple[float, float, str, str]]()
        for name, measured in rows.items():
            loss = mean_loss(measured)
            if not math.isfinite(loss):
                continue
            row = RowName.parse(name)
            if row.kind == "none":
                axes.axhline(loss, color="grey", linewidth=0.8, linestyle="--")
                axes.annotate(
                    row.label, (0.01, loss), xycoords=("axes fraction", "data"), xytext=(0, 3),
                    textcoords="offset points", fontsize="x-small", color="grey",
                )  # fmt: skip
                continue
            sent = statistics.fmean(
                one.bytes_per_parameter_step for one in measured.results.values()
            )
            colour = OKABE_ITO[0] if KINDS[row.kind].is_ours else OKABE_ITO[3]
            axes.errorbar(sent, loss, yerr=loss_std(measured), color=colour, marker="o", capsize=3)
            points.append((loss, sent, row.label.removeprefix("gossipdp, "), colour))
        axes.set(xscale="log", xlabel="bytes a worker sent per parameter and step")
        _label(axes, points)
        axes.set_ylabel("validation loss of the average (bits a byte)")
        axes.set_title(f"{kind} data; gossipdp in blue", fontsize="medium")
        axes.grid(True, which="major", linewidth=0.4, alpha=0.6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _label(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Name points (loss, bytes, label, colour), with names apart where points are near.

    Those that send little have their names beside them, the others in a column at the right.
    """
    if not points:
        return
    losses, bytes_sent = [point[0] for point in points], [point[1] for point in points]
    gap = (max(losses) - min(losses)) / 34
    middle, most = math.sqrt(min(bytes_sent) * max(bytes_sent)), max(bytes_sent)
    free = {True: -math.inf, False: -math.inf}
    for loss, sent, label, colour in sorted(points):
        in_column = sent > middle
        free[in_column] = max(loss, free[in_column] + gap)
        axes.annotate(
            label, (sent, loss), (1.4 * most if in_column else 1.1 * sent, free[in_column]),
            va="center", fontsize="x-small", color=colour,
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": colour, "alpha": 0.6},
        )  # fmt: skip
    axes.set_xlim(right=12 * most)  # room for the column
