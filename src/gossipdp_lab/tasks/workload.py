"""The interface of a training, so that one loop can train them all: demo, recipes, benchmarks."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from gossipdp.rules import at_least_0, at_least_1

Batch = TypeVar("Batch")


class Workload(ABC, Generic[Batch]):
    """A model, its data, its loss and its metric; the caller owns the training loop.

    The model is a plain ``nn.Module`` whose initial values follow from ``torch.manual_seed``, so
    the same code trains one worker, many workers, or rows of a matrix by functional calls.

    Each worker goes through the training set in a seeded order of its own.

    batch_size: samples per gradient step of one worker.
    """

    metric_name: ClassVar[str]

    def __init__(self, batch_size: int, *, device: str = "cpu") -> None:
        self.batch_size = at_least_1("batch_size", batch_size)
        self.device = worker_device(device)

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Return the samples of one epoch, of all the training data."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make a model on the device, initialised from torch's global random state."""

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer at its peak learning rate; :meth:`rate_factor` scales it."""

    def rate_factor(self, progress: float, world_size: int) -> float:
        """Return the factor on the learning rate at the progress of the whole run, 0 to 1."""
        return learning_rate_factor(progress)

    @abstractmethod
    def train_loader(self, rank: int, num_workers: int, seed: int) -> Iterable[Batch]:
        """Return the batches of one worker; the same arguments give the same batches."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean training loss of one batch, a scalar, after its augmentation."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """Return the metric on held-out data; the model's training mode is restored."""

    def check_one_batch(self) -> None:
        """Raise ValueError if the training data does not fill one batch."""
        if self.num_samples < self.batch_size:
            raise ValueError(
                f"{self.num_samples} training samples are less than one batch of "
                f"{self.batch_size}; choose a smaller --batch-size"
            )


class BatchLoader(Generic[Batch]):
    """Batches gathered from tensors in memory; every iteration is a new seeded shuffle.

    items: 1-D tensor of the items this loader draws from (row numbers, window starts).
    gather: turns a slice of ``items`` into a batch.
    A last batch smaller than ``batch_size`` is left out.
    """

    def __init__(
        self, items: Tensor, *, batch_size: int, seed: int, gather: Callable[[Tensor], Batch]
    ) -> None:
        if len(items) < batch_size:
            raise ValueError(
                f"a worker's share of the training data holds {len(items)} samples, less than "
                f"one batch of {batch_size}; use fewer workers or a smaller batch"
            )
        self.batch_size = batch_size
        self._items = items
        self._gather = gather
        self._seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch: int) -> None:
        """Give the next iteration the order of that epoch, as in a run that was resumed."""
        self._generator.manual_seed((self._seed + epoch * 0x9E3779B97F4A7C15) % (1 << 63))

    def __len__(self) -> int:
        return len(self._items) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        order = self._items[torch.randperm(len(self._items), generator=self._generator)]
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield self._gather(order[start : start + self.batch_size])


def worker_seed(rank: int, num_workers: int, seed: int) -> int:
    """Return the seed of a worker's shuffle, below 2**32: torch's generators drop higher bits.

    Unlike for all ranks below 2**20 and seeds below 4,096; for one rank, for all below 2**32.
    """
    if not 0 <= rank < num_workers:
        raise ValueError(f"rank is {rank}; with {num_workers} workers it must be 0 to n - 1")
    high, low = divmod((at_least_0("seed", seed) << 20) + rank, 1 << 32)
    return (low + high * 0x9E3779B1) % (1 << 32)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients; restore the former mode, also on errors."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def learning_rate_factor(progress: float) -> float:
    """Return the factor on the peak rate: up to 1 over 5% of the run, then half a cosine to 1%.

    ``progress`` is that of the whole run, 0 to 1, so that fast and slow workers decay together.
    """
    warmup, last = 0.05, 0.01
    if progress < warmup:
        return last + (1 - last) * progress / warmup
    through = min(1.0, (progress - warmup) / (1 - warmup))
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * through))


def worker_device(name: str) -> torch.device:
    """Return the device of this worker; ``cuda``: the workers of a machine take turns."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ValueError(f"--device is {name!r}; choose cpu or cuda")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device here; choose cpu")
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    return torch.device("cuda", local_rank % torch.cuda.device_count())
