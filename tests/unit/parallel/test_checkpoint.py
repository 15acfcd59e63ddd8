"""One worker's checkpoints: a resumed run is bitwise the uninterrupted one, whatever happens."""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from checkpoint_writers import AtOnce
from mixed_net import Net
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from gossipdp import Checkpoints, Counting, GossipDataParallel, PoisonedError
from gossipdp.parallel.checkpoint import saved_by
from gossipdp.parallel.checkpoint_files import read_tensors, write_tensors
from gossipdp.parallel.checkpointer import Checkpointer

NUM_STEPS = 23
EVERY = 4


class CentredState(torch.optim.Optimizer):
    """Keeps what ``load_state_dict`` would cast or break: double precision, text, a tuple."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.05)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                assert state.setdefault("note", "text") == "text"
                mean, count = state.get("means", (torch.zeros_like(parameter).double(), 0))
                mean = 0.9 * mean + parameter.grad.double() / 3
                state["means"] = (mean, count + 1)
                parameter.sub_(group["lr"] * mean)


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net, 0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net, 1e-2, amsgrad=True),
    "lbfgs": lambda net: torch.optim.LBFGS(list(net), lr=0.1, max_iter=3, history_size=4),
    "own": CentredState,
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """These steps are shorter than a write, which would put off the checkpoint after it."""
    monkeypatch.setattr(Checkpointer, "make_writer", AtOnce)


@pytest.fixture
def run() -> Iterator[Any]:
    """``run(directory, **options)``: a script that trains and gives its losses and end state.

    ``stop_after`` steps it is cut off without a word, as by a kill.
    """
    models: list[GossipDataParallel] = []

    def script(
        directory: Path | None,
        *,
        optimizer: str = "sgd",
        loader: str = "plain",
        stop_after: int | None = None,
        with_schedule: bool = True,
        resume: Any = "auto",
        every: int | None = EVERY,
        method: str = "a2cid2",
        keep: int = 3,
    ) -> tuple[list[Any], dict[str, torch.Tensor], GossipDataParallel]:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        net = Net()
        if optimizer != "lbfgs":  # which wants its gradients contiguous
            net.to(memory_format=torch.channels_last)
        made = OPTIMIZERS[optimizer](p for p in net.parameters() if p.requires_grad)
        saving = {} if directory is None else {"directory": directory, "resume": resume}
        if directory is not None and every:
            saving["every_steps"] = every
        model = GossipDataParallel(
            net,
            made,
            budget_samples=6 * NUM_STEPS,
            counting=Counting(samples_per_step=6),
            method=method,
            checkpoints=Checkpoints(keep=keep, **saving),
        )
        models.append(model)
        schedule = torch.optim.lr_scheduler.MultiStepLR(made, [5, 9], 0.5)
        if with_schedule:
            model.also_checkpoint(schedule=schedule)
        seen: list[Any] = []
        for images, labels in model.batches(LOADERS[loader]()):

            def loss_of(images: torch.Tensor = images, labels: torch.Tensor = labels) -> Any:
                made.zero_grad()
                noise = random.random() + numpy.random.rand()
                loss = nn.functional.cross_entropy(model(images), labels) * noise
                loss.backward()
                return loss

            if optimizer == "lbfgs":
                loss = made.step(loss_of)
            else:
                loss = loss_of()
                made.step()
            schedule.step()
            seen.append((model.stats().gradient_steps, loss.item(), images.sum().item()))
            if len(seen) == stop_after:
                break
        state = {name: value.clone() for name, value in model.state_dict().items()}
        return seen, state, model

    yield script
    for model in models:
        model.close()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(54, 2, 5, 5, generator=generator)
    return TensorDataset(images, torch.randint(0, 3, (54,), generator=generator))


class SeededByEpoch(RandomSampler):
    """Its order follows from the epoch alone, as that of Accelerate's seedable sampler."""

    def __init__(self, data: TensorDataset) -> None:
        super().__init__(data)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.epoch)
        yield from super().__iter__()
        self.epoch += 1


