"""``gossipdp demo --compare``: all-reduce and gossip train the same, with one slow worker."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from gossipdp_lab.demo.options import DemoArguments
from gossipdp_lab.demo.training import Training, shown, train, write_reports

WORKLOAD: Final = "pystdlib-small"

# Its learning rate, 0.016, is the best for both methods. These are bits per byte, measured by
# benchmarks/quality.py with the same text, batches and betas, a network of 72,000 parameters, and 4
# equally fast workers of 2,048 steps at pace "strict". The seed is 0, at 0.016 also 1 and 2:
#
#   rate    DDP                   a2cid2
#   0.008   2.191                 2.254
#   0.016   2.168, 2.217, 2.231   2.185, 2.224, 2.279
#   0.032   2.210                 2.211
AS_GOOD = 0.03
"""Losses that differ by at most this share count as equally good: DDP's above differ by 2.9%."""

AS_LONG = 0.05
"""Times that differ by at most this share count as equally long."""

PICTURE_FILE = "comparison.png"


def check_compare(arguments: DemoArguments) -> None:
    """Raise ValueError for options that exclude ``--compare``."""
    tuned = f"it trains {WORKLOAD} at a learning rate that is tuned for it"
    reasons = {
        "restart": (arguments.restart, "all-reduce does not outlive a death"),
        "workload": (arguments.workload not in (None, WORKLOAD), tuned),
        "learning-rate": (arguments.learning_rate is not None, tuned),
    }
    for option, (is_given, reason) in reasons.items():
        if is_given:
            raise ValueError(f"--compare does not go with --{option}: {reason}; leave one out")
    if arguments.method not in ("a2cid2", "gossip"):
        raise ValueError(
            f"--compare compares all-reduce with gossip, not with --method {arguments.method}; "
            "choose a2cid2 or gossip"
        )
    if arguments.faults is not None and (
        arguments.slow_worker is None or len(arguments.fault_plan.clauses) > 1
    ):
        raise ValueError(
            'the --faults of --compare make one worker slow all the time, such as "slow 4x 2"; '
            f"here they are {str(arguments.fault_plan)!r}"
        )
    if arguments.workers < 2:
        raise ValueError("--compare needs workers that wait for one another: --workers 2 or more")


def both(arguments: DemoArguments) -> dict[str, DemoArguments]:
    """Return the two trainings: all-reduce first, then ``--method``; equal except the method."""
    return {
        method: replace(
            arguments,
            compare=False,
            workload=WORKLOAD,
            method=method,
            faults=arguments.faults or f"slow 4x {min(2, arguments.workers - 1)}",
            output=arguments.directory / method,
        )
        for method in ("allreduce", arguments.method)
    }


@dataclass(frozen=True)
class Verdict:
    """The results of two trainings on the same samples, all-reduce's and gossip's.

    Seconds are from the start to the last gradient step; losses are the averaged models', in
    bits per byte of held-out text.
    """

    method: str
    slow_worker: tuple[int, float]
    num_samples: int
    allreduce_s: float
    gossip_s: float
    allreduce_loss: float
    gossip_loss: float

    @property
    def times_as_fast(self) -> float:
        """Return how many times as fast gossip was."""
        return self.allreduce_s / self.gossip_s

    @property
    def worse_by(self) -> float:
        """Return the share by which gossip's loss is higher; negative if it is lower."""
        return self.gossip_loss / self.allreduce_loss - 1

    def __str__(self) -> str:
        gain, gap = self.times_as_fast, self.worse_by
        is_faster, is_worse = gain > 1 + AS_LONG, gap > AS_GOOD
        speed = "slower" if gain < 1 - AS_LONG else "not faster"
        if is_faster:
            speed = f"{gain:.1f} times as fast"
        if abs(gap) <= AS_GOOD:
            quality = "both models are as good"
        else:
            quality = f"its model is {abs(gap):.1%} {'worse' if is_worse else 'better'}"
        but = "but" if is_faster == is_worse else "and"
        rank, factor = self.slow_worker
        return (
            f"While worker {rank} was {factor:g} times slower, {self.method} took "
            f"{self.gossip_s:.1f} s and all-reduce {self.allreduce_s:.1f} s for the same "
            f"{self.num_samples:,} samples, so {self.method} was {speed}, {but} {quality}: "
            f"{self.gossip_loss:.3f} and {self.allreduce_loss:.3f} bits per byte (lower is better)."
        )


def compare(arguments: DemoArguments) -> int:
    """Train by both methods, show the difference and draw it; return the exit status."""
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    runs = both(arguments)
    trainings = {}
    for number, (method, own) in enumerate(runs.items(), 1):
        say(f"{number} of {len(runs)}: {_name(method)}")
        trainings[method] = train(own, console)
    verdict = judge(arguments.method, trainings)
    console.print(_table(trainings))
    console.print(str(verdict), style="bold", highlight=False)
    picture = arguments.directory / PICTURE_FILE
    _draw(verdict, trainings, picture)
    say(f"picture: {shown(picture)}")
    for method, own in runs.items():
        write_reports(own, trainings[method].run_log)
        say(f"report, logs and model of {_name(method)}: {shown(own.directory)}")
    problems = [
        f"{method}: {problem}"
        for method, training in trainings.items()
        for problem in training.problems
    ]
    for problem in problems:
        say(problem)
    if arguments.json is not None:
        results = {
            "verdict": str(verdict),
            "times_as_fast": verdict.times_as_fast,
            "worse_by": verdict.worse_by,
            **{method: training.summary for method, training in trainings.items()},
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        say(f"results: {arguments.json}")
    return 1 if problems else 0


def judge(method: str, trainings: Mapping[str, Training]) -> Verdict:
    """Compare ``method`` with all-reduce."""
    allreduce, gossip = trainings["allreduce"].summary, trainings[method].summary
    metric_name, slow = trainings[method].metric_name, gossip["slow_worker"]
    return Verdict(
        method,
        (slow["rank"], slow["factor"]),
        gossip["configuration"]["samples"],
        allreduce["train_seconds"],
        gossip["train_seconds"],
        allreduce[metric_name],
        gossip[metric_name],
    )


def _name(method: str) -> str:
    return "all-reduce" if method == "allreduce" else method


def _table(trainings: Mapping[str, Training]) -> Table:
    table = Table()
    for heading in ("method", "trained (s)", "samples/s", "waited", "bits per byte"):
        table.add_column(heading, justify="right")
    for method, training in trainings.items():
        summary = training.summary
        seconds, workers = summary["train_seconds"], summary["workers"]
        waited = sum(worker["waited_seconds"] for worker in workers) / len(workers) / seconds
        table.add_row(
            _name(method),
            f"{seconds:.1f}",
            f"{summary['samples'] / seconds:,.0f}",
            f"{waited:.0%}",
            f"{summary[training.metric_name]:.3f}",
        )
    return table


def _draw(verdict: Verdict, trainings: Mapping[str, Training], path: Path) -> None:
    from gossipdp_lab.demo.comparison import Compared, draw_comparison

    draw_comparison(
        [
            Compared(_name(method), training.run_log, training.summary[training.metric_name])
            for method, training in trainings.items()
        ],
        path,
        title=textwrap.fill(str(verdict), 80),
        loss_label="training loss (bits per byte)",
        loss_unit=math.log(2),
    )
