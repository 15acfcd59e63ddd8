"""The rows of time_to_loss, its optimizer among them; the loop is time_to_loss_worker's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from support.rows import (
    DECENT_DP,
    DecentDP,
    DistributedDataParallel,
    Gossip,
    Row,
    RowPlan,
    average_parameters,
    missing_package,
)
from time_to_loss_task import BATCH_SIZE, MOMENTUM, PEAK_RATE, WEIGHT_DECAY
from torch import nn

SYNCHRONOUS_WARMUP = 0.05  # of the run, while periodic averaging still averages gradients


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The same for every row."""
    return torch.optim.SGD(
        parameters, lr=PEAK_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, foreach=True
    )


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


ROWS: dict[str, tuple[str, type[Row]]] = {
    "a2cid2": ("gossipdp, a2cid2", Gossip),
    "gossip": ("gossipdp, gossip", Gossip),
    "ddp": ("DDP (gloo)", DistributedDataParallel),
    "periodic": ("periodic averaging", PeriodicAveraging),
    "decent": ("Decent-DP", DecentDP),
    "none": ("no exchange", Gossip),
}
"""By the name that the command takes: the name in tables, and what runs."""


def row_plan(
    row: str,
    num_workers: int,
    samples: int,
    *,
    seed: int,
    options: Mapping[str, Any] | None = None,
    period: int = 4,
) -> RowPlan:
    """What the row of this name is told; the arguments are :class:`~support.rows.RowPlan`'s."""
    return RowPlan(
        name=row,
        num_workers=num_workers,
        samples=samples,
        seed=seed,
        batch_size=BATCH_SIZE,
        make_optimizer=make_optimizer,
        method=row,
        options=options or {},
        period=period,
    )


def missing(row: str) -> str | None:
    """Why a row cannot run here; None where it can."""
    return missing_package(DECENT_DP) if row == "decent" else None