class CountingLoader(DataLoader):
    """Tells its sampler the epoch that it has counted itself, as that of Accelerate does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.sampler.set_epoch(self.epoch)
        yield from super().__iter__()
        self.epoch += 1


LOADERS = {
    "plain": lambda: DataLoader(dataset(), 6, shuffle=True),
    "own generator": lambda: DataLoader(
        dataset(), 6, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "distributed": lambda: DataLoader(
        dataset(), 6, sampler=DistributedSampler(dataset(), num_replicas=1, rank=0)
    ),
    "seeded by epoch": lambda: DataLoader(dataset(), 6, sampler=SeededByEpoch(dataset())),
    "counting": lambda: CountingLoader(dataset(), 6, sampler=SeededByEpoch(dataset())),
    "list": lambda: list(DataLoader(dataset(), 6)),
}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.stride() == other[name].stride(), name


def file_of(directory: Path, step: int) -> Path:
    return directory / "worker-0" / f"step-{step:08d}.safetensors"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stop_after", [5, 9, 22])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run, tmp_path, optimizer, stop_after):
    whole, end, model = run(None, optimizer=optimizer)
    assert len(whole) == NUM_STEPS
    first, _, _ = run(tmp_path, optimizer=optimizer, stop_after=stop_after)
    second, resumed_end, resumed = run(tmp_path, optimizer=optimizer)
    at = stop_after // EVERY * EVERY
    # What was trained after the checkpoint is trained again; the samples count as often as done.
    assert first == whole[:stop_after]
    assert second == whole[at:][: len(second)]
    assert len(second) == NUM_STEPS - at
    assert_same(end, resumed_end)
    assert resumed.stats().samples == model.stats().samples == 6 * NUM_STEPS
    assert resumed.progress() == 1.0


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saved_at", [6, 9, 18])
def test_the_data_go_on_where_they_were(run, tmp_path, loader, saved_at):
    # 9 batches an epoch: within one, at its very end, and at the end of the second.
    whole, end, _ = run(None, loader=loader)
    run(tmp_path, loader=loader, stop_after=saved_at + 1, every=3)
    second, resumed_end, _ = run(tmp_path, loader=loader, every=None)
    assert second == whole[saved_at:]
    assert_same(end, resumed_end)


@pytest.mark.parametrize("method", ["none", "gossip"])
def test_every_method_resumes(run, tmp_path, method):
    whole, end, _ = run(None, method=method)
    run(tmp_path, method=method, stop_after=6)
    second, resumed_end, _ = run(tmp_path, method=method)
    assert second == whole[4:]
    assert_same(end, resumed_end)


def test_where_no_momentum_is_held_z_goes_on(tmp_path):
    """A file of a2cid2, resumed by a worker that holds no c, goes on from x + c/2."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(tmp_path))
    path = model.save_checkpoint()
    model.close()
    tensors, metadata = read_tensors(path)
    x = tensors["model/weight"]
    write_tensors(path, {**tensors, "c/weight": torch.full_like(x, 2.0)}, metadata)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    saving = Checkpoints(tmp_path, resume="auto")
    model = GossipDataParallel(net, optimizer, method="gossip", checkpoints=saving)
    assert torch.equal(model.state_dict()["weight"], x + 1.0)
    model.close()


def test_a_loop_of_ones_own_saves_by_itself_and_on_demand(run, tmp_path):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(
        net, optimizer, checkpoints=Checkpoints(tmp_path, every_steps=2, keep=9)
    )
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if step == 3:
            path = model.save_checkpoint()
            assert path == file_of(tmp_path, 3)
            assert torch.equal(safetensors.torch.load_file(path)["model/weight"], net.weight)
    result = model.consolidate()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [4, 3, 2]
    assert (model.stats().checkpoints, model.stats().checkpoints_failed) == (3, 0)
    assert model.stats().checkpoint_pause_seconds > 0
    assert result.samples == 20


