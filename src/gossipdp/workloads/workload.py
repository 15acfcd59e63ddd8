"""What a training task must offer so that the demo, the benchmarks and the simulator can run it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")


class Workload(ABC):
    """A model, its data, its loss and its metric; the caller owns the training loop.

    The model is a plain ``nn.Module`` whose initial values follow from ``torch.manual_seed``, so
    the same code trains one worker, many workers, or rows of a matrix by functional calls.

    disjoint: False, each worker goes through the whole training set in its own seeded order;
        True, no two workers see the same training data.
    batch_size: samples per gradient step of one worker; None takes the workload's own.
    """

    name: ClassVar[str]
    metric_name: ClassVar[Literal["test_accuracy", "validation_bits_per_byte"]]
    higher_is_better: ClassVar[bool]
    default_batch_size: ClassVar[int]
    default_budget_samples: ClassVar[int]
    """Samples over all workers that make a demo of 20 to 30 s of training on two cores."""

    def __init__(self, *, disjoint: bool = False, batch_size: int | None = None) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        self.disjoint = disjoint
        self.batch_size = self.default_batch_size if batch_size is None else batch_size

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new model, initialised from torch's global random state."""

    @abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer at its peak learning rate; ``learning_rate_factor`` scales it."""

    @abstractmethod
    def train_loader(self, rank: int, num_workers: int, seed: int) -> "BatchLoader[Any]":
        """The batches of one worker; the same arguments give the same batches."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean training loss of one batch, a scalar."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> float:
        """The metric on held-out data; the model's training mode is restored afterwards."""


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
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self._items) // self.batch_size

    def __iter__(self) -> Iterator[Batch]:
        order = self._items[torch.randperm(len(self._items), generator=self._generator)]
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            yield self._gather(order[start : start + self.batch_size])


def check_worker(rank: int, num_workers: int, seed: int) -> None:
    """Raise ValueError unless 0 <= rank < num_workers and 0 <= seed."""
    if not 0 <= rank < num_workers:
        raise ValueError(f"rank is {rank}; with {num_workers} workers it must be 0 to n - 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more")


def worker_seed(seed: int, rank: int) -> int:
    """A seed for one worker's shuffle: different for every (seed, rank) with rank < 2**20."""
    return (seed << 20) + rank


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the former mode comes back even after an error."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def learning_rate_factor(progress: float, *, warmup: float = 0.05, last: float = 0.01) -> float:
    """Factor on the peak learning rate: linear warm-up, then half a cosine down to ``last``.

    progress: global progress of the run, 0 to 1, so that fast and slow workers decay together.
    warmup: share of the run spent warming up.
    """
    if progress < warmup:
        return last + (1 - last) * progress / warmup
    through = min(1.0, (progress - warmup) / (1 - warmup))
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * through))
