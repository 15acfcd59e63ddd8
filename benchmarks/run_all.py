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

from support.report import Table, results_folder

FOLDER = Path(__file__).parent
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
    Benchmark("exchange", (), 25),
    Benchmark("overlap", ("--rounds", "2", *(f"--only={name}" for name in OVERLAPS)), 140),
    Benchmark("memory", ("--rounds", "1"), 35),
    Benchmark("shards", ("--rounds", "1"), 90),
    Benchmark("startup", ("--rounds", "2"), 70),
    Benchmark("independence", ("--real", "--rounds", "1", "--events", "stop"), 150),
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


def run(benchmark: Benchmark, quick: bool) -> tuple[str, list[str]]:
    """Run one, its output to ours; return its end, and a line for each row that it misses."""
    command = [sys.executable, str(FOLDER / f"{benchmark.script}.py"), *benchmark.arguments]
    print(f"\n=== {benchmark.name}", flush=True)
    started_ns, limit_s = time.time_ns(), 120 + 3 * benchmark.seconds
    with subprocess.Popen([*command, *(["--quick"] if quick else [])]) as process:
        try:
            code = process.wait(limit_s)
            status = "done" if code == 0 else f"failed, exit status {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
            stop(process)
        except BaseException:
            stop(process)  # the signal may have come to this process alone
            raise
    return status, [
        f"{result['benchmark']}: {row['row']}: {row['why']}"
        for path in results_folder(quick).glob("*.json")
        if path.stat().st_mtime_ns >= started_ns
        for result in [json.loads(path.read_text("utf-8"))]
        for row in result["missing"]
    ]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it as Ctrl+C does, so that it ends its workers and networks; kill it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    scripts = sorted({benchmark.script for benchmark in BENCHMARKS})
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(scripts))
    parser.add_argument("--minutes", type=float, default=20.0, help="for all together")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that all works")
    options = parser.parse_args()
    if unknown := set(options.names).difference(scripts):
        parser.error(f"there is no benchmark {unknown.pop()!r}; choose from {', '.join(scripts)}")
    started_s = time.monotonic()
    rows, missing, failed = [], [], False
    for benchmark in BENCHMARKS:
        if options.names and benchmark.script not in options.names:
            continue
        began_s = time.monotonic()
        if began_s - started_s + benchmark.seconds > 60 * options.minutes and not options.quick:
            status, lines = f"no time was left of {options.minutes:g} minutes", []
        else:
            status, lines = run(benchmark, options.quick)
            failed |= status != "done"
        missing += lines if status == "done" else [*lines, f"{benchmark.name}: {status}"]
        rows.append((benchmark.name, status, f"{time.monotonic() - began_s:.0f}"))
    table = Table(
        f"All benchmarks, {(time.monotonic() - started_s) / 60:.1f} minutes",
        ("benchmark", "", "seconds"),
        rows,
        f"Results are in {os.path.relpath(results_folder(options.quick))}.",
    )
    print(table.markdown(), "Rows that are missing:", sep="\n\n")
    print("\n".join(f"  {line}" for line in missing or ["none"]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
