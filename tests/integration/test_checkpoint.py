import time
from typing import Any

import pytest
import torch
from small_run import three_chunks
from torch import Tensor, nn

from gossipdp import Checkpoints, Exchange, GossipDataParallel
from gossipdp.parallel.checkpoint import read, saved_in

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


def train_and_save(directory: str) -> Any:
    strict = Exchange(pace="strict")
    model, optimizer = make_model(directory, every_steps=4, keep=2, exchange=strict)
    train(model, optimizer, STEPS + model.rank)
    path, stats = model.save_checkpoint(), model.stats()
    model.close()
    return path, stats.samples, stats.exchanges, stats.checkpoints_failed


def resume_and_look(directory: str, steps: int) -> Any:
    model, optimizer = make_model(directory, exchange=Exchange(pace="strict"))
    start = model._worker.capture()  # no exchange runs before the 4th step
    total, own = model._worker.total_samples(), model.stats()
    train(model, optimizer, steps)
    model.save_checkpoint()
    exchanges = model.stats().exchanges
    return start, total, own, model.consolidate(), exchanges


TOTAL = BATCH * sum(STEPS + rank for rank in range(NUM_WORKERS))


def test_as_many_workers_go_on_with_every_bit(workers, tmp_path):
    saved = workers(train_and_save, NUM_WORKERS, (str(tmp_path),))
    for rank, (path, samples, exchanges, failed) in enumerate(saved):
        assert path.parent.name == f"worker-{rank}"
        assert (samples, failed) == (BATCH * (STEPS + rank), 0)
        assert exchanges > 0
    for rank, kept in saved_in(tmp_path).items():
        assert (len(kept), kept[0].steps) == (2, STEPS + rank)
    files = [read(path)[0] for path, *_ in saved]
    assert all(any(name.startswith("c/") and t.any() for name, t in f.items()) for f in files)
    results = workers(resume_and_look, NUM_WORKERS, (str(tmp_path), 10))
    for rank, (start, total, own, result, _) in enumerate(results):
        torch.testing.assert_close(start, files[rank], rtol=0, atol=0)
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
