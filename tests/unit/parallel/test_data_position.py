"""A resumed run trains on the samples on which it would have trained, whatever loads them."""

import itertools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from gossipdp import Checkpoints
from gossipdp.parallel.data_position import _Order, random_states, restore_random_states

NUM_STEPS = 20
NUM_SAMPLES = 12
BATCH = 2
NUMBERS = torch.arange(12.0).view(NUM_SAMPLES, 1)  # a data set: sample i is the number i


class Stream(IterableDataset):
    """The same numbers, of which each process yields a share; the order follows from the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in order[first::step]:
            yield torch.tensor([float(number)])


class Draws(IterableDataset):
    """Yields numbers that it draws from a generator of its own, which goes on from pass to pass."""

    def __init__(self):
        self.numbers = numpy.random.default_rng(5)

    def __iter__(self):
        for _ in range(NUM_SAMPLES):
            yield torch.tensor([float(self.numbers.integers(1000))])


class DrawnBatches:
    """Draws each batch when it is asked for one; it is no Sampler of torch's."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        for _ in range(NUM_SAMPLES // BATCH):
            yield [int(NUM_SAMPLES * self.numbers.random()) for _ in range(BATCH)]


SAMPLED = {
    "shuffled": lambda given: {"shuffle": True, "generator": given},
    "distributed": lambda _: {"sampler": DistributedSampler(NUMBERS, num_replicas=2, rank=1)},
    "weighted": lambda given: {"sampler": WeightedRandomSampler([1.0] * 12, 12, generator=given)},
    "drawn by Random": lambda _: {"batch_sampler": DrawnBatches(random.Random(3))},
    "drawn batches": lambda _: {"batch_sampler": DrawnBatches(numpy.random.default_rng(3))},
    "drawn by RandomState": lambda _: {"batch_sampler": DrawnBatches(numpy.random.RandomState(3))},
    "stream": lambda _: {},
}


def make_loader(order, has_generator=False, **options):
    generator = torch.Generator().manual_seed(17) if has_generator else None
    made = {"generator": generator, **SAMPLED[order](generator), **options}
    if "batch_sampler" not in made:
        made["batch_size"] = BATCH
    return DataLoader(Stream() if order == "stream" else NUMBERS, **made)


@pytest.fixture
def train(tmp_path, wrap, at_once):
    """Return the samples of each step of a script, which saves at ``save_at`` and goes on there."""
    seeds = itertools.count()

    def script(loader, save_at=None, loop="batches"):
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
        seen = []
        if save_at == 0:
            model.save_checkpoint()
            batches = iter(())
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


WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}
LOOPS = ("batches", "epochs")
# 6 batches a pass: in the first, at its very end, in the second, and in the third.
SAVED_AT = (2, 6, 8, 15)
CASES = [
    *(
        (order, "no workers", SAVED_AT[(number + turn) % 4], bool(turn), LOOPS[number // 2 % 2])
        for number, order in enumerate(SAMPLED)
        for turn in (0, 1)
    ),
    # The order is drawn in the main process, whatever the workers: few rows are enough.
    ("shuffled", "workers", 2, False, "batches"),
    ("stream", "workers", 6, False, "epochs"),
    ("shuffled", "persistent workers", 2, True, "epochs"),
    ("drawn batches", "persistent workers", 8, False, "batches"),
    ("stream", "persistent workers", 15, False, "batches"),
]
ROWS = [pytest.param(*row, marks=pytest.mark.processes if WORKERS[row[1]] else ()) for row in CASES]


@pytest.mark.parametrize(("order", "workers", "save_at", "has_generator", "loop"), ROWS)
def test_every_loader_goes_on_where_it_was(train, order, workers, save_at, *, has_generator, loop):
    options = {"has_generator": has_generator, **WORKERS[workers]}
    whole = train(make_loader(order, **options), save_at, loop)
    assert len(whole) >= 18
    assert train(make_loader(order, **options), loop=loop) == whole[save_at:]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_before_the_first_step_keeps_the_place(train, loop):
    """As SIGTERM takes one, or a run that had ended and is to go on with a larger budget."""
    whole = train(make_loader("shuffled"), 8, loop)
    assert train(make_loader("shuffled"), 0, loop) == []
    assert train(make_loader("shuffled"), loop=loop) == whole[8:]


@pytest.mark.processes
def test_a_loader_whose_workers_run_already_goes_on_too(train):
    """As in a notebook, where the same loader trained before."""
    loader = make_loader("shuffled", num_workers=1, persistent_workers=True)
    whole = train(loader, 3)
    assert train(loader) == whole[3:]


def test_workers_that_run_already_are_let_go_where_the_pass_began_without_any():
    loader = DataLoader(NUMBERS, BATCH)
    start = _Order(loader).capture()
    loader._iterator = iter(())  # as of workers that persist
    _Order(loader).restore(start)
    assert loader._iterator is None


def test_a_dataset_that_draws_goes_on_where_its_generator_was(train, caplog):
    whole = train(DataLoader(Draws(), BATCH), 9)
    assert not caplog.records
    assert train(DataLoader(Draws(), BATCH)) == whole[9:]
    assert "an IterableDataset alone knows what it yields" in caplog.text


@pytest.mark.processes
def test_an_order_that_depends_on_timing_is_said(train, caplog):
    train(make_loader("shuffled", num_workers=1, in_order=False), 2)
    assert not caplog.records
    train(make_loader("shuffled", num_workers=1, in_order=False))
    assert "after 2 batches, which are loaded and dropped; but with in_order=False" in caplog.text


def test_a_loader_that_has_become_shorter_is_said(train, caplog):
    train(DataLoader(NUMBERS, BATCH), 4)
    seen = train(DataLoader(NUMBERS[:6], BATCH, in_order=False))
    assert "in_order" not in caplog.text, "it has no workers"
    assert "ended after 3 of the 4 batches that were trained on before" in caplog.text
    assert seen[:2] == [[0.0, 1.0], [2.0, 3.0]]


def test_an_accelerators_random_states_are_kept_once_it_is_used(monkeypatch):
    given, held = [], [torch.ones(3)]
    module = SimpleNamespace(
        is_initialized=lambda: False, get_rng_state_all=lambda: held, set_rng_state_all=given.append
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    assert "xpu" not in random_states()
    module.is_initialized = lambda: True
    states = random_states()
    restore_random_states(states)
    assert given == [held]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    restore_random_states(states)  # on a machine without one
    assert given == [held]
