"""One worker alone: training is bitwise that of the plain loop; and the public surface."""

import copy
import math
import re
from contextlib import ExitStack, nullcontext
from itertools import product, repeat
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock, PropertyMock

import pytest
import torch
from checkpointing import step
from clocks import Clock
from mixed_net import Net
from torch import nn
from torch._dynamo.testing import CompileCounter

from gossipdp import Checkpoints, Counting, Exchange, ModelChangedError
from gossipdp.dynamics import update
from gossipdp.dynamics.chunks import Chunk
from gossipdp.parallel.worker import Worker


def make(seed: int = 0, memory_format=torch.contiguous_format) -> nn.Module:
    torch.manual_seed(seed)
    return Net().to(memory_format=memory_format)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def leave_pending(worker: Worker, total: float) -> list[Chunk]:
    """Leave in each chunk what brings its values to ``total``, as exchanges do."""
    for chunk in worker._state.averaged_chunks:
        chunk.pending.copy_(total - chunk.x)
        chunk.restored()
    return worker._state.averaged_chunks


def train_step(model, optimizer, number: int, kind: str = "plain") -> None:
    def closure():
        optimizer.zero_grad()
        for part in range(3 if kind == "accumulating" else 1):
            seeded = torch.Generator().manual_seed(10 * number + part)
            images = torch.randn(6, 2, 5, 5, generator=seeded)
            labels = torch.randint(0, 3, (6,), generator=seeded)
            with getattr(model, "no_sync", nullcontext)():
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()
        if kind == "accumulating":
            nn.utils.clip_grad_norm_(trainable(model), 0.5)
        return loss

    if kind == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(trainable(m), 0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda m: torch.optim.AdamW(trainable(m), 1e-2),
    "foreach": lambda m: torch.optim.AdamW(trainable(m), 1e-2, foreach=True),
    "lbfgs": lambda m: torch.optim.LBFGS(trainable(m), max_iter=4),
}


@pytest.mark.parametrize(
    ("kind", "optimizer_name", "memory_format"),
    [
        ("plain", "sgd", torch.channels_last),
        ("accumulating", "sgd", torch.contiguous_format),
        ("accumulating", "foreach", torch.channels_last),
        ("autocast", "adamw", torch.channels_last),
        ("closure", "lbfgs", torch.contiguous_format),
    ],
)
def test_one_worker_is_bitwise_the_plain_loop(wrap, kind, optimizer_name, memory_format):
    plain, wrapped = make(0, memory_format), make(0, memory_format)
    trained = []
    for module in (plain, wrapped):
        optimizer = OPTIMIZERS[optimizer_name](module)
        model = wrap(module, optimizer) if module is wrapped else module
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        torch.manual_seed(1)
        for number in range(6):
            train_step(model, optimizer, number, kind)
            scheduler.step()
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_another_default_device_changes_nothing(wrap_sgd, tmp_path):
    net, saving = nn.Linear(3, 2), Checkpoints(tmp_path)
    before, inputs = net.weight.detach().clone(), torch.ones(4, 3)
    with torch.device("meta"):
        model, optimizer = wrap_sgd(net, wire_format="lattice8", checkpoints=saving)
        step(model, optimizer, inputs)
        assert model.consolidate().samples == 4
    torch.testing.assert_close(net.weight, before - 0.4)


