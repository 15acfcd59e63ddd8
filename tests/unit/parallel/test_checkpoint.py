"""One worker's checkpoints: a resumed run is bitwise the uninterrupted one, whatever happens."""

import copy
import math
import random
import re

import numpy
import pytest
import torch
from checkpointing import step, steps_saved
from mixed_net import Net
from own_optimizer import OwnOptimizer
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset

from gossipdp import Checkpoints, Counting, PoisonedError
from gossipdp.parallel.checkpoint import warn_of_older
from gossipdp.parallel.checkpoint_files import read_tensors, write_tensors

pytestmark = pytest.mark.usefixtures("at_once")
NUM_STEPS = 23
OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net, 0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net, 1e-2, amsgrad=True),
}


@pytest.fixture
def run(wrap):
    """``run(place, **options)``: losses, end state and model of a script, which may be killed."""

    def script(
        place, kind="sgd", *, order="shuffled", stop_after=None, resume="auto", every=4, **options
    ):
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(0)
        data = TensorDataset(torch.randn(54, 2, 5, 5), torch.randint(0, 3, (54,)))
        net = Net().to(memory_format=torch.channels_last)
        made = OPTIMIZERS[kind](p for p in net.parameters() if p.requires_grad)
        saving = place and Checkpoints(place, every, resume=resume)
        options |= {"budget_samples": 6 * NUM_STEPS, "counting": Counting(samples_per_step=6)}
        model = wrap(net, made, checkpoints=saving, **options)
        schedule = torch.optim.lr_scheduler.MultiStepLR(made, [5, 9], 0.5)
        model.also_checkpoint(schedule=schedule, scaler=torch.amp.GradScaler("cpu"))
        loader = DataLoader(data, 6, shuffle=order == "shuffled")
        if order == "drawn in a loop of one's own":
            num_left = NUM_STEPS - model.stats().gradient_steps
            batches = (data[torch.randint(54, (6,))] for _ in range(num_left))
        else:
            batches = model.batches(list(loader) if order == "listed" else loader)
        seen = []
        for images, labels in batches:
            made.zero_grad()
            noise = random.random() + numpy.random.rand()
            loss = nn.functional.cross_entropy(model(images), labels) * noise
            loss.backward()
            made.step()
            schedule.step()
            seen.append((model.stats().gradient_steps, loss.item(), images.sum().item()))
            if len(seen) == stop_after:
                break
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if stop_after is not None:
            model.close()
        return seen, state, model

    return script


