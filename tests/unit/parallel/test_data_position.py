"""A resumed run trains on the samples on which it would have trained, whatever loads them."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_writers import AtOnce
from resumable_loaders import BATCH, NUM_SAMPLES, ORDERS, Draws, Numbers, make_loader
from torch import nn
from torch.utils.data import DataLoader, Subset

from gossipdp import Checkpoints
from gossipdp.parallel.checkpointer import Checkpointer

NUM_STEPS = 20


@pytest.fixture
def train(tmp_path: Path, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``train(loader, ...)``: a script that goes on where it was saved, if it was.

    It saves after ``save_at`` steps, and gives the numbers of the samples of each step.
    """
    monkeypatch.setattr(Checkpointer, "make_writer", AtOnce)
    seeds = itertools.count()

    def script(loader: Any, save_at: int | None = None, loop: str = "batches") -> list[list[float]]:
        seed = next(seeds)  # so that nothing of one run is in the next by chance
        for seeded in (random.seed, numpy.random.seed, torch.manual_seed):
            seeded(seed)
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)
        budget = BATCH * NUM_STEPS if loop == "batches" else None
        saving = Checkpoints(tmp_path, resume="auto")
        model = wrap(net, optimizer, checkpoints=saving, budget_samples=budget)
        if loop == "batches":
            batches = model.batches(loader)
        else:
            epochs = model.epochs(loader, NUM_STEPS * BATCH // NUM_SAMPLES, samples=NUM_SAMPLES)
            batches = itertools.chain.from_iterable(each for _, each in epochs)
        seen: list[list[float]] = []
        for batch in batches:
            optimizer.zero_grad()
            noise = random.random() + numpy.random.rand() + torch.rand(())  # as dropout draws some
            (model(batch).sum() * noise).backward()
            optimizer.step()
            seen.append(batch.flatten().tolist())
            if len(seen) == save_at:
                model.save_checkpoint()
        model.close()
        return seen

    return script


def in_pairs(*factors: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows in which any values of two factors meet: far fewer than the product."""
    rows = list(itertools.product(*factors))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    while missing:
        row = max(rows, key=lambda each: len(pairs[each] & missing))
        missing -= pairs[row]
        yield row


WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
# 6 batches a pass: in the first, at its very end, in the second, and in the third.
SAVED_AT = (2, 6, 8, 15)


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    list(in_pairs(ORDERS, tuple(WORKERS), SAVED_AT, (False, True), ("batches", "epochs"))),
    ids=lambda row: ", ".join(map(str, row)),
)
def test_every_loader_goes_on_where_it_was(train, row: tuple[str, str, int, bool, str]) -> None:
    order, workers, save_at, has_generator, loop = row

    def make() -> Any:
        return make_loader(order, has_generator=has_generator, **WORKERS[workers])

    whole = train(make(), save_at, loop)
    assert len(whole) >= 18
    assert train(make(), loop=loop) == whole[save_at:]


@pytest.mark.processes
def test_spawned_workers_go_on_where_they_were(train) -> None:
    """The order is drawn in the main process, as with a fork: one row is enough."""
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    whole = train(make_loader("shuffled", **options), 8)
    assert train(make_loader("shuffled", **options)) == whole[8:]


@pytest.mark.processes
def test_a_loader_whose_workers_run_already_goes_on_too(train) -> None:
    """As in a notebook, where the same loader trained before."""
    loader = make_loader("shuffled", **WORKERS["persistent workers"])
    whole = train(loader, 3)
    assert train(loader) == whole[3:]


def test_a_dataset_that_draws_goes_on_where_its_generator_was(
    train, caplog: pytest.LogCaptureFixture
) -> None:
    whole = train(DataLoader(Draws(), BATCH), 9)
    assert not caplog.records
    assert train(DataLoader(Draws(), BATCH)) == whole[9:]
    assert "an IterableDataset alone knows what it yields" in caplog.text


@pytest.mark.processes
def test_an_order_that_depends_on_timing_is_said(train, caplog: pytest.LogCaptureFixture) -> None:
    train(make_loader("plain", num_workers=2, in_order=False), 2)
    assert not caplog.records
    train(make_loader("plain", num_workers=2, in_order=False))
    assert "after 2 batches, which are loaded and dropped; but with in_order=False" in caplog.text


def test_a_loader_that_has_become_shorter_is_said(train, caplog: pytest.LogCaptureFixture) -> None:
    train(DataLoader(Numbers(), BATCH), 4)
    seen = train(DataLoader(Subset(Numbers(), range(6)), BATCH))
    assert "ended after 3 of the 4 batches that were trained on before" in caplog.text
    assert seen[:2] == [[0.0, 1.0], [2.0, 3.0]]