@pytest.mark.parametrize("order", ["compile, wrap", "wrap, compile", "compile()"])
def test_compiled_in_any_order_there_is_one_graph_for_training(wrap, tmp_path, order):
    """Whatever is due between two forward passes; and the bits are those of the plain module."""
    plain, net = make(), make()
    plain.drop.p = net.drop.p = 0.0
    graphs = CompileCounter()
    torch._dynamo.reset()
    optimizers = [torch.optim.SGD(trainable(each), 0.1, momentum=0.9) for each in (plain, net)]
    module = torch.compile(net, backend=graphs) if order == "compile, wrap" else net
    model = wrap(module, optimizers[1], checkpoints=Checkpoints(tmp_path, every_steps=2))
    called = torch.compile(model, backend=graphs) if order == "wrap, compile" else model
    if order == "compile()":
        model.compile(backend=graphs)
    for _ in range(6):
        inputs = torch.randn(4, 2, 5, 5)
        for each, optimizer in zip((plain, called), optimizers, strict=True):
            step(each, optimizer, inputs)
    assert graphs.frame_count == 1
    assert list(model.state_dict()) == list(module.state_dict())
    torch.testing.assert_close(plain.state_dict(), net.state_dict(), rtol=0, atol=0)
    assert model.stats().samples == 24
    model.close()
    assert model.stats().checkpoints >= 1
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "fused"), [(torch.optim.SGD, False), (torch.optim.AdamW, True)])
def test_a_step_that_grad_scaler_skips_is_no_boundary(wrap, kind, fused):
    net = nn.Linear(2, 1)
    optimizer = kind(net.parameters(), 0.1, fused=fused)
    model = wrap(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 2), value)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.stats().gradient_steps == 2


@pytest.mark.parametrize("outer", [nn.Sequential, torch.compile])
@pytest.mark.parametrize("name", ["module", "_orig_mod", "net"])
def test_a_module_loads_what_it_saved_of_a_wrapper_within(wrap_sgd, outer, name):
    whole = outer(wrap_sgd(nn.ModuleDict({name: nn.Linear(2, 2)}))[0])
    within = next(iter(whole._modules))
    for of_ddp in (within, f"{within}.module"):
        saved = {name: value + 1 for name, value in whole.state_dict().items()}
        whole.load_state_dict({name.replace(within, of_ddp, 1): saved[name] for name in saved})
        torch.testing.assert_close(dict(whole.state_dict()), saved)


def test_strict_pace_leaves_what_other_optimizers_train_to_their_own_boundary(wrap, monkeypatch):
    """Between a step of the first and another's, a backward pass may still need its parameters."""
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    worker = wrap(net, [first, second], exchange=Exchange(pace="strict"))._worker
    for parameter in net.parameters():
        parameter.data.fill_(1.0)

    def backlogs():  # looked at once a turn
        leave_pending(worker, 2.0)
        yield 5
        yield from repeat(0)

    pairing = Mock(answers=True, available={1: 1.0})
    type(pairing).backlog = PropertyMock(side_effect=backlogs())
    protocol = SimpleNamespace(pairing=pairing, neighbours=frozenset({1}))
    monkeypatch.setattr(worker, "_protocol", protocol)
    first.step()
    assert all((parameter == 2.0).all() for parameter in net[0].parameters())
    assert all((parameter == 1.0).all() for parameter in net[1].parameters())


