"""The samples that are counted, the end of training, and loops that count nothing."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from checkpointing import step
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from gossipdp import Counting, ProgressLR
from gossipdp.parallel.stats import Consolidated


def test_an_extra_forward_counts_nothing_and_a_batch_without_a_step_counts_with_the_next(linear):
    """A closure; accumulation, and a step that GradScaler skips."""
    model, optimizer = linear(budget_samples=20)
    for number, batch in enumerate(model.batches([torch.ones(5, 3)])):
        model(torch.ones(9, 3))
        for _ in range(2):
            model(batch).sum().backward()
        if number % 2:
            optimizer.step()
    assert (model.stats().samples, model.stats().gradient_steps) == (20, 2)


Batch = dataclasses.make_dataclass("Batch", ["name", "inputs"])  # as some libraries collate them
TIME_FIRST, IMAGES = torch.ones(7, 3, 2), [torch.ones(3, size, 20) for size in range(16, 21)]
EPISODE = ((torch.ones(5, 3), torch.ones(5)), (torch.ones(7, 3), torch.ones(7)))


@pytest.mark.parametrize(
    ("batch", "size", "samples"),
    [
        (TIME_FIRST, 3, 3),
        ({"text": "a", "x": [torch.ones(4, 3)]}, None, 4),
        (Batch("a", torch.ones(6, 3)), 6, 6),
        ((IMAGES, [{}] * 5), None, 5),
        ([(each, {}) for each in IMAGES], None, 5),
        (IMAGES, 5, 5),
        (IMAGES[:1], None, 3),
        (IMAGES[:2], 2, 2),
        ([{"image": IMAGES[1]}, {"image": IMAGES[0]}], None, 2),
        ({"spectra": [torch.ones(80, 7), torch.ones(80, 9)]}, 2, 2),
        ({"sequences": [torch.ones(7, 2), torch.ones(9, 2)]}, None, 2),
        ((pack_sequence([torch.ones(7, 2), torch.ones(4, 2)]), torch.ones(2)), 2, 2),
        ([{"x": (pack_sequence([torch.ones(7, 2), torch.ones(4, 2)]),)}], None, 2),
        ([torch.ones(4, 9, 2), {"y": torch.ones(4, 9, 1)}], None, 4),  # inputs and targets
        ([torch.ones(2, 9), torch.ones(2, 9)], 2, 2),
        (([torch.ones(8, 2), torch.ones(8, 3)], torch.ones(8)), 8, 8),  # inputs of two parts
        (EPISODE, None, 5),
        (torch.ones(6, 3), 2, 6),
        (IMAGES, 2, 5),
    ],
)
def test_a_batch_counts_its_first_tensor_or_a_list_of_samples(linear, batch, size, samples, caplog):
    """In any mode. The loader's size says which is meant; a count that differs is said once."""
    counting = Counting(batch_dim=int(batch is TIME_FIRST))
    model, optimizer = linear(budget_samples=6 * samples, counting=counting)
    loader = type("Sized", (list,), {"batch_size": size})([batch, batch])
    model.eval()
    for _ in model.batches(loader):
        step(model.module, optimizer)
    assert (model.stats().samples, model.stats().gradient_steps) == (6 * samples, 6)
    said = f"a batch counts as {samples} samples, and the loader's batch_size is {size}: "
    warned = [each.startswith(said) for each in caplog.messages]
    assert warned == [True] * (size not in (None, samples))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_counts_its_parts(linear):
    model, optimizer = linear(budget_samples=10)
    parts = torch.nested.nested_tensor([torch.ones(length, 3) for length in (5, 2, 4, 1, 6)])
    for _ in model.batches([(parts, torch.ones(5)), (parts, parts)]):
        step(model.module, optimizer)
    assert (model.stats().samples, model.stats().gradient_steps) == (10, 2)


def test_a_loop_that_counts_nothing_is_told_so_once(linear, caplog):
    model, optimizer = linear()
    step(model.module, optimizer, torch.ones(4, 3), times=5)
    assert caplog.text.count("3 gradient steps of the Linear, and not one sample was") == 1


class OfTexts(nn.Linear):
    def forward(self, texts: list[str]) -> Tensor:
        return super().forward(torch.ones(len(texts), 3))


