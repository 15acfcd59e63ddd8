"""The outer step of one wrapped model: what it is asked with, and what carries it on."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gossipdp import Checkpoints, Counting, GossipDataParallel, OuterStep
from gossipdp.dynamics.chunks import Chunk

Make = Callable[..., tuple[GossipDataParallel, torch.optim.Optimizer, list[Chunk]]]


@pytest.fixture
def make(wrap: Callable[..., GossipDataParallel]) -> Make:
    """``make(**options)``: a wrapped model, its optimizer and its trained chunks."""

    def call(
        *, dtype: torch.dtype = torch.float32, **options: object
    ) -> tuple[GossipDataParallel, torch.optim.Optimizer, list[Chunk]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = wrap(net, optimizer, counting=Counting(samples_per_step=1), **options)
        chunks = model._engine._state.chunks
        return model, optimizer, [chunk for chunk in chunks if chunk.outer is not None]

    return call


EACH = OuterStep(every=1)
"""One in each exchange, as these tests take them by hand."""


def step(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(model.module.parameters()):
        parameter.grad = torch.full_like(parameter, 0.3 + 0.1 * number)
    optimizer.step()


def outer_steps(chunks: list[Chunk]) -> None:
    for chunk in chunks:
        chunk.outer_step()


def test_its_numbers_may_be_of_any_kind() -> None:
    assert OuterStep(momentum=np.float32(0.5), lr=2) == OuterStep(0.5, 2.0)


def test_only_what_is_trained_has_one(make: Make) -> None:
    assert not make()[2]
    for method in ("a2cid2", "gossip"):
        model, _, chunks = make(method=method, outer=OuterStep())
        trained = sum(parameter.numel() for parameter in model.parameters())
        assert sum(int(chunk.x.any()) for chunk in chunks) == len(chunks) == 1
        assert chunks[0].num_elements >= trained
        torch.testing.assert_close(chunks[0].outer.base, chunks[0].x, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_carries_it_on(make: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    saving = Checkpoints(tmp_path, resume="auto")
    model, optimizer, (chunk,) = make(outer=EACH, checkpoints=saving, dtype=dtype)
    for _ in range(3):
        step(model, optimizer)
        outer_steps([chunk])
    with torch.no_grad():
        for parameter in model.module.parameters():  # a step whose boundary has not come
            parameter += 0.25
    x, pending, (_, base, m) = chunk.x.clone(), chunk.pending.clone(), chunk.outer or ()
    base, m = base.clone(), m.clone()
    model.save_checkpoint()
    model.close()
    _, optimizer, (other,) = make(outer=EACH, checkpoints=saving, dtype=dtype)
    assert m.any()
    assert pending.any()
    assert (x.float() != base).any()
    assert other.outer is not None
    for ours, theirs in ((x, other.x), (pending, other.pending), (m, other.outer.m)):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(other.outer.base, base, rtol=0, atol=1e-7)
    optimizer.step()  # without gradients: what the outer step had left in pending goes to x
    assert torch.equal(other.x, (x.float() + pending).to(dtype))


@pytest.mark.parametrize(
    "case",
    [
        (EACH, EACH, ""),
        (None, None, ""),
        (None, EACH, "saved with no outer step: OuterStep.* begins without momentum"),
        (EACH, None, "ends here: to go on with it, wrap with outer=OuterStep"),
        (EACH, OuterStep(0.9, every=1), r"saved with OuterStep\(momentum=0.5.* goes on in .*0.9"),
    ],
)
def test_a_resumed_run_says_what_becomes_of_it(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    case: tuple[OuterStep | None, OuterStep | None, str],
) -> None:
    saved, goes_on, word = case
    saving = Checkpoints(tmp_path, resume="auto")
    model, optimizer, chunks = make(outer=saved, checkpoints=saving)
    step(model, optimizer)
    outer_steps(chunks)
    model.save_checkpoint()
    model.close()
    with caplog.at_level(logging.WARNING, "gossipdp"):
        _, _, others = make(outer=goes_on, checkpoints=saving)
    if word:
        assert re.search(word, caplog.text)
    else:
        assert all("the run goes on from step" in message for message in caplog.messages)
    for chunk in others:
        assert chunk.outer is not None
        assert bool(chunk.outer.m.any()) is (saved is not None)
        if saved is None:
            assert torch.equal(chunk.outer.base, chunk.x)
