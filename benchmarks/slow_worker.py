"""One worker is four times slower: what gossip and DDP get done in the same time.

    python benchmarks/slow_worker.py               writes benchmarks/results/slow_worker.{json,md}

The task, the loop and the rows are those of time_to_loss.py, table ``slow``: four workers, whose
compute is a timed wait in which this machine's cores compute real gradients. Samples/s is the sum
of the workers' own speeds; the ideal is what they do without any exchange.
"""

from __future__ import annotations

import argparse
import os

from support.report import Report, Spread, Table, Target, interleaved
from time_to_loss import NUM_WORKERS, QUICK_SAMPLES, SLOW_FACTOR, SLOW_RANK, TABLES
from time_to_loss_rows import ROWS, row_plan
from time_to_loss_worker import RunPlan, prepare, run

MEASURED_ROWS = ("a2cid2", "ddp", "none")
LEAST_OVER_DDP = 3.0
TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="interleaved repetitions")
    parser.add_argument("--samples", type=int, default=10_240, help="of a run, all workers")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args()
    rounds, samples = (1, QUICK_SAMPLES) if options.quick else (options.rounds, options.samples)
    report = Report("slow_worker", "One worker is slower", quick=options.quick)
    prepare()
    found = interleaved(MEASURED_ROWS, rounds, lambda row: samples_per_s(row, samples))
    rows = [(ROWS[row][0], Spread.of(speeds).text(".0f")) for row, speeds in found.items()]
    over_ddp, over_ideal = (
        Spread.of(ours / theirs for ours, theirs in zip(found["a2cid2"], found[row], strict=True))
        for row in ("ddp", "none")
    )
    report.tables.append(
        Table(
            f"{NUM_WORKERS} workers, rank {SLOW_RANK} is {SLOW_FACTOR:g} times slower",
            ("", "samples/s, all workers"),
            rows,
            f"Medians of {rounds} interleaved rounds (least to greatest) of {samples:,} samples. "
            f"Within a round: a2cid2 over DDP {over_ddp.text()}, over no exchange "
            f"{over_ideal.text()}.",
        )
    )
    report.targets.append(
        Target("samples/s, a2cid2 over DDP", over_ddp.median, LEAST_OVER_DDP, at_most=False)
    )
    report.write({"samples": samples, "samples_per_s": found, "over_ddp": over_ddp})


def samples_per_s(row: str, samples: int) -> float:
    """Of all workers together, in one run."""
    table = TABLES["slow"]
    plan = row_plan(row, NUM_WORKERS, samples, seed=0, options=table.gossip, period=table.period)
    results = run(RunPlan(plan, table.compute, TIMEOUT_S, False), None)
    return sum(one.samples_per_s for one in results)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