def test_a_batch_without_a_tensor_is_no_single_sample_and_may_be_of_a_given_size(wrap_sgd):
    texts = ["some", "text"]
    model, optimizer = wrap_sgd(OfTexts(3, 2), budget_samples=100)
    step(model, optimizer, texts, times=2)
    assert model.stats().samples == 0
    message = r"never be used up: 3 gradient steps of .*not one sample was .*\(samples_per_step="
    with pytest.raises(RuntimeError, match=message):
        step(model, optimizer, texts)
    counting = Counting(samples_per_step=2)
    model, optimizer = wrap_sgd(OfTexts(3, 2), budget_samples=8, counting=counting)
    for batch in model.batches([texts]):
        step(model, optimizer, batch)
        if model.finished:  # the run may end in the body of its last batch
            assert model.consolidate().samples == 8
    assert (model.stats().samples, model.stats().gradient_steps) == (8, 4)


def test_a_loop_that_never_steps_is_told_so_once(wrap, caplog):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([net.weight], 0.1)
    model = wrap(net, [optimizer, torch.optim.AdamW([net.bias])], budget_samples=10**6)
    for number, batch in zip(range(1000), model.batches([torch.ones(4, 3)]), strict=False):
        assert caplog.text.count("loop without a step of the SGD") == (number >= 500)
        if number in (0, 150, 300, 600):
            step(model.module, optimizer, batch)


def test_a_schedule_follows_the_run_until_the_script_sets_a_rate(linear, monkeypatch):
    """From the first step of a worker that comes late; not in the next training of the script."""
    model, optimizer = linear()
    monkeypatch.setattr(model._worker, "total_samples", lambda: 90)
    schedule = ProgressLR(optimizer, model, "linear")
    assert schedule.get_last_lr() == [0.1], "nothing says where the run ends"
    loader = DataLoader(torch.ones(25, 3), 5)
    model.epochs(loader, 4)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    optimizer.param_groups[0]["lr"] = 1e-3
    model.epochs(loader, 4)
    assert optimizer.param_groups[0]["lr"] == 1e-3


class FailsOnce:
    dataset, numbers = range(8), iter(range(100))

    def __iter__(self):
        while True:
            if next(self.numbers) == 1:
                raise OSError("a file is damaged")
            yield torch.ones(4, 3)


def test_a_script_may_go_on_after_an_error_of_its_loader(linear):
    model, optimizer = linear()
    steps, failures = [], 0
    for epoch, batches in model.epochs(FailsOnce(), 3):
        try:
            for inputs in batches:
                step(model, optimizer, inputs)
                steps.append(epoch)
        except OSError:
            failures += 1
    assert (steps, failures) == ([0, 1, 1, 1, 2, 2], 1)
    assert model.stats().samples == 24


def steps_of(model, optimizer, loader, num_epochs, *, of_each=None, **options):
    """Train for epochs, each left after so many steps; yield the epoch of each step."""
    for epoch, batches in model.epochs(loader, num_epochs, **options):
        for inputs in islice(batches, of_each):
            step(model, optimizer, inputs)
            yield epoch


def test_epochs_are_those_of_the_whole_run(linear, monkeypatch):
    model, optimizer = linear()
    monkeypatch.setattr(model._worker, "total_samples", lambda: 3 * model.stats().samples)
    progress = {0: [], 1: [], 2: []}
    for epoch in steps_of(model, optimizer, DataLoader(torch.ones(24, 3), 4), 3):
        progress[epoch].append(model.progress())
    assert list(progress.values()) == [pytest.approx([n / 6, (n + 1) / 6]) for n in (1, 3, 5)]
    assert (model.stats().samples, model.finished) == (24, True)


def test_epochs_that_are_left_early_or_missed(linear, monkeypatch):
    loader = DataLoader(torch.ones(8, 3), 4)
    model, optimizer = linear()
    assert list(steps_of(model, optimizer, loader, 3, of_each=1)) == [0, 1, 2]
    assert model.stats().samples == 12
    model, optimizer = linear()
    monkeypatch.setattr(model._worker, "total_samples", lambda: 5 * model.stats().samples)
    assert list(steps_of(model, optimizer, loader, 8)) == [0, 2, 5, 7], "others are past the rest"


