"""Does it train as well? Final loss at equal tokens, beside what a user would take instead.

    python benchmarks/quality.py --quick            every row, tiny: 10 minutes on two cores
    python benchmarks/quality.py --size small       72,000 parameters, hours
    python benchmarks/quality.py                    a million parameters, days

README.md says what is trained, and how. Finished runs are kept in --runs, so a call that was
stopped goes on from there. The table goes to benchmarks/results once all is measured, and until
then to unfinished.md there.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import torch
import tyro
from support.conditions import CONDITIONS
from support.finished_runs import Campaign, NoBestRateError, best_rate, next_rate
from support.hosts import Hosts
from support.quality_rows import DEFAULT_ROWS, WEIGHT_DECAY, RowName
from support.quality_worker import (
    DataName,
    Processor,
    RunResult,
    RunSettings,
    Size,
    num_parameters,
    run,
)
from support.report import Missing, Provenance, Report, Table, results_folder, run_script

from gossipdp.rules import at_least_1, check_flags, option, positive_number, whole_number

SIZES = {
    "tiny": Size(width=48, depth=2, context=64, batch_size=8, steps=32),
    "small": Size(width=48, depth=2, context=64, batch_size=8, steps=1_024),
    "large": Size(width=128, depth=5, context=128, batch_size=8, steps=4_096),
}


@dataclass(frozen=True)
class QualityBenchmark:
    """Measure how well a model trains: loss at equal tokens, each row with its own learning rate.

    Rows: see support/quality_rows.py. A name ends in @H where something happens every H steps.
    """

    size: Literal["tiny", "small", "large"] = "large"
    """tiny and small: 72,000 parameters; large: a million. They differ in steps too."""

    steps: int | None = option(None, partial(whole_number, least=32))
    """Gradient steps of each worker, instead of the size's own."""

    rows: str = DEFAULT_ROWS
    """Rows to run, with commas between them."""

    data: DataName = "common"
    """common: all draw from the whole text; disjoint: each worker has a stretch of its own."""

    rates: str = "0.004,0.008,0.016"
    """The grid of learning rates to begin with, each twice the last; of one, none is tuned."""

    decays: str = f"{WEIGHT_DECAY}"
    """The same of AdamW's weight decays, tuned at the best rate."""

    seeds: int = option(3, at_least_1)
    """Runs at the best rate; the seed of the tuning is none of them."""

    graph: str = "ring"
    """The graph of gossipdp's rows."""

    step_ms: float | None = option(None, positive_number)
    """Let a step last so long, as if each worker had a processor of its own; pace is free then, and
    learning rates are those that are best without."""

    device: Literal["cpu", "cuda"] = "cpu"
    """The workers' device. On cuda, and with several threads each, their pace is free."""

    threads: int = option(1, at_least_1)
    """Threads of torch of each worker, where the machine has as many cores for them all."""

    runs: Path = Path("runs/quality/runs.jsonl")
    """The file in which finished runs are kept, and found again."""

    minutes: float | None = None
    """Begin no run after so long; what is finished is shown."""

    quick: bool = False
    """A few steps of one seed, to see that all works."""


def main() -> None:
    torch.set_num_threads(1)  # two that score a small model wait for each other on a busy machine
    measure_all(tyro.cli(QualityBenchmark, config=(tyro.conf.FlagCreatePairsOff,)))


