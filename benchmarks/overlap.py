"""Does gossip in the background slow training down?

    python benchmarks/overlap.py [--rounds 5] [--only resnet18] [--comm-rate auto]

One worker computes (one thread, pinned to a core) and exchanges its parameters with a neighbour
once a step, or at a rate that sets itself; its gossip thread may use the other core, and the
neighbour's compute is a timed wait. Then loops that launch thousands of tiny operations a step, so
that the interpreter is always wanted. Then two workers that compute, each on the one core that it
shares with its gossip thread: ResNet-18, and 117 million parameters at a batch of 8 (needs 14 GB).
Turns without a wrapper, with one that never exchanges, and with exchanges alternate in the same
processes; for the tiny operations also without exchanges while something else keeps the other core
as busy as the gossip threads do, which tells what the machine takes by itself.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from overlap_worker import ARMS, CONTROLLED_ARMS, ArmTimes, OverlapTask, run_worker
from support.meeting import Meeting
from support.report import Report, Spread, Table, Target, quantile

from gossipdp import launch

RATE_LIMIT, TAIL_LIMIT, STEP_LIMIT = 0.97, 1.15, 1.1
NAMES = {
    "plain": "no wrapper",
    "none": "method none",
    "busy": "method none, the other core as busy",
    "a2cid2": "a2cid2",
}


@dataclass(frozen=True)
class Setting:
    """One of the questions; turn_s: of one arm in one round."""

    title: str
    workload: str
    shares_cores: bool
    batch_size: int
    turn_s: float
    arms: tuple[str, ...] = ARMS


SETTINGS = {
    "resnet18": Setting(
        "ResNet-18, a core of its own, the other core free", "resnet18", False, 32, 8.0
    ),
    "launch-bound": Setting(
        "Tiny operations, 1M parameters, a core of its own, the other core free",
        "launch-bound",
        False,
        4,
        1.5,
        CONTROLLED_ARMS,
    ),
    "launch-bound-large": Setting(
        "Tiny operations, 11.2M parameters, a core of its own, the other core free",
        "launch-bound-large",
        False,
        4,
        1.5,
        CONTROLLED_ARMS,
    ),
    "resnet18-shared-core": Setting(
        "ResNet-18 on both workers, each on one core with its gossip thread",
        "resnet18",
        True,
        8,
        8.0,
        ("none", "a2cid2"),
    ),
    "gpt-shared-core": Setting(
        "117M parameters, AdamW, on both workers, each on one core with its gossip thread",
        "gpt",
        True,
        8,
        15.0,
        ("none", "a2cid2"),
    ),
}


def measure(
    setting: Setting, num_rounds: int, comm_rate: float | Literal["auto"], gossip_nice: int
) -> list[dict[str, ArmTimes]]:
    """Run the two workers; the times of each."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        Meeting.create(meeting, 2)
        task = OverlapTask(
            setting.workload,
            setting.shares_cores,
            setting.batch_size,
            setting.turn_s,
            num_rounds,
            setting.arms,
            meeting,
            comm_rate,
            gossip_nice,
        )
        return launch(run_worker, world_size=2, args=(task,), timeout_s=900.0)


def computing(setting: Setting, workers: list[dict[str, ArmTimes]], arm: str) -> list[ArmTimes]:
    """Return the times of an arm, of those workers that compute."""
    return [worker[arm] for worker in (workers if setting.shares_cores else workers[:1])]


def steps_per_s(setting: Setting, workers: list[dict[str, ArmTimes]], arm: str) -> list[float]:
    """By round: the mean over the workers that compute."""
    rates = [
        [len(steps) / sum(steps) for steps in times.step_s]
        for times in computing(setting, workers, arm)
    ]
    return [sum(of_round) / len(of_round) for of_round in zip(*rates, strict=True)]


