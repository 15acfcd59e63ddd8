"""Where machines misbehave: gossipdp beside its strongest rivals, at equal wall time.

    python benchmarks/race.py --runs runs/race.jsonl                 hours: all conditions and rows
    python benchmarks/race.py --conditions calm,kills10 --quick      tiny: 6 minutes

README.md says what is trained, and what the rows and conditions are. Rows take turns, in an order
that rotates from round to round; a round's seed is that of all its rows. With --runs finished runs
are kept. Writes benchmarks/results/race.{json,md,png}, of what is there.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import msgspec
import tyro
from race_report import NOTE, Run, as_json, draw, table, unequal
from race_run import race
from support.conditions import MODEL_PARAMETERS, RACE_CONDITIONS, RaceCondition
from support.finished_runs import Campaign, NoBestRateError, best_rate, next_rate
from support.hosts import Hosts, ShapedHosts, missing
from support.quality_rows import KINDS, TORCHFT, RowName
from support.race_settings import STEP_S, RaceSettings, num_parameters, saves
from support.report import Missing, Provenance, Report, results_folder, rotated, run_script
from time_to_loss import given_rates

from gossipdp.rules import at_least_1, check_flags, option, positive_number, whole_number

ROWS = (
    "gossipdp,ddp,ddp_torchft,local_sgd@16,diloco@16,local_sgd_torchft@16,diloco_torchft@16,"
    "decent_dp"
)
RATE = 0.01
RATES = {
    "gossipdp": 0.04,
    "ddp": 0.02,
    "ddp_torchft": 0.02,
    "local_sgd_torchft@16": 0.02,
    "diloco_torchft@16": 0.02,
    "local_sgd@16": 0.02,
    "diloco@16": 0.01,
    "decent_dp": 0.04,
    "local_sgd_torchft@4": 0.02,
    "diloco_torchft@4": 0.02,
    "ddp_bf16": 0.02,
    "ddp_powersgd": 0.02,
}
"""Learning rates, where ``--rates`` gives none: as ``--tune`` found them; DDP's hooks have DDP's,
H = 4 that of 16."""
TUNING_GRID, TUNING_SEED = (0.005, 0.01, 0.02), 0
QUICK_SECONDS = 15.0
MBITS_PER_S, BAD_MBITS_PER_S, FAST_MBITS_PER_S = 1_000.0, 100.0, 10_000.0
CHECKPOINT_STEPS = 25
"""Steps from one checkpoint to the next, in the rows that take them."""
JOIN_MS, TIMEOUT_S = 200, 5
"""torchft: the lighthouse waits so long for a late replica, plus the time between two averages (its
own: 60 s); the time-out of collectives and quorums (its own: 60)."""
HEARTBEAT_MS, SILENT_HEARTBEAT_MS = 5_000, 1_000
"""torchft: a replica counts as dead after this time without a heartbeat: its own, and where workers
are killed or stand still. Tuned there on its DDP."""


@dataclass(frozen=True)
class Race:
    """Measure what misbehaving machines cost: gossipdp and its rivals at equal wall time.

    Conditions: support/conditions.py. Rows: as in support/quality_rows.py.
    """

    conditions: str = ",".join(RACE_CONDITIONS)
    """Conditions to run, with commas between them; without calm no share of it is shown."""

    rows: str = ROWS
    """Rows to run, with commas between them."""

    rounds: int = option(5, at_least_1)
    """Runs of each row under each condition."""

    seconds: float = option(70.0, positive_number)
    """Wall time of a run, the start included; kills120 takes 300 s at least."""

    workers: int = option(4, partial(whole_number, least=2))
    """Worker processes, one torch thread each."""

    step_ms: float = option(1e3 * STEP_S, positive_number)
    """The time of a gradient step."""

    rates: str = ""
    """Learning rates, instead of the written ones: ddp=0.02,diloco@16=0.01."""

    tune: bool = False
    """Find each row's learning rate in the calm, by factors of two, and run nothing else."""

    spares: Literal["none", "gossipdp", "torchft"] = "gossipdp"
    """Rows that restart in a spare interpreter: none, gossipdp's, or gossipdp's and torchft's."""

    runs: Path | None = None
    """Keep finished runs in this file, and take those that it has."""

    minutes: float | None = None
    """Begin no run after so long; what is finished is shown."""

    quick: bool = False
    """One round of short runs, to see that all works."""

    @cached_property
    def chosen(self) -> dict[str, RaceCondition]:
        """Return the conditions to run, by name, in the order of the report."""
        names = ["calm"] if self.tune else [name.strip() for name in self.conditions.split(",")]
        for name in names:
            if name not in RACE_CONDITIONS:
                known = ", ".join(RACE_CONDITIONS)
                raise ValueError(f"there is no condition {name!r}; choose from {known}")
        return {
            name: condition.quick() if self.quick else condition
            for name, condition in RACE_CONDITIONS.items()
            if name in names
        }

    @cached_property
    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of each row to run."""
        rates = RATES | given_rates(self.rates)
        names = [RowName.parse(row.strip()) for row in self.rows.split(",")]
        return {name.text: rates.get(name.text, RATE) for name in names}

    def settings(self, row: str, condition: str, seed: int) -> RaceSettings:
        """Return the settings of a run, without the options that its row does not have."""
        plan, name = self.chosen[condition], RowName.parse(row)
        is_torchft = KINDS[name.kind].needs is TORCHFT
        # Replicas that do not wait so long for one another never all meet: they come there as they
        # began, each at its own time between two averages.
        between_ms = round((name.period or 0) * self.step_ms)
        heartbeat_ms = SILENT_HEARTBEAT_MS if plan.silences else HEARTBEAT_MS
        return RaceSettings(
            row=row,
            condition=condition,
            faults=plan.faults,
            learning_rate=self.learning_rates[row],
            seed=seed,
            seconds=plan.seconds(self.seconds),
            workers=self.workers,
            step_s=self.step_ms / 1e3,
            spread=plan.spread,
            checkpoint_steps=CHECKPOINT_STEPS if saves(name) else None,
            join_ms=JOIN_MS + between_ms if is_torchft else None,
            timeout_s=TIMEOUT_S if is_torchft else None,
            heartbeat_ms=heartbeat_ms if is_torchft else None,
            # `gossipdp run` keeps one on its own host, and a host that vanishes takes it along.
            keeps_spare=plan.network != "hosts"
            and (
                (self.spares != "none" and KINDS[name.kind].is_ours)
                or (self.spares == "torchft" and is_torchft)
            ),
        )


def main() -> None:
    benchmark = tyro.cli(Race, config=(tyro.conf.FlagCreatePairsOff,))
    # A namespace has no names for addresses, of which torch would warn in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    measure_all(benchmark)


def cannot_run(row: str, condition: RaceCondition) -> str | None:
    """Say why a row cannot run under a condition here; None if it can."""
    name = RowName.parse(row)
    if (why := name.missing()) is not None:
        return why
    if condition.network is not None and (why := missing("tc")) is not None:
        return why
    if name.kind == "decent_dp" and condition.plan.kills:
        return "Decent-DP has no answer to a death: it takes over the optimizers, and saves none"
    return None


def hosts_for(condition: RaceCondition, settings: RaceSettings) -> Hosts | None:
    """Return the namespaces of a run: one a worker, spare ones, and one for the launcher."""
    if condition.network is None:
        return None
    scale = num_parameters() / MODEL_PARAMETERS
    if condition.network == "bad_link":
        bad = {settings.workers - 1: BAD_MBITS_PER_S * scale}
        return ShapedHosts(settings.workers + 1, MBITS_PER_S * scale, bad)
    assert condition.kill_period_s is not None
    num_spare = math.ceil(settings.seconds / condition.kill_period_s)
    return ShapedHosts(settings.workers + num_spare + 1, FAST_MBITS_PER_S)


class Runs(Campaign[Run]):
    """The runs of the race."""

    def __init__(
        self,
        path: Path | None,
        minutes: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(path, Run, lambda run: run.settings.key, minutes, clock)

    def of(self, settings: RaceSettings, condition: RaceCondition) -> Run | None:
        """Return a run, of this call or an earlier one; None if it failed or no time is left."""

        def make() -> Run:
            started_s = time.monotonic()
            hosts = hosts_for(condition, settings)
            with hosts or nullcontext():
                result = race(settings, hosts)
            run = Run(settings, result, Provenance.here(time.monotonic() - started_s))
            print(
                f"{settings.condition}, seed {settings.seed}, {settings.row}: "
                f"{result.samples:,} samples, loss {run.loss:.3f}, {run.num_done} faults, "
                f"{result.num_lives} processes, {run.provenance.seconds:.0f} s",
                flush=True,
            )
            return run

        return self.find(settings.key, label_of(settings.condition, settings.row), make)


def label_of(condition: str, row: str) -> str:
    """Return the name of a row under a condition, as the report has it."""
    return f"{condition}: {RowName.parse(row).label}"


def measure_all(benchmark: Race) -> None:
    """Run what is not finished; print and write what came out.

    Raises:
        ValueError: for bad input, before any process starts.
    """
    check_flags(benchmark)
    if benchmark.quick:
        benchmark = replace(benchmark, seconds=min(benchmark.seconds, QUICK_SECONDS), rounds=1)
    runs = Runs(benchmark.runs, benchmark.minutes)
    if benchmark.tune:
        print(tune(benchmark, runs))
        return
    suffix = "" if benchmark.workers == Race.workers else f"_{benchmark.workers}"
    report = Report(f"race{suffix}", "Where machines misbehave", benchmark.quick)
    found = measure_rows(benchmark, runs)
    report.missing = missing_rows(benchmark, runs, found)
    write(benchmark, runs, found, report)
    if runs.failures:
        sys.exit("race: a row failed; see above")


Found = dict[str, dict[str, list[Run]]]
"""The runs, by condition and row."""


def measure_rows(benchmark: Race, runs: Runs) -> Found:
    """Run round after round; each begins with another row."""
    found: Found = {
        name: {row: [] for row in benchmark.learning_rates} for name in benchmark.chosen
    }
    for number in range(benchmark.rounds):
        for name, condition in benchmark.chosen.items():
            rows = [row for row in benchmark.learning_rates if not cannot_run(row, condition)]
            for row in rotated(rows, number):
                settings = benchmark.settings(row, name, number + 1)
                run = runs.of(settings, condition)
                if run is not None:
                    found[name][row].append(run)
    return found


def tune(benchmark: Race, runs: Runs) -> str:
    """Return the best learning rate of each row in the calm, as ``--rates`` takes them."""
    best = []
    calm = benchmark.chosen["calm"]
    for row in benchmark.learning_rates:
        if cannot_run(row, calm) is not None:
            continue
        tried: dict[float, float] = {}
        try:
            while (rate := next_rate(tried, TUNING_GRID)) is not None:
                settings = benchmark.settings(row, "calm", TUNING_SEED)
                run = runs.of(msgspec.structs.replace(settings, learning_rate=rate), calm)
                if run is None:
                    break
                tried[rate] = run.loss
            else:
                best.append(f"{row}={best_rate(tried):g}")
        except NoBestRateError as error:
            print(f"{row}: {error}", file=sys.stderr)
        losses = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(tried.items()))
        print(f"{row}: {losses}", flush=True)
    return f"--rates {','.join(best)}" if best else "no row is tuned yet: call again"


def missing_rows(benchmark: Race, runs: Runs, found: Found) -> list[Missing]:
    """Return what is not measured, and why."""
    rows = []
    for name, condition in benchmark.chosen.items():
        for row in benchmark.learning_rates:
            label = label_of(name, row)
            why = cannot_run(row, condition)
            if why is None and label in runs.failures:
                why = f"it failed: {runs.failures[label]}"
            count = len(found[name][row])
            if why is None and count < benchmark.rounds:
                why = f"{count} of {benchmark.rounds} rounds are measured: call again"
            if why is not None:
                rows.append(Missing(label, why))
    return rows


def write(benchmark: Race, runs: Runs, found: Found, report: Report) -> None:
    """Print and write the report of what is there."""
    calm = found.get("calm", {})
    shown = [name for name in benchmark.chosen if any(found[name].values())]
    for name in shown:
        title = f"{name}: {benchmark.chosen[name].text}"
        report.tables.append(table(title, found[name], calm))
    if shown:
        settings = (
            f"{benchmark.workers} workers, steps of {benchmark.step_ms:g} ms, "
            f"{benchmark.seconds:g} s (kills120: at least 300), {benchmark.rounds} rounds. "
            f"Source of the runs: {', '.join(sorted(runs.commits))}."
        )
        report.notes += [NOTE, f"Not equal: {unequal(found)}", settings]
        path = results_folder(benchmark.quick) / f"{report.name}.png"
        draw(path, found, benchmark.chosen)
    report.write(as_json(found))


if __name__ == "__main__":
    run_script(main)