@pytest.mark.parametrize(
    ("row", "stop_after"),
    [
        # 9 batches an epoch: saved within one, at its very end, and at the end of the second.
        (("sgd", "a2cid2", "shuffled", 4), 5),
        (("sgd", "none", "shuffled", 3), 10),
        (("sgd", "gossip", "listed", 3), 19),
        (("adamw", "a2cid2", "shuffled", 4), 22),
        (("adamw", "a2cid2", "drawn in a loop of one's own", 4), 10),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run, tmp_path, row, stop_after):
    options = dict(zip(("kind", "method", "order", "every"), row, strict=True))
    whole, end, model = run(None, **options)
    first, _, _ = run(tmp_path, stop_after=stop_after, **options)
    second, resumed_end, resumed = run(tmp_path, **options)
    # What was trained after the checkpoint is trained again; the samples count as often as done.
    assert first == whole[:stop_after]
    assert second == whole[stop_after // row[-1] * row[-1] :]
    torch.testing.assert_close(end, resumed_end, rtol=0, atol=0, check_stride=True)
    assert resumed.stats().samples == model.stats().samples == 6 * NUM_STEPS
    assert resumed.progress() == 1.0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_where_no_momentum_is_held_z_goes_on(linear, tmp_path, num_workers):
    """A file of a2cid2 goes on from x + c/2, and with its random numbers, also in a smaller run."""
    model, optimizer = linear(tmp_path)
    step(model, optimizer)
    path = model.save_checkpoint()
    drawn = torch.rand(3)
    model.close()
    tensors, metadata = read_tensors(path)
    facts, x = metadata["facts"], tensors["model/weight"]
    metadata["facts"] = facts.replace('"world_size":1', f'"world_size":{num_workers}')
    write_tensors(path, {**tensors, "c/weight": torch.full_like(x, 2.0)}, metadata)
    model, _ = linear(tmp_path, resume="auto", method="gossip")
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(model.state_dict()["weight"], x + 1.0)


def test_a_loop_of_ones_own_saves_by_itself_and_on_demand(linear, tmp_path):
    model, optimizer = linear(tmp_path, 2, keep=9)
    for number in range(1, 6):
        step(model, optimizer)
        if number == 3:
            tensors, _ = read_tensors(model.save_checkpoint())
            assert torch.equal(tensors["model/weight"], model.module.weight)
    result = model.consolidate()
    assert steps_saved(tmp_path) == [5, 4, 3, 2]  # the last at the end, whenever it is
    assert (model.stats().checkpoints, model.stats().checkpoints_failed) == (5, 0)
    assert model.stats().checkpoint_pause_seconds > 0
    assert result.samples == 5


def test_saves_keep_as_many_good_files_and_name_no_damaged_one(linear, tmp_path, caplog):
    model, optimizer = linear(tmp_path, keep=2)
    for is_damaged in (False, True, False):
        step(model, optimizer)
        path = model.save_checkpoint()
        if is_damaged:
            path.write_bytes(path.read_bytes()[:100])
    assert steps_saved(tmp_path) == [3, 2, 1]
    assert not caplog.messages


def test_a_run_that_was_stopped_trains_on(linear, tmp_path):
    def train(budget_samples: int) -> tuple[int, int]:
        model, optimizer = linear(tmp_path, resume="auto", budget_samples=budget_samples)
        for batch in model.batches([torch.ones(5, 3)]):
            step(model, optimizer, batch)
            if model.progress() == 0.5:
                model.stop()
                model.save_checkpoint()
        assert model.finished
        return model.consolidate().samples, model.stats().checkpoints

    # A step that the script has saved is saved again after the average, and not before it.
    assert (train(20), train(15)) == ((10, 2), (15, 2))


def test_a_run_goes_on_from_another_directory_and_never_mixes_two(run, tmp_path):
    run(tmp_path, stop_after=5)
    for place, resume, message in [
        (tmp_path, None, "holds checkpoints of another run; go on"),
        (tmp_path / "b", tmp_path / "nowhere", "nowhere' is no directory: name the directory"),
        (tmp_path / "b", tmp_path / "worker-0", "worker-0' holds no checkpoint: name"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(place, resume=resume)
    second, _, _ = run(tmp_path / "b", resume=tmp_path)
    assert second[0][0] == 5
    assert steps_saved(tmp_path / "b") == [20, 16, 12]


def test_workers_with_far_older_checkpoints_are_named(caplog):
    warn_of_older({0: 900, 1: 10_000, 2: 9_000, 3: 8_999})
    (line,) = caplog.messages
    assert "worker 1 knows of 10,000 " in line
    assert " run, worker 0's of 900, worker 3's of 8,999. " in line
    assert " folder worker-1 " in line
    warn_of_older({0: 0, 1: 0})  # a fresh start
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("what", ["values", "end", "facts", "layout"])
def test_a_damaged_file_is_passed_over(run, tmp_path, caplog, what):
    whole, _, _ = run(None, stop_after=9)
    run(tmp_path, stop_after=14)
    newest, *older = sorted((tmp_path / "worker-0").iterdir(), reverse=True)
    if what == "layout":  # its checksum fits
        tensors, metadata = read_tensors(newest)
        del tensors["training/layout"]
        write_tensors(newest, tensors, metadata)
    else:
        data = bytearray(newest.read_bytes()).replace(b"rank", b"rink", int(what == "facts"))
        data[len(data) // 2] ^= 1
        newest.write_bytes(data[:-100] if what == "end" else data)
    second, _, resumed = run(tmp_path, stop_after=1)
    assert second == whole[8:9]
    warning, goes_on = caplog.messages
    text = f"the run goes on from step 8 of worker 0 in {tmp_path}, from checkpoints of 1"
    assert goes_on == f"{text} workers, with world_size 1"
    assert str(newest) in warning
    assert "damaged" in warning or "cannot be read" in warning
    resumed.close()
    for path in older:
        path.unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole"):
        run(tmp_path)
    assert len(caplog.messages) == 3, "it is named once"


def test_another_model_or_optimizer_is_refused(run, wrap, tmp_path):
    run(tmp_path, stop_after=5)
    net, other = Net(), Net()
    other.tail = nn.Linear(2, 2)  # behind many that are alike
    for module, trained, message in [
        (other, other, r"is of another model: 'tail\.bias' is absent or frozen there and float"),
        (net, net.conv, r"does not fit optimizer 0, a SGD; make the optimizer as it was"),
    ]:
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        with pytest.raises(ValueError, match=message):
            wrap(module, optimizer, checkpoints=Checkpoints(resume=tmp_path))


def test_a_frozen_base_is_in_no_checkpoint_and_another_one_is_refused(wrap, tmp_path):
    def wrapped(seed):
        torch.manual_seed(seed)
        net = nn.ModuleDict({"base": nn.Linear(512, 512), "adapter": nn.Linear(4, 2)})
        net["base"].requires_grad_(False)
        optimizer = torch.optim.SGD(net["adapter"].parameters(), 0.1)
        return wrap(net, optimizer, checkpoints=Checkpoints(tmp_path, resume="auto"))

    model = wrapped(0)
    with torch.no_grad():
        model.module["adapter"].weight.fill_(7.0)
    model.save_checkpoint()
    for base, names in (True, {"base.weight", "base.bias"}), (False, set()):
        model.save_averaged(tmp_path / "average.safetensors", base=base)
        found = load_file(tmp_path / "average.safetensors")
        assert found.keys() == {"adapter.weight", "adapter.bias"} | names
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())
    model.close()
    (path,) = tmp_path.glob("worker-0/*.safetensors")
    assert path.stat().st_size < 20_000  # most of it the random states; the base is a megabyte
    with pytest.raises(ValueError, match=r"are of another frozen base: .* call torch.manual_seed"):
        wrapped(1)
    assert (wrapped(0).module["adapter"].weight == 7.0).all()


@pytest.mark.parametrize(("name", "poison"), [("0.weight", math.nan), ("1.running_var", math.inf)])
def test_poison_is_neither_saved_nor_averaged(wrap_sgd, tmp_path, caplog, name, poison):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2).eval())
    model, optimizer = wrap_sgd(net, checkpoints=Checkpoints(tmp_path, every_steps=1))
    model.save_checkpoint()
    good = copy.deepcopy(net.state_dict())
    net.state_dict()[name].view(-1)[1] = poison
    with pytest.raises(PoisonedError, match="are not saved"):
        model.save_checkpoint()
    with pytest.raises(PoisonedError, match="of worker 0 hold NaN or infinity: they are not aver"):
        model.save_averaged(tmp_path / "average.pt")
    assert not (tmp_path / "average.pt").exists()
    model.load_state_dict(good)
    with model.averaged():
        torch.testing.assert_close(net.state_dict(), good, rtol=0, atol=0)
    net.state_dict()[name].view(-1)[1] = poison
    step(model, optimizer, times=2)
    assert "hold NaN or infinity: they are not saved" in caplog.text
    with pytest.raises(PoisonedError, match="are not averaged"):
        model.consolidate()
    assert steps_saved(tmp_path) == [0]


def test_a_state_that_cannot_be_saved_is_said_at_wrapping_or_where_it_is_named(wrap, tmp_path):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    first, optimizer = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    saving = Checkpoints(tmp_path)
    optimizer.param_groups[0]["rule"] = print
    message = r"the SGD\['param_groups'\]\[0\]\['rule'\] is a builtins.builtin_function"
    with pytest.raises(ValueError, match=message):
        wrap(net, [first, optimizer], checkpoints=saving)
    assert not list(tmp_path.iterdir())
    del optimizer.param_groups[0]["rule"]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    schedule.shape = print
    model = wrap(net, [first, optimizer], checkpoints=saving)
    with pytest.raises(ValueError, match=r"'schedule'\['shape'\] is a builtins.builtin_function"):
        model.also_checkpoint(schedule=schedule)


def test_a_state_that_a_step_makes_and_nobody_can_take_is_said_after_it(wrap, tmp_path, caplog):
    """An error with checkpoints; without, one warning, since no joiner can take it either."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    codes = TwoTensor(torch.zeros(2), torch.zeros(2))  # a class of its own
    first = torch.optim.SGD(net[0].parameters(), 0.1)
    second = OwnOptimizer(net[1].parameters(), lambda _: codes, key="codes")
    state = r"the state of the OwnOptimizer\['state'\]\[0\]\['codes'\] is a TwoTensor"
    model = wrap(net, [first, second], checkpoints=Checkpoints(tmp_path))
    model(torch.ones(1, 3)).sum().backward()
    first.step()
    with pytest.raises(ValueError, match=f"{state}; .*: use an optimizer"):
        second.step()
    model.close()
    model = wrap(net, [first, second])
    model._worker.world_size = 2
    for _ in range(3):
        second.step()
    assert len(re.findall(f"take over this one's optimizer, since {state}", caplog.text)) == 1
    model._worker.world_size = 1