@pytest.mark.parametrize(
    ("loads", "names", "num_loads"),
    [
        (lambda net: net, ("0", "1", "2"), 1),
        (lambda net: net[0], ("0",), 1),
        (lambda net: net[1], ("1",), 1),
        (lambda net: nn.ModuleDict({"whole": net, "other": nn.Linear(1, 1)}), ("0", "1", "2"), 1),
        (lambda net: nn.ModuleList([net[0], nn.Linear(1, 1), net[2]]), ("0", "2"), 2),
    ],
)
def test_a_load_drops_what_exchanges_brought_to_it(wrap_sgd, monkeypatch, loads, names, num_loads):
    """And the last that one in flight brings, until it is broken off."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2))
    model, optimizer = wrap_sgd(net)
    worker = model._worker
    hold, held = worker._loop.hold, []

    def exchange_and_hold():
        for chunk in () if held else worker._state.chunks:
            mine, peers = torch.zeros_like(chunk.x), torch.full_like(chunk.x, 4.0)
            chunk.exchange(0.0, mine, peers, 0.5)
        held.append(True)
        hold()

    monkeypatch.setattr(worker._loop, "hold", exchange_and_hold)
    expected = {}
    for name, value in model.state_dict().items():
        if name.startswith(names):
            expected[name] = torch.full_like(value, 7)
        else:  # half of the difference
            expected[name] = value + 2.0 if value.is_floating_point() else value
    loaded = loads(net)
    loaded.load_state_dict({key: torch.full_like(v, 7) for key, v in loaded.state_dict().items()})
    assert len(held) == num_loads
    assert worker._protocol.pairing.answers
    for now in (model.state_dict, net.state_dict):
        torch.testing.assert_close(dict(now()), expected)
        optimizer.step()  # without a gradient: a boundary alone


def test_loading_a_target_network_breaks_no_exchange_off(wrap, monkeypatch):
    """It is averaged at the end alone: no exchange holds a part of it."""
    net = nn.ModuleDict({"online": nn.Linear(2, 2), "target": nn.Linear(2, 2)})
    model = wrap(net, torch.optim.SGD(net["online"].parameters(), 0.1))
    monkeypatch.setattr(model._worker._loop, "hold", hold := Mock())
    net["target"].load_state_dict(net["online"].state_dict())
    hold.assert_not_called()
    assert torch.equal(net["target"].weight, net["online"].weight)


def test_channels_last_after_wrapping_is_an_error(wrap, wrap_sgd):
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1))
    model, optimizer = wrap_sgd(net)
    with pytest.raises(ModelChangedError, match=r"channels_last after wrapping.* before"):
        model.to(memory_format=torch.channels_last)
    model.close()
    wrap(net, optimizer).to(memory_format=torch.channels_last)
    optimizer.step()
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_samples_are_counted_in_training_mode_alone_and_may_be_given(wrap, wrap_sgd):
    net = nn.Linear(2, 1)
    model, optimizer = wrap_sgd(net)
    model(input=torch.ones(7, 2)).sum().backward()
    model.eval()
    model(torch.ones(50, 2))
    model.train()
    with torch.no_grad():
        model(torch.ones(50, 2))
    optimizer.step()
    assert model.stats().samples == 7
    net(torch.ones(7, 2)).sum().backward()
    model.eval().count_batch({"labels": [torch.ones(5)]})
    optimizer.step()
    assert model.stats().samples == 12
    net.train()
    step(model, optimizer, torch.ones(5, 2))
    assert (model.training, model.stats().samples) == (False, 17)
    model.close()
    given = wrap(net, optimizer, counting=Counting(samples_per_step=3))
    given.count_batch(torch.ones(7, 2))
    step(given, optimizer, torch.ones(7, 2))
    assert given.stats().samples == 3
    model, optimizer = wrap_sgd(nn.MultiheadAttention(2, 1))
    outputs, _ = model(*3 * [torch.ones(4, 8, 2)])  # several arguments are no list of samples
    outputs.sum().backward()
    optimizer.step()
    assert model.stats().samples == 4


def test_without_a_budget_progress_is_an_error_that_says_what_to_give(linear):
    model, optimizer = linear()
    assert model.progress() == 0.0
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"budget_samples=, or loop over model\.epochs"):
        model.progress()
    assert not model.finished


def test_the_fingerprint_covers_how_optimizers_group_parameters(wrap):
    """Else two workers would cut chunks of the same tensors differently and not know it."""
    models = set()
    for groups in ([[0, 1, 2]], [[0, 2], [1]], [[0, 1], [2]], [[2], [0, 1]]):
        net = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
        optimizers = [torch.optim.SGD([net[i].weight for i in group], 0.1) for group in groups]
        models.add(wrap(net, optimizers)._worker.settings.model)
    assert len(models) == 4


def test_what_all_workers_must_have_alike_is_told_to_the_others(linear):
    def settings(**options):
        return linear(**options)[0]._worker.settings

    there, here = settings(), settings(method="gossip", comm_rate=2.0, wire_format="lattice8")
    assert (there.method, there.comm_rate, there.wire_format) == ("a2cid2", "auto", "auto")
    assert (here.method, here.comm_rate, here.wire_format) == ("gossip", "2", "lattice8")
    assert settings(exchange=Exchange(pace="strict")).comm_rate == "1"
    assert (there.budget_samples, settings(budget_samples=8).budget_samples) == (None, 8)
    here = settings(exchange=Exchange(moments={"momentum_buffer": 4}))
    message = r"the models differ, .*momentum_buffer in one exchange of 4,.* here and none on"
    assert re.match(message, here.difference_of_models(there.tensors))


@pytest.mark.parametrize("fails", [False, True])
def test_within_averaged_the_worker_s_own_parameters_stay(wrap_sgd, tmp_path, monkeypatch, fails):
    monkeypatch.setattr("gossipdp.parallel.flat_parameters.chunk_bytes_for", lambda *_, **__: 64)
    net = nn.BatchNorm1d(2)  # parameters and statistics, of two chunks each
    model, optimizer = wrap_sgd(net, checkpoints=Checkpoints(tmp_path))
    chunks = leave_pending(model._worker, 2.0)
    before = copy.deepcopy(net.state_dict())
    address = net.weight.data_ptr()
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), model.averaged():
        assert net.weight.data_ptr() == address, "a captured graph reads the average"
        for each in (*net.parameters(), net.running_mean, net.running_var):
            torch.testing.assert_close(each.detach(), torch.full_like(each, 2.0))
        kept = model.state_dict()
        assert torch.equal(kept["weight"], average := net.weight.clone())
        with torch.no_grad():  # so that another average would not be this one
            net.weight.fill_(7.0)
        model.save_averaged(tmp_path / "best.pt")
        assert torch.load(tmp_path / "best.pt")["weight"].eq(7.0).all()
        assert net.weight.eq(7.0).all()
        zeros = {key: torch.zeros_like(each) for key, each in before.items()}
        for act in (optimizer.step, model.save_checkpoint, lambda: model.load_state_dict(zeros)):
            with pytest.raises(RuntimeError, match=r"within model\.averaged"):
                act()
        model.to("cpu")
        if fails:
            raise ZeroDivisionError
    assert torch.equal(kept["weight"], average), "what was taken there is still the average"
    assert model._worker._protocol.pairing.answers
    assert net.weight.data_ptr() == address
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    model.close()  # what exchanges have brought is not lost
    for chunk in chunks:
        torch.testing.assert_close(chunk.x, torch.full_like(chunk.x, 2.0))


def test_after_inference_mode_states_are_written_as_before(wrap_sgd, monkeypatch, tmp_path):
    """Room that was made in that mode could not be written outside of it."""
    monkeypatch.setattr(update, "_kept", update._Kept())
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, _ = wrap_sgd(net, checkpoints=Checkpoints(tmp_path))
    before = copy.deepcopy(net.state_dict())
    with torch.inference_mode():
        states = [model.state_dict()]
        with model.averaged():
            states.append(model.state_dict())
    model.save_checkpoint()
    for state in (*states, model.state_dict(), net.state_dict()):
        assert all(torch.equal(value, before[key]) for key, value in state.items())
    leave_pending(model._worker, 2.0)
    model._worker._state.boundary(0.0)
    torch.testing.assert_close(net[0].weight, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("ends_within", [False, True])
def test_an_average_may_begin_in_inference_mode_and_end_outside_of_it(wrap_sgd, ends_within):
    """As where callbacks enter and leave it; or the other way round."""
    net = nn.Linear(2, 2)
    model, optimizer = wrap_sgd(net)
    before = copy.deepcopy(net.state_dict())
    with ExitStack() as averaged:
        with nullcontext() if ends_within else torch.inference_mode():
            averaged.enter_context(model.averaged())
        with torch.inference_mode() if ends_within else nullcontext():
            averaged.close()
    torch.testing.assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)
    step(net, optimizer, torch.ones(1, 2))
    torch.testing.assert_close(net.bias.detach(), before["bias"] - 0.1)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_end_within_averaged_or_after_ctrl_c_stays(wrap_sgd, monkeypatch, is_interrupted):
    net = nn.Linear(2, 2)
    model, _ = wrap_sgd(net)
    leave_pending(model._worker, 2.0)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext(), model.averaged():
        with torch.no_grad():
            net.weight.fill_(7.0)
        if is_interrupted:
            flat = model._worker._flat
            once = Mock(side_effect=[KeyboardInterrupt, DEFAULT], wraps=flat.swap_back)
            monkeypatch.setattr(flat, "swap_back", once)
        else:
            model.consolidate()
    if is_interrupted:
        model.consolidate()
    for parameter in net.parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, 2.0))


def test_what_has_no_average_is_left_alone(wrap_sgd):
    """A sparse buffer that is not persistent, and a frozen parameter: a mask of infinities."""
    net = nn.Linear(2, 2)
    net.register_buffer("adjacency", torch.eye(2).to_sparse(), persistent=False)
    net.mask = nn.Parameter(torch.full((2, 2), -torch.inf).triu(1), requires_grad=False)
    before = net.mask.clone()
    model, _ = wrap_sgd(net)
    with model.averaged():
        assert torch.equal(net.mask, before)
    model.consolidate()
    assert torch.equal(net.mask, before)
    assert torch.equal(net.adjacency.to_dense(), torch.eye(2))


def test_consolidate_closes_and_the_module_trains_on_alone_and_a_state_dict_stays(wrap_sgd):
    model, optimizer = wrap_sgd(net := make())
    worker = model._worker
    kept = copy.deepcopy(before := model.state_dict())
    train_step(model, optimizer, 0)
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    result = model.consolidate()
    assert (result.world_size, result.consensus_distance, result.gradient_steps) == (1, 0.0, 1)
    assert worker._protocol.consolidation.total_chunks == len(worker._state.all_chunks)
    train_step(model, optimizer, 1)
    assert model.stats().gradient_steps == 1
    with pytest.raises(RuntimeError, match="before"):
        model.consolidate()
    trained = copy.deepcopy(net.state_dict())
    with model.averaged():
        torch.testing.assert_close(net.state_dict(), trained, rtol=0, atol=0)
    assert model.half().state_dict()["conv.weight"].dtype == torch.float16, "it may change now"


@pytest.mark.parametrize(("given", "wait_s"), [({}, math.inf), ({"timeout_s": 3.0}, 3.0)])
def test_the_end_waits_as_long_as_it_is_told(linear, monkeypatch, caplog, given, wait_s):
    model, _ = linear()
    worker, clock, waits_s = model._worker, Clock(longest_s=60.0), []
    loop, done = worker._loop, worker._protocol.done

    def wait(ended, _):
        clock.sleep(5.0)
        assert worker.monitoring._status(worker, worker.stats(), None).state == "averaging"
        if clock.now_s == 25.0:
            worker._call(lambda: loop.perform(done(loop.clock(), *waits_s)))
            ended[0].result(30)

    monkeypatch.setattr(worker._protocol, "done", lambda now, s: waits_s.append(s) or [])
    monkeypatch.setattr("gossipdp.parallel.worker.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("gossipdp.parallel.worker.wait", wait)
    monkeypatch.setattr(worker.replica, "gather", lambda *of: ((n, 2 * n) for n in of))
    assert model.consolidate(**given).world_size == 1, "in the shard that heard of fewest"
    assert waits_s == [wait_s]
    assert caplog.text.count("worker 0 waits in consolidate(): worker 0 (its") == 2, "each 10 s"


def test_what_took_the_place_of_parameters_since_the_last_step_is_averaged(linear):
    """As a moving average that a script updates by hand, or SAM; it is no load."""
    model, _ = linear()
    weight = model.module.weight
    weight.data = weight.data + 1.0
    leave_pending(model._worker, 2.0)
    expected = torch.full_like(weight, 3.0)
    with model.averaged():
        torch.testing.assert_close(weight.detach(), expected)
    model.consolidate()
    torch.testing.assert_close(weight.detach(), expected)


def test_worker_seeds_are_distinct_and_fit_into_32_bits(linear):
    model, _ = linear(seed=123_456)
    seeds = set()
    for rank, life in product(range(64), repeat=2):
        model._worker.rank, model._worker.incarnation = rank, life
        seeds.add(model.worker_seed)
    assert len(seeds) == 64 * 64
    assert all(0 <= seed < 2**32 for seed in seeds)
    model._worker.rank = model._worker.incarnation = 0
