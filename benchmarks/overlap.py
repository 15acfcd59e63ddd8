"""Does gossip in the background slow training down?

    python benchmarks/overlap.py [--rounds 5] [--only resnet18] [--comm-rate auto]

One worker computes (one thread, pinned to a core) and exchanges its parameters with a neighbour
once a step, or at a rate that sets itself; its gossip thread may use the other core, and the
neighbour's compute is a timed wait. Then loops that launch thousands of tiny operations a step, so
that the interpreter is always wanted. Then two workers that compute, each on the one core that it
shares with its gossip thread: ResNet-18, and 117 million parameters at a batch of 8 (needs 14 GB).
Turns with a wrapper that never exchanges, and with exchanges, alternate in the same processes.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from support.meeting import Meeting
from support.overlap_worker import ARMS, ArmTimes, OverlapTask, run_worker
from support.report import Report, Spread, Table, quantile

from gossipdp import launch

NAMES = {"none": "method none", "a2cid2": "a2cid2"}


@dataclass(frozen=True)
class Setting:
    """One of the questions; turn_s: of one arm in one round."""

    title: str
    workload: str
    shares_cores: bool
    batch_size: int
    turn_s: float


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
    ),
    "launch-bound-large": Setting(
        "Tiny operations, 11.2M parameters, a core of its own, the other core free",
        "launch-bound-large",
        False,
        4,
        1.5,
    ),
    "resnet18-shared-core": Setting(
        "ResNet-18 on both workers, each on one core with its gossip thread",
        "resnet18",
        True,
        8,
        8.0,
    ),
    "gpt-shared-core": Setting(
        "117M parameters, AdamW, on both workers, each on one core with its gossip thread",
        "gpt",
        True,
        8,
        15.0,
    ),
}


def measure(
    setting: Setting, num_rounds: int, comm_rate: float | Literal["auto"]
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
            meeting,
            comm_rate,
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
    rates = {arm: steps_per_s(setting, workers, arm) for arm in ARMS}
    arms = {}
    for arm in ARMS:
        step_ms = [
            1e3 * step
            for times in computing(setting, workers, arm)
            for steps in times.step_s
            for step in steps
        ]
        num_steps = sum(worker[arm].num_steps for worker in workers)
        exchanges = sum(worker[arm].exchanges for worker in workers)
        exchange_s = sum(worker[arm].exchange_s for worker in workers)
        gossip_cpu_s = sum(worker[arm].gossip_cpu_s for worker in workers)
        arms[arm] = {
            "steps_per_s": Spread.of(rates[arm]),
            "num_steps": len(step_ms),
            "step_ms_median": quantile(step_ms, 0.5),
            "step_ms_p99": quantile(step_ms, 0.99),
            "achieved_comm_rate": exchanges / num_steps if num_steps else 0.0,
            "exchange_ms": 1e3 * exchange_s / exchanges if exchanges else None,
            "gossip_cpu_ms": 1e3 * gossip_cpu_s / exchanges if exchanges else None,
        }
    over = (w / v for w, v in zip(rates["a2cid2"], rates["none"], strict=True))
    return {"arms": arms, "rate_over": Spread.of(over)}


def table(setting: Setting, found: dict[str, Any]) -> Table:
    """Return the table of steps."""
    rows = []
    for arm, each in found["arms"].items():
        has = arm == "a2cid2" and each["exchange_ms"] is not None
        rows.append(
            (
                NAMES[arm],
                each["steps_per_s"].text(),
                f"{each['step_ms_median']:.1f}",
                f"{each['step_ms_p99']:.1f}",
                f"{each['num_steps']}",
                f"{each['achieved_comm_rate']:.2f}" if has else "",
                f"{each['exchange_ms']:.1f}" if has else "",
                f"{each['gossip_cpu_ms']:.1f}" if has else "",
            )
        )
    head = (
        "", "steps/s", "step, median ms", "p99 ms", "steps", "comm rate", "exchange, ms",
        "its CPU, ms",
    )  # fmt: skip
    note = (
        f"With exchanges over method none: steps/s {found['rate_over'].text('.3f')}. Medians over "
        "the rounds, least and greatest."
    )
    return Table(setting.title, head, rows, note)


def _comm_rate(text: str) -> float | Literal["auto"]:
    return "auto" if text == "auto" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SETTINGS, action="append")
    parser.add_argument("--comm-rate", type=_comm_rate, default=1.0, help="a number, or auto")
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
        found = summary(setting, measure(setting, num_rounds, options.comm_rate))
        results[name] = found
        report.tables.append(table(setting, found))
    report.write(results)


if __name__ == "__main__":
    main()
