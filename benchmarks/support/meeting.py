"""A place where the worker processes of one benchmark meet: a few numbers in a shared file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

PATIENCE_S, POLL_S = 120.0, 1e-3


class Meeting:
    """One number for each worker, which all can read; nobody but its owner writes it.

    Args:
        path: of the file, made by :meth:`create`.
        rank: of this worker.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._numbers = np.memmap(path, dtype=np.float64, mode="r+")
        self._rank = rank
        self._num_met = 0

    @staticmethod
    def create(path: Path, num_workers: int) -> None:
        """Make the file, before the workers start: two numbers a worker, its place and its word."""
        path.write_bytes(np.zeros(2 * num_workers).tobytes())

    def meet(self) -> None:
        """Wait until all workers have called this as often as this one.

        Raises:
            TimeoutError: somebody did not come.
        """
        self._num_met += 1
        places = self._numbers[: len(self._numbers) // 2]
        places[self._rank] = self._num_met
        deadline_s = time.monotonic() + PATIENCE_S
        while places.min() < self._num_met:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"worker {int(places.argmin())} did not come to the meeting")
            time.sleep(POLL_S)

    def say(self, number: float) -> None:
        """Leave a number for the others; they may read it after the next :meth:`meet`."""
        self._numbers[len(self._numbers) // 2 + self._rank] = number

    def heard(self, rank: int) -> float:
        """Return the number that the worker of this rank said last."""
        return float(self._numbers[len(self._numbers) // 2 + rank])
