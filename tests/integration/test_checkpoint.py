"""Checkpoints of several real workers: resumed by as many and by fewer."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import three_chunks
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gossipdp import Checkpoints, Exchange, GossipDataParallel
from gossipdp.parallel.checkpoint import file_path, read, saved_in

pytestmark = pytest.mark.processes

NUM_WORKERS, STEPS = 4, 18  # the complete graph, also the ring of three, has no momentum
BATCH = 8


def make_model(folder: str, every_steps: int | None = None, keep: int = 3, **options: Any) -> Any:
    net = three_chunks()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoints = Checkpoints(folder, every_steps=every_steps, keep=keep, resume="auto")
    model = GossipDataParallel(net, optimizer, graph="ring", checkpoints=checkpoints, **options)
    return model, optimizer


def train(model: GossipDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.randn(BATCH, 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(dim=1)).backward()
        optimizer.step()
        time.sleep(0.004)


def state_of(model: GossipDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as memory has them; no exchange runs before the 4th step."""
    tensors = model._worker.capture()
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer/{index}/{name}"] = value.clone()
    tensors["random"] = torch.get_rng_state()
    return tensors


def train_and_save(directory: str) -> Any:
    strict = Exchange(pace="strict")
    model, optimizer = make_model(directory, every_steps=4, keep=2, exchange=strict)
    train(model, optimizer, STEPS + model.rank)
    path, stats = model.save_checkpoint(), model.stats()
    model.close()
    return str(path), stats.samples, stats.exchanges, stats.checkpoints_failed


def resume_and_look(directory: str, steps: int) -> Any:
    model, optimizer = make_model(directory, exchange=Exchange(pace="strict"))
    start = state_of(model, optimizer)
    total = model._worker.total_samples()
    own = model.stats()
    train(model, optimizer, steps)
    model.save_checkpoint()
    exchanges = model.stats().exchanges
    return start, total, own, model.consolidate(), exchanges


def tensors_of(directory: Path, rank: int) -> dict[str, Tensor]:
    tensors, training = read(file_path(directory, rank, saved_in(directory)[rank][0].step))
    held = [each for each in tree_leaves(training) if isinstance(each, Tensor)]
    return tensors | {f"training/{number}": each for number, each in enumerate(held)}


def is_among(tensor: Tensor, held: Iterable[Tensor]) -> bool:
    flat = tensor.flatten()
    return any(flat.dtype == each.dtype and torch.equal(flat, each.flatten()) for each in held)


TOTAL = BATCH * sum(STEPS + rank for rank in range(NUM_WORKERS))


def test_as_many_workers_go_on_with_every_bit(workers, tmp_path):
    saved = workers(train_and_save, NUM_WORKERS, (str(tmp_path),))
    for rank, (path, samples, exchanges, failed) in enumerate(saved):
        assert Path(path).parent.name == f"worker-{rank}"
        assert (samples, failed) == (BATCH * (STEPS + rank), 0)
        assert exchanges > 0
    for rank, kept in saved_in(tmp_path).items():
        assert (len(kept), kept[0].steps) == (2, STEPS + rank)
    files = [tensors_of(tmp_path, rank) for rank in range(NUM_WORKERS)]
    assert all(any(name.startswith("c/") and t.any() for name, t in f.items()) for f in files)
    results = workers(resume_and_look, NUM_WORKERS, (str(tmp_path), 10))
    for rank, (start, total, own, result, _) in enumerate(results):
        file = files[rank]
        names = {name for name in start if name.startswith(("model/", "c/"))}
        assert names == {name for name in file if not name.startswith("training/")}
        held = [t for name, t in file.items() if name.startswith("training/")]
        for name, tensor in start.items():
            is_there = torch.equal(tensor, file[name]) if name in names else is_among(tensor, held)
            assert is_there, name
        # Its own is exact; of the others at least what their files say of them.
        assert (own.gradient_steps, own.samples) == (STEPS + rank, BATCH * (STEPS + rank))
        assert TOTAL <= total <= result.samples  # the others may have begun
        assert result.samples == TOTAL + NUM_WORKERS * 10 * BATCH
        assert result.gradient_steps * BATCH == result.samples
    # One of them may be done before it was its turn.
    assert sum(exchanges for *_, exchanges in results) > 0


def end_a_run(directory: str) -> dict[str, Tensor]:
    model, optimizer = make_model(directory, every_steps=100)
    if model._worker.resumption is None:
        train(model, optimizer, 5)
    model.consolidate()
    return model.module.state_dict()


def test_a_finished_run_started_again_holds_exactly_its_average(workers, tmp_path):
    """Three of them: a sum of three equal numbers, divided by three, is often not that number."""
    (first, *_), again = (workers(end_a_run, 3, (str(tmp_path),)) for _ in range(2))
    for state in again:
        assert all(torch.equal(value, first[name]) for name, value in state.items())
