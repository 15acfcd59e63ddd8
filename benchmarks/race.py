"""Where machines misbehave: gossipdp beside its strongest rivals, at equal wall time.

    python benchmarks/race.py --runs runs/race.jsonl              3 hours: the series of the pages
    python benchmarks/race.py --tune outer,restarts --runs FILE   find the rows' own settings
    python benchmarks/race.py --quick                             tiny: 5 minutes

README.md says what is trained, and what the rows and conditions are. Rows take turns, in an order
that rotates from round to round; a round's seed is that of all its rows. With --runs finished runs
are kept, so a call that was stopped goes on. Writes benchmarks/results/NAME.{json,md,png}, of what
is there.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import tyro
from race_report import Run, as_json, draw, notes, table
from race_run import race
from support.byte_task import num_parameters
from support.conditions import MODEL_PARAMETERS, RACE_CONDITIONS, RaceCondition
from support.finished_runs import Campaign, NoBestRateError, next_rate
from support.hosts import Hosts, ShapedHosts, missing
from support.quality_rows import KINDS, WEIGHT_DECAY, RowName
from support.race_fleet import Quota
from support.race_settings import STEP_S, RaceSettings, restarts_whole, saves
from support.report import RESULTS, Missing, Provenance, Report, results_folder, rotated, run_script
from support.rows import TORCHFT

from gossipdp.launcher.faults import FaultPlan
from gossipdp.rules import at_least_1, check_flags, one_of, option, positive_number, whole_number

CONDITIONS = "calm,moving,kills10,kills10_moving"
ROWS = "gossipdp,ddp,ddp_torchft,local_sgd_torchft@16,diloco_torchft@16,local_sgd@16"
CHOICES = RESULTS / "race_choices.json"
TUNING_SEED = 0
QUICK_SECONDS, QUICK_STRETCH, QUICK_CONDITIONS = (15.0, 40.0), 0.2, "calm,kills10_moving"
"""The seconds are of timed steps, and of steps without waits: a starved worker imports slowly."""
MBITS_PER_S, BAD_MBITS_PER_S, FAST_MBITS_PER_S = 1_000.0, 100.0, 10_000.0
FULL_STEP_S = 0.1
"""About what a step without waits takes; torchft's replicas wait for one another by it."""
LONG_STEPS = 3_500
"""From so many steps on, twice those of the series, rows are tuned again: the best decay falls."""


