"""The rows of time_to_loss: ways to train together, each as its own documentation says to use it.

A row owns model, optimizer and what travels; the loop, the data, the clock and the schedule are
time_to_loss_worker's, the same for all.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from time_to_loss_task import BATCH_SIZE, MOMENTUM, PEAK_RATE, WEIGHT_DECAY
from torch import Tensor, nn

from gossipdp import GossipDataParallel

SYNCHRONOUS_WARMUP = 0.05  # of the run, while periodic averaging still averages gradients


@dataclass(frozen=True)
class RowPlan:
    """What a row is told. options: of GossipDataParallel; period: steps between two averages."""

    name: str
    num_workers: int
    samples: int
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    period: int = 4


class Row(ABC):
    """One worker's part of one way to train together."""

    model: nn.Module

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        self.net, self.plan = net, plan
        self.steps = 0
        # Who waits for all others at each step takes its share of the samples and no more.
        self.own_steps = -(-plan.samples // (BATCH_SIZE * plan.num_workers))

    def progress(self) -> float:
        """Of the whole run, 0 to 1; the run has used up its samples at 1."""
        return self.steps / self.own_steps

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step."""

    @abstractmethod
    def step(self, loss: Tensor) -> None:
        """Gradients, what this row does with them, and the optimizer's step."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the average of all workers in ``net``."""

    def account(self) -> dict[str, float]:
        """What this row counts: exchanges (or averages) of this worker."""
        return {}

    def close(self) -> None:
        """End what was started."""
        if dist.is_initialized():
            dist.destroy_process_group()


def make_optimizer(parameters: Any) -> torch.optim.SGD:
    """The same for every row."""
    return torch.optim.SGD(
        parameters, lr=PEAK_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True
    )


class _OneOptimizer(Row):
    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        self.optimizer: torch.optim.Optimizer = make_optimizer(net.parameters())

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1


class Gossip(_OneOptimizer):
    """GossipDataParallel: methods a2cid2, gossip, and none, which averages once, at the end."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        self.model = self.gossip = GossipDataParallel(
            net,
            self.optimizer,
            method=plan.name,  # type: ignore[arg-type]
            budget_samples=plan.samples,
            samples_per_step=BATCH_SIZE,
            seed=plan.seed,
            **plan.options,
        )

    def progress(self) -> float:
        return self.gossip.progress()

    def account(self) -> dict[str, float]:
        stats = self.gossip.stats()
        return {"exchanges": stats.exchanges, "failed": stats.exchanges_failed}

    def finish(self) -> None:
        self.gossip.consolidate()


class DistributedDataParallel(_OneOptimizer):
    """torch's own, over gloo, with its defaults."""

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        dist.init_process_group("gloo")
        self.model = nn.parallel.DistributedDataParallel(net)

    def account(self) -> dict[str, float]:
        return {"exchanges": self.steps}

    def finish(self) -> None:
        """All hold the same already."""


class PeriodicAveraging(DistributedDataParallel):
    """torch's PostLocalSGDOptimizer: parameters averaged every ``period`` steps, after a warm-up.

    During the warm-up gradients are averaged at each step; after it each worker takes its own.
    """

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        self._warmup = max(1, round(SYNCHRONOUS_WARMUP * self.own_steps))
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(
            None, alone, start_localSGD_iter=self._warmup, post_local_gradient_allreduce=False
        )
        self.model.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=plan.period, warmup_steps=self._warmup)
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def account(self) -> dict[str, float]:
        after = max(0, self.steps - self._warmup)
        return {"exchanges": min(self.steps, self._warmup) + after / self.plan.period}

    def finish(self) -> None:
        average_parameters(self.net)


class DecentDP(Row):
    """PyPI's decent-dp: each step averages with one neighbour of a ring, overlapped with the next.

    Its optimizers, one a bucket, step in the backward pass.
    """

    def __init__(self, net: nn.Module, plan: RowPlan) -> None:
        super().__init__(net, plan)
        dist.init_process_group("gloo")
        from decent_dp.ddp import DecentralizedDataParallel
        from loguru import logger

        logger.remove()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._rate = PEAK_RATE
        self.model = DecentralizedDataParallel(
            net, self._make_optimizer, topology="ring", _local_world_size=plan.num_workers
        )
        self.model.train()

    def _make_optimizer(self, named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        made = make_optimizer([parameter for _, parameter in named])
        self._optimizers.append(made)
        self.set_rate(self._rate)
        return made

    def set_rate(self, rate: float) -> None:
        self._rate = rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def step(self, loss: Tensor) -> None:
        loss.backward()
        self.steps += 1

    def account(self) -> dict[str, float]:
        return {"exchanges": self.steps}

    def finish(self) -> None:
        self.model.global_avg(will_revert=False)


ROWS: dict[str, tuple[str, type[Row]]] = {
    "a2cid2": ("gossipdp, a2cid2", Gossip),
    "gossip": ("gossipdp, gossip", Gossip),
    "ddp": ("DDP (gloo)", DistributedDataParallel),
    "periodic": ("periodic averaging", PeriodicAveraging),
    "decent": ("Decent-DP", DecentDP),
    "none": ("no exchange", Gossip),
}
"""By the name that the command takes: the name in tables, and what runs."""


def missing(row: str) -> str | None:
    """Why a row cannot run here; None where it can."""
    if row == "decent":
        for module, package in (("decent_dp", "decent-dp"), ("loguru", "loguru")):
            if importlib.util.find_spec(module) is None:
                return f"{package} is not installed (pip install decent-dp, in any environment)"
    return None


@torch.no_grad()
def average_parameters(net: nn.Module) -> None:
    """Make all workers' parameters their average."""
    flat = nn.utils.parameters_to_vector(net.parameters())
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), net.parameters())