def test_a_stop_ends_batches_and_epochs(linear):
    model, optimizer = linear(method="gossip", budget_samples=100)
    loop = model._worker._loop
    model._worker._call(lambda: setattr(loop, "_publish_due_s", math.inf))  # news comes later
    for batch in model.batches([torch.ones(5, 3)]):
        step(model, optimizer, batch)
        assert not model.finished
        model.stop()
    assert (model.stats().samples, model.finished, model.progress()) == (5, True, 0.05)
    model, optimizer = linear(method="gossip")
    for epoch, batches in model.epochs(DataLoader(torch.ones(8, 3), 4), 5):
        for inputs in batches:
            step(model, optimizer, inputs)
        if epoch == 1:
            model.stop()
    assert (epoch, model.stats().samples) == (1, 16)


def test_how_long_an_epoch_is_may_be_given(linear):
    model, optimizer = linear()
    loader = type("Endless", (list,), {"dataset": object()})([torch.ones(4, 3)])
    with pytest.raises(ValueError, match=r"give epochs\(\.\.\., samples=\)"):
        model.epochs(loader, 2)
    assert list(steps_of(model, optimizer, loader, 2.0, samples=8.0)) == [0, 0, 1, 1]
    assert (model.stats().samples, str(model._worker.batches.budget_samples)) == (16, "16")


def test_batches_that_a_dataset_holds_are_not_counted_as_samples(linear):
    """As under ``batch_size=None``, unless the sampler asks for a batch of samples at a time."""
    model, _ = linear()
    with pytest.raises(ValueError, match=r"may hold batches: give epochs\(\.\.\., samples=\)"):
        model.epochs(DataLoader(torch.ones(6, 4, 3), batch_size=None), 1)
    of_four = BatchSampler(range(24), 4, drop_last=False)
    model.epochs(DataLoader(torch.ones(24, 3), batch_size=None, sampler=of_four), 1)
    assert model._worker.batches.budget_samples == 24


@pytest.mark.parametrize(
    ("num_epochs", "samples", "waited_s", "later", "is_told"),
    [
        (2, 16, 9.0, 200, False),
        (2, 17, 9.0, 200, False),  # late news
        (2, 18, 9.0, 49, False),
        (2, 18, 9.0, 50, True),
        (2, 32, 4.9, 200, False),  # late news too: it has waited for less than a time-out
        (0, 32, 9.0, 200, False),  # without epochs the script has stopped the run
        (None, 32, 0.0, 200, True),  # it counts its own steps
    ],
)
def test_who_counts_shorter_epochs_than_the_others_says_so(
    linear, monkeypatch, caplog, *, num_epochs, samples, waited_s, later, is_told
):
    """Its dataset is shorter, so the others train on after its last epoch."""
    model, optimizer = linear()
    if num_epochs:
        list(steps_of(model, optimizer, DataLoader(torch.ones(8, 3), 4), num_epochs))
    elif num_epochs == 0:
        model.stop()
    end = Consolidated(0.0, 2, samples, 4 + later, {0: 4, 1: later})
    times_s = iter([1.0, 1.0 + waited_s])  # before the wait, and after it
    clock = SimpleNamespace(monotonic=times_s.__next__)
    monkeypatch.setattr("gossipdp.parallel.module.time", clock)
    monkeypatch.setattr(model._worker, "consolidate", lambda timeout_s: end)
    model.consolidate()
    told = f"worker 0 ended after 4 steps of its own, and then the others made {later} more."
    assert [text.startswith(told) for text in caplog.messages] == [True] * is_told


@pytest.mark.parametrize(
    ("counts", "stop", "expected"),
    [((2, 1), None, [[0, 0, 1, 1], [2, 2]]), ((2, 3), 3, [[0, 0, 1], [1, 2, 2]])],
)
def test_a_second_call_of_epochs_goes_on_where_the_first_stopped(linear, counts, stop, expected):
    model, optimizer = linear()
    loader = DataLoader(torch.ones(20, 3), 10)
    first = list(islice(steps_of(model, optimizer, loader, counts[0]), stop))
    second = list(steps_of(model, optimizer, loader, counts[1]))
    assert ([first, second], model.progress()) == (expected, 1.0)
    assert model.consolidate().samples == 60