class Choice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row's own settings; ``--tune`` finds them, and keeps them in ``CHOICES``.

    weight_decay: AdamW's. A worker's second moment holds the noise of its own batches, and makes
        its steps smaller beside the decay than those of one large batch.
    outer: rate and momentum of DiLoCo's outer step.
    join_ms, heartbeat_ms, timeout_s: of torchft: the lighthouse waits so long for a late replica,
        beside the time between two averages (its own: 60 s); a replica counts as dead after this
        time without a heartbeat (5 s); the time-out of collectives and quorums (60 s).
    keeps_spares: of a job that a death ends: all its workers have spare interpreters, whose imports
        take time from those who train.
    checkpoint_steps: from one checkpoint to the next, where workers are killed and in the rows that
        take them; tuned for a job that a death ends, as it loses what it did since the last one.
    """

    learning_rate: float = 0.01
    weight_decay: float = WEIGHT_DECAY
    outer: tuple[float, float] | None = None
    join_ms: int = 200
    heartbeat_ms: int = 5_000
    timeout_s: int = 5
    keeps_spares: bool = True
    checkpoint_steps: int = 25


GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "rates": {"learning_rate": ()},  # this and the next by factors of two, until the best is within
    "decay": {"weight_decay": ()},
    "outer": {"outer": ((1.0, 0.7), (1.0, 0.5), (1.0, 0.0), (0.7, 0.7), (0.7, 0.9), (0.5, 0.9))},
    "restarts": {
        "heartbeat_ms": (500, 1_000, 2_000, 5_000),
        "join_ms": (100, 200, 400, 1_000),
        "timeout_s": (2, 5, 10, 30),
        "keeps_spares": (True, False),
        "checkpoint_steps": (1, 2, 5, 10, 25),
    },
}
"""What ``--tune`` tries, one after the other: in the calm by the loss, what restarts need in the
worst condition, by the samples kept."""


@dataclass(frozen=True)
class Race:
    """Measure what misbehaving machines cost: gossipdp and its rivals at equal wall time.

    Conditions: support/conditions.py. Rows: as in support/quality_rows.py.
    """

    conditions: str = CONDITIONS
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

    without_waits: bool = False
    """Fill a core a worker with a transformer of a million parameters; no wait stands for it."""

    stretch: float = option(1.0, positive_number)
    """Lengthen all times of the conditions by this factor."""

    tune: str = ""
    """Find the rows' own rates, decay, outer, restarts (with commas), and do nothing else."""

    name: str = "race"
    """Of the results' files."""

    runs: Path | None = None
    """Keep finished runs in this file, and take those that it has."""

    minutes: float | None = None
    """Begin no run after so long; what is finished is shown."""

    quick: bool = False
    """One round of short runs, to see that all works."""

    @cached_property
    def chosen(self) -> dict[str, RaceCondition]:
        """Return the conditions to run, by name, in the order of the report."""
        names = [name.strip() for name in self.conditions.split(",")]
        for name in names:
            if name not in RACE_CONDITIONS:
                known = ", ".join(RACE_CONDITIONS)
                raise ValueError(f"there is no condition {name!r}; choose from {known}")
        return {name: self.condition(name) for name in RACE_CONDITIONS if name in names}

    def condition(self, name: str) -> RaceCondition:
        return RACE_CONDITIONS[name].stretched(self.stretch)

    @cached_property
    def names(self) -> list[str]:
        return [RowName.parse(row.strip()).text for row in self.rows.split(",")]

    @cached_property
    def choices(self) -> dict[str, Choice]:
        """Return the rows' own settings, by row."""
        known = read_choices()
        own, others = known[self.kind], {} if self.without_waits else known["timed"]
        return {row: own.get(row, others.get(row, Choice())) for row in self.names}

    @property
    def kind(self) -> str:
        """Return for which runs the rows are tuned: timed, long ones of these, or without waits."""
        if self.without_waits:
            return "without waits"
        return "long" if self.seconds * 1e3 / self.step_ms >= LONG_STEPS else "timed"

    def settings(self, row: str, condition: str, seed: int) -> RaceSettings:
        """Return the settings of a run, without the options that its row does not have."""
        plan, name, choice = self.condition(condition), RowName.parse(row), self.choices[row]
        is_torchft, seconds = KINDS[name.kind].needs is TORCHFT, plan.seconds(self.seconds)
        step_s = FULL_STEP_S if self.without_waits else self.step_ms / 1e3
        between_ms = round((name.period or 0) * 1e3 * step_s)
        between_saves = (choice if plan.kills else Choice()).checkpoint_steps
        signalled = self.workers - 1 if plan.quota_s and not has_quotas() else None
        return RaceSettings(
            row=row,
            condition=condition,
            faults=str(plan.plan(seed, seconds, signalled)),
            learning_rate=choice.learning_rate,
            weight_decay=choice.weight_decay,
            seed=seed,
            seconds=seconds,
            workers=self.workers,
            step_s=step_s,
            spread=plan.spread,
            checkpoint_steps=between_saves if saves(name) else None,
            # Replicas that do not wait so long for one another never all meet: they come there as
            # they began, each at its own time between two averages.
            join_ms=choice.join_ms + between_ms if is_torchft else None,
            timeout_s=choice.timeout_s if is_torchft else None,
            heartbeat_ms=choice.heartbeat_ms if is_torchft else None,
            # Nobody is started again where nobody dies, and a host that vanishes takes its own.
            keeps_spare=plan.kills and plan.network != "hosts" and choice.keeps_spares,
            outer=choice.outer,
            waits=not self.without_waits,
            quota_s=0.0 if signalled is not None else plan.quota_s,
        )


