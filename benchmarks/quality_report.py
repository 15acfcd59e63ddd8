"""The report of quality.py: tables and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from support.quality_rows import (
    BETAS,
    OUTER_MOMENTUM,
    OUTER_RATE,
    POWER_SGD_AFTER,
    WEIGHT_DECAY,
    RowName,
)
from support.quality_runs import TUNING_SEED, Measured
from support.quality_worker import ONE_THREAD, RunSettings, num_parameters
from support.report import Table

if TYPE_CHECKING:
    pass

Results = Mapping[str, Measured]
"""By row."""

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


def rows_as_json(results: Results, base: RunSettings) -> dict[str, Any]:
    """Return the content of ``--json``; base: one of the runs."""
    size = base.size
    return {
        "data": base.data,
        "rows": {name: row_as_json(row) for name, row in results.items() if row.results},
        "parameters": num_parameters(size),
        "steps": size.steps,
        "samples_per_step": size.batch_size,
        "context": size.context,
    }


def tables(results: Results, base: RunSettings, tuning: RunSettings, commits: str) -> list[Table]:
    """All that is shown; base and tuning: two of the runs, commits: of the source that made all."""
    return [
        _outcome(results, base.data),
        _grid(results, base.data),
        _settings(base, tuning, commits),
    ]


def _outcome(rows: Results, kind: str) -> Table:
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


def _grid(rows: Results, kind: str) -> Table:
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
