"""Fixtures that several of these tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gossipdp import GossipDataParallel


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
