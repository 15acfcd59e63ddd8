"""How the paper trains its ResNets, whatever the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gossipdp.parallel.schedule import large_batch_schedule, parameter_groups
from gossipdp.recipes.recipe import Recipe

Batch = TypeVar("Batch")

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
WARMUP_EPOCHS = 5


class PaperRecipe(Recipe[Batch]):
    """SGD with momentum at a rate scaled by the workers' number, over five epochs of warm-up.

    milestones: shares of the run after which the rate is divided by ten.
    """

    milestones: ClassVar[tuple[float, ...]]

    def __init__(self, device: torch.device, epochs: int) -> None:
        super().__init__(device)
        self._epochs = epochs

    @final
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM)

    @final
    def make_schedule(
        self, optimizer: torch.optim.Optimizer, progress: Callable[[], float], num_workers: int
    ) -> LRScheduler:
        warmup = min(1.0, WARMUP_EPOCHS / self._epochs)
        return large_batch_schedule(
            optimizer, progress, num_workers, warmup=warmup, milestones=self.milestones
        )