def test_a_loop_after_the_end_is_an_error(linear):
    model, optimizer = linear(budget_samples=30)
    batches = model.batches([torch.ones(10, 3)])
    step(model.module, optimizer, next(batches))
    model.consolidate()
    with pytest.raises(RuntimeError, match=r"the run has ended .* wrap .* once more"):
        next(batches)
    assert model.finished
    with pytest.raises(RuntimeError, match="the run has ended"):
        model.batches([torch.ones(10, 3)])
    model, _ = linear()
    model.consolidate()
    with pytest.raises(RuntimeError, match="the run has ended"):
        model.epochs(DataLoader(torch.ones(20, 3)), 1)
    model(torch.ones(5, 3))
    assert model._worker.batches._forwarded == [], "nothing is kept of what passes now"


def test_batches_that_another_thread_asks_for_are_an_error(linear):
    """Checkpoints would be taken there, in the middle of a step."""
    model, optimizer = linear(budget_samples=20)
    batches = model.batches([torch.ones(5, 3)])
    with ThreadPoolExecutor(1) as other:
        batch = other.submit(next, batches).result()
        with pytest.raises(RuntimeError, match=r"another thread .* let the loader prefetch"):
            step(model, optimizer, batch)
        batch = next(batches)
        other.submit(step, model, optimizer, batch).result()  # as a backward pass on a GPU may step
    assert model.stats().gradient_steps == 1


def test_a_loop_without_a_step_says_so(linear, caplog):
    model, optimizer = linear(budget_samples=20)
    for batch in model.batches([torch.ones(10, 3)]):
        step(model.module, optimizer, batch)
    assert not caplog.text
    assert list(model.batches([torch.ones(10, 3)])) == []
    assert "batches() of 20 samples yields nothing: the workers have trained on 20" in caplog.text
    model, _ = linear()
    model.stop()
    assert list(model.epochs(DataLoader(torch.ones(20, 3)), 1)) == []
    assert "epochs() up to 1 yields nothing: model.stop() has ended the run" in caplog.text


@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("order", [None, torch.Generator()])
@pytest.mark.parametrize("kind", [RandomSampler, SubsetRandomSampler, WeightedRandomSampler])
def test_samplers_that_draw_alike_get_a_warning(linear, monkeypatch, caplog, *, kind, order, size):
    """Without a ``size`` the sampler lies within the loader's sampler of batches."""
    arguments = ([1.0] * 12, 12) if kind is WeightedRandomSampler else (range(12),)
    model, _ = linear(budget_samples=20)
    monkeypatch.setattr(model._worker, "world_size", 2)  # both with torch's state of the start
    sampler = kind(*arguments, generator=order)
    if size is None:
        sampler = BatchSampler(sampler, 4, drop_last=False)
    next(model.batches(DataLoader(torch.ones(12, 3), size, sampler=sampler)))
    assert caplog.text.count("all workers go through the data in the same order") == (order is None)
    is_loaders = kind is RandomSampler and size is not None
    call = "DataLoader(..., shuffle=True, " if is_loaders else f"{kind.__name__}(..., "
    assert caplog.text.count(f"write {call}generator=") == (order is None)
    assert all(record.is_of_run for record in caplog.records), "one worker says it for all"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_one_alone_and_those_seeded_apart_get_no_warning_of_their_order(
    linear, monkeypatch, caplog, num_workers
):
    model, _ = linear(budget_samples=20)
    monkeypatch.setattr(model._worker, "world_size", num_workers)
    if num_workers > 1:
        torch.manual_seed(model.worker_seed)
    next(model.batches(DataLoader(torch.ones(12, 3), 4, shuffle=True)))
    assert not caplog.messages


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_sampler_of_fixed_shares_gets_a_warning(linear, shuffles, caplog):
    """One that shuffles draws another share in each pass, since batches() sets its epoch."""
    data = torch.ones(12, 3)
    sampler = DistributedSampler(data, 2, 0, shuffle=shuffles)
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 3, drop_last=False))
    model, optimizer = linear(budget_samples=20)
    next(model.batches(loader))  # a loop that is broken off
    for batch in model.batches(loader):
        step(model.module, optimizer, batch)
    assert sampler.epoch == 3
    assert caplog.text.count("each worker trains on one share of the data") == (not shuffles)
    assert len(caplog.messages) == (not shuffles)
