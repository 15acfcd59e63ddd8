"""The loss at equal time: gossipdp beside what a user would take instead, in one run.

    python benchmarks/time_to_loss.py slow_link        100 Mbit/s and 20 ms (root)
    python benchmarks/time_to_loss.py slow speeds      one worker 4 times slower; speeds 8:4:2:1
    python benchmarks/time_to_loss.py --quick          all tables, tiny: 15 minutes on two cores

The task, the worker and the rows are quality.py's, under a condition (support/conditions.py);
README.md says what equal time is. Rows take turns, in an order that rotates from round to round; a
round's seed is that of all its rows. Writes benchmarks/results/time_to_loss_TABLE.{json,md}.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from quality import SIZES, Runs, settings_note
from support.conditions import CONDITIONS
from support.hosts import Hosts, missing
from support.quality_rows import RowName
from support.quality_worker import RunResult, RunSettings, num_parameters
from support.report import Missing, Report, Spread, Table, rotated, run_script

from gossipdp.rules import at_least_1, check_flags, option, whole_number

NUM_WORKERS = 4
QUICK_STEPS = 48
SLACK = 1.05
"""A run that takes no longer than so many times the ideal one counts for equal time too."""

ROWS = {
    "slow_link": (
        "ddp_bf16,ddp_powersgd,local_sgd_bf16@64,diloco@64,decent_dp,gossip@4,a2cid2@4,"
        "gossip_lattice8@4,a2cid2_lattice8@4"
    ),
    "slow": "ddp,ddp_bf16_by_speed,local_sgd_by_speed@8,diloco@16,gossip,a2cid2",
    "speeds": "ddp_bf16_by_speed,local_sgd_by_speed@8,diloco@16,gossip,a2cid2",
    "equal": "ddp,ddp_bf16,local_sgd@4,decent_dp,gossip,a2cid2,a2cid2_lattice8@1/2",
    "gigabit": "ddp_bf16,local_sgd@4,decent_dp,gossip,a2cid2,a2cid2_lattice8@1/2",
    "jitter": "ddp,ddp_bf16,local_sgd@4,decent_dp,gossip,a2cid2",
}
"""By table: the strongest that a user would take; local SGD at the best of periods that were tried
by factors of two."""

RATE = 0.008
RATES = {"diloco@64": 0.004}
"""Learning rates: RATE, where no other is here. Tuned by quality.py
--size small --steps 512 --data common, with factors of two."""


@dataclass(frozen=True)
class Round:
    """One row of one round. tokens: its run on the table's tokens. time: in the table's time.

    Both are the same run where the first took no longer.
    """

    tokens: RunResult
    time: RunResult


Results = Mapping[str, Sequence[Round]]


FIGURES: dict[str, tuple[str, str, Callable[[Round], float]]] = {
    "samples_per_s": ("samples/s", ".0f", lambda one: one.tokens.samples_per_s),
    "loss": ("loss at equal tokens", ".3f", lambda one: one.tokens.loss_or_inf),
    "loss_at_equal_time": ("loss at equal time", ".3f", lambda one: one.time.loss_or_inf),
    "bytes_per_parameter_step": (
        "bytes/(parameter, step)",
        ".3g",
        lambda one: one.tokens.bytes_per_parameter_step,
    ),
    "comm_rate": ("comm rate", ".3g", lambda one: one.tokens.comm_rate),
}
"""By the name in JSON: the column's head and format, and the figure of a round."""


def measured_table(results: Results, rates: Mapping[str, float], ideal_s: float) -> Table:
    """Medians over the rounds, with the least and the most; one line a row."""
    lines = [
        (
            RowName.parse(row).label,
            f"{rates[row]:g}",
            *(Spread.of(map(value, rounds)).text(form) for _, form, value in FIGURES.values()),
        )
        for row, rounds in results.items()
        if rounds
    ]
    return Table(
        "Loss at equal time",
        ("row", "learning rate", *(head for head, _, _ in FIGURES.values())),
        lines,
        "Losses: of the workers' average on held-out text, in bits a byte. Equal time: "
        f"{ideal_s:.1f} s, what the tokens take if nobody waits for anybody. samples/s: the sum "
        "of the workers' own speeds. Bytes: sent by a worker's sockets, or, where it has a "
        "network, by its interface, with headers; a step is a full batch.",
    )


def rows_as_json(results: Results, rates: Mapping[str, float], ideal_s: float) -> dict[str, Any]:
    """Return what is stored: by row the medians, and every run."""
    rows = {
        row: {"learning_rate": rates[row]}
        | {name: Spread.of(map(value, rounds)).median for name, (_, _, value) in FIGURES.items()}
        | {"runs": [{"tokens": one.tokens, "time": one.time} for one in rounds]}
        for row, rounds in results.items()
        if rounds
    }
    return {"equal_time_s": ideal_s, "rows": rows}