def test_a_run_that_was_stopped_trains_on(tmp_path):
    def train(budget_samples: int) -> int:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        checkpoints = Checkpoints(tmp_path, resume="auto")
        model = GossipDataParallel(
            net, optimizer, budget_samples=budget_samples, checkpoints=checkpoints
        )
        for batch in model.batches([torch.ones(5, 2)]):
            model(batch).sum().backward()
            optimizer.step()
            if model.progress() == 0.5:
                model.stop()
                model.save_checkpoint()
        assert model.finished
        return model.consolidate().samples

    assert train(20) == 10
    assert train(15) == 15


def test_the_newest_stay(run, tmp_path):
    run(tmp_path, every=2, keep=2)
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [22, 20]
    assert not list((tmp_path / "worker-0").glob(".*"))


def test_auto_starts_afresh_where_there_is_nothing_and_never_mixes_two_runs(run, tmp_path):
    run(tmp_path, stop_after=5)
    with pytest.raises(ValueError, match="holds checkpoints of another run; go on"):
        run(tmp_path, resume=None)
    with pytest.raises(ValueError, match="nowhere' is no directory: name the directory"):
        run(tmp_path / "b", resume=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="worker-0' holds no checkpoint: name"):
        run(tmp_path / "b", resume=tmp_path / "worker-0")
    # From another directory, and on into one's own.
    second, _, _ = run(tmp_path / "b", resume=tmp_path)
    assert second[0][0] == 5
    assert [saved.facts.step for saved in saved_by(tmp_path / "b", 0)] == [20, 16, 12]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "one bit":
        data[len(data) // 2] ^= 1
    elif how == "cut short":
        data = data[:-100]
    elif how == "empty":
        data = bytearray()
    else:
        data[8:40] = b"x" * 32
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["one bit", "cut short", "empty", "header"])
def test_a_damaged_file_is_passed_over(run, tmp_path, caplog, how):
    whole, end, _ = run(None)
    run(tmp_path, stop_after=14)
    damage(file_of(tmp_path, 12), how)
    with caplog.at_level(logging.WARNING, "gossipdp"):
        second, resumed_end, _ = run(tmp_path)
    assert second == whole[8:]
    assert_same(end, resumed_end)
    assert len(caplog.records) == 1, "one warning"
    assert str(file_of(tmp_path, 12)) in caplog.text
    assert "damaged" in caplog.text or "cannot be read" in caplog.text


def test_nothing_but_damaged_files_is_one_clear_error(run, tmp_path):
    run(tmp_path, stop_after=5)
    damage(file_of(tmp_path, 4), "one bit")
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        run(tmp_path)


def test_another_model_or_optimizer_is_refused(run, tmp_path):
    run(tmp_path, stop_after=5)
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"is of another model: 'bias' is absent there and float"):
        GossipDataParallel(
            net, torch.optim.SGD(net.parameters(), 0.1), checkpoints=Checkpoints(resume=tmp_path)
        )
    net = Net()
    with pytest.raises(
        ValueError, match=r"does not fit optimizer 0, a SGD; make the optimizer as it was"
    ):
        GossipDataParallel(
            net,
            torch.optim.SGD(net.head.parameters(), 0.1),
            checkpoints=Checkpoints(resume=tmp_path),
        )


def test_poison_is_not_saved(run, tmp_path, caplog):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints(tmp_path, every_steps=1))
    model.save_checkpoint()
    with torch.no_grad():
        net.weight[0, 0] = float("nan")
    with pytest.raises(PoisonedError, match="are not saved"):
        model.save_checkpoint()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert "hold NaN or infinity: they are not saved" in caplog.text
    model.close()
    assert [saved.facts.step for saved in saved_by(tmp_path, 0)] == [0]


