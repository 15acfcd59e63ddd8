"""How soon is a model trained? gossipdp beside what a user would take instead, in one run.

    python benchmarks/time_to_loss.py equal            four equal workers, one machine
    python benchmarks/time_to_loss.py slow             one of them four times slower
    python benchmarks/time_to_loss.py jitter           lognormal step times
    python benchmarks/time_to_loss.py gigabit          1 Gbit/s links, a namespace a worker (root)
    python benchmarks/time_to_loss.py slow_link        100 Mbit/s and 20 ms (root)
    python benchmarks/time_to_loss.py                  all of them

Rows take turns, in an order that rotates from round to round; a round's seed is that of all its
rows. The compute of a step is a timed wait in which this machine's cores compute real gradients;
nothing stands for a network but a network. Each table is printed and written, with every round's
values and curves, to benchmarks/results/time_to_loss_TABLE.{json,md,png}. One round of all tables
takes about 11 minutes; figures to be quoted want --rounds 5 and a machine that is quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from networks.emulated import EmulatedHosts
from networks.measure import measure
from networks.namespaces import Hosts
from networks.namespaces import missing as missing_namespaces
from networks.shaped import ShapedHosts
from support.report import Missing, Report, results_folder
from time_to_loss_report import RoundRow, draw, measured_tables, score, settings_table, targets
from time_to_loss_rows import ROWS, missing, row_plan
from time_to_loss_worker import RunFailedError, RunPlan, prepare, run

from gossipdp.simulate.scenario import ComputeTime, ConstantTime, LognormalTime, SlowedTime

NUM_WORKERS = 4
STEP_S = 0.050
SLOW_RANK, SLOW_FACTOR = 2, 4.0
JITTER = 0.5


@dataclass(frozen=True)
class Table:
    """One condition. gossip: options of GossipDataParallel; period: of periodic averaging.

    samples: of the run, all workers together.
    """

    condition: str
    compute: ComputeTime = field(default_factory=lambda: ConstantTime(STEP_S))
    hosts: Callable[[], Hosts] | None = None
    gossip: Mapping[str, Any] = field(default_factory=lambda: {"graph": "ring", "comm_rate": 1.0})
    period: int = 4
    samples: int = 20_480


TABLES = {
    "equal": Table("equal workers on one machine"),
    "slow": Table(
        f"worker {SLOW_RANK} is {SLOW_FACTOR:g} times slower, one machine",
        SlowedTime(ConstantTime(STEP_S), {SLOW_RANK: SLOW_FACTOR}),
    ),
    "jitter": Table(
        f"step times lognormal, of the same mean, their logarithm's deviation {JITTER:g} (five "
        "times what is typical); one machine",
        LognormalTime(STEP_S, JITTER),
    ),
    "gigabit": Table(
        "equal workers, each behind 1 Gbit/s (a namespace each, veth, the kernel's tbf)",
        hosts=lambda: ShapedHosts(NUM_WORKERS, 1_000),
    ),
    "slow_link": Table(
        "equal workers, each behind 100 Mbit/s, 20 ms one way from every other (a namespace each, "
        "TUN devices, the kernel's TCP over a link emulator)",
        hosts=lambda: EmulatedHosts(NUM_WORKERS, 100, 20),
        gossip={"graph": "ring", "comm_rate": 0.3, "wire_format": "lattice8"},
        period=8,
    ),
}


QUICK_SAMPLES = 1_280


def main() -> None:
    """Run the tables asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--rounds", type=int, default=1, help="interleaved repetitions")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas")
    parser.add_argument("--samples", type=int, help="of a run, instead of the table's own")
    parser.add_argument("--target-loss", type=float, default=0.05, help="validation loss timed")
    parser.add_argument("--comm-rate", type=float, help="of gossipdp, instead of the table's own")
    parser.add_argument("--wire-format", help="of gossipdp, instead of the table's own")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a run may take")
    parser.add_argument("--pin", action="store_true", help="give each worker one core, in turn")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that all works")
    options = parser.parse_args()
    names = options.tables or list(TABLES)
    rows = options.rows.split(",")
    for kind, known, given in (("table", TABLES, names), ("row", ROWS, rows)):
        for name in given:
            if name not in known:
                parser.error(f"there is no {kind} {name!r}; choose from {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    # A namespace has no names for addresses, of which torch would warn in every run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare()
    failed = [name for name in names if not measure_table(name, rows, options)]
    if failed:
        sys.exit(f"time_to_loss: a row failed in {', '.join(failed)}; see above")


def measure_table(name: str, rows: list[str], options: argparse.Namespace) -> bool:
    """Measure, print and write one table; whether every row that can run here did."""
    table = TABLES[name]
    report = Report(f"time_to_loss_{name}", f"Time to loss: {table.condition}", options.quick)
    reason = missing_namespaces("tc") if table.hosts is not None else None
    if reason is not None:
        report.missing.append(Missing("all rows", reason))
        report.write([])
        return True
    reasons = {row: why for row in rows if (why := missing(row)) is not None}
    failures: dict[str, str] = {}
    results: dict[str, list[RoundRow]] = {row: [] for row in rows if row not in reasons}
    network = None
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(table.hosts()) if table.hosts is not None else None
        if hosts is not None:
            network = measure(hosts)
        for number in range(options.rounds):
            running = [row for row in results if row not in failures]
            turn = number % max(1, len(running))
            for row in running[turn:] + running[:turn]:
                try:
                    scored = score(row, run(run_plan(table, row, number, options), hosts))
                except RunFailedError as error:
                    failures[row] = str(error).strip()
                    print(f"{name}, round {number}, {row}: failed\n{error}", file=sys.stderr)
                    continue
                results[row].append(scored)
                print(f"{name}, round {number}, {scored.line(options.target_loss)}", flush=True)
    for row, why in failures.items():
        del results[row]
        reasons[row] = f"it failed: {why.splitlines()[-1]}"
    report.missing += [Missing(ROWS[row][0], why) for row, why in reasons.items()]
    facts = settings(table, options)
    if network is not None:
        facts["network, measured"] = (
            f"{network.mbits_per_s:.0f} Mbit/s by one TCP connection, round trip "
            f"{network.round_trip_ms:.2f} ms; {hosts.account if hosts else ''}".rstrip("; ")
        )
    if any(results.values()):
        report.tables += measured_tables(results, options.target_loss)
        report.targets += targets(name, results, options.target_loss)
        picture = results_folder(report.quick) / f"{report.name}.png"
        draw(picture, table.condition, results, options.target_loss)
    report.tables.append(settings_table(facts))
    report.write([one.as_json(options.target_loss) for many in results.values() for one in many])
    return not failures


def gossip_options(table: Table, options: argparse.Namespace) -> dict[str, Any]:
    """What GossipDataParallel is told."""
    given = {"comm_rate": options.comm_rate, "wire_format": options.wire_format}
    return {**table.gossip} | {name: value for name, value in given.items() if value is not None}


def num_samples(table: Table, options: argparse.Namespace) -> int:
    """Of one run."""
    return options.samples or (QUICK_SAMPLES if options.quick else table.samples)


def settings(table: Table, options: argparse.Namespace) -> dict[str, str]:
    """What the table was measured with, in words."""
    gossip = gossip_options(table, options)
    return {
        "compute of a step": (
            f"a stand-in for an accelerator: a timed wait of {1e3 * STEP_S:g} ms on average, in "
            "which this machine's cores compute the real gradients; no wait stands for a network"
        ),
        "samples of a run": f"{num_samples(table, options):,}, {NUM_WORKERS} workers together",
        "interleaved rounds": f"{options.rounds}",
        "cores": "a worker to one core, in turn" if options.pin else "shared by all workers",
        "gossipdp": ", ".join(f"{name} {value}" for name, value in gossip.items()),
        "DDP": "torch's DistributedDataParallel, its defaults, gloo",
        "periodic averaging": (
            f"torch's PostLocalSGDOptimizer, gloo, every {table.period} steps, after 5% of the run "
            "as DDP"
        ),
        "Decent-DP": "topology ring, its other defaults, gloo",
        "no exchange": "gossipdp, method none: one average at the end",
    }


def run_plan(table: Table, row: str, number: int, options: argparse.Namespace) -> RunPlan:
    """The ``number``-th run of a row."""
    gossip = gossip_options(table, options)
    samples = num_samples(table, options)
    plan = row_plan(row, NUM_WORKERS, samples, seed=number, options=gossip, period=table.period)
    return RunPlan(plan, table.compute, options.timeout, options.pin)


if __name__ == "__main__":
    main()
