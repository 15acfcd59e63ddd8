"""Does gossip in the background slow training down?

    python benchmarks/overlap.py [--rounds 5] [--only resnet18] [--comm-rate auto]

A wrapper that never exchanges and one that does (the *arms*) take turns in the same processes, each
with a model of its own. So they meet the same core, the same memory and the same neighbours on the
machine. In a control group with a processor limit, as a container has, both workers share what it
allows: results/overlap_auto_limited.md is of half a core.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from support.meeting import Meeting
from support.report import Report, Spread, Table
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel, launch
from gossipdp.launcher.cores import limit
from gossipdp.protocol.worker import Method
from gossipdp_lab.tasks.resnet import CIFAR_RESNET18_PARAMETERS, cifar_resnet18

ARMS: tuple[Method, ...] = ("none", "a2cid2")
"""The wrapper without exchanges, and with them."""
WARM_UP_TURNS, LEAST_WARM_UP_S = 0.4, 2.0
SETTLE_S = 0.25  # for what an arm's exchanges still have to do when its turn is over


@dataclass(frozen=True)
class Setting:
    """One of the questions.

    workload: ``resnet18``, ``launch-bound`` or ``launch-bound-large``.
    shares_cores: both workers compute, each on a core that its gossip thread shares. Otherwise
        worker 0 computes on a core of its own, and worker 1's compute is a timed wait: the other
        core is there for both gossip threads.
    turn_s: of one arm in one round.
    """

    title: str
    workload: str
    shares_cores: bool
    batch_size: int
    turn_s: float


TINY = "Tiny operations, a core of its own, the other core free"
SETTINGS = {
    "resnet18": Setting(
        "ResNet-18, a core of its own, the other core free", "resnet18", False, 32, 8.0
    ),
    "launch-bound": Setting(f"{TINY}, 1M parameters", "launch-bound", False, 4, 1.5),
    "launch-bound-large": Setting(f"{TINY}, 11.2M parameters", "launch-bound-large", False, 4, 1.5),
    "resnet18-shared-core": Setting(
        "ResNet-18 on both workers, each on one core with its gossip thread",
        "resnet18",
        True,
        8,
        8.0,
    ),
}


class LaunchBound(nn.Module):
    """Thousands of operations on a few values each: Python is busy all the time.

    ``ballast`` gets no gradient, so that no step computes with it, but the optimizer holds it: an
    exchange may carry as much as one of ResNet-18. (batch, 16) to (batch, 16).
    """

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(16) for _ in range(200))
        self.shifts = nn.ParameterList(torch.zeros(16) for _ in range(200))
        self.ballast = nn.Parameter(torch.zeros(num_parameters - 2 * 16 * 200))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values after 1,200 scalings and shifts."""
        for _ in range(6):
            for scale, shift in zip(self.scales, self.shifts, strict=True):
                values = torch.tanh(values * scale + shift)
        return values


@dataclass
class ArmTimes:
    """The measurements of one worker in one arm.

    steps_per_s: by round; the first step of a turn is left out.
    num_steps: of the wrapper, those left out included; so are the exchanges.
    """

    steps_per_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    exchanges: int = 0


