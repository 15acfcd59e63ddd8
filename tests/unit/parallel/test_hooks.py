"""Clear errors and one warning each for a script that acts behind the wrapper's back."""

import copy
import gc
import io
import logging
import threading
import weakref

import pytest
import torch
from checkpointing import full, sgd, step
from run_processes import run_python
from torch import nn
from torch.utils.checkpoint import checkpoint

from gossipdp import Checkpoints, GossipDataParallel, Monitor, ProgressLR
from gossipdp.dynamics.state import State
from gossipdp.errors import ModelChangedError
from gossipdp.links.sockets import listen
from gossipdp.parallel import worker as worker_module
from gossipdp.parallel.hooks import warn_of_step_counters


class Child(torch.optim.SGD):
    """Twice what the parent does, and 1 on top of it, which is a part of the same step."""

    within = staticmethod(lambda: None)

    def step(self, closure=None):
        super().step(closure)
        loss = super().step()
        self.within()
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return loss


@pytest.mark.parametrize("kind", [torch.optim.SGD, Child])
def test_an_optimizer_that_was_not_wrapped_is_an_error_at_its_first_step(wrap, kind):
    net = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    first, second = sgd(net[0]), kind(net[1].parameters(), 0.1)
    model = wrap(net, first)
    first.step()
    sgd(nn.Linear(2, 1)).step()  # of something else
    message = rf"a {kind.__name__} that was not wrapped .* \[first, second\]"
    with pytest.raises(RuntimeError, match=message):
        second.step()
    model.close()
    second.step()


class Shell(torch.optim.Optimizer):
    """Steps an optimizer within, as SAM does; each of the two holds the other."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, inner.outer = inner, self
        super().__init__(inner.param_groups[0]["params"], {})

    def step(self, closure=None):
        self.inner.step()


class Repeated(Shell):
    """Has no step of its own that was hooked into, around one that calls its parent's."""

    def step(self, closure=None):
        super().step()


@pytest.mark.parametrize(("kind", "wrapped"), [(Shell, 0), (Shell, 1), (Repeated, 1)])
def test_a_shell_around_an_optimizer_may_be_wrapped_or_what_is_in_it(wrap, kind, wrapped):
    net = nn.Linear(2, 1)
    inner = sgd(net)
    Shell(sgd(nn.Linear(2, 1)))  # torch hooks into a class with its first instance
    outer = kind(inner)
    model = wrap(net, (outer, inner)[wrapped])
    outer.step()
    outer.step()
    assert model.stats().gradient_steps == 2


def test_a_step_that_calls_its_parent_s_is_one_step(wrap, monkeypatch):
    """Torch hooks into the classes one by one, as soon as there is an instance of each."""
    net = nn.Linear(2, 1, bias=False)
    sgd(nn.Linear(2, 1))
    child = Child(net.parameters(), 0.5)
    model = wrap(net, child)
    boundary, seen, given = State.boundary, [], []

    def watched(state, *args, **kwargs):
        seen.append(net.weight.detach().clone())
        return boundary(state, *args, **kwargs)

    monkeypatch.setattr(State, "boundary", watched)
    net.weight.grad = torch.full((1, 2), 2.0)
    expected = net.weight.detach() - 2 * 0.5 * 2.0 + 1.0
    stepping = model._worker.between_steps._stepping
    child.within = lambda: given.append(not stepping)
    for _ in range(2):
        child.step()
        given.append(not stepping)
    assert given == 2 * [False, True], "no joiner gets the state within a step"
    assert model.stats().gradient_steps == 2
    torch.testing.assert_close(torch.stack(seen), torch.stack([expected, expected - 1.0]))
    with pytest.raises(ZeroDivisionError):
        child.step(lambda: 1 / 0)
    child.step()
    assert model.stats().gradient_steps == 3


