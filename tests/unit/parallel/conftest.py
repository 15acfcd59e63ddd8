"""Fixtures that several of these tests share."""

import pytest
from checkpointing import AtOnce, sgd
from torch import nn

from gossipdp import Checkpoints, GossipDataParallel


@pytest.fixture
def wrap():
    """Wrap, and close at the end of the test."""
    models = []

    def call(*args, **kwargs):
        models.append(GossipDataParallel(*args, **kwargs))
        return models[-1]

    yield call
    for model in models:
        model.close()


@pytest.fixture
def wrap_sgd(wrap):
    """Wrap a module with an SGD of its trainable parameters; return model and optimizer."""

    def call(net, **options):
        optimizer = sgd(net)
        return wrap(net, optimizer, **options), optimizer

    return call


@pytest.fixture
def at_once(monkeypatch):
    """Let writes end at once: steps of tests are shorter, and would put off the next checkpoint."""
    monkeypatch.setattr("gossipdp.parallel.checkpointer.BackgroundWriter", AtOnce)


@pytest.fixture
def linear(wrap_sgd):
    """Wrap ``nn.Linear(3, 2)``, saved as the first arguments say; return model and optimizer."""

    def call(directory=None, every_steps=None, *, keep=3, resume=None, **options):
        saving = Checkpoints(directory, every_steps, keep, resume)
        return wrap_sgd(nn.Linear(3, 2), checkpoints=saving, **options)

    return call