def measure_all(benchmark: QualityBenchmark) -> None:
    """Run what is not finished; print and write what came out.

    Raises:
        ValueError: for bad input, before any process starts.
    """
    if benchmark.quick:
        path = results_folder(benchmark.quick) / "quality_runs.jsonl"
        path.unlink(missing_ok=True)  # it is to run, not to find what ran before
        benchmark = replace(benchmark, size="tiny", seeds=1, runs=path)
    names = RowName.parse_all(benchmark.rows)
    grids = grid("--rates", benchmark.rates), grid("--decays", benchmark.decays)
    check_flags(benchmark)
    size = SIZES[benchmark.size]
    size = replace(size, steps=benchmark.steps or size.steps)
    report = Report(f"quality_{benchmark.size}", "Does it train as well?", benchmark.quick)
    here = [name for name in names if name.missing() is None]
    report.missing = [Missing(name.label, why) for name in names if (why := name.missing())]
    if not here:
        raise ValueError(f"none of these rows can run here: {report.missing[0].why}")
    runs = Runs(benchmark.runs, benchmark.minutes)
    condition = None
    if benchmark.step_ms is not None:
        condition = replace(CONDITIONS["equal"], step_s=benchmark.step_ms / 1000)
    bases = [
        RunSettings(
            row=name.text,
            data=benchmark.data,
            learning_rate=grids[0][0],
            seed=0,
            size=size,
            graph=benchmark.graph,
            condition=condition,
            processor=Processor(benchmark.device, benchmark.threads),
        )
        for name in here
    ]
    results = measure_rows(bases, grids, benchmark.seeds, runs)
    left = [
        *(Missing(label, f"it failed: {why}") for label, why in runs.failures.items()),
        *(each for each in unfinished(results, benchmark.seeds) if each.row not in runs.failures),
    ]
    report.missing += left
    rows = {name: row_as_json(row) for name, row in results.items() if row.results}
    report.tables.append(table(rows, benchmark.data))
    report.notes.append(settings_note(bases[0], runs.commits))
    if left:
        report.name = "unfinished"  # never over committed results
    report.write(
        {
            "data": benchmark.data,
            "rows": rows,
            "parameters": num_parameters(size),
            "steps": size.steps,
            "samples_per_step": size.batch_size,
            "context": size.context,
        }
    )
    if runs.failures:
        sys.exit(f"quality: failed: {', '.join(runs.failures)}; see above")