def test_a_closure_that_is_called_often_counts_its_samples_once(wrap):
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=10)  # does not converge
    model = wrap(net, optimizer)
    calls, parts = [], list(torch.randn(8, 2, 3))

    def closure():
        optimizer.zero_grad()
        losses = [model(part).square().sum() for part in parts]
        sum(losses).backward()
        calls.append(losses)
        return sum(losses)

    optimizer.step(closure)
    assert len(calls) > 5
    assert model.stats().samples == 16
    optimizer.step(closure=closure)
    assert model.stats().samples == 32
    for part in parts:  # of the same batch, as with SAM, though each time another view of it
        model(part.view(2, 3)).sum().backward()
    optimizer.step(closure)
    assert model.stats().samples == 48
    model(torch.ones(5, 3)).sum().backward()  # accumulated, as under Lightning
    optimizer.step(closure)
    assert model.stats().samples == 69


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_pass_that_the_backward_pass_repeats_counts_once(wrap_sgd, use_reentrant):
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    model, optimizer = wrap_sgd(net)
    passes = []
    net[0].register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for _ in range(2):
        inputs = torch.ones(7, 3, requires_grad=True)
        checkpoint(model, inputs, use_reentrant=use_reentrant).sum().backward()
    optimizer.step()
    assert passes == 2 * [not use_reentrant, True]
    assert model.stats().samples == 14


def test_wrapping_twice_is_an_error(wrap, wrap_sgd):
    net = nn.Linear(2, 1)
    model, optimizer = wrap_sgd(net)
    for again in (net, model, nn.Sequential(net), nn.Sequential(model)):
        with pytest.raises(ValueError, match="is wrapped already"):
            wrap(again, optimizer)
    model.close()
    wrap(net, optimizer)


def test_a_scheduler_that_counts_steps_gets_a_warning_that_names_another(caplog):
    net, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, theirs = sgd(net), sgd(other)
    ProgressLR(optimizer, lambda: 0.0)
    torch.optim.lr_scheduler.ReduceLROnPlateau(theirs)
    warn_of_step_counters([optimizer, theirs])
    assert not caplog.records
    torch.optim.lr_scheduler.CosineAnnealingLR(theirs, 10)
    warn_of_step_counters([optimizer, theirs])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "scheduler of the SGD counts this worker's own steps" in record.getMessage()
    assert "gossipdp.ProgressLR(optimizer, model, shape)" in record.getMessage()


WITHOUT_US = """import sys, torch; sys.modules["gossipdp"] = None
net = torch.load("net.pt", weights_only=False)
print(net.load_state_dict(net.state_dict()), net[1].num_batches_tracked.item())"""


def test_the_module_can_be_saved_and_copied_whole(wrap_sgd, tmp_path, monkeypatch):
    told: list[bool] = []
    monkeypatch.setattr(worker_module.Worker, "loaded", lambda *_: told.append(True))
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model, optimizer = wrap_sgd(net, budget_samples=40)
    mean = torch.optim.swa_utils.AveragedModel(model)
    for inputs in model.batches([torch.randn(4, 2)]):
        step(model, optimizer, inputs)
        mean.update_parameters(model)
    torch.save(model.module, tmp_path / "net.pt")
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    there = run_python("-c", WITHOUT_US, cwd=tmp_path, check=True)
    assert there.stdout == "<All keys matched successfully> 10\n"
    for other in (loaded, copy.deepcopy(model.module), copy.deepcopy(model)):
        assert not isinstance(other, GossipDataParallel)
        torch.testing.assert_close([*other.parameters()], [*net.parameters()], rtol=0, atol=0)
        other.load_state_dict(net.state_dict())
    mean.load_state_dict(mean.state_dict())
    assert not told, "the run goes on as it was"
    assert list(mean.state_dict()) == ["n_averaged", *(f"module.{key}" for key in net.state_dict())]
    with pytest.raises(TypeError, match=r"save model\.module, model\.state_dict\(\)"):
        torch.save(model, io.BytesIO())


def threads() -> list[str]:
    own = [each for each in threading.enumerate() if each.name.startswith("gossipdp")]
    assert all(each.daemon for each in own), "it would hold up the interpreter's end"
    return [each.name for each in own]