def read_choices() -> dict[str, dict[str, Choice]]:
    """Return the rows' own settings, by kind of run and row."""
    return msgspec.json.decode(CHOICES.read_bytes(), type=dict[str, dict[str, Choice]])


@cache
def has_quotas() -> bool:
    """Return whether the processors of a process can be limited here; else signals stop it."""
    try:
        Quota().close()
    except OSError:
        return False
    return True


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
    if condition.network is not None and (why := missing()) is not None:
        return why
    if name.kind == "decent_dp" and condition.kills:
        return "Decent-DP has no answer to a death: it takes over the optimizers, and saves none"
    return None


def hosts_for(condition: RaceCondition, settings: RaceSettings) -> Hosts | None:
    """Return the namespaces of a run: one a worker, spare ones, and one for the launcher."""
    if condition.network is None:
        return None
    scale = num_parameters(settings.task) / MODEL_PARAMETERS
    if condition.network == "bad_link":
        bad = {settings.workers - 1: BAD_MBITS_PER_S * scale}
        return ShapedHosts(settings.workers + 1, MBITS_PER_S * scale, bad)
    (kills,) = FaultPlan.parse(settings.faults).clauses
    num_spare = math.ceil(settings.seconds / kills.time_s)
    return ShapedHosts(settings.workers + num_spare + 1, FAST_MBITS_PER_S)


