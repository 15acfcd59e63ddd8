"""Graphs of workers compared: simulated workers, a small language model.

    python benchmarks/graphs.py [--workers 4,8,16] [--seeds 3] [--rows "ring a2cid2"]

Every row trains the same network on the same batches, at the same learning rate; only the graph,
the method and the data differ. Exchanges follow the real protocol. The loss is that of the
mean model on held-out text, in bits a byte. The consensus distance is a mean over the run, since at
the end the learning rate is zero and workers agree anyway. Adam's second moment is averaged in
every 16th exchange.

Each run that ends is appended to a file of JSON lines; a run that is in it is not run again.
Writes benchmarks/results/graphs.{json,md}, of all runs in that file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.byte_model import ByteModel
from support.finished_runs import FinishedRuns
from support.report import Report, Table, run_script

from gossipdp_lab.simulate import (
    Link,
    LinkModel,
    Scenario,
    simulate,
)
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


CONDITIONS = ("disjoint data", "common data")


@dataclass(frozen=True)
class Run:
    """One simulated run."""

    condition: str
    graph: str
    method: str
    workers: int
    steps: int
    learning_rate: float
    seed: int

    @classmethod
    def of(cls, found: dict[str, Any]) -> Run:
        """Return the run that found this."""
        return cls(**{name: found[name] for name in cls.__annotations__})

    def scenario(self) -> Scenario:
        """Return what the simulator runs."""
        return Scenario(
            graph=self.graph,
            num_workers=self.workers,
            objective=ByteModel(
                self.condition == "disjoint data", batch_size=16, predicted=4, width=8, hidden=32
            ),
            optimizer=partial(torch.optim.AdamW, lr=self.learning_rate),
            num_steps=self.steps,
            seed=self.seed,
            num_records=10,
            exchange_moments={"exp_avg_sq": 16},
            schedule=learning_rate_factor,
            fidelity="links",
            links=LinkModel(Link(latency_s=0.0)),
        )

    def make(self) -> dict[str, Any]:
        """Simulate it."""
        trace = simulate(self.scenario(), self.method)
        last = trace.records[-1]
        # The first record is before the first step.
        distances = [record.consensus_distance for record in trace.records[1:]]
        return asdict(self) | {
            "loss": last.loss,
            "consensus_distance": statistics.fmean(distances),
            "comm_rate": trace.achieved_comm_rate,
            "messages_per_exchange": sum(trace.num_messages.values()) / max(1, last.exchanges),
            "gradient_steps": last.gradient_steps,
            "wall_s": trace.wall_s,
        }


class Runs(FinishedRuns[dict[str, Any]]):
    """The runs that have ended."""

    def __init__(self, path: Path, make: Callable[[Run], dict[str, Any]] = Run.make) -> None:
        super().__init__(path, dict[str, Any], Run.of)
        self._make = make

    def find(self, run: Run) -> dict[str, Any]:
        """Return a run, from the file or made now."""
        if run not in self.known:
            found = self._make(run)
            self.keep(found)
            print(f"{run}: {found['loss']:.4f}, {found['wall_s']:.0f} s", flush=True)
        return self.known[run]


def tables(runs: list[dict[str, Any]]) -> list[Table]:
    """Return one table for each number of workers, condition, length and learning rate."""
    names = ("workers", "condition", "steps", "learning_rate")
    settings = {tuple(run[name] for name in names) for run in runs}
    made = []
    for values in sorted(settings, key=str):
        setting = dict(zip(names, values, strict=True))
        reference = _cell(runs, setting, *CASES[-1])
        rows = []
        for graph, method in CASES:
            found = _cell(runs, setting, graph, method)
            if not found:
                continue
            both = sorted(found.keys() & reference.keys())
            above = [100 * (found[seed]["loss"] / reference[seed]["loss"] - 1) for seed in both]
            rows.append(
                (
                    f"{graph}, {method}",
                    f"{_mean(found, 'loss'):.3f}",
                    f"{statistics.fmean(above):+.2f}%" if above else "",
                    f"{min(above):+.2f} to {max(above):+.2f}" if above else "",
                    f"{len(found)}",
                    f"{_mean(found, 'consensus_distance'):.3g}",
                    f"{_mean(found, 'comm_rate'):.2f}",
                    f"{_mean(found, 'messages_per_exchange'):.1f}",
                )
            )
        made.append(
            Table(
                "{} workers, {}, {} steps, learning rate {:g}".format(*values),
                (
                    "",
                    "bits a byte",
                    "above complete",
                    "of each seed",
                    "seeds",
                    "consensus distance",
                    "exchanges a step",
                    "messages each",
                ),
                rows,
            )
        )
    return made


def _cell(
    runs: list[dict[str, Any]], setting: dict[str, Any], graph: str, method: str
) -> dict[int, dict[str, Any]]:
    """Return the runs of a row, by seed."""
    wanted = setting | {"graph": graph, "method": method}
    return {run["seed"]: run for run in runs if wanted.items() <= run.items()}


def _mean(found: dict[int, dict[str, Any]], name: str) -> float:
    return statistics.fmean(float(run[name]) for run in found.values())


def cases(workers: int, only: str | None) -> list[tuple[str, str]]:
    """Return the rows for a number of workers; ``only``: such as "ring a2cid2,complete gossip"."""
    if only is not None:
        chosen = [tuple(words.split()) for words in only.split(",")]
        unknown = [each for each in chosen if each not in CASES]
        if unknown:
            raise ValueError(f"there is no row {unknown[0]}: the rows are {CASES}")
        return [each for each in CASES if each in chosen]
    if workers == 4:
        return [each for each in CASES if each[0] in ("ring", "complete")]
    return [each for each in CASES if each[0] != "torus" or workers >= 16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", default="4,8,16", help="numbers of workers")
    parser.add_argument("--data", nargs="+", choices=CONDITIONS, default=CONDITIONS[:1])
    parser.add_argument("--rows", help='such as "ring a2cid2,complete gossip"; by default all')
    parser.add_argument("--seeds", type=int, default=3, help="number of them")
    parser.add_argument("--steps", type=int, default=150, help="of an ordinary worker")
    parser.add_argument("--runs", type=Path, default=Path("runs/graphs.jsonl"))
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.workers, options.seeds, options.steps = "4", 1, 10
        options.runs = Path("runs/graphs_quick.jsonl")
    report = Report("graphs", __doc__.split("\n", 1)[0], quick=options.quick)
    runs = Runs(options.runs)
    for seed in range(0 if options.no_runs else options.seeds):
        for condition in options.data:
            for workers in map(int, options.workers.split(",")):
                for graph, method in cases(workers, options.rows):
                    runs.find(
                        Run(
                            condition,
                            graph,
                            method,
                            workers,
                            options.steps,
                            LEARNING_RATE,
                            seed,
                        )
                    )
    found = list(runs.known.values())
    report.tables += tables(found)
    report.write({"runs": found})


if __name__ == "__main__":
    run_script(main)
