"""A worker process of overlap.py: the same training loop, in turn with and without.

All ways to train (the *arms*) live in one process, each with a model of its own, and take turns of
a second or two. So they meet the same core, the same memory and the same neighbours on the machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from support.meeting import Meeting
from support.models import GptShaped, LaunchBound
from torch import Tensor, nn

from gossipdp import Counting, GossipDataParallel
from gossipdp_lab.tasks.images import CIFAR_RESNET18_PARAMETERS, cifar_resnet18

ARMS = ("none", "a2cid2")
"""The wrapper without exchanges, and with them."""
WARM_UP_TURNS, LEAST_WARM_UP_S = 0.4, 2.0
SETTLE_S = 0.25  # for what an arm's exchanges still have to do when its turn is over


@dataclass(frozen=True)
class OverlapTask:
    """One setting, the same for both workers.

    workload: ``resnet18``, ``launch-bound``, ``launch-bound-large`` or ``gpt``.
    shares_cores: both workers compute, each on a core that its gossip thread shares. Otherwise
        worker 0 computes on a core of its own, and worker 1's compute is a timed wait: the other
        core is there for both gossip threads.
    turn_s: how long an arm's turn lasts.
    """

    workload: str
    shares_cores: bool
    batch_size: int
    turn_s: float
    num_rounds: int
    meeting: Path
    comm_rate: float | Literal["auto"] = "auto"


@dataclass
class ArmTimes:
    """The measurements of one worker in one arm.

    step_s: seconds of each step, by round; the first of a turn is left out.
    num_steps: of the wrapper, those left out included; so are the exchanges.
    exchange_s: wall time with an exchange under way.
    gossip_cpu_s: CPU time of the gossip thread.
    """

    step_s: list[list[float]] = field(default_factory=list)
    num_steps: int = 0
    exchanges: int = 0
    exchange_s: float = 0.0
    gossip_cpu_s: float = 0.0


def run_worker(task: OverlapTask) -> dict[str, ArmTimes]:
    """Take turns with the other worker; return this one's times by arm."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    meeting = Meeting(task.meeting, rank)
    cores = sorted(os.sched_getaffinity(0))
    own_core = cores[rank % len(cores)]
    waits = rank == 1 and not task.shares_cores
    if waits or task.shares_cores:
        os.sched_setaffinity(0, {own_core})  # the gossip thread, started below, has the same
    arms = {name: _Arm(name, task, rank) for name in ARMS}
    # Of the calling thread alone: the gossip thread, which runs already, keeps all cores.
    os.sched_setaffinity(0, {own_core})
    if not waits:
        meeting.say(min(arm.step() for arm in arms.values() for _ in range(2)))
    meeting.meet()
    wait_s = meeting.heard(0) if waits else None
    for round_number in range(-1, task.num_rounds):
        for name in ARMS if round_number % 2 else reversed(ARMS):
            meeting.meet()
            time.sleep(SETTLE_S)
            meeting.meet()
            turn_s = task.turn_s
            if round_number < 0:
                turn_s = max(LEAST_WARM_UP_S, WARM_UP_TURNS * turn_s)
            durations_s = arms[name].take_turn(turn_s, wait_s)
            if round_number >= 0:
                arms[name].times.step_s.append(durations_s)
            else:
                arms[name].start_over()
    meeting.meet()
    for arm in arms.values():
        arm.close()
    return {name: arm.times for name, arm in arms.items()}


class _Arm:
    """One way to train, with its own model and optimizer."""

    def __init__(self, name: str, task: OverlapTask, rank: int) -> None:
        torch.manual_seed(rank)
        self.times = ArmTimes()
        self._inputs: Tensor
        self._labels: Tensor | None = None
        if task.workload == "resnet18":
            net: nn.Module = cifar_resnet18()
            self._inputs = torch.randn(task.batch_size, 3, 32, 32)
            self._labels = torch.randint(10, (task.batch_size,))
        elif task.workload == "gpt":
            net = GptShaped()
            self._inputs = torch.randint(50_257, (task.batch_size,))
            self._labels = torch.randint(50_257, (task.batch_size,))
        else:
            large = task.workload == "launch-bound-large"
            net = LaunchBound(num_parameters=CIFAR_RESNET18_PARAMETERS if large else 1_000_000)
            self._inputs = torch.randn(task.batch_size, 16)
        self._optimizer: torch.optim.Optimizer
        if task.workload == "gpt":
            self._optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
        else:
            foreach = task.workload == "resnet18"
            self._optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, foreach=foreach)
        self._wrap(net, name, task)

    def _wrap(self, net: nn.Module, name: str, task: OverlapTask) -> None:
        before = threading.enumerate()
        with _alone() if name == "none" else nullcontext():
            self._wrapped = GossipDataParallel(
                net,
                self._optimizer,
                method=name,
                comm_rate=task.comm_rate,
                counting=Counting(samples_per_step=task.batch_size),
            )
        (thread,) = (
            each
            for each in threading.enumerate()
            if each.name.startswith("gossipdp-") and each not in before
        )
        self._gossip_clock = time.pthread_getcpuclockid(thread.ident or 0)

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

    def take_turn(self, turn_s: float, wait_s: float | None) -> list[float]:
        """Step for so long, at least twice; return the durations without the first."""
        began_s = time.perf_counter()
        durations_s = []
        while len(durations_s) < 2 or time.perf_counter() < began_s + turn_s:
            durations_s.append(self.step(wait_s))
        return durations_s[1:]

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
        times.exchange_s += sign * stats.exchange_seconds
        times.gossip_cpu_s += sign * time.clock_gettime(self._gossip_clock)


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
