"""A model's steps and checkpoints, and writers with which a test orders events.

They take the place of ``BackgroundWriter`` in :mod:`gossipdp.parallel.checkpointer`.
"""

import errno
import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from gossipdp.parallel.checkpoint import saved_steps
from gossipdp.parallel.checkpointer import Write

ONES = torch.ones(1, 3)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], 0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = ONES, *, times: int = 1
) -> None:
    """Take steps of the model that the fixture ``linear`` makes."""
    for _ in range(times):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


def steps_saved(directory: Path) -> list[int]:
    """Return the steps of worker 0's checkpoints, the newest first."""
    return saved_steps(directory, 0)


def full(*_: object, **__: object) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class AtOnce:
    """Writes in the calling thread, so that every checkpoint is on the disk when a step ends."""

    def __init__(self, rank: int) -> None: ...
    def wait(self, written: "Future[Path]") -> None: ...
    def close(self) -> None: ...

    def begin(self, write: Write) -> "Future[Path]":
        written: Future[Path] = Future()
        try:
            written.set_result(write(lambda: None))
        except Exception as error:
            written.set_exception(error)
        return written

    def has_ended(self, written: "Future[Path]") -> bool:
        return written.done()


class WhenTold(AtOnce):
    """Writes when :meth:`finish` is called, or when it is waited for."""

    def __init__(self, rank: int) -> None:
        self.open: list[tuple[Write, Future[Path]]] = []

    def begin(self, write: Write) -> "Future[Path]":
        written: Future[Path] = Future()
        written.result = partial(written.result, 0.0)  # whoever reads it has waited
        self.open.append((write, written))
        return written

    def finish(self) -> None:
        while self.open:
            write, written = self.open.pop(0)
            written.set_result(write(lambda: None))

    def wait(self, written: "Future[Path]") -> None:
        self.finish()
