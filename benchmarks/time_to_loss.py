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
values and curves, to benchmarks/results/time_to_loss_TABLE.{json,md,png}.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from demo_runs import write_report
from networks.emulated import EmulatedHosts
from networks.measure import measure
from networks.namespaces import Hosts
from networks.namespaces import missing as missing_namespaces
from networks.shaped import ShapedHosts
from time_to_loss_report import RoundRow, claims, draw, score, table_lines
from time_to_loss_rows import ROWS, RowPlan, missing
from time_to_loss_task import DESCRIPTION, make_model
from time_to_loss_worker import RunFailedError, RunPlan, prepare, run

from gossipdp.simulate.compute_time import ComputeTime, ConstantTime, LognormalTime, SlowedTime

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
    samples: int = 25_600


TABLES = {
    "equal": Table("equal workers on one machine"),
    "slow": Table(
        f"worker {SLOW_RANK} is {SLOW_FACTOR:g} times slower, one machine",
        SlowedTime(ConstantTime(STEP_S), {SLOW_RANK: SLOW_FACTOR}),
    ),
    "jitter": Table(
        f"step times lognormal, of the same mean, their logarithm's deviation {JITTER:g}; one "
        "machine",
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
        gossip={"graph": "ring", "comm_rate": 0.1},
        period=8,
    ),
}


def main() -> None:
    """Run the tables asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--rounds", type=int, default=1, help="interleaved repetitions")
    parser.add_argument("--rows", default=",".join(ROWS), help="which rows, with commas")
    parser.add_argument("--samples", type=int, help="of a run, instead of the table's own")
    parser.add_argument("--target-loss", type=float, default=0.1, help="validation loss timed")
    parser.add_argument("--comm-rate", type=float, help="of gossipdp, instead of the table's own")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds a run may take")
    options = parser.parse_args()
    names = options.tables or list(TABLES)
    rows = options.rows.split(",")
    for kind, known, given in (("table", TABLES, names), ("row", ROWS, rows)):
        for name in given:
            if name not in known:
                parser.error(f"there is no {kind} {name!r}; choose from {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    prepare()
    failed = [name for name in names if not measure_table(name, rows, options)]
    if failed:
        sys.exit(f"time_to_loss: a row failed in {', '.join(failed)}; see the tables")


def measure_table(name: str, rows: list[str], options: argparse.Namespace) -> bool:
    """Measure, print and write one table; whether every row that can run here did."""
    table = TABLES[name]
    command = f"python {' '.join(map(shlex.quote, ['benchmarks/time_to_loss.py', *sys.argv[1:]]))}"
    lines = [f"**Time to loss: {table.condition}.**", ""]
    reason = missing_namespaces("tc") if table.hosts is not None else None
    if reason is not None:
        write_report(f"time_to_loss_{name}", command, [], [*lines, f"missing: {reason}"])
        return True
    load = os.getloadavg()[0]
    network = None
    results: dict[str, list[RoundRow]] = {row: [] for row in rows}
    reasons = {row: why for row in rows if (why := missing(row)) is not None}
    failures: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(table.hosts()) if table.hosts is not None else None
        if hosts is not None:
            network = measure(hosts)
        for number in range(options.rounds):
            turn = number % len(rows)
            for row in rows[turn:] + rows[:turn]:
                if row in reasons or row in failures:
                    continue
                plan = run_plan(table, row, number, options)
                try:
                    scored = score(row, run(plan, hosts))
                except RunFailedError as error:
                    failures[row] = str(error).strip()
                    print(f"{name}, round {number}, {row}: failed\n{error}", file=sys.stderr)
                    continue
                results[row].append(scored)
                print(f"{name}, round {number}, {scored.line(options.target_loss)}", flush=True)
    gossip = {**table.gossip} | ({"comm_rate": options.comm_rate} if options.comm_rate else {})
    num_parameters = sum(parameter.numel() for parameter in make_model(0).parameters())
    samples = options.samples or table.samples
    lines += [
        f"{NUM_WORKERS} workers, {num_parameters:,} float32 parameters, {samples:,} samples a run, "
        f"{options.rounds} interleaved rounds. Stand-in for an accelerator: the compute of a step "
        f"is a timed wait of {1e3 * STEP_S:g} ms on average, in which this machine's cores compute "
        "the real gradients. No wait stands for a network.",
        "",
        f"Task: {DESCRIPTION}. gossipdp: "
        + ", ".join(f"{key} {value}" for key, value in gossip.items())
        + f", float32 wire unless said. Periodic averaging: every {table.period} steps after a "
        "synchronous warm-up of 5%.",
        "",
    ]
    if network is not None:
        lines += [
            f"The network as measured by a plain TCP connection before the runs: "
            f"{network.mbits_per_s:.0f} Mbit/s, round trip {network.round_trip_ms:.2f} ms. "
            f"{getattr(hosts, 'account', '')}".rstrip(),
            "",
        ]
    lines.append(f"Load of the machine (1 min): {load:.1f} before, {os.getloadavg()[0]:.1f} after.")
    shown_reasons = reasons | {
        row: f"failed: {why.splitlines()[-1]}" for row, why in failures.items()
    }
    lines += ["", *table_lines(results, shown_reasons, options.target_loss), ""]
    lines += claims(name, results, options.target_loss)
    draw(name, table.condition, results, options.target_loss)
    values = [one.as_json(options.target_loss) for many in results.values() for one in many]
    values += [{"row": row, "missing": why} for row, why in shown_reasons.items()]
    write_report(f"time_to_loss_{name}", command, values, lines)
    return not failures


def run_plan(table: Table, row: str, number: int, options: argparse.Namespace) -> RunPlan:
    """The ``number``-th run of a row."""
    gossip = dict(table.gossip)
    if options.comm_rate is not None:
        gossip["comm_rate"] = options.comm_rate
    plan = RowPlan(
        name=row,
        num_workers=NUM_WORKERS,
        samples=options.samples or table.samples,
        seed=number,
        options=gossip,
        period=table.period,
    )
    return RunPlan(plan, table.compute, options.timeout)


if __name__ == "__main__":
    main()