@dataclass(frozen=True)
class TimeToLossBenchmark:
    """Measure losses at equal time: the rows of support/quality_rows.py on the clock.

    Tables: slow_link, slow, speeds, equal, gigabit, jitter; without any, all of them.
    """

    tables: Annotated[tuple[str, ...], tyro.conf.Positional] = ()

    rounds: int = option(1, at_least_1)
    """Runs of each row; quoted figures want 5."""

    rows: str | None = None
    """Rows to run, with commas between them, instead of the tables' own."""

    steps: int = option(512, partial(whole_number, least=QUICK_STEPS))
    """Gradient steps of each worker, if all are equally fast: more tokens than that no row gets."""

    runs: Path | None = None
    """Keep finished runs in this file, and take those that it has: a long call may be stopped."""

    quick: bool = False
    """A few steps, to see that all works."""


def main() -> None:
    benchmark = tyro.cli(TimeToLossBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    plan = check(benchmark)
    # A namespace has no names for addresses, of which torch would warn in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    failed = [name for name, rows in plan.items() if not measure_table(name, rows, benchmark)]
    if failed:
        sys.exit(f"time_to_loss: a row failed in {', '.join(failed)}; see above")


def check(benchmark: TimeToLossBenchmark) -> dict[str, dict[str, float]]:
    """Each table's rows and their learning rates; raises ValueError for what cannot be meant."""
    plan = {}
    for table in benchmark.tables or ROWS:
        if table not in ROWS:
            raise ValueError(f"there is no table {table!r}; choose from {', '.join(ROWS)}")
        names = RowName.parse_all(benchmark.rows or ROWS[table])
        plan[table] = {name.text: RATES.get(name.text, RATE) for name in names}
    check_flags(benchmark)
    return plan


def measure_table(table: str, rows: dict[str, float], benchmark: TimeToLossBenchmark) -> bool:
    """Measure, print and write one table; whether every row that can run here did."""
    condition = CONDITIONS[table]
    title = f"Time to loss: {condition.text}"
    report = Report(f"time_to_loss_{table}", title, benchmark.quick)
    why_not = missing() if condition.mbits_per_s is not None else None
    if why_not is not None:
        report.missing.append(Missing("all rows", why_not))
        report.write({})
        return True
    names = [RowName.parse(row) for row in rows]
    report.missing = [Missing(name.label, why) for name in names if (why := name.missing())]
    here = [name.text for name in names if name.missing() is None]
    size = replace(SIZES["small"], steps=QUICK_STEPS if benchmark.quick else benchmark.steps)
    base = RunSettings(
        row="none",
        data="common",
        learning_rate=0.0,
        seed=0,
        size=size,
        workers=NUM_WORKERS,
        condition=condition,
    )
    runs, results = Runs(benchmark.runs), {row: list[Round]() for row in here}
    hosts, links = condition.hosts(NUM_WORKERS, num_parameters(size)), "one machine, all by sockets"
    with hosts or nullcontext():
        for number in range(benchmark.rounds):
            for row in rotated(here, number):
                settings = replace(base, row=row, learning_rate=rows[row], seed=number + 1)
                if (one := measure_round(settings, runs, hosts)) is not None:
                    results[row].append(one)
    if hosts is not None:
        links = f"as for a model of a million parameters: {hosts.mbits_per_s:.3g} Mbit/s"
        links += f"; {hosts.account}" if hosts.account else ""
    for row in here:
        if (why := runs.failures.get(label := RowName.parse(row).label)) is not None:
            del results[row]
            report.missing.append(Missing(label, f"it failed: {why}"))
    ideal_s = condition.ideal_s(NUM_WORKERS, size.steps)
    if any(results.values()):
        report.tables.append(measured_table(results, rows, ideal_s))
    report.notes.append(
        f"Condition: {condition.text}; links: {links}. {benchmark.rounds} rounds, rows in turn. "
        f"{settings_note(base, runs.commits)}"
    )
    report.write(rows_as_json(results, rows, ideal_s))
    return not runs.failures


def measure_round(settings: RunSettings, runs: Runs, hosts: Hosts | None) -> Round | None:
    """Train a row on the tokens of the table, and once more for its time where that took longer.

    None: the row has failed.
    """
    assert settings.condition is not None
    tokens = runs.result(settings, hosts)
    if tokens is None:
        return None
    steps = settings.size.steps
    ideal_s = settings.condition.ideal_s(settings.workers, steps)
    if tokens.loss is None or tokens.ended_s <= SLACK * ideal_s:
        return Round(tokens, tokens)
    # The average at the end takes as long after a short run as after a long one.
    trained_s = tokens.samples / tokens.samples_per_s
    average_s = tokens.ended_s - trained_s
    fewer = max(1, round(steps * (ideal_s - average_s) / trained_s))
    fewer_steps = replace(settings, size=replace(settings.size, steps=fewer))
    time = runs.result(fewer_steps, hosts)
    return None if time is None else Round(tokens, time)


if __name__ == "__main__":
    run_script(main)