def run_worker(
    setting: Setting, num_rounds: int, comm_rate: float | Literal["auto"], meeting_path: Path
) -> dict[str, ArmTimes]:
    """Take turns with the other worker; return this one's times by arm."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    meeting = Meeting(meeting_path, rank)
    cores = sorted(os.sched_getaffinity(0))
    own_core = cores[rank % len(cores)]
    waits = rank == 1 and not setting.shares_cores
    if waits or setting.shares_cores:
        os.sched_setaffinity(0, {own_core})  # the gossip thread, started below, has the same
    arms = {name: _Arm(name, setting, comm_rate, rank) for name in ARMS}
    # Of the calling thread alone: the gossip thread, which runs already, keeps all cores.
    os.sched_setaffinity(0, {own_core})
    if not waits:
        meeting.say(min(arm.step() for arm in arms.values() for _ in range(2)))
    meeting.meet()
    wait_s = meeting.heard(0) if waits else None
    for round_number in range(-1, num_rounds):
        for name in ARMS if round_number % 2 else reversed(ARMS):
            meeting.meet()
            time.sleep(SETTLE_S)
            meeting.meet()
            turn_s = setting.turn_s
            if round_number < 0:
                turn_s = max(LEAST_WARM_UP_S, WARM_UP_TURNS * turn_s)
            steps_per_s = arms[name].take_turn(turn_s, wait_s)
            if round_number >= 0:
                arms[name].times.steps_per_s.append(steps_per_s)
            else:
                arms[name].start_over()
    meeting.meet()
    for arm in arms.values():
        arm.close()
    return {name: arm.times for name, arm in arms.items()}


class _Arm:
    """One way to train, with its own model and optimizer."""

    def __init__(
        self, name: Method, setting: Setting, comm_rate: float | Literal["auto"], rank: int
    ) -> None:
        torch.manual_seed(rank)
        self.times = ArmTimes()
        self._inputs: Tensor
        self._labels: Tensor | None = None
        if setting.workload == "resnet18":
            net: nn.Module = cifar_resnet18()
            self._inputs = torch.randn(setting.batch_size, 3, 32, 32)
            self._labels = torch.randint(10, (setting.batch_size,))
        else:
            large = setting.workload == "launch-bound-large"
            net = LaunchBound(num_parameters=CIFAR_RESNET18_PARAMETERS if large else 1_000_000)
            self._inputs = torch.randn(setting.batch_size, 16)
        foreach = setting.workload == "resnet18"
        self._optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, foreach=foreach)
        with _alone() if name == "none" else nullcontext():
            self._wrapped = GossipDataParallel(
                net,
                self._optimizer,
                method=name,
                comm_rate=comm_rate,
                counting=Counting(samples_per_step=setting.batch_size),
            )

    def step(self, wait_s: float | None = None) -> float:
        """One gradient step, or a timed wait and the optimizer's step; its duration in seconds."""
        began_s = time.perf_counter()
        if wait_s is not None:
            time.sleep(wait_s)
            self._optimizer.step()  # no gradient: nothing but the boundary
            return time.perf_counter() - began_s
        self._optimizer.zero_grad()
        outputs = self._wrapped(self._inputs)
        if self._labels is not None:
            loss = nn.functional.cross_entropy(outputs, self._labels)
        else:
            loss = outputs.square().mean()
        loss.backward()
        self._optimizer.step()
        return time.perf_counter() - began_s

    def take_turn(self, turn_s: float, wait_s: float | None) -> float:
        """Step for so long, at least twice; return the steps/s without the first."""
        began_s = time.perf_counter()
        durations_s: list[float] = []
        while len(durations_s) < 2 or time.perf_counter() < began_s + turn_s:
            durations_s.append(self.step(wait_s))
        return 1 / statistics.fmean(durations_s[1:])

    def start_over(self) -> None:
        """Forget what was measured so far: the warm-up."""
        self.times = ArmTimes()
        self._count(-1)

    def close(self) -> None:
        """Take note of the exchanges, and end them."""
        self._count(1)
        self._wrapped.close()

    def _count(self, sign: int) -> None:
        stats, times = self._wrapped.stats(), self.times
        times.num_steps += sign * stats.gradient_steps
        times.exchanges += sign * stats.exchanges


@contextmanager
def _alone() -> Iterator[None]:
    """Without a launcher's variables, so that what is wrapped meanwhile is a run of its own."""
    kept = dict(os.environ)
    for name in kept:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR") or (
            name.startswith(("MASTER_PORT", "GOSSIPDP_", "TORCHELASTIC_"))
            and name != "GOSSIPDP_KERNELS"
        ):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def measure(
    setting: Setting, num_rounds: int, comm_rate: float | Literal["auto"]
) -> list[dict[str, ArmTimes]]:
    """Run the two workers; the times of each."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        Meeting.create(meeting, 2)
        task = (setting, num_rounds, comm_rate, meeting)
        return launch(run_worker, world_size=2, args=task, timeout_s=900.0)


def summary(setting: Setting, workers: list[dict[str, ArmTimes]]) -> dict[str, Any]:
    """Return the figures of one setting; steps/s are the mean of the workers that compute."""
    rates: dict[str, list[float]] = {}
    arms = {}
    for arm in ARMS:
        times = [worker[arm] for worker in workers]
        computing = times if setting.shares_cores else times[:1]
        of_rounds = zip(*(each.steps_per_s for each in computing), strict=True)
        rates[arm] = [statistics.fmean(each) for each in of_rounds]
        num_steps = sum(each.num_steps for each in times)
        arms[arm] = {
            "steps_per_s": Spread.of(rates[arm]),
            "achieved_comm_rate": sum(each.exchanges for each in times) / max(1, num_steps),
        }
    over = (w / v for w, v in zip(rates["a2cid2"], rates["none"], strict=True))
    return {"arms": arms, "rate_over": Spread.of(over)}


def table(setting: Setting, found: dict[str, Any]) -> Table:
    rows = [
        (
            "method none" if arm == "none" else arm,
            each["steps_per_s"].text(),
            "" if arm == "none" else f"{each['achieved_comm_rate']:.2f}",
        )
        for arm, each in found["arms"].items()
    ]
    note = (
        f"With exchanges over method none: steps/s {found['rate_over'].text('.3f')}. Medians over "
        "the rounds, least and greatest."
    )
    return Table(setting.title, ("", "steps/s", "comm rate"), rows, note)


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
    name += "_limited" if limit()[0] < math.inf else ""
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