class Runs(Campaign[Run]):
    def __init__(
        self, path: Path | None, minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(path, Run, lambda run: run.settings.key, minutes, clock)

    def of(self, settings: RaceSettings, condition: RaceCondition) -> Run | None:
        """Return a run, of this call or an earlier one; None if it failed or no time is left."""

        def make() -> Run:
            started_s = time.monotonic()
            hosts = hosts_for(condition, settings)
            with hosts or nullcontext():
                result = race(settings, hosts)
            seconds = time.monotonic() - started_s
            run = Run(settings, result, Provenance.here(seconds))
            print(
                f"{settings.condition}, seed {settings.seed}, {settings.row}: "
                f"{result.samples:,} samples, loss {run.loss:.3f}, {run.num_done} faults, "
                f"{result.num_lives} processes, {seconds:.0f} s",
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
        seconds = min(benchmark.seconds, QUICK_SECONDS[benchmark.without_waits])
        names = benchmark.conditions
        names = QUICK_CONDITIONS if names == CONDITIONS else names  # the others are in them
        quick: dict[str, Any] = {"seconds": seconds, "conditions": names, "stretch": QUICK_STRETCH}
        benchmark = replace(benchmark, rounds=1, **quick)
    runs = Runs(benchmark.runs, benchmark.minutes)
    if benchmark.tune:
        tune(benchmark, runs)
        return
    report = Report(benchmark.name, "Where machines misbehave", benchmark.quick)
    found = measure_rows(benchmark, runs)
    report.missing = missing_rows(benchmark, runs, found)
    write(benchmark, runs, found, report)
    if runs.failures:
        sys.exit("race: a row failed; see above")


Found = dict[str, dict[str, list[Run]]]
"""The runs, by condition and row."""


def measure_rows(benchmark: Race, runs: Runs) -> Found:
    """Run round after round; each begins with another row."""
    found: Found = {name: {row: [] for row in benchmark.names} for name in benchmark.chosen}
    for number in range(benchmark.rounds):
        for name, condition in benchmark.chosen.items():
            rows = [row for row in benchmark.names if not cannot_run(row, condition)]
            for row in rotated(rows, number):
                settings = benchmark.settings(row, name, number + 1)
                run = runs.of(settings, condition)
                if run is not None:
                    found[name][row].append(run)
    return found


def tune(benchmark: Race, runs: Runs) -> None:
    """Try the grids, row by row and one setting after the other; keep the best of each.

    Raises:
        ValueError: there is no such grid.
    """
    path = results_folder(benchmark.quick) / CHOICES.name
    groups = [one_of(tuple(GRIDS), "--tune", group) for group in benchmark.tune.split(",")]
    settings = [each for group in groups for each in GRIDS[group]]
    for row in benchmark.names:
        if (why := RowName.parse(row).missing()) is not None:
            print(f"{row}: {why}", file=sys.stderr)
            continue
        for setting in filter(partial(has, row), settings):
            try:
                scores = try_all(benchmark, runs, row, setting)
            except NoBestRateError as error:
                print(f"{row}: {error}", file=sys.stderr)
                continue
            shown = ", ".join(f"{value}: {score:.3f}" for value, score in scores.items())
            print(f"{row}, {setting}: {shown}", flush=True)
        kept = read_choices()
        kept[benchmark.kind][row] = benchmark.choices[row]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


def has(row: str, setting: str) -> bool:
    """Return whether a row has one of the settings of ``GRIDS``."""
    name = RowName.parse(row)
    if setting == "outer":
        return "DiLoCo" in KINDS[name.kind].label
    if setting in {"keeps_spares", "checkpoint_steps"}:
        return restarts_whole(name)
    return setting in {"learning_rate", "weight_decay"} or KINDS[name.kind].needs is TORCHFT


def try_all(benchmark: Race, runs: Runs, row: str, setting: str) -> dict[Any, float]:
    """Try the values of a setting, and choose the best if there is time for all.

    Return their scores: the loss, or thousands of samples kept, negative.
    """
    worst = "starved" if benchmark.without_waits else "kills10_moving"
    name = worst if setting in GRIDS["restarts"] else "calm"
    values = next((each[setting] for each in GRIDS.values() if setting in each), ())
    before, scores = benchmark.choices[row], dict[Any, float]()
    now = getattr(before, setting)
    while True:
        value = next((each for each in values if each not in scores), None)
        if not values:
            value = next_rate(scores, (now, now / 2, 2 * now))
        best = value if value is not None else min(scores, key=lambda each: scores[each])
        benchmark.choices[row] = msgspec.structs.replace(before, **{setting: best})
        if value is None:
            return scores
        settings = benchmark.settings(row, name, TUNING_SEED)
        run = runs.of(settings, benchmark.condition(name))
        if run is not None:
            scores[value] = run.loss if name == "calm" else -run.samples / 1e3
        elif runs.failures.pop(label_of(name, row), None) is not None:
            scores[value] = math.inf
        else:  # no time is left
            benchmark.choices[row] = before
            return scores


def missing_rows(benchmark: Race, runs: Runs, found: Found) -> list[Missing]:
    """Return what is not measured, and why."""
    rows = []
    for name, condition in benchmark.chosen.items():
        for row in benchmark.names:
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
    shown = [name for name in benchmark.chosen if any(found[name].values())]
    for name in shown:
        title = f"{name}: {benchmark.chosen[name].text}"
        if benchmark.stretch != 1:
            title += f" (all times {benchmark.stretch:g} times as long)"
        report.tables.append(table(title, found[name], found.get("calm", {})))
    if shown:
        settings = (
            f"{benchmark.workers} workers, {benchmark.seconds:g} s (kills120: at least "
            f"{benchmark.condition('kills120').least_s:g}, with the settings of shorter runs), "
            f"{benchmark.rounds} rounds. Source of the runs: {', '.join(sorted(runs.commits))}."
        )
        tuned = read_choices()[benchmark.kind]
        if untuned := [row for row in benchmark.names if row not in tuned]:
            settings += f" Not tuned for so many steps: {', '.join(untuned)}."
        report.notes += [*notes(found), settings]
        draw(results_folder(benchmark.quick) / f"{report.name}.png", found)
    report.write(as_json(found))


if __name__ == "__main__":
    run_script(main)
