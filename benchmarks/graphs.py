"""Graphs of workers compared: simulated workers, a small language model.

    python benchmarks/graphs.py [--workers 4,8,16] [--seeds 3]

Every row trains the same network on the same batches, at the same learning rate; each worker has a
stretch of the text of its own. Exchanges follow the real protocol. The loss is that of the
mean model on held-out text, in bits a byte. The consensus distance is a mean over the run, since at
the end the learning rate is zero and workers agree anyway. Adam's second moment is averaged in
every 16th exchange.

Each run that ends is appended to a file of JSON lines; a run that is in it is not run again.
Writes benchmarks/results/graphs.{json,md}, of all runs in that file.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from support.byte_model import ByteModel
from support.finished_runs import Simulations, loss_of
from support.report import Report, Table, run_script

from gossipdp_lab.simulate import Link, LinkModel, Scenario, Trace
from gossipdp_lab.tasks.workload import learning_rate_factor

LEARNING_RATE = 0.064
"""Tuned for gossip on the complete graph in quality_simulated, a larger model."""
CASES = (
    ("ring", "gossip"),
    ("ring", "a2cid2"),
    ("torus", "a2cid2"),
    ("exponential", "gossip"),
    ("exponential", "a2cid2"),
    ("complete", "gossip"),
)
"""On a complete graph A2CiD2 is plain gossip. A torus of 4 is the ring; that of 8 is left out."""

CONDITION = "disjoint data"
"""Of new runs; stored ones have others too."""
SETTING = ("workers", "condition", "steps", "learning_rate")
Run = dict[str, Any]
"""A run's fields: those of SETTING, graph, method, seed, and what was found."""


def scenario(run: Run) -> Scenario:
    """Return what the simulator runs."""
    return Scenario(
        graph=run["graph"],
        num_workers=run["workers"],
        objective=ByteModel(disjoint=True, batch_size=16, predicted=4, width=8, hidden=32),
        optimizer=partial(torch.optim.AdamW, lr=run["learning_rate"]),
        num_steps=run["steps"],
        seed=run["seed"],
        num_records=10,
        exchange_moments={"exp_avg_sq": 16},
        schedule=learning_rate_factor,
        fidelity="links",
        links=LinkModel(Link(latency_s=0.0)),
    )


def outcome(trace: Trace) -> dict[str, Any]:
    """Return what is kept of a run."""
    last = trace.records[-1]
    # The first record is before the first step.
    distances = [record.consensus_distance for record in trace.records[1:]]
    return {
        "consensus_distance": statistics.fmean(distances),
        "comm_rate": trace.achieved_comm_rate,
        "messages_per_exchange": sum(trace.num_messages.values()) / max(1, last.exchanges),
        "gradient_steps": last.gradient_steps,
    }


def kept(path: Path) -> Simulations:
    """Return the runs that have ended."""
    return Simulations(path, (*SETTING, "graph", "method", "seed"))


def find(runs: Simulations, workers: int, steps: int, case: tuple[str, str], seed: int) -> Run:
    """Return a run, from the file or made now."""
    setting = dict(zip(SETTING, (workers, CONDITION, steps, LEARNING_RATE), strict=True))
    run = setting | dict(zip(("graph", "method"), case, strict=True)) | {"seed": seed}
    return runs.find(run, case[1], lambda: scenario(run), outcome)


def tables(runs: Simulations) -> list[Table]:
    """Return one table for each number of workers, condition, length and learning rate."""
    settings = {tuple(run[name] for name in SETTING) for run in runs.known.values()}
    return [_table(runs, dict(zip(SETTING, each, strict=True))) for each in sorted(settings)]


def _table(runs: Simulations, setting: dict[str, Any]) -> Table:
    cells = {
        (graph, method): runs.of(graph=graph, method=method, **setting) for graph, method in CASES
    }
    reference = {run["seed"]: loss_of(run) for run in cells[CASES[-1]]}
    rows = []
    for (graph, method), found in cells.items():
        if not found:
            continue
        above = [
            100 * (loss_of(run) / reference[run["seed"]] - 1)
            for run in found
            if run["seed"] in reference
        ]
        rows.append(
            (
                f"{graph}, {method}",
                f"{statistics.fmean(map(loss_of, found)):.3f}",
                f"{statistics.fmean(above):+.2f}%" if above else "",
                f"{min(above):+.2f} to {max(above):+.2f}" if above else "",
                f"{len(found)}",
                f"{_mean(found, 'consensus_distance'):.3g}",
                f"{_mean(found, 'comm_rate'):.2f}",
                f"{_mean(found, 'messages_per_exchange'):.1f}",
            )
        )
    head = (
        "", "bits a byte", "above complete", "of each seed", "seeds", "consensus distance",
        "exchanges a step", "messages each",
    )  # fmt: skip
    title = "{workers} workers, {condition}, {steps} steps, learning rate {learning_rate:g}"
    return Table(title.format(**setting), head, rows)


def _mean(found: list[Run], name: str) -> float:
    return statistics.fmean(float(run[name]) for run in found)


def cases(workers: int) -> list[tuple[str, str]]:
    """Return the rows for a number of workers."""
    if workers == 4:
        return [each for each in CASES if each[0] in ("ring", "complete")]
    return [each for each in CASES if each[0] != "torus" or workers >= 16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", default="4,8,16", help="numbers of workers")
    parser.add_argument("--seeds", type=int, default=3, help="their number; 0 only tabulates")
    parser.add_argument("--steps", type=int, default=150, help="of an ordinary worker")
    parser.add_argument("--runs", type=Path, default=Path("runs/graphs.jsonl"))
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.seeds, options.steps = "4", 1, 10
        options.runs = Path("runs/graphs_quick.jsonl")
    report = Report("graphs", __doc__.split("\n", 1)[0], quick=options.quick)
    runs = kept(options.runs)
    for seed, workers in product(range(options.seeds), map(int, options.workers.split(","))):
        for case in cases(workers):
            find(runs, workers, options.steps, case, seed)
    report.tables += tables(runs)
    report.write({"runs": list(runs.known.values())})


if __name__ == "__main__":
    run_script(main)
