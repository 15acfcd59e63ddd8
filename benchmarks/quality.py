"""Does it train as well? Final loss at equal tokens, beside what a user would take instead.

    python benchmarks/quality.py --quick            every row, tiny: 10 minutes on two cores
    python benchmarks/quality.py --size small       72,000 parameters, hours
    python benchmarks/quality.py                    a million parameters, days
    python benchmarks/quality.py --rows ddp,gossip --data disjoint

README.md says what is trained, and how. Finished runs are kept in --runs, so a call that was
stopped goes on from there. The table goes to benchmarks/results once all is measured, and until
then to unfinished.md there.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import tyro
from support.conditions import CONDITIONS
from support.finished_runs import FinishedRuns, NoBestRateError, best_rate, next_rate
from support.provenance import Provenance
from support.quality_rows import (
    DEFAULT_ROWS,
    RowName,
)
from support.quality_worker import (
    DataName,
    Processor,
    RunResult,
    RunSettings,
    Size,
    num_parameters,
    run,
)
from support.report import Missing, Report, Table, results_folder, run_script

from gossipdp import WorkerFailedError
from gossipdp.rules import (
    at_least_1,
    check_flags,
    option,
    positive_number,
    whole_number,
)

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

    tuning_steps: int | None = option(None, partial(whole_number, least=32))
    """Tune learning rates by runs of so many steps, instead of as many as are measured."""

    tuning_device: Literal["cpu", "cuda"] | None = None
    """Tune learning rates there, instead of where the runs are measured."""

    runs: Path = Path("runs/quality/runs.jsonl")
    """The file in which finished runs are kept, and found again."""

    minutes: float | None = None
    """Begin no run after so long; what is finished is shown."""

    quick: bool = False
    """A few steps of one seed, to see that all works."""

    def tuning(self, base: RunSettings) -> RunSettings:
        """Return the runs by which the rate of ``base`` is tuned; they are under no condition."""
        size = replace(base.size, steps=self.tuning_steps or base.size.steps)
        processor = Processor(self.tuning_device) if self.tuning_device else base.processor
        return replace(base, size=size, processor=processor, condition=None)


def main() -> None:
    torch.set_num_threads(1)  # two that score a small model wait for each other on a busy machine
    measure_all(tyro.cli(QualityBenchmark, config=(tyro.conf.FlagCreatePairsOff,)))


def measure_all(benchmark: QualityBenchmark) -> None:
    """Run what is not finished; print and write what came out.

    Raises:
        ValueError: for bad input, before any process starts.
    """
    if benchmark.quick:
        runs = results_folder(benchmark.quick) / "quality_runs.jsonl"
        runs.unlink(missing_ok=True)  # it is to run, not to find what ran before
        benchmark = replace(benchmark, size="tiny", seeds=1, runs=runs)
    names, rates = check(benchmark)
    size = SIZES[benchmark.size]
    size = replace(size, steps=benchmark.steps or size.steps)
    report = Report(f"quality_{benchmark.size}", "Does it train as well?", benchmark.quick)
    here = [name for name in names if name.missing() is None]
    report.missing = [Missing(name.label, why) for name in names if (why := name.missing())]
    if not here:
        raise ValueError(f"none of these rows can run here: {report.missing[0].why}")
    campaign = Campaign(benchmark, Runs(benchmark.runs))
    condition = None
    if benchmark.step_ms is not None:
        condition = replace(CONDITIONS["equal"], step_s=benchmark.step_ms / 1000)
    bases = [
        RunSettings(
            row=name.text,
            data=benchmark.data,
            learning_rate=rates[0],
            seed=0,
            size=size,
            graph=benchmark.graph,
            condition=condition,
            processor=Processor(benchmark.device, benchmark.threads),
        )
        for name in here
    ]
    results = campaign.measure_rows(bases, rates, benchmark.seeds)
    report.missing += [
        Missing(label, f"it failed: {why.splitlines()[-1]}")
        for label, why in campaign.failures.items()
    ]
    left = unfinished(results, benchmark.seeds)
    report.missing += left
    report.tables.append(outcome(results, benchmark.data))
    report.notes.append(settings_note(bases[0], campaign.runs.commits()))
    if campaign.failures or left:
        report.name = "unfinished"  # never over committed results
    report.write(rows_as_json(results, bases[0]))
    if campaign.failures:
        sys.exit(f"quality: failed: {', '.join(campaign.failures)}; see above")


def check(benchmark: QualityBenchmark) -> tuple[list[RowName], list[float]]:
    """Rows and rates; raises ValueError for what cannot be meant."""
    names = RowName.parse_all(benchmark.rows)
    try:
        rates = [float(text) for text in benchmark.rates.split(",")]
    except ValueError:
        raise ValueError(f"--rates is {benchmark.rates!r}; give numbers, with commas") from None
    if rates[0] <= 0 or any(two != 2 * one for one, two in itertools.pairwise(rates)):
        raise ValueError(f"--rates is {benchmark.rates!r}; each is twice the one before")
    check_flags(benchmark)
    return names, rates


TUNING_SEED = 0


class Line(msgspec.Struct, frozen=True):
    """A finished run as it is stored; found again by its settings."""

    key: str
    result: RunResult
    provenance: Provenance


class Runs(FinishedRuns[Line]):
    """Runs that are finished, by their settings; notes the commits of those that are asked for."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, Line, key=lambda line: line.key)
        self._commits: set[str] = set()

    def result(self, settings: RunSettings, make: Callable[[RunSettings], RunResult]) -> RunResult:
        """Return the result of a run: of a finished one, or made and kept now."""
        line = self.known.get(settings.key)
        if line is None:
            result = make(settings)
            line = Line(settings.key, result, Provenance.here(result.seconds))
            self.keep(line)
        self._commits.add(line.provenance.commit)
        return line.result

    def commits(self) -> str:
        """Return the commits by which the runs that were found or added were made."""
        return ", ".join(sorted(self._commits))