def grid(flag: str, text: str) -> list[float]:
    """Return the values of a grid; raises ValueError unless each is twice the last."""
    try:
        values = [float(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}; give numbers, with commas") from None
    if values[0] <= 0 or any(two != 2 * one for one, two in itertools.pairwise(values)):
        raise ValueError(f"{flag} is {text!r}; each is twice the one before")
    return values


TUNING_SEED = 0
Grids: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Of learning rates and of weight decays."""


class Line(msgspec.Struct, frozen=True):
    """A finished run as it is stored; found again by its settings."""

    key: str
    result: RunResult
    provenance: Provenance


class Runs(Campaign[Line]):
    """The runs of quality and of time_to_loss, by their settings."""

    def __init__(self, path: Path | None, minutes: float | None = None) -> None:
        super().__init__(path, Line, lambda line: line.key, minutes)

    def result(self, settings: RunSettings, hosts: Hosts | None = None) -> RunResult | None:
        """Return a run's result, found or made now; None if it failed or no time is left."""
        label = RowName.parse(settings.row).label

        def make() -> Line:
            result = run(settings, hosts)
            print(
                f"{label}, {settings.data} data, {settings.size.steps} steps, rate "
                f"{settings.learning_rate:g}, decay {settings.weight_decay:g}, seed "
                f"{settings.seed}: {result.loss_or_inf:.4f} bits a byte, "
                f"{result.samples_per_s:.0f} samples/s, {result.seconds:.0f} s",
                flush=True,
            )
            return Line(settings.key, result, Provenance.here(result.seconds))

        line = self.find(settings.key, label, make)
        return None if line is None else line.result


@dataclass
class Measured:
    """One row on one kind of data.

    settings: with the best rate and decay so far; tried: by setting, value → loss of the tuning
    seed; results: by seed.
    """

    settings: RunSettings
    tried: dict[str, dict[float, float]] = field(default_factory=dict)
    is_tuned: bool = False
    results: dict[int, RunResult] = field(default_factory=dict)


def having(settings: RunSettings, setting: str, value: float) -> RunSettings:
    """Return the settings with another value of one of them."""
    changed: dict[str, Any] = {setting: value}
    return replace(settings, **changed)


def measure(
    base: RunSettings,
    grids: Grids,
    num_seeds: int,
    run: Callable[[RunSettings], RunResult | None],
) -> Measured:
    """Tune the row of ``base``, then run seeds 1 to ``num_seeds`` with what was best.

    The tuning seed is none of those: what was best by chance gains nothing by it. It is tuned under
    no condition.

    Args:
        base: what is measured, but for rate, decay and seed.
        grids: of rates and of decays, to begin with; a value alone is not tuned.
        num_seeds: how many; with 0 the row is only tuned.
        run: gives a run's result, or None where it is not to be had now.
    """
    found = Measured(replace(base, learning_rate=grids[0][0], weight_decay=grids[1][0]))
    for setting, values in zip(("learning_rate", "weight_decay"), grids, strict=True):
        tried = found.tried[setting] = dict[float, float]()
        while len(values) > 1 and (value := next_rate(tried, values)) is not None:
            tuning = replace(found.settings, seed=TUNING_SEED, condition=None)
            result = run(having(tuning, setting, value))
            if result is None:
                return found
            tried[value] = result.loss_or_inf
        if tried:
            found.settings = having(found.settings, setting, best_rate(tried))
    found.is_tuned = True
    for seed in range(1, num_seeds + 1):
        result = run(replace(found.settings, seed=seed))
        if result is None:
            return found
        found.results[seed] = result
    return found


def measure_rows(
    bases: Sequence[RunSettings], grids: Grids, num_seeds: int, runs: Runs
) -> dict[str, Measured]:
    """Tune every row, then run seed after seed: what is finished compares like with like."""
    results: dict[str, Measured] = {}
    for up_to in range(num_seeds + 1):
        for base in bases:
            try:
                results[base.row] = measure(base, grids, up_to, runs.result)
            except NoBestRateError as error:
                runs.failures[RowName.parse(base.row).label] = str(error)
    return results


def unfinished(results: Mapping[str, Measured], num_seeds: int) -> list[Missing]:
    """Return the part of the written plan that is not measured yet."""
    found = []
    for row, measured in results.items():
        label = RowName.parse(row).label
        if not measured.is_tuned:
            found.append(Missing(label, "it is not tuned yet: call again"))
        elif len(measured.results) < num_seeds:
            why = f"{len(measured.results)} of {num_seeds} seeds are measured: call again"
            found.append(Missing(label, why))
    return found


def row_as_json(measured: Measured) -> dict[str, Any]:
    """Return one row's figures, means over the seeds; a loss that diverged is null."""
    results = list(measured.results.values())
    losses = [one.loss for one in results if one.loss is not None]
    return {
        "loss": statistics.fmean(losses) if len(losses) == len(results) else None,
        "loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
        "learning_rate": measured.settings.learning_rate,
        "weight_decay": measured.settings.weight_decay,
        "bytes_per_parameter_step": statistics.fmean(x.bytes_per_parameter_step for x in results),
        "samples_per_s": statistics.fmean(x.samples_per_s for x in results),
        "comm_rate": statistics.fmean(x.comm_rate for x in results),
        "samples": statistics.fmean(x.samples for x in results),
        "seeds": {seed: x.loss for seed, x in measured.results.items()},
        "tried": {
            setting: {f"{value:g}": tried[value] for value in sorted(tried)}
            for setting, tried in measured.tried.items()
        },
    }


def table(rows: Mapping[str, dict[str, Any]], kind: str) -> Table:
    base = rows["ddp"]["loss"] if "ddp" in rows else None
    lines = []
    for name, row in rows.items():
        loss, std = row["loss"], row["loss_std"]
        lines.append(
            (
                RowName.parse(name).label,
                f"{loss or math.inf:.3f}" + ("" if std is None else f" ± {std:.3f}"),
                f"{100 * (loss / base - 1):+.1f}%" if loss and base else "-",
                f"{len(row['seeds'])}",
                f"{row['learning_rate']:g}",
                f"{row['weight_decay']:g}",
                f"{row['bytes_per_parameter_step']:.3g}",
                f"{row['comm_rate']:.3g}",
                f"{row['samples_per_s']:.0f}",
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
            "weight decay",
            "bytes/(parameter, step)",
            "comm rate",
            "samples/s",
        ),
        lines,
        "Validation loss of the workers' average at the end, mean ± standard deviation over the "
        "seeds. Bytes: payload that a worker's TCP sockets sent, by the kernel's count. Comm rate: "
        "exchanges, all-reduces or averages per worker and step.",
    )


def settings_note(base: RunSettings, commits: Iterable[str]) -> str:
    """Say what all runs like this one share. commits: of the source of the runs."""
    size, processor = base.size, base.processor
    return (
        f"{num_parameters(size):,} parameters; {base.workers} workers, {size.steps:,} steps of "
        f"each, {size.batch_size} windows of {size.context} bytes a step; a worker's processor: "
        f"{processor.device}, {processor.threads} threads. gossipdp: graph {base.graph}, but for "
        f"rows of its defaults. Source of the runs: {', '.join(sorted(commits))}. What "
        "is equal in all rows, and what is not: benchmarks/README.md."
    )


if __name__ == "__main__":
    run_script(main)
