"""A worker that gives a large state trains on, is heard by all, and needs no second copy of it."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from waiting import wait_until

from gossipdp import GossipDataParallel, Network
from gossipdp.gossip.loop import GossipLoop

pytestmark = pytest.mark.processes

SILENCE_S = 2.0
STATE_BYTES = 300_000_000


class Hoarder(torch.optim.SGD):
    """SGD that keeps far more than it needs, as Shampoo and its like do, in two large tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"][:1]:
            kept = self.state[parameter]
            if "history" not in kept:
                kept["history"] = torch.ones(2, STATE_BYTES // 8)
            kept["history"][0, :1000] += 1.0


class Turns:
    """Notes the longest turn of this process's gossip thread: its own CPU time, however busy the
    machine is.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        turn = GossipLoop.turn

        def timed(loop: GossipLoop, *arguments: Any) -> None:
            began_s = time.thread_time()
            turn(loop, *arguments)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)

        GossipLoop.turn = timed  # type: ignore[method-assign]


def memory_bytes(kind: str) -> int:
    """``VmRSS``: in memory now; ``VmHWM``: the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def train_and_come_back(directory: Path) -> None:
    life = int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.Linear(1500, 4))
    optimizer = Hoarder(net.parameters(), lr=1e-4, momentum=0.9)
    before_bytes, turns = memory_bytes("VmRSS"), Turns()
    model = GossipDataParallel(
        net, optimizer, network=Network(timeout_s=SILENCE_S, start_timeout_s=60.0)
    )
    told: dict[str, Any] = {}
    if life:
        told["held_bytes"] = memory_bytes("VmHWM") - before_bytes
        told["history"] = float(optimizer.state[net[0].weight]["history"][1].mean())
    steps: list[float] = []

    def step() -> None:
        began_s = time.thread_time()
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        steps.append(time.thread_time() - began_s)
        time.sleep(0.005)

    def noticed(kind: str) -> list[int]:
        return [notice.rank for notice in model.stats().noticed if notice.kind == kind]

    for _ in range(10):
        step()
    if model.rank == 1 and life == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if model.rank == 0:
        before_bytes, turns.longest_s = memory_bytes("VmRSS"), 0.0
        steps.clear()
        wait_until(lambda: noticed("rejoined"), "worker 1 is back", step)
        told["held_bytes"] = memory_bytes("VmHWM") - before_bytes
        told["longest_turn_s"] = turns.longest_s
        told["longest_step_s"] = max(steps)
        told["donated"] = model.stats().states_donated
    told["dead"] = noticed("dead")
    model.consolidate()
    (directory / f"{model.rank}.json").write_text(json.dumps(told))


def test_a_donor_of_300_mb_holds_up_nobody(workers: Callable, tmp_path: Path) -> None:
    workers(train_and_come_back, 2, (tmp_path,), max_restarts=1)
    donor, joiner = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    print(donor, joiner)
    assert donor["donated"] == 1
    assert donor["dead"] == [1], "its own death, and no other"
    assert joiner["dead"] == [], "the donor was not taken for dead"
    assert joiner["history"] == 1.0
    # The time of a processor, and not of a clock: it was 0.4 to 2.7 s, and 0.9 GB.
    assert donor["longest_turn_s"] < 0.3
    assert donor["longest_step_s"] < SILENCE_S / 2
    assert donor["held_bytes"] < STATE_BYTES / 3
    assert joiner["held_bytes"] < 1.8 * STATE_BYTES  # a second copy would make it 2.4
