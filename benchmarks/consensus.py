"""The rate at which real workers come to agree, beside simulated ones.

python benchmarks/consensus.py --workers 16 --graph ring --method a2cid2 --json PATH
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import tyro
from support.consensus_series import LOWEST_SHARE, NetworkSeries, Outcome
from support.consensus_worker import NUM_OBSERVED, ConsensusTask, run_worker
from support.meeting import Meeting
from support.report import Report, Spread, Table, run_script

import gossipdp
from gossipdp.graph import build_graph
from gossipdp.rules import (
    at_least_1,
    check_flags,
    megabits_per_s,
    option,
    output_file,
    positive_number,
    whole_number,
)
from gossipdp_lab.simulate import Consensus, ConstantTime, LinkModel, Scenario, simulate

MethodName = Literal["a2cid2", "gossip"]
# A run that starves its workers of cores must not be given up too early.
LEAST_RUN_LIMIT_S, RUN_LIMIT_IN_RUNS = 120.0, 10.0
SIMULATIONS_PER_RUN = 4
SEEDS_APART = 1_000_000


@dataclass(frozen=True)
class ConsensusBenchmark:
    """Measure with real processes how fast workers agree, and simulate the same.

    Each worker begins with a random vector and only exchanges; a timed wait stands for a gradient
    step. The simulator runs the same protocol with exchange durations drawn from those measured.
    """

    workers: int = option(16, partial(whole_number, least=2))
    """Worker processes."""

    graph: str = "ring"
    """ring, path, star, complete, exponential, hypercube, torus, random-regular or erdos-renyi."""

    method: MethodName = "a2cid2"
    """a2cid2: accelerated gossip; gossip: plain pairwise averaging."""

    comm_rate: float = option(1.0, positive_number)
    """Exchanges per worker per gradient step."""

    step_ms: float = option(50.0, positive_number)
    """Duration of a gradient step, in milliseconds."""

    steps: int = option(400, partial(whole_number, least=20))
    """Gradient steps of each worker in each run."""

    floats: int = option(100_000, at_least_1)
    """Length of each worker's vector."""

    seeds: int = option(5, at_least_1)
    """Runs, one for each seed."""

    link_mbytes: float | None = option(None, positive_number)
    """Limit on what each worker sends, in MB/s; by default none."""

    json: Path | None = option(None, output_file)
    """Write the figures to this file alone."""

    quick: bool = False
    """A few short steps of three workers, to see that it works."""


