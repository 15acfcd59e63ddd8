"""``gossipdp demo``: real workers train a small model on real data, in about half a minute."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from gossipdp_lab.demo.compare import check_compare, compare
from gossipdp_lab.demo.training import WorkerResult, train, write_reports
from gossipdp_lab.demo.watch import (
    Fault,
    fault_line,
    least_duration_s,
    parse_faults,
    parse_slow_worker,
)
from gossipdp_lab.tasks.options import RunOptions, check_numbers

DEFAULT_SAMPLES = {"digits": 128_000, "pystdlib": 6_000, "pystdlib-small": 28_000}
"""Over all workers: 15 to 30 seconds of training by gossip on two cores."""


@dataclass(frozen=True)
class DemoArguments(RunOptions):
    """Train a small model with several worker processes here, and show what happens."""

    compare: bool = False
    """Train twice, by all-reduce and by --method, with one worker four times slower, and draw both
    in one picture. It takes a little over a minute. The workload is pystdlib-small."""

    workload: Literal["digits", "pystdlib", "pystdlib-small"] | None = None
    """digits (the default): handwritten digits, a small convolutional network; pystdlib: the source
    text of Python's standard library, a small byte-level transformer; pystdlib-small: the same
    text, a transformer six times smaller."""

    workers: int = 4
    """Worker processes."""

    slow_worker: str | None = None
    """RANK:FACTOR, such as 2:4: make one worker so many times slower; it waits after each
    backward pass."""

    kill: str | None = None
    """RANK@TIME, several with commas between them, such as 0@5s,3@9s: kill -9 those workers.
    Times count from the first gradient step of the run."""

    stop: str | None = None
    """RANK@TIME:DURATION, several with commas between them, such as 2@4s:8s: SIGSTOP, and SIGCONT
    after that time."""

    restart: bool = False
    """Start workers that were killed again; they rejoin the run."""

    learning_rate: float | None = None
    """The optimizer's highest learning rate; by default the workload's own."""

    samples: int | None = None
    """Samples to train on, all workers together; by default what takes about half a minute, and
    longer where faults want it."""

    pin: bool = False
    """Give each worker its own share of the cores."""

    disjoint: bool = False
    """No two workers see the same training data; for pystdlib each has a stretch of the text."""

    @property
    def task(self) -> str:
        """The workload, also where none was asked for."""
        return self.workload or "digits"

    @property
    def directory(self) -> Path:
        """Where the run's files go."""
        kind = "compare" if self.compare else self.task
        name = f"{kind}-{self.method}-{self.graph}-{self.workers}"
        return (self.output or Path("runs", name)).absolute()

    @property
    def num_samples(self) -> int:
        """Of the whole run."""
        return self.samples or DEFAULT_SAMPLES[self.task]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """In order of time."""
        return parse_faults(self.kill, self.stop, num_workers=self.workers)

    @property
    def least_s(self) -> float:
        """How long the run trains at least."""
        return 0.0 if self.samples else least_duration_s(self.faults, restart=self.restart)


def check(arguments: DemoArguments) -> None:
    """Raise ValueError for what cannot be meant; quick, without torch."""
    check_numbers(arguments, workers=1, samples=1, seed=0)
    if arguments.compare:
        check_compare(arguments)
    parse_slow_worker(arguments.slow_worker, arguments.workers)
    if arguments.faults and arguments.method == "allreduce":
        raise ValueError(
            "--kill and --stop with --method allreduce: there a death ends the run and a stop "
            "stops all; choose a2cid2, gossip or none"
        )
    if arguments.restart and arguments.kill is None:
        raise ValueError("--restart starts again who was killed; say who with --kill RANK@TIME")

    from gossipdp.graph import build_graph

    build_graph(arguments.graph, arguments.workers, seed=arguments.seed)


def run(arguments: DemoArguments) -> int:
    """Train, show the results and write the files; returns the exit status.

    Raises ValueError for bad input, before any process starts.
    """
    check(arguments)
    if arguments.compare:
        return compare(arguments)
    console = Console()

    def say(text: str, *, markup: bool = True) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=markup)

    training = train(arguments, console)
    words = training.metric_name.replace("_", " ")
    console.print(_table(training.results, words))
    lines = _lines(arguments, training.summary, words)
    for line in (*lines, *write_reports(arguments, training.run_log)):
        say(line)
    for problem in training.problems:
        say(f"[bold red]{problem}[/bold red]")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(training.summary, indent=2) + "\n", "utf-8")
        say(f"results: {arguments.json}", markup=False)
    return 1 if training.problems else 0


def _table(results: list[WorkerResult], words: str) -> Table:
    table = Table()
    headings = ("worker", "gradient steps", "samples/s", "exchanges", "waited (s)")
    for heading in (*headings, f"{words} before averaging"):
        table.add_column(heading, justify="right")
    for result in results:
        metric = result.metric_before_average
        table.add_row(
            str(result.rank),
            f"{result.gradient_steps:,}",
            f"{result.samples_per_second:,.0f}",
            f"{result.exchanges:,}",
            f"{result.waited_seconds:.2f}",
            "killed" if metric is None else f"{metric:.4f}",
        )
    return table


def _lines(arguments: DemoArguments, summary: dict[str, Any], words: str) -> list[str]:
    steps = [worker["gradient_steps"] for worker in summary["workers"]]
    metric = summary[words.replace(" ", "_")]
    lines = [
        f"{words} of the averaged model: [bold]{metric:.4f}[/bold]",
        f"trained {summary['train_seconds']:.1f} s on {summary['samples']:,} samples; gradient "
        f"steps of the slowest and the fastest worker: {min(steps):,} and {max(steps):,}",
    ]
    if arguments.method in ("a2cid2", "gossip") and len(steps) > 1:
        lines.append(
            f"achieved comm rate: {summary['achieved_comm_rate']:.3f} exchanges per worker per "
            f"gradient step, asked for {arguments.comm_rate:g}"
        )
    lines.append(
        f"consensus distance just before averaging: {summary['consensus_distance']:.3g}; "
        f"waited: {sum(worker['waited_seconds'] for worker in summary['workers']):.2f} s in all"
    )
    return lines + [fault_line(each) for each in summary.get("faults", ()) if "missed" not in each]
