"""What a recipe offers, so that one loop can train them all."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

Batch = TypeVar("Batch")


class Recipe(ABC, Generic[Batch]):
    """Data, model, optimizer, schedule, loss and metric of one training.

    device: where a worker computes.
    num_samples: of the training data, all of which every worker sees, in an order of its own.
    """

    metric_name: ClassVar[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples of one epoch."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new model on the device, initialised from torch's global random state."""

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, at the rate that suits one worker."""

    @abstractmethod
    def make_schedule(
        self, optimizer: torch.optim.Optimizer, progress: Callable[[], float], num_workers: int
    ) -> LRScheduler:
        """The schedule on the progress of the whole run, 0 to 1; stepped after each step."""

    @abstractmethod
    def loader(self, seed: int) -> Iterable[Batch]:
        """All training data in batches, in an order drawn anew for each epoch."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean training loss of one batch, a scalar, its augmentation included."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric on held-out data; the model's training mode is restored afterwards."""


def worker_device(name: str) -> torch.device:
    """The device of this worker; ``cuda`` gives the workers of a machine its devices in turn.

    Raises:
        ValueError: there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ValueError(f"--device is {name!r}; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; choose cpu")
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def check_samples(what: str, num_samples: int, batch_size: int) -> None:
    """Raise ValueError where the training data does not fill one batch."""
    if num_samples < batch_size:
        raise ValueError(
            f"{what}: {num_samples} training samples are less than one batch of {batch_size}; "
            "choose a smaller --batch-size"
        )
