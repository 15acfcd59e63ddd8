"""Loaders of numbered samples, of every kind; here, so that a spawned process can import them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

NUM_SAMPLES = 12
BATCH = 2


class Numbers(Dataset[Tensor]):
    """Sample i is the number i."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """The same numbers, of which each process yields a share; the order follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        order = random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in order[first::step]:
            yield torch.tensor([float(number)])


class Draws(IterableDataset[Tensor]):
    """Yields numbers that it draws from a generator of its own, which goes on from pass to pass."""

    def __init__(self) -> None:
        self.numbers = numpy.random.default_rng(5)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(NUM_SAMPLES):
            yield torch.tensor([float(self.numbers.integers(1000))])


class ListedBatches:
    """Draws a whole pass at its begin, from Python's numbers; it is no Sampler of torch's."""

    def __init__(self) -> None:
        self.numbers = random.Random(3)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.numbers.sample(range(NUM_SAMPLES), NUM_SAMPLES)
        return iter([order[at : at + BATCH] for at in range(0, NUM_SAMPLES, BATCH)])

    def __len__(self) -> int:
        return NUM_SAMPLES // BATCH


class DrawnBatches(ListedBatches):
    """Draws each batch when it is asked for one, from NumPy's numbers."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            draw = getattr(self.numbers, "integers", None) or self.numbers.randint
            yield [int(each) for each in draw(NUM_SAMPLES, size=BATCH)]


ORDERS = (
    "plain",
    "shuffled",
    "distributed",
    "weighted",
    "with replacement",
    "listed batches",
    "drawn batches",
    "drawn by RandomState",
    "stream",
)


def make_loader(order: str, *, has_generator: bool = False, **options: Any) -> DataLoader[Tensor]:
    """Make a loader as a script does when it is started again."""
    generator = torch.Generator().manual_seed(17) if has_generator else None
    data, options = Numbers(), options | {"generator": generator}
    match order:
        case "listed batches":
            return DataLoader(data, batch_sampler=ListedBatches(), **options)
        case "drawn batches":
            numbers = numpy.random.default_rng(3)
            return DataLoader(data, batch_sampler=DrawnBatches(numbers), **options)
        case "drawn by RandomState":
            numbers = numpy.random.RandomState(3)
            return DataLoader(data, batch_sampler=DrawnBatches(numbers), **options)
        case "stream":
            return DataLoader(Stream(), BATCH, **options)
        case "plain" | "shuffled":
            return DataLoader(data, BATCH, shuffle=order == "shuffled", **options)
    sampler: Any
    if order == "distributed":
        sampler = DistributedSampler(data, num_replicas=2, rank=1)
    elif order == "weighted":
        sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, generator=generator)
    else:
        sampler = RandomSampler(data, replacement=True, num_samples=NUM_SAMPLES)
    return DataLoader(data, BATCH, sampler=sampler, **options)