@dataclass
class Measured:
    """One row on one kind of data. tried: rate → loss of the tuning seed; given: the rate, if it is
    not tuned; results: by seed.
    """

    tried: dict[float, float] = field(default_factory=dict)
    given: float | None = None
    is_tuned: bool = False
    results: dict[int, RunResult] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The best learning rate."""
        return best_rate(self.tried) if self.given is None else self.given


def measure(
    base: RunSettings,
    tuning: RunSettings,
    rates: Sequence[float],
    num_seeds: int,
    run: Callable[[RunSettings], RunResult | None],
) -> Measured:
    """Tune the row of ``base``, then run seeds 1 to ``num_seeds`` at the rate that was best.

    The tuning seed is none of those: a rate that was best by chance gains nothing by it.

    Args:
        base: what is measured, but for rate and seed.
        tuning: what its rate is tuned by: the same, or something that takes less time.
        rates: the grid to begin with.
        num_seeds: how many; with 0 the row is only tuned.
        run: gives a run's result, or None where it is not to be had now.
    """
    found = Measured(given=rates[0] if len(rates) == 1 else None)
    while found.given is None and (rate := next_rate(found.tried, rates)) is not None:
        result = run(replace(tuning, learning_rate=rate, seed=TUNING_SEED))
        if result is None:
            return found
        found.tried[rate] = result.loss_or_inf
    found.is_tuned = True
    for seed in range(1, num_seeds + 1):
        result = run(replace(base, learning_rate=found.rate, seed=seed))
        if result is None:
            return found
        found.results[seed] = result
    return found


class Campaign:
    """Makes the runs that are not finished, one after the other."""

    def __init__(self, benchmark: QualityBenchmark, runs: Runs) -> None:
        self.runs = runs
        self.failures: dict[str, str] = {}
        self._benchmark = benchmark
        self._started_s = time.monotonic()

    def measure_rows(
        self, bases: Sequence[RunSettings], rates: Sequence[float], num_seeds: int
    ) -> dict[str, Measured]:
        """Tune every row, then run seed after seed: what is finished compares like with like."""
        results: dict[str, Measured] = {}
        for up_to in range(num_seeds + 1):
            for base in bases:
                if RowName.parse(base.row).label in self.failures:
                    continue
                try:
                    tuning = self._benchmark.tuning(base)
                    results[base.row] = measure(base, tuning, rates, up_to, self.run)
                except (WorkerFailedError, NoBestRateError) as error:
                    self.failures[RowName.parse(base.row).label] = str(error).strip()
                    print(f"{base.row}: failed\n{error}", file=sys.stderr)
        return results

    def run(self, settings: RunSettings) -> RunResult | None:
        """Return the result of a run, of this call or an earlier one; None if no time is left."""
        is_known = settings.key in self.runs.known
        elapsed_s = time.monotonic() - self._started_s
        minutes = self._benchmark.minutes
        if not is_known and minutes is not None and elapsed_s > 60 * minutes:
            return None
        result = self.runs.result(settings, run)
        if not is_known:
            print(
                f"{settings.row}, {settings.data} data, rate {settings.learning_rate:g}, seed "
                f"{settings.seed}: {result.loss_or_inf:.4f} bits a byte, {result.seconds:.0f} s",
                flush=True,
            )
        return result


def unfinished(results: Mapping[str, Measured], num_seeds: int) -> list[Missing]:
    """Return the part of the written plan that is not measured yet."""
    found = []
    for row, measured in results.items():
        label = RowName.parse(row).label
        if not measured.is_tuned:
            found.append(Missing(label, "its learning rate is not tuned yet: call again"))
        elif len(measured.results) < num_seeds:
            why = f"{len(measured.results)} of {num_seeds} seeds are measured: call again"
            found.append(Missing(label, why))
    return found


BASELINE = "ddp"


def mean_loss(measured: Measured) -> float:
    """Over the seeds; infinity where one diverged, NaN without any."""
    losses = [one.loss_or_inf for one in measured.results.values()]
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


def rows_as_json(results: Mapping[str, Measured], base: RunSettings) -> dict[str, Any]:
    """Return what is stored of the rows; base: one of the runs."""
    size = base.size
    return {
        "data": base.data,
        "rows": {name: row_as_json(row) for name, row in results.items() if row.results},
        "parameters": num_parameters(size),
        "steps": size.steps,
        "samples_per_step": size.batch_size,
        "context": size.context,
    }


def outcome(rows: Mapping[str, Measured], kind: str) -> Table:
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


def settings_note(base: RunSettings, commits: str) -> str:
    """Say what all runs like this one share. commits: of the source of the runs."""
    size, processor = base.size, base.processor
    return (
        f"{num_parameters(size):,} parameters; {base.workers} workers, {size.steps:,} steps of "
        f"each, {size.batch_size} windows of {size.context} bytes a step; a worker's processor: "
        f"{processor.device}, {processor.threads} threads. gossipdp: graph {base.graph}, but for "
        f"rows of its defaults. Source of the runs: {commits}. What is equal in all rows, and what "
        "is not: benchmarks/README.md."
    )


if __name__ == "__main__":
    run_script(main)
