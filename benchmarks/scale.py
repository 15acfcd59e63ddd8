"""Does gossip keep its pace, and its cost a worker, with many workers on one machine?

    python benchmarks/scale.py [--workers 4,16,48] [--rounds 3]

Workers of a small model, forked from one server, wait 100 ms where they would compute, so that the
machine's few cores are not the limit; all exchanges are real. Measured: the comm rate achieved
against the nominal 1, how long a proposal takes to become an exchange, and CPU time a worker.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_worker import WARM_UP_STEPS, ScaleTask, WorkerScale, run_worker
from support.meeting import Meeting
from support.report import Report, Spread, Table, Target, interleaved, quantile

from gossipdp import launch

LEAST_RATE, UNCONTENDED_MS, MOST_LOAD, FLAT = 0.95, 1.0, 0.70, 1.25


@dataclass(frozen=True)
class Options:
    """The arguments of every run."""

    graph: str
    step_ms: float
    steps: int
    hidden: int

    def run(self, num_workers: int) -> list[WorkerScale]:
        """One run."""
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder) / "meeting"
            Meeting.create(meeting, num_workers)
            task = ScaleTask(self.graph, self.step_ms / 1e3, self.steps, self.hidden, meeting)
            return launch(run_worker, world_size=num_workers, args=(task,), timeout_s=300.0)


def summary(runs: list[list[WorkerScale]]) -> dict[str, Any]:
    """Return the figures of one number of workers; spreads are over the runs."""
    num_cores = len(os.sched_getaffinity(0))
    workers = [worker for run in runs for worker in run]
    handshake_ms = [1e3 * each for worker in workers for each in worker.handshake_s]
    exchange_ms = [1e3 * each for worker in workers for each in worker.exchange_s]

    def share(name: str, of: str, run: list[WorkerScale]) -> float:
        return sum(getattr(one, name) for one in run) / sum(getattr(one, of) for one in run)

    return {
        "num_workers": len(runs[0]),
        "num_parameters": workers[0].num_parameters,
        # Each exchange counts for two workers.
        "comm_rate": Spread.of(2 * share("initiated", "num_steps", run) for run in runs),
        "served": Spread.of(share("initiated", "num_ticks", run) for run in runs),
        "failed": sum(worker.num_failed for worker in workers),
        "handshake_ms": {f"p{q}": quantile(handshake_ms, q / 100) for q in (50, 90, 99)},
        "exchange_ms": {f"p{q}": quantile(exchange_ms, q / 100) for q in (50, 90, 99)},
        "num_handshakes": len(handshake_ms),
        "cpu_ms_per_step": Spread.of(1e3 * share("cpu_s", "num_steps", run) for run in runs),
        "gossip_cpu_ms_per_step": Spread.of(
            1e3 * share("gossip_cpu_s", "num_steps", run) for run in runs
        ),
        "step_ms": Spread.of(1e3 * share("wall_s", "num_steps", run) for run in runs),
        "own_load": Spread.of(len(run) * share("cpu_s", "wall_s", run) / num_cores for run in runs),
        "machine_load": Spread.of(max(one.busy_cores for one in run) / num_cores for run in runs),
    }


def table(found: list[dict[str, Any]], options: Options) -> Table:
    """One row a number of workers."""
    head = (
        "workers",
        "comm rate",
        "demands served",
        "handshake p50 ms",
        "p99",
        "exchange p50 ms",
        "p99",
        "CPU ms a step",
        "of it gossip",
        "load, own",
        "load, machine",
    )
    rows = [
        (
            f"{each['num_workers']}",
            each["comm_rate"].text(),
            each["served"].text(".3f"),
            f"{each['handshake_ms']['p50']:.2f}",
            f"{each['handshake_ms']['p99']:.1f}",
            f"{each['exchange_ms']['p50']:.2f}",
            f"{each['exchange_ms']['p99']:.1f}",
            each["cpu_ms_per_step"].text(),
            each["gossip_cpu_ms_per_step"].text(),
            f"{each['own_load'].median:.0%}",
            f"{each['machine_load'].median:.0%}",
        )
        for each in found
    ]
    note = (
        f"Graph {options.graph}, {found[0]['num_parameters']} parameters, a wait of "
        f"{options.step_ms:g} ms for each step's compute, {options.steps} steps a run after "
        f"{WARM_UP_STEPS}. Comm rate: 2 × exchanges / gradient steps, nominally 1; its demands are "
        "drawn at random, so 'demands served', exchanges / demands, has less noise. Handshake: "
        "from the proposal that was accepted to the exchange's begin, where the proposal was made. "
        "Load: share of all cores, of these workers, and of everything on the machine."
    )
    return Table("Many workers on one machine", head, rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", default="4,16,48")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--graph", default="ring")
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 20
    numbers = [int(word) for word in arguments.workers.split(",")]
    options = Options(arguments.graph, arguments.step_ms, arguments.steps, arguments.hidden)
    report = Report(
        "scale", "Does gossip keep its pace with many workers on one machine?", arguments.quick
    )
    runs = interleaved(numbers, arguments.rounds, options.run)
    found = [summary(runs[number]) for number in numbers]
    report.tables.append(table(found, options))
    for each in found:
        name = f"{each['num_workers']} workers"
        report.targets += [
            Target(f"{name}: demands served", each["served"].median, LEAST_RATE, at_most=False),
            Target(f"{name}: load of the machine", each["machine_load"].median, MOST_LOAD),
        ]
    first, last = found[0], found[-1]
    if first["num_workers"] == 4:
        title = "4 workers: median handshake, ms"
        report.targets.append(Target(title, first["handshake_ms"]["p50"], UNCONTENDED_MS))
    if len(found) > 1:
        ratio = last["cpu_ms_per_step"].median / first["cpu_ms_per_step"].median
        title = f"CPU a worker and step, {last['num_workers']} workers over {first['num_workers']}"
        report.targets.append(Target(title, ratio, FLAT))
    report.write(found)


if __name__ == "__main__":
    main()