def test_a_model_that_is_dropped_ends_its_thread(tmp_path):
    net = nn.Linear(2, 1)
    optimizer = sgd(net)
    saving, monitor = Checkpoints(tmp_path, 1), Monitor(tmp_path / "log", 0)
    model = GossipDataParallel(net, optimizer, checkpoints=saving, monitor=monitor)
    step(model, optimizer, torch.ones(1, 2))
    assert threads()
    model.itself = [model]  # a cycle
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert threads() == []
    optimizer.step()
    GossipDataParallel(net, optimizer).close()


@pytest.mark.parametrize("what", ["the graph", "the optimizers' state"])
def test_a_model_that_is_closed_ends_what_its_thread_has_others_do(linear, monkeypatch, what):
    """The other thread ends only once somebody waits for its end."""
    awaited, join = threading.Event(), threading.Thread.join

    def tell(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "gossipdp-background":
            awaited.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", tell)
    model, _ = linear()
    worker = model._worker
    work_out = worker._work_out if what == "the graph" else worker.between_steps._described
    assert worker._thread.call(lambda: work_out("a key", awaited.wait)).result() is None
    assert "gossipdp-background" in threads()
    model.close()
    assert threads() == []


@pytest.mark.parametrize("what", ["kept_moments", "Worker.start", "Worker._start_thread", "Hooks"])
def test_a_model_that_cannot_be_wrapped_leaves_neither_thread_nor_port(monkeypatch, what):
    """One so large that its boundaries have helpers, wherever the wrapping fails."""
    monkeypatch.setattr(f"gossipdp.parallel.worker.{what}", full)  # a mock would keep a traceback
    place, opened = "gossipdp.parallel.entry.listen", []
    monkeypatch.setattr(place, lambda *at: opened.append(listen(*at)) or opened[-1])
    monkeypatch.setattr("gossipdp.dynamics.state.LEAST_HELPED_VALUES", 1)
    monkeypatch.setenv("GOSSIPDP_KERNELS", "numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    net = nn.Linear(2, 1)
    with pytest.raises(OSError, match="No space left"):
        GossipDataParallel(net, sgd(net), monitor=Monitor(status_port=0))
    assert threads() == []
    assert [each.fileno() for each in opened] == [-1] * (what in ("Worker._start_thread", "Hooks"))


@pytest.mark.parametrize("end", ["none", "close", "consolidate", "wrap again"])
def test_a_dropped_wrapper_s_optimizers_warn_once_unless_it_was_ended(wrap, caplog, end):
    net = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizers = [sgd(part) for part in net]
    model = GossipDataParallel(net, optimizers)
    if end in ("close", "consolidate"):
        getattr(model, end)()
    del model
    gc.collect()
    assert not caplog.records
    if end == "wrap again":
        wrap(net, optimizers)
    for _ in range(2):
        for part, optimizer in zip(reversed(net), reversed(optimizers), strict=True):
            step(part, optimizer, torch.ones(1, 2))
            assert caplog.text.count("this model trains alone") == (end == "none")
    levels = [each.levelno for each in caplog.records]
    assert levels == [logging.WARNING] * (end == "none")


@pytest.mark.parametrize("what", ["module", "parameter", "new head"])
def test_what_is_added_to_the_module_is_an_error_at_the_next_step(wrap_sgd, what):
    net = nn.Sequential(nn.Linear(2, 1))
    _, optimizer = wrap_sgd(net)
    net.frozen = nn.Linear(1, 1).requires_grad_(False)
    nn.Linear(2, 1)  # no part of it
    optimizer.step()
    if what == "module":
        net.head, message = nn.Linear(1, 1), r"'head\.weight' was added to the module after"
    elif what == "parameter":
        net[0].scale, message = nn.Parameter(torch.ones(1)), r"'0\.scale' was added to the module"
    else:  # it takes the old one's place, and has an optimizer of its own
        net[0], message = nn.Linear(2, 1), r"'0\.weight' was replaced after"
        optimizer = sgd(net[0])
    for _ in range(2):
        with pytest.raises(ModelChangedError, match=message):
            optimizer.step()
