"""A small model of a worker: its scripts and functions train it until something is so."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gossipdp import GossipDataParallel, Network
from gossipdp.protocol import peers


def three_chunks() -> nn.Module:
    """Return a net of about three chunks of 1 MB, seeded differently on each worker."""
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    front = nn.Linear(16, 700), nn.BatchNorm1d(700), nn.ReLU()
    return nn.Sequential(*front, nn.Linear(700, 900), nn.Linear(900, 4))


def patient() -> Network:
    """Let this process give up no exchange because a busy machine keeps the other from a core."""
    peers.SHORTEST_GAP_S = 60.0
    return Network(timeout_s=peers.SHORTEST_GAP_S)


class SmallRun:
    """A linear layer, wrapped with these options, on data that each worker has of its own."""

    def __init__(self, pause_s: float = 0.01, **options: Any) -> None:
        self.net = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.model = GossipDataParallel(self.net, self.optimizer, **options)
        self.rank, self.life = self.model.rank, int(os.environ.get("GOSSIPDP_RESTARTS") or 0)
        self.inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(self.rank))
        self.pause_s = pause_s

    def step(self) -> None:
        """Make a step, and leave the cores to others for a moment."""
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        time.sleep(self.pause_s)

    def train_until(self, is_time: Callable[[], object]) -> None:
        while not is_time():
            self.step()

    def noticed(self) -> list[str]:
        """Return the kinds of what this worker has noticed of others."""
        return [notice.kind for notice in self.model.stats().noticed]
