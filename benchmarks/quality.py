"""Does it train as well? Final loss at equal tokens, beside what a user would take instead.

    python benchmarks/quality.py --quick            every row, tiny: 10 minutes on two cores
    python benchmarks/quality.py --size small       72,000 parameters, hours
    python benchmarks/quality.py                    a million parameters, days
    python benchmarks/quality.py --rows ddp,gossip --data disjoint

Worker processes train a byte-level transformer on the source of Python's standard library over the
loopback interface: every row on the same number of tokens, with its own learning rate, tuned on a
grid of factors of two that is widened where the best lies at its end, and then with seeds that took
no part in the tuning. Finished runs are kept in --runs, so a call that was stopped goes on from
there. The table goes to benchmarks/results once all is measured.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro
from quality_report import rows_as_json, tables
from support.conditions import CONDITIONS
from support.learning_rates import NoBestRateError
from support.quality_rows import DEFAULT_ROWS, RowName
from support.quality_runs import Measured, Runs, measure
from support.quality_worker import DataName, Processor, RunResult, RunSettings, Size, run
from support.report import Missing, Report, results_folder, run_script

from gossipdp import WorkerFailedError
from gossipdp.rules import (
    at_least_1,
    check_flags,
    option,
    output_file,
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
    """The grid of learning rates to begin with, each twice the one before."""

    seeds: int = option(3, at_least_1)
    """Runs at the best rate; the seed of the tuning is none of them."""

    workers: int = option(4, partial(whole_number, least=2))
    """Worker processes."""

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

    json: Path | None = option(None, output_file)
    """Write the figures to this file alone."""

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
            workers=benchmark.workers,
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
    tuning = benchmark.tuning(bases[0])
    report.tables += tables(results, bases[0], tuning, campaign.runs.commits())
    data = rows_as_json(results, bases[0])
    path = benchmark.json
    if path is None and (campaign.failures or left) and not benchmark.quick:
        path = benchmark.runs.with_name("unfinished.json")  # never over committed results
    report.write(data, path)
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
        result = self.runs.find(settings)
        if result is not None:
            return result
        elapsed_s = time.monotonic() - self._started_s
        minutes = self._benchmark.minutes
        if minutes is not None and elapsed_s > 60 * minutes:
            return None
        text = (
            f"{settings.row}, {settings.data} data, rate {settings.learning_rate:g}, seed "
            f"{settings.seed}"
        )
        result = run(settings)
        self.runs.add(settings, result)
        loss = "diverged" if result.loss is None else f"{result.loss:.4f} bits a byte"
        print(f"{text}: {loss}, {result.seconds:.0f} s", flush=True)
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


if __name__ == "__main__":
    run_script(main)
