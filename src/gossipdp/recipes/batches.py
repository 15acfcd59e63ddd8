"""Loaders of data that gives whole batches at once."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

Batch = TypeVar("Batch")


def whole_batches(
    data: Dataset[Batch],
    batch_size: int,
    *,
    seed: int | None = None,
    processes: int = 0,
) -> DataLoader[Batch]:
    """A loader of data whose ``__getitems__`` makes a batch from the numbers of its samples.

    Args:
        data: see above.
        batch_size: samples of a batch.
        seed: of an order drawn anew for each epoch, where a last smaller batch is left out; None:
            all samples in their own order.
        processes: that make batches ahead, beside training; 0: the training process makes them.
    """
    return DataLoader(
        data,
        batch_size,
        shuffle=seed is not None,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        drop_last=seed is not None,
        num_workers=processes,
        collate_fn=_as_it_is,
    )


def _as_it_is(batch: Batch) -> Batch:
    return batch
