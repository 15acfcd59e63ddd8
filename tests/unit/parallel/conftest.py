"""Fixtures that several of these tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import AtOnce
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel
from gossipdp.parallel.checkpointer import Checkpointer


@pytest.fixture
def wrap() -> Iterator[Callable[..., GossipDataParallel]]:
    """Wrap, and close at the end of the test."""
    models = []

    def call(*args: Any, **kwargs: Any) -> GossipDataParallel:
        models.append(GossipDataParallel(*args, **kwargs))
        return models[-1]

    yield call
    for model in models:
        model.close()


@pytest.fixture
def wrap_sgd(wrap: Callable[..., GossipDataParallel]) -> Callable[..., Any]:
    """Wrap a module with an SGD of its trainable parameters; return model and optimizer."""

    def call(net: nn.Module, **options: Any) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
        return wrap(net, optimizer, **options), optimizer

    return call


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes end at once: steps of tests are shorter, and would put off the next checkpoint."""
    monkeypatch.setattr(Checkpointer, "make_writer", AtOnce)


@pytest.fixture
def linear(wrap_sgd: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``nn.Linear(3, 2)``, saved as the first arguments say; return model and optimizer."""

    def call(
        directory: Path | None = None,
        every_steps: int | None = None,
        *,
        keep: int = 3,
        resume: str | None = None,
        **options: Any,
    ) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
        saving = Checkpoints(directory, every_steps, keep, resume)
        return wrap_sgd(nn.Linear(3, 2), checkpoints=saving, **options)

    return call