def test_poisoned_buffers_are_neither_saved_nor_averaged(tmp_path):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = GossipDataParallel(
        net, torch.optim.SGD(net.parameters(), 0.1), checkpoints=Checkpoints(tmp_path)
    )
    net[1].running_var[1] = float("inf")
    with pytest.raises(PoisonedError, match="are not saved"):
        model.save_checkpoint()
    with pytest.raises(PoisonedError, match="are not averaged"):
        model.consolidate()
    model.close()  # and with it the handler of SIGTERM
    assert saved_by(tmp_path, 0) == []


class PackedTensor(torch.Tensor):
    """Stands for the states of optimizers that hold codes of 8 bits in a class of their own."""


class PackedSGD(torch.optim.Optimizer):
    """Keeps such a state from its first step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)
            self.state[parameter]["codes"] = torch.zeros(2).as_subclass(PackedTensor)


def test_a_state_that_cannot_be_saved_is_said_at_wrapping(wrap, tmp_path):
    net = nn.Linear(3, 2)
    net.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    message = r"the module\['phases'\] is a tensor of torch.complex128, .*: .*persistent=False"
    with pytest.raises(ValueError, match=message):
        wrap(net, optimizer, checkpoints=Checkpoints(tmp_path))
    wrap(net, optimizer).close()  # which needs no file
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer.param_groups[0]["rule"] = test_poison_is_not_saved
    message = r"the SGD\['param_groups'\]\[0\]\['rule'\] is a builtins.function"
    with pytest.raises(ValueError, match=message):
        wrap(net, optimizer, checkpoints=Checkpoints(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_second", [False, True])
def test_a_state_that_an_optimizer_makes_and_cannot_be_saved_is_said_after_its_first_step(
    wrap, tmp_path, is_second
):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    plain = torch.optim.SGD(net[0].parameters(), 0.1)
    packed = PackedSGD(net[1].parameters(), {})
    optimizers = [plain, packed] if is_second else [packed, plain]
    model = wrap(net, optimizers, checkpoints=Checkpoints(tmp_path, every_steps=100))
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    message = r"of the PackedSGD\['state'\]\[0\]\['codes'\] is a PackedTensor; .*: use an optim"
    with pytest.raises(ValueError, match=message):
        packed.step()


def test_without_checkpoints_a_state_that_no_joiner_can_take_is_a_warning(wrap, caplog):
    net = nn.Linear(3, 2)
    optimizer = PackedSGD(net.parameters(), {})
    model = wrap(net, optimizer)
    model._engine.world_size = 2
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    message = "cannot take over this one's optimizer, since the state of the PackedSGD['state'][0]"
    assert caplog.text.count(message) == 1
    model._engine.world_size = 1


def test_another_object_whose_state_cannot_be_saved_is_said_where_it_is_named(wrap, tmp_path):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    schedule.shape = test_poison_is_not_saved
    model = wrap(net, optimizer, checkpoints=Checkpoints(tmp_path))
    with pytest.raises(ValueError, match=r"'schedule'\['shape'\] is a builtins.function"):
        model.also_checkpoint(schedule=schedule)


@pytest.mark.parametrize("stop_after", [3, 7])
def test_a_loop_of_ones_own_goes_on_with_the_same_random_numbers(tmp_path, stop_after):
    def script(steps: int, **options: Any) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        model = GossipDataParallel(net, optimizer, **options)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        model.also_checkpoint(schedule=schedule)
        losses = []
        for _ in range(steps - model.stats().gradient_steps):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        model.close()
        return losses

    options = {"checkpoints": Checkpoints(tmp_path, every_steps=2, resume="auto")}
    whole = script(12)
    script(stop_after, **options)
    rest = script(12, **options)
    # A step is shorter than a write here, so the newest checkpoint may be one before the last due.
    assert 12 - stop_after < len(rest) < 12
    assert rest == whole[12 - len(rest) :]
