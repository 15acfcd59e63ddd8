"""Fixtures that several of these tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel


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
def linear(wrap: Callable[..., GossipDataParallel]) -> Callable[..., Any]:
    """Wrap ``nn.Linear(3, 2)``, saved as the first arguments say; return model and optimizer."""

    def call(
        directory: Path | None = None,
        every_steps: int | None = None,
        *,
        keep: int = 3,
        resume: str | None = None,
        **options: Any,
    ) -> tuple[GossipDataParallel, torch.optim.Optimizer]:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        saving = Checkpoints(directory, every_steps, keep, resume)
        return wrap(net, optimizer, checkpoints=saving, **options), optimizer

    return call
