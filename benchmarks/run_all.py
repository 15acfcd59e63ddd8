"""All benchmarks, one after the other: what `make bench` runs.

    python benchmarks/run_all.py [NAME ...] [--minutes 20] [--quick]

Each is a script of its own, with the settings that fit it into the time; figures to be quoted want
the script's own defaults and a machine that does nothing else. What does not fit is left out and
said. Ends with a line for each benchmark, and with the rows that are missing and why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.report import Missing, Table, print_table, results_folder

FOLDER = Path(__file__).parent
BUSY_LOAD_PER_CORE = 0.3
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Benchmark:
    """A script and its arguments; seconds: what it takes on two quiet cores."""

    script: str
    arguments: tuple[str, ...]
    seconds: float

    @property
    def name(self) -> str:
        """As it is chosen and shown."""
        return " ".join([self.script, *(word for word in self.arguments if word.isidentifier())])


# Not the large launch-bound loop, which is there to show the worst case.
OVERLAPS = ("resnet18", "launch-bound", "resnet18-shared-core")
# Rows that send at each step need minutes over a slow link.
FEW_ROWS = "ddp_bf16,local_sgd@16,diloco@64,a2cid2_lattice8@4"
BENCHMARKS = (
    Benchmark("update", (), 20),
    Benchmark("exchange", (), 25),
    Benchmark("overlap", ("--rounds", "2", *(f"--only={name}" for name in OVERLAPS)), 140),
    Benchmark("memory", ("--rounds", "1"), 35),
    Benchmark("shards", ("--rounds", "1"), 90),
    Benchmark("startup", ("--rounds", "2"), 70),
    Benchmark("faults", ("--rounds", "2"), 90),
    # The tables in the order in which they matter, should time run out.
    Benchmark("time_to_loss", ("slow_link", "--steps", "128", "--rows", FEW_ROWS), 160),
    Benchmark("time_to_loss", ("slow", "--steps", "128"), 190),
    Benchmark("time_to_loss", ("speeds", "--steps", "128"), 140),
    Benchmark("time_to_loss", ("equal", "--steps", "128"), 130),
    Benchmark("time_to_loss", ("gigabit", "--steps", "128"), 150),
    Benchmark("time_to_loss", ("jitter", "--steps", "128"), 130),
    Benchmark(
        "race",
        (
            *("--conditions", "calm,kills10", "--rows", "gossipdp,ddp"),
            *("--rounds", "1", "--seconds", "35"),
        ),
        165,
    ),
    # Hours in all: each call goes on where the one before was stopped.
    Benchmark("quality", ("--size", "small", "--minutes", "10"), 630),
)


@dataclass(frozen=True)
class Outcome:
    """The end of one benchmark."""

    name: str
    seconds: float
    status: str
    missing: tuple[Missing, ...]


def run(benchmark: Benchmark, quick: bool) -> Outcome:
    """Run one, its output to ours; then read what it wrote."""
    extra = ("--quick",) if quick else ()
    script = FOLDER / f"{benchmark.script}.py"
    print(f"\n=== {benchmark.name}", flush=True)
    started_s, started_ns = time.monotonic(), time.time_ns()
    limit_s = 120 + 3 * benchmark.seconds
    with subprocess.Popen([sys.executable, str(script), *benchmark.arguments, *extra]) as process:
        try:
            code = process.wait(limit_s)
            status = "done" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
            stop(process)
        except BaseException:
            stop(process)  # the signal may have come to this process alone
            raise
    written = [
        json.loads(path.read_text("utf-8"))
        for path in results_folder(quick).glob("*.json")
        if path.stat().st_mtime_ns >= started_ns
    ]
    missing = [
        Missing(f"{result['benchmark']}: {row['row']}", row["why"])
        for result in written
        for row in result["missing"]
    ]
    if status != "done":
        missing.append(Missing(benchmark.name, status))
    return Outcome(benchmark.name, time.monotonic() - started_s, status, tuple(missing))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it as Ctrl+C does, so that it ends its workers and networks; kill it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def left_out(benchmark: Benchmark, why: str) -> Outcome:
    """One that did not run."""
    return Outcome(benchmark.name, 0.0, "not run", (Missing(benchmark.name, why),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    scripts = sorted({benchmark.script for benchmark in BENCHMARKS})
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(scripts))
    parser.add_argument("--minutes", type=float, default=20.0, help="for all together")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that all works")
    options = parser.parse_args()
    for name in options.names:
        if name not in scripts:
            parser.error(f"there is no benchmark {name!r}; choose from {', '.join(scripts)}")
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > BUSY_LOAD_PER_CORE * num_cores:
        print(f"This machine is busy (load average {load:.1f}): the figures will show it.")
    started_s = time.monotonic()
    outcomes = []
    for benchmark in BENCHMARKS:
        if options.names and benchmark.script not in options.names:
            continue
        left_s = 60 * options.minutes - (time.monotonic() - started_s)
        if left_s < benchmark.seconds and not options.quick:
            why = f"no time was left of {options.minutes:g} minutes"
            outcomes.append(left_out(benchmark, why))
        else:
            outcomes.append(run(benchmark, options.quick))
    rows = [(each.name, each.status, f"{each.seconds:.0f}") for each in outcomes]
    minutes = (time.monotonic() - started_s) / 60
    print_table(
        Table(
            f"All benchmarks, {minutes:.1f} minutes",
            ("benchmark", "", "seconds"),
            rows,
            f"Results are in {os.path.relpath(results_folder(options.quick))}.",
        )
    )
    missing = [row for each in outcomes for row in each.missing]
    print("Rows that are missing:")
    for row in missing:
        print(f"  {row.row}: {row.why}")
    if not missing:
        print("  none")
    if any(each.status not in ("done", "not run") for each in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