def summary(setting: Setting, workers: list[dict[str, ArmTimes]]) -> dict[str, Any]:
    """Return the figures of one setting."""
    rates = {arm: steps_per_s(setting, workers, arm) for arm in setting.arms}
    arms = {}
    for arm in setting.arms:
        measured = computing(setting, workers, arm)
        step_ms = [1e3 * step for times in measured for steps in times.step_s for step in steps]
        median_ms, tail_ms = quantile(step_ms, 0.5), quantile(step_ms, 0.99)
        num_steps = sum(worker[arm].num_steps for worker in workers)
        boundary_ms = {
            kind: [1e3 * each for times in measured for each in times.boundary_s[kind]]
            for kind in ArmTimes().boundary_s
        }
        initiated = sum(worker[arm].exchanges_initiated for worker in workers)
        exchanges = sum(worker[arm].exchanges for worker in workers)
        arms[arm] = {
            "steps_per_s": Spread.of(rates[arm]),
            "num_steps": len(step_ms),
            "boundary_share": sum(map(sum, boundary_ms.values())) / sum(step_ms),
            "step_ms_median": median_ms,
            "step_ms_p99": tail_ms,
            "tail": tail_ms / median_ms,
            "achieved_comm_rate": 2 * initiated / num_steps if num_steps else 0.0,
            "exchange_ms": 1e3 * sum(worker[arm].exchange_s for worker in workers) / exchanges
            if exchanges
            else None,
            "gossip_cpu_ms": 1e3 * sum(worker[arm].gossip_cpu_s for worker in workers) / exchanges
            if exchanges
            else None,
            "boundary_ms": {
                kind: {"median": quantile(each, 0.5), "p99": quantile(each, 0.99), "num": len(each)}
                for kind, each in boundary_ms.items()
                if each
            },
        }
    ratios = {
        arm: Spread.of(w / v for w, v in zip(rates["a2cid2"], rates[arm], strict=True))
        for arm in setting.arms
        if arm != "a2cid2"
    }
    return {
        "arms": arms,
        "rate_over": ratios,
        "tail_over": {arm: arms["a2cid2"]["tail"] / arms[arm]["tail"] for arm in ratios},
    }


def tables(setting: Setting, found: dict[str, Any]) -> list[Table]:
    """Return the table of steps and boundary costs."""
    arms = found["arms"]
    steps = [
        (
            NAMES[arm],
            arms[arm]["steps_per_s"].text(),
            f"{arms[arm]['step_ms_median']:.1f}",
            f"{arms[arm]['step_ms_p99']:.1f}",
            f"{arms[arm]['tail']:.3f}",
            f"{arms[arm]['num_steps']}",
            f"{arms[arm]['boundary_share']:.1%}",
            f"{arms[arm]['achieved_comm_rate']:.2f}" if arm == "a2cid2" else "",
            f"{arms[arm]['exchange_ms']:.1f}" if arm == "a2cid2" else "",
            f"{arms[arm]['gossip_cpu_ms']:.1f}" if arm == "a2cid2" else "",
        )
        for arm in setting.arms
    ]
    texts = {"nothing": "nothing to add", "flow": "flow alone", "pending": "an exchange's part"}
    boundaries = [
        (
            f"{NAMES[arm]}: {texts[kind]}",
            f"{each['median']:.2f}",
            f"{each['p99']:.2f}",
            f"{each['num']}",
        )
        for arm in setting.arms
        for kind, each in arms[arm]["boundary_ms"].items()
    ]
    over = "; ".join(
        f"over {NAMES[arm]}: steps/s {found['rate_over'][arm].text('.3f')}, p99/median "
        f"{found['tail_over'][arm]:.3f}"
        for arm in found["rate_over"]
    )
    note = f"With exchanges {over}. Medians over the rounds, least and greatest."
    head = (
        "",
        "steps/s",
        "step, median ms",
        "p99 ms",
        "p99/median",
        "steps",
        "in the boundary",
        "comm rate",
        "exchange, ms",
        "its CPU, ms",
    )
    return [
        Table(setting.title, head, steps, note),
        Table(
            f"{setting.title}: the step boundary", ("", "median ms", "p99 ms", "number"), boundaries
        ),
    ]


def _comm_rate(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--comm-rate", type=_comm_rate, default=1.0, help="a number, or auto")
    parser.add_argument("--gossip-nice", type=int, default=0, help="nice of the gossip threads")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    options = parser.parse_args()
    name = "overlap_auto" if options.comm_rate == "auto" else "overlap"
    report = Report(name, "Does gossip in the background slow training down?", options.quick)
    results: dict[str, Any] = {}
    for name in options.only or SETTINGS:
        setting, num_rounds = SETTINGS[name], options.rounds
        if options.quick:
            setting, num_rounds = replace(setting, turn_s=min(setting.turn_s, 2.0)), 2
        print(f"{setting.title} ...", flush=True)
        found = summary(
            setting, measure(setting, num_rounds, options.comm_rate, options.gossip_nice)
        )
        results[name] = found
        report.tables += tables(setting, found)
        if name == "gpt-shared-core":
            over = 1 / found["rate_over"]["none"].median
            report.targets.append(
                Target(f"{name}: a step over one of method none", over, STEP_LIMIT)
            )
            continue
        rate, tail = found["rate_over"]["none"].median, found["tail_over"]["none"]
        if setting.shares_cores:
            title = f"{name}: p99/median step time over that without communication"
            report.targets.append(Target(title, tail, TAIL_LIMIT))
        else:
            title = f"{name}: steps/s over no communication"
            report.targets.append(Target(title, rate, RATE_LIMIT, at_most=False))
    report.write(results)


if __name__ == "__main__":
    main()
