"""``gossipdp demo --compare``: all-reduce and gossip train for as long, on machines that misbehave.

In both trainings one worker at a time is four times slower, three in turn. Gossip's loses a worker
besides: under all-reduce a death ends the run.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console
from rich.table import Table

from gossipdp.launcher.fault_plan import FaultPlan
from gossipdp_lab.demo.options import DemoArguments
from gossipdp_lab.demo.training import Training, shown, train, write_reports
from gossipdp_lab.tasks import MethodName

WORKLOAD: Final = "pystdlib-small"
SECONDS: Final = 40.0

ALLREDUCE_RATE: Final = 0.008
"""All-reduce makes so few steps here that half of the workload's rate suits it better: 3.39 bits a
byte in place of 3.58, one run each on two cores. Gossip keeps the workload's, 0.016. In 2,048 steps
of equally fast workers that is the best for both, on a grid of factors of two (quality.py)."""

AS_GOOD = 0.03
"""Losses that differ by at most this share count as equally good: with three seeds, 2,048 steps and
equally fast workers DDP ended at 2.168, 2.217 and 2.231, which differ by 2.9%."""

AS_MANY = 0.05
"""Numbers of samples that differ by at most this share count as equal."""

PICTURE_FILE = "comparison.png"


def check_compare(arguments: DemoArguments) -> None:
    """Raise ValueError for options that exclude ``--compare``."""
    tuned = f"it trains {WORKLOAD} at a learning rate that is tuned for it"
    reasons = {
        "restart": (arguments.restart, "killed workers are started again anyway"),
        "samples": (arguments.samples is not None, "both train for as long, see --seconds"),
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
    if arguments.workers < 2:
        raise ValueError("--compare needs workers that wait for one another: --workers 2 or more")


def default_faults(num_workers: int, seconds: float) -> str:
    """Return a plan with one slow worker after the other, and worker 0 killed half-way."""
    turn_s = round(seconds / 3, 1)
    slow = [
        f"slow 4x {(1 + turn) % num_workers} at {round(turn * turn_s, 1)}s for {turn_s}s"
        for turn in range(3)
    ]
    return "; ".join([*slow, f"kill 0 at {round(seconds / 2, 1)}s"])


def both(arguments: DemoArguments) -> dict[str, DemoArguments]:
    """Return the two trainings, all-reduce first; only gossip's has kills."""
    seconds = arguments.seconds or SECONDS
    text = arguments.faults or default_faults(arguments.workers, seconds)
    plan = FaultPlan.parse(text, arguments.workers)
    survivable = FaultPlan(tuple(each for each in plan.clauses if each.kind != "kill"))

    def training(method: MethodName, faults: FaultPlan) -> DemoArguments:
        return replace(
            arguments,
            compare=False,
            workload=WORKLOAD,
            seconds=seconds,
            method=method,
            learning_rate=ALLREDUCE_RATE if method == "allreduce" else None,
            faults=str(faults) or None,
            restart=faults.kills,
            output=arguments.directory / method,
        )

    return {
        "allreduce": training("allreduce", survivable),
        arguments.method: training(arguments.method, plan),
    }


@dataclass(frozen=True)
class Verdict:
    """The results of two trainings of the same length, all-reduce's and gossip's.

    The losses are those of the averaged models, in bits per byte of held-out text.
    """

    method: str
    seconds: float
    num_kills: int
    allreduce_samples: int
    gossip_samples: int
    allreduce_loss: float
    gossip_loss: float

    @property
    def times_the_samples(self) -> float:
        """Return how many times as many samples gossip trained on."""
        return self.gossip_samples / self.allreduce_samples

    @property
    def worse_by(self) -> float:
        """Return the share by which gossip's loss is higher; negative if it is lower."""
        return self.gossip_loss / self.allreduce_loss - 1

    def __str__(self) -> str:
        gain, gap = self.times_the_samples, self.worse_by
        many = f"{gain:.1f} times as many" if abs(gain - 1) > AS_MANY else "as many"
        if abs(gap) <= AS_GOOD:
            quality = "both models are as good"
        else:
            quality = f"its model is {abs(gap):.1%} {'worse' if gap > 0 else 'better'}"
        but = "but" if (gain > 1) == (gap > AS_GOOD) else "and"
        killed = "1 worker was" if self.num_kills == 1 else f"{self.num_kills} workers were"
        hurt = f"although {killed} killed in its run alone, " if self.num_kills else ""
        return (
            f"In {self.seconds:g} s {self.method} trained on {self.gossip_samples:,} samples, "
            f"{hurt}{many} as all-reduce ({self.allreduce_samples:,}), {but} {quality}: "
            f"{self.gossip_loss:.3f} and {self.allreduce_loss:.3f} bits per byte (lower is better)."
        )


def compare(arguments: DemoArguments) -> int:
    """Train by both methods, show the difference and draw it; return the exit status."""
    from gossipdp_lab.demo.comparison import Compared, draw_comparison
    from gossipdp_lab.report.view import RunView

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    runs = both(arguments)
    trainings = {}
    for number, (method, own) in enumerate(runs.items(), 1):
        say(f"{number} of {len(runs)}: {_name(method)}")
        trainings[method] = train(own, console)
    verdict = judge(runs[arguments.method], trainings)
    console.print(_table(trainings))
    console.print(str(verdict), style="bold", highlight=False)
    picture = arguments.directory / PICTURE_FILE
    draw_comparison(
        [
            Compared(
                _name(method),
                RunView(training.run_log),
                training.summary[training.metric_name],
                training.summary.get("faults", ()),
            )
            for method, training in trainings.items()
        ],
        picture,
        title=textwrap.fill(str(verdict), 80),
        loss_label="training loss (bits per byte)",
        loss_unit=math.log(2),
    )
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
            "times_the_samples": verdict.times_the_samples,
            "worse_by": verdict.worse_by,
            **{method: training.summary for method, training in trainings.items()},
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        say(f"results: {arguments.json}")
    return 1 if problems else 0


def judge(gossip: DemoArguments, trainings: Mapping[str, Training]) -> Verdict:
    """Compare gossip's training with that by all-reduce."""
    both = [trainings[method] for method in ("allreduce", gossip.method)]
    faults = trainings[gossip.method].summary.get("faults", ())
    done = [each["kind"] for each in faults if "missed" not in each]
    return Verdict(
        gossip.method,
        gossip.least_s,
        done.count("kill"),
        *(each.summary["samples"] for each in both),
        *(each.summary[each.metric_name] for each in both),
    )


def _name(method: str) -> str:
    return "all-reduce" if method == "allreduce" else method


def _table(trainings: Mapping[str, Training]) -> Table:
    table = Table()
    for heading in ("method", "samples", "samples/s", "waited", "bits per byte"):
        table.add_column(heading, justify="right")
    for method, training in trainings.items():
        summary = training.summary
        seconds, workers = summary["train_seconds"], summary["workers"]
        waited = sum(worker["waited_seconds"] for worker in workers) / len(workers) / seconds
        table.add_row(
            _name(method),
            f"{summary['samples']:,}",
            f"{summary['samples'] / seconds:,.0f}",
            f"{waited:.0%}",
            f"{summary[training.metric_name]:.3f}",
        )
    return table
