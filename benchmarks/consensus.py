"""The rate at which real workers come to agree, beside simulated ones.

python benchmarks/consensus.py --workers 16 --graph ring --method a2cid2 --json PATH
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from consensus_series import LOWEST_SHARE, NetworkSeries, Outcome, summarize
from consensus_worker import NUM_OBSERVED, ConsensusTask, run_worker
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from support.report import quantile, run_script

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

    seeds: str = "0,1,2,3,4"
    """One run for each: a list such as 0,1,2, or how many."""

    link_mbytes: float | None = option(None, positive_number)
    """Limit on what each worker sends, in MB/s; by default none."""

    json: Path | None = option(None, output_file)
    """Also write the results to this file."""

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
        arguments = replace(arguments, workers=3, steps=40, step_ms=20.0, seeds="0,")
    seeds = check(arguments)
    console = Console()
    tasks = [make_task(arguments, seed) for seed in seeds]
    console.print(_opening(arguments, seeds), highlight=False, soft_wrap=True)
    exchange_s: list[float] = []
    measured: list[Outcome] = []
    num_failed = 0
    for task in tasks:
        with _bar(console, f"measured, seed {task.seed}") as advance:
            outcome, durations_s, failed = measure(task, arguments.workers, advance)
        measured.append(outcome)
        exchange_s += durations_s
        num_failed += failed
        _tell(console, "measured", task.seed, outcome)
    simulated: list[Outcome] = []
    for task in tasks:
        with _bar(console, f"simulated, seed {task.seed}") as advance:
            outcomes = simulate_task(task, arguments.workers, exchange_s, advance)
        for outcome in outcomes:
            _tell(console, "simulated", task.seed, outcome)
        simulated += outcomes
    summary: dict[str, Any] = {
        "measured": {
            **summarize(measured),
            "exchange_s": {
                "median": quantile(exchange_s, 0.5),
                "p10": quantile(exchange_s, 0.1),
                "p90": quantile(exchange_s, 0.9),
            },
            "exchanges": len(exchange_s) // 2,
            "failed_exchanges": num_failed,
        },
        "simulated": summarize(simulated),
        "configuration": configuration(arguments, seeds),
    }
    console.print(_table(summary))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
        console.print(f"written: {arguments.json}", highlight=False, soft_wrap=True, markup=False)


def check(arguments: ConsensusBenchmark) -> list[int]:
    """Return the seeds, or raise ValueError for an invalid list. Quick, without torch."""
    check_flags(arguments)
    numbers = arguments.seeds.strip(",").split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--seeds is {arguments.seeds!r}; write a list such as 0,1,2")
    seeds = [int(number) for number in numbers]
    if arguments.link_mbytes is not None:
        megabits_per_s("8 * --link-mbytes", 8 * arguments.link_mbytes)
    build_graph(arguments.graph, arguments.workers, seed=seeds[0])
    return seeds


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
    )


def measure(
    task: ConsensusTask, num_workers: int, advance: Callable[[float], None]
) -> tuple[Outcome, list[float], int]:
    """One run of real processes: its figures, the durations of all exchanges, how many failed."""
    expected_s = task.num_steps * task.step_s
    started_s = time.monotonic()
    workers = gossipdp.launch(
        run_worker,
        world_size=num_workers,
        args=(task,),
        environment={
            # The arithmetic of one chunk gains nothing from threads, and the cores are few.
            "OMP_NUM_THREADS": "1",
            # The table tells the achieved rate: no warning of each worker that it is low.
            "GOSSIPDP_LOG": os.environ.get("GOSSIPDP_LOG", "error"),
        },
        timeout_s=max(LEAST_RUN_LIMIT_S, RUN_LIMIT_IN_RUNS * expected_s),
        on_poll=lambda: advance(min(1.0, (time.monotonic() - started_s) / expected_s)),
    )
    outcome = NetworkSeries.of_workers(workers, task.step_s).outcome()
    durations_s = [duration_s for worker in workers for duration_s in worker.exchange_s]
    return outcome, durations_s, sum(worker.num_failed for worker in workers)


def simulate_task(
    task: ConsensusTask,
    num_workers: int,
    exchange_s: list[float],
    advance: Callable[[float], None],
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

        def advance_all(share: float, done: int = repeat) -> None:
            advance((done + share) / SIMULATIONS_PER_RUN)

        trace = simulate(replace(scenario, seed=seed), task.method, advance_all)
        outcomes.append(NetworkSeries.of_trace(trace).outcome())
    return outcomes


def configuration(arguments: ConsensusBenchmark, seeds: list[int]) -> dict[str, Any]:
    """Return the configuration that was asked for."""
    asked = asdict(arguments) | {"seeds": seeds}
    del asked["json"], asked["quick"]
    return asked


@contextmanager
def _bar(console: Console, text: str) -> Iterator[Callable[[float], None]]:
    """Show a bar of the share that is done, on a terminal only."""
    with Progress(
        console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(text, total=1.0)

        def advance(share: float) -> None:
            progress.update(task, completed=share, refresh=True)

        yield advance


def _opening(arguments: ConsensusBenchmark, seeds: list[int]) -> str:
    text = (
        f"consensus: {arguments.workers} workers, graph {arguments.graph}, method "
        f"{arguments.method}, comm rate {arguments.comm_rate:g}, "
        f"{arguments.steps} steps of {arguments.step_ms:g} ms, "
        f"{arguments.floats:,} floats"
    )
    if arguments.link_mbytes is not None:
        text += f", links of {arguments.link_mbytes:g} MB/s"
    return f"{text}, seeds {', '.join(map(str, seeds))}"


def _tell(console: Console, half: str, seed: int, outcome: Outcome) -> None:

    line = (
        f"{half}, seed {seed}: decay per exchange {outcome.decay_per_exchange:.4g}, achieved comm "
        f"rate {outcome.achieved_comm_rate:.3f}"
    )
    if not outcome.is_long_enough:
        line += (
            f" (short: the consensus distance fell to {outcome.lowest_share:.2g} of its first "
            f"value, and the slope should be taken down to {LOWEST_SHARE:g}; give more --steps)"
        )
    console.print(line, highlight=False, soft_wrap=True)


def _table(summary: dict[str, Any]) -> Table:

    measured, simulated = summary["measured"], summary["simulated"]
    table = Table()
    for heading in ("", "measured", "simulated", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    for name in ("decay_per_exchange", "achieved_comm_rate"):
        table.add_row(
            name.replace("_", " "),
            *(f"{half[name]:.4g} ± {half[f'{name}_spread']:.2g}" for half in (measured, simulated)),
            f"{simulated[name] / measured[name]:.3f}",
        )
    times = measured["exchange_s"]
    table.add_row(
        "exchange (ms)",
        f"{1e3 * times['median']:.2f} ({1e3 * times['p10']:.2f} to {1e3 * times['p90']:.2f})",
        "drawn from those",
        "",
    )
    return table


if __name__ == "__main__":
    run_script(main)
