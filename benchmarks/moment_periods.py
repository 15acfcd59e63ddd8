"""Compare periods of Adam's second moment v. Simulated workers, a small language model.

The task is that of quality_simulated.py, with a quarter of the predictions in a batch, so that one
core gets through it. v travels so many gradient steps after the last time, at comm rates of 1 and 4
and three values of beta_2; every row has one learning rate. Each run that ends is kept, and
not run again. Writes benchmarks/results/moment_periods.{jsonl,json,md}.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from quality_simulated import Row, Runs, Setting, loss_of
from support.report import QUICK_RESULTS, RESULTS, Report, Table

NAME = "moment_periods"
LEARNING_RATES = {"allreduce": 0.032, "gossip": 0.064}
PERIODS: dict[int, dict[float, tuple[int | None, ...]]] = {
    1: {0.95: (1, 2, 5, None), 0.99: (1, 4, 12, None), 0.999: (1, 4, 42, None)},
    4: {0.95: (1, 5), 0.99: (1, 4), 0.999: (1, 42)},
}
"""By comm rate and beta_2: gradient steps between two exchanges with v; None: v stays at home."""
BOTH = "gossip, beta_2 0.99, 4 a step, m and v every 2nd"


def rows() -> dict[str, Row]:
    """Return all rows by name, those first that tell most."""
    found: dict[str, Row] = {}
    optimizers = {0.95: "adamw, beta_2 0.95", 0.99: "adamw, beta_2 0.99", 0.999: "adamw"}
    for beta, optimizer in optimizers.items():
        rate = LEARNING_RATES["allreduce"]
        found[f"all-reduce, beta_2 {beta:g}"] = Row("allreduce", rate, optimizer=optimizer)
    for comm_rate, by_beta in PERIODS.items():
        for beta, periods in by_beta.items():
            for period in periods:
                moments = {} if period is None else {"exp_avg_sq": comm_rate * period}
                found[name_of(beta, comm_rate, period)] = _gossip(
                    comm_rate, optimizers[beta], moments
                )
    both = {"exp_avg": 2, "exp_avg_sq": 2}
    found[BOTH] = _gossip(4, optimizers[0.99], both)
    return found


def _gossip(comm_rate: float, optimizer: str, moments: dict[str, int]) -> Row:
    rate, options = LEARNING_RATES["gossip"], {"exchange_moments": moments}
    return Row("gossip", rate, comm_rate=comm_rate, optimizer=optimizer, options=options)


def name_of(beta: float, comm_rate: float, period: int | None) -> str:
    """Return the name of a row of gossip."""
    which = "no v" if period is None else f"v every {period} steps"
    return f"gossip, beta_2 {beta:g}, {comm_rate} a step, {which}"


def tables(runs: Runs, setting: Setting) -> list[Table]:
    """Return what has been run, for each comm rate how far gossip ends above all-reduce."""

    def losses(name: str) -> dict[int, float]:
        return {run["seed"]: loss_of(run) for run in runs.of(name, setting)}

    def cell(name: str, beta: float) -> str:
        ours, theirs = losses(name), losses(f"all-reduce, beta_2 {beta:g}")
        above = [100 * (ours[seed] / theirs[seed] - 1) for seed in sorted(ours.keys() & theirs)]
        if not above:
            return ""
        spread = f" ± {statistics.stdev(above):.1f}" if len(above) > 1 else ""
        return f"{statistics.mean(above):+.1f}%{spread} ({len(above)})"

    found = []
    for comm_rate, by_beta in PERIODS.items():
        periods = sorted({each or math.inf for periods in by_beta.values() for each in periods})
        lines = [
            [
                "never" if period == math.inf else f"{period} steps" if period > 1 else "each step",
                *(cell(name_of(beta, comm_rate, _finite(period)), beta) for beta in by_beta),
            ]
            for period in periods
        ]
        if comm_rate == 4:
            lines.append(["m and v, twice a step", "", cell(BOTH, 0.99), ""])
        found.append(
            Table(
                f"Loss above all-reduce, comm rate {comm_rate}: {setting}",
                ("v travels", *(f"beta_2 {beta:g}" for beta in by_beta)),
                lines,
                "Mean and standard deviation over seeds (how many). Learning rates, not tuned: "
                + ", ".join(f"{rate:g} ({method})" for method, rate in LEARNING_RATES.items()),
            )
        )
    return found


def _finite(period: float) -> int | None:
    return None if period == math.inf else int(period)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose names contain this")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=256, help="of each worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    steps, workers = (20, 4) if options.quick else (options.steps, options.workers)
    setting = Setting("common", "mlp, 64 predictions", workers, steps)
    report = Report(NAME, "How often Adam's second moment travels, simulated", quick=options.quick)
    runs = Runs((QUICK_RESULTS if options.quick else RESULTS) / f"{NAME}.jsonl")
    for seed in range(1 if options.quick else options.seeds):
        for name, row in rows().items():
            if options.only in name:
                runs.find(name, row, setting, row.first_rate, seed)
    report.tables = [table for each in runs.settings() for table in tables(runs, each)]
    every = list(runs.known.values())
    report.write({"runs": every if options.json else f"{NAME}.jsonl"}, options.json)


if __name__ == "__main__":
    main()