def main() -> None:
    benchmark = tyro.cli(ConsensusBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    run(benchmark)


def run(arguments: ConsensusBenchmark) -> None:
    """Measure, simulate, show both and write the file.

    Raises ValueError for bad input, before any process starts.
    """
    if arguments.quick:
        arguments = replace(arguments, workers=3, steps=40, step_ms=20.0, seeds=1)
    check(arguments)
    report = Report("consensus", "How fast real and simulated workers agree", arguments.quick)
    tasks = [make_task(arguments, seed) for seed in range(arguments.seeds)]
    exchange_s: list[float] = []
    measured: list[Outcome] = []
    num_failed = 0
    for task in tasks:
        outcome, durations_s, failed = measure(task, arguments.workers)
        print(f"measured, seed {task.seed}: {outcome}", flush=True)
        measured.append(outcome)
        exchange_s += durations_s
        num_failed += failed
    simulated = [
        outcome for task in tasks for outcome in simulate_task(task, arguments.workers, exchange_s)
    ]
    names = ("decay_per_exchange", "achieved_comm_rate")
    found = {
        name: [Spread.of(getattr(one, name) for one in half) for half in (measured, simulated)]
        for name in names
    }
    rows = [
        (name.replace("_", " "), *(half.text(".4g") for half in halves),
         f"{halves[1].median / halves[0].median:.3f}")
        for name, halves in found.items()
    ]  # fmt: skip
    asked = (
        f"{arguments.workers} workers, graph {arguments.graph}, method {arguments.method}, comm "
        f"rate {arguments.comm_rate:g}, {arguments.steps} steps of {arguments.step_ms:g} ms"
    )
    note = (
        f"Medians (least to greatest). Exchanges took {1e3 * Spread.of(exchange_s).median:.2f} ms; "
        f"{num_failed} failed. The slope is taken down to {LOWEST_SHARE:g} of the first consensus "
        f"distance; they fell to {max(one.lowest_share for one in measured):.2g}: for less give "
        "more --steps."
    )
    report.tables.append(Table(asked, ("", "measured", "simulated", "ratio"), rows, note))
    figures = {
        "measured": [asdict(one) for one in measured],
        "simulated": [asdict(one) for one in simulated],
        "exchange_s": exchange_s,
        "failed_exchanges": num_failed,
        "configuration": asked,
    }
    report.write(figures, arguments.json)


def check(arguments: ConsensusBenchmark) -> None:
    """Raise ValueError for bad input. Quick, without torch."""
    check_flags(arguments)
    if arguments.link_mbytes is not None:
        megabits_per_s("8 * --link-mbytes", 8 * arguments.link_mbytes)
    build_graph(arguments.graph, arguments.workers, seed=0)


def make_task(arguments: ConsensusBenchmark, seed: int) -> ConsensusTask:
    """Return the task of the workers of one run."""
    return ConsensusTask(
        graph=arguments.graph,
        method=arguments.method,
        comm_rate=arguments.comm_rate,
        step_s=arguments.step_ms / 1e3,
        num_steps=arguments.steps,
        num_floats=arguments.floats,
        seed=seed,
        max_megabits_per_s=arguments.link_mbytes and 8 * arguments.link_mbytes,
        meeting=Path(),  # of each run its own
    )


def measure(task: ConsensusTask, num_workers: int) -> tuple[Outcome, list[float], int]:
    """One run of real processes: its figures, the durations of all exchanges, how many failed."""
    expected_s = task.num_steps * task.step_s
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        Meeting.create(meeting, num_workers)
        workers = gossipdp.launch(
            run_worker,
            world_size=num_workers,
            args=(replace(task, meeting=meeting),),
            environment={
                # The arithmetic of one chunk gains nothing from threads, and the cores are few.
                "OMP_NUM_THREADS": "1",
                # The table tells the achieved rate: no warning of each worker that it is low.
                "GOSSIPDP_LOG": os.environ.get("GOSSIPDP_LOG", "error"),
            },
            timeout_s=max(LEAST_RUN_LIMIT_S, RUN_LIMIT_IN_RUNS * expected_s),
        )
    outcome = NetworkSeries.of_workers(workers, task.step_s).outcome()
    durations_s = [duration_s for worker in workers for duration_s in worker.exchange_s]
    return outcome, durations_s, sum(worker.num_failed for worker in workers)


def simulate_task(
    task: ConsensusTask,
    num_workers: int,
    exchange_s: list[float],
) -> list[Outcome]:
    """Simulate the same run, with exchanges that last as long as the measured ones.

    Simulated several times, first with the run's own seed: it costs little, and of the two figures
    that are compared one is then nearly free of chance.
    """
    scenario = Scenario(
        graph=build_graph(task.graph, num_workers, seed=task.seed),
        num_workers=num_workers,
        objective=Consensus(min(NUM_OBSERVED, task.num_floats)),
        comm_rate=task.comm_rate,
        fidelity="links",
        compute_time=ConstantTime(task.step_s),
        links=LinkModel(durations_s=tuple(exchange_s)),
        num_steps=task.num_steps,
        num_records=task.num_steps,
    )
    outcomes = []
    for repeat in range(SIMULATIONS_PER_RUN):
        seed = task.seed + repeat * SEEDS_APART
        trace = simulate(replace(scenario, seed=seed), task.method)
        outcomes.append(NetworkSeries.of_trace(trace).outcome())
    return outcomes


if __name__ == "__main__":
    run_script(main)
