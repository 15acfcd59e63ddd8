"""What ``batches()`` and ``epochs()`` yield, how it is counted, and where it ends."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from gossipdp.parallel.checkpointer import Checkpointer
from gossipdp.parallel.data_position import DataPosition, batch_size

Batch = TypeVar("Batch")


class Feed:
    """Yields a loader's batches until all workers together have trained on enough samples.

    Args:
        position: goes on in the middle of a pass where the run resumed.
        checkpointer: takes what is due between two batches.
        total_samples: over all workers, as far as this one knows.
        samples_per_step: as given; None: counted in the batches.
        batch_dim: the dimension of a batch's first tensor that counts them.
    """

    def __init__(
        self,
        position: DataPosition,
        checkpointer: Checkpointer,
        total_samples: Callable[[], int],
        samples_per_step: int | None,
        batch_dim: int,
    ) -> None:
        self._position = position
        self._checkpointer = checkpointer
        self._total_samples = total_samples
        self._samples_per_step = samples_per_step
        self._batch_dim = batch_dim
        self._is_yielding = False
        self._counted = 0

    def take_counted(self) -> int:
        """Return the samples of the step that has just ended."""
        counted, self._counted = self._counted, 0
        return self._samples_per_step or counted

    def count_forward(self, batch: Any) -> None:
        """Count a batch of a loop of the user's own; one that was yielded here is counted."""
        if self._samples_per_step is None and not self._is_yielding:
            self._counted += batch_size(batch, self._batch_dim) or 1

    def until(self, samples: int, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches until the workers together have trained on so many samples."""
        with self._yielding():
            yield from self._until(samples, self._passes(loader))

    def epochs(
        self, loader: Iterable[Batch], num_epochs: int, size: int
    ) -> Iterator[tuple[int, Iterator[Batch]]]:
        """Yield epochs of ``size`` samples of all workers, each as its number and its batches."""
        with self._yielding():
            passes = self._passes(loader)
            epoch = -1
            while self._total_samples() < num_epochs * size:
                epoch = max(epoch + 1, self._total_samples() // size)
                if epoch >= num_epochs:  # the loop left epochs before their ends
                    return
                yield epoch, self._until((epoch + 1) * size, passes)

    def _until(self, samples: int, passes: Iterator[Batch]) -> Iterator[Batch]:
        while self._total_samples() < samples:
            yield next(passes)
            self._checkpointer.take_due()

    def _passes(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, each counted, pass after pass without end."""
        self._position.begin()
        self._counted = 0
        while True:
            for batch in self._position.epoch(loader):
                self._count(batch)
                yield batch
            if self._position.batch == 0:
                raise ValueError(
                    "the loader yielded no batch: it is empty, or it is an iterator that can "
                    "be gone through only once (pass the loader itself)"
                )

    def _count(self, batch: Any) -> None:
        if self._samples_per_step is not None:
            return
        samples = batch_size(batch, self._batch_dim)
        if samples is None:
            raise ValueError(
                f"a batch of type {type(batch).__name__} holds no tensor with a dimension "
                f"{self._batch_dim} that would tell its samples: wrap with samples_per_step="
            )
        self._counted += samples

    @contextlib.contextmanager
    def _yielding(self) -> Iterator[None]:
        with self._checkpointer.of_batches():
            self._is_yielding = True
            try:
                yield
            finally:
                self._is_yielding = False
