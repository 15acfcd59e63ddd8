"""Optimizers that keep a copy of the weights are found by their values, and no others are."""

from functools import partial

import pytest
import torch
from own_optimizer import OwnOptimizer
from torch import nn

from gossipdp import Exchange
from gossipdp.parallel.optimizer_watch import OptimizerWatch, _is_between, _is_telling, _sample

# Lookahead (arXiv 1907.08610) begins with its first way back, here in the fifth step; an average
# before the step. Prodigy remembers where it began; the last step equals what began at zero.
LOOKAHEAD = partial(OwnOptimizer, make=lambda p: p - 0.05 * p.grad, key="slow", at_step=5)
AVERAGE = partial(OwnOptimizer, make=lambda p: p - 0.3 * 0.05 * p.grad, key="average")
FLAT_START = partial(OwnOptimizer, make=lambda p: p.flatten().clone(), key="p0")
LAST_STEP = partial(OwnOptimizer, make=lambda p: -0.05 * p.grad, key="velocity")


class MastersAside(OwnOptimizer):
    """Steps float32 copies, outside of its state, and writes them over the parameters."""

    def __init__(self, params):
        super().__init__(params)
        self.masters = [each.detach().float() for each in self.param_groups[0]["params"]]

    def step(self, closure=None):
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.sub_(parameter.grad.float(), alpha=0.05)
            parameter.data.copy_(master)


class MastersTogether(MastersAside):
    """The same, with the copies in its state, and of no parameter."""

    masters = property(lambda self: self.state["all"], lambda self, all: self.state.update(all=all))


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))


def train(wrap, make, steps=3, dtype=torch.float32, net=None, **options):
    net = (net or make_net()).to(dtype)
    optimizer = make(net.parameters())
    model = wrap(net, optimizer, **options)
    for step in range(steps):
        torch.manual_seed(step)
        inputs, targets = torch.randn(16, 8, dtype=dtype), torch.randn(16, 4, dtype=dtype)

        def loss(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            value = (model(inputs) - targets).square().mean()
            value.backward()
            return value

        loss()
        optimizer.step(loss)


@pytest.mark.parametrize(
    ("kind", "key", "dtype", "at_step"),
    [
        (LOOKAHEAD, "slow", torch.float32, 5),
        (MastersAside, "masters", torch.bfloat16, 1),
        (MastersTogether, "all", torch.bfloat16, 1),
        (MastersAside, "masters", torch.float32, 1),  # in memory that was the parameters'
        (AVERAGE, "average", torch.float64, 1),
        (FLAT_START, "p0", torch.float32, 1),
        (torch.optim.ASGD, "ax", torch.float32, 1),
    ],
)
def test_a_copy_of_the_weights_is_found_where_it_appears(wrap, kind, key, dtype, at_step):
    train(wrap, kind, at_step - 1, dtype)
    name = getattr(kind, "func", kind).__name__
    message = rf"the {name} keeps its own copy of the weights: '{key}' of parameter '0\."
    with pytest.raises(ValueError, match=message):
        train(wrap, kind, at_step, dtype)


def test_a_copy_that_is_to_be_exchanged_is_none_of_our_business(wrap):
    train(wrap, AVERAGE, exchange=Exchange(moments={"average": 1}))


def test_of_parameters_that_begin_alike_the_first_is_named():
    alike = [nn.Parameter(torch.arange(6.0, dtype=torch.bfloat16)) for _ in range(2)]
    names = {id(parameter): f"number {index}" for index, parameter in enumerate(alike)}
    with pytest.raises(ValueError, match="'masters' of parameter 'number 0'"):
        OptimizerWatch(MastersAside(alike), names, is_moved=True).stepped()


def test_it_looks_again_once_the_state_has_further_tensors():
    first, second = parameters = [nn.Parameter(torch.arange(6.0).roll(n)) for n in range(2)]
    optimizer = OwnOptimizer(parameters, torch.zeros_like)
    names = {id(first): "first", id(second): "second"}
    watch = OptimizerWatch(optimizer, names, is_moved=True)
    optimizer.step()
    watch.stepped()
    optimizer.state[second]["kept"].copy_(second.detach())
    watch.stepped()
    optimizer.state[first]["further"] = torch.zeros(6)
    with pytest.raises(ValueError, match="'kept' of parameter 'second'"):
        watch.stepped()


ORDINARY = {
    name: kind
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam", "Muon", "ASGD")  # the last keeps an average
} | {
    "Muon": lambda params: torch.optim.Muon([each for each in params if each.dim() == 2]),
    "momentum": partial(torch.optim.SGD, lr=1.0, momentum=0.9),
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "sums from 1": partial(torch.optim.Adagrad, initial_accumulator_value=1),
    "none": OwnOptimizer,
    "rate 0": partial(torch.optim.SGD, lr=0.0),
    "one iteration": partial(torch.optim.LBFGS, lr=0.01, max_iter=1),  # alone it has no exchanges
    "complex": partial(OwnOptimizer, make=lambda p: p.to(torch.complex64)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)  # each in one of them


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, DTYPES[number % 3]) for number, name in enumerate(ORDINARY, 1)]
)
def test_no_ordinary_optimizer_is_taken_for_one(wrap, caplog, name, dtype):
    num_steps = 1 if name == "LBFGS" and dtype == torch.bfloat16 else 4  # then it diverges
    train(wrap, ORDINARY[name], num_steps, dtype)
    assert not caplog.records


@pytest.mark.parametrize(
    ("max_iter", "is_moved", "forgets", "num_warnings"),
    [(4, True, False, 1), (1, True, False, 1), (4, True, True, 0), (4, False, False, 0)],
)
def test_memory_across_exchanges_is_warned_of(caplog, max_iter, is_moved, forgets, num_warnings):
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = torch.optim.LBFGS([parameter], lr=0.1, max_iter=max_iter)
    watch = OptimizerWatch(optimizer, {id(parameter): "x"}, is_moved=is_moved)

    def closure():
        optimizer.zero_grad()
        loss = (parameter * torch.tensor([1.0, 3.0])).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        if forgets:
            optimizer.state.clear()
        optimizer.step(closure)
        watch.stepped()
    assert len(caplog.messages) == num_warnings, caplog.messages
    assert all("before each step, optimizer.state.clear()" in each for each in caplog.messages)


@pytest.mark.parametrize("start", [0.0, 1.0, 1e-6])
def test_a_parameter_that_begins_at_a_constant_proves_nothing(wrap, start):
    net = make_net()
    nn.init.constant_(net[3].weight, start)
    with torch.no_grad():
        net[0].weight.mul_(start)
    train(wrap, LAST_STEP, net=net)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.9), lambda p: p.square() / 2),
        (partial(torch.optim.Adam, lr=1e-3), lambda p: 5 * p.square()),
        (partial(torch.optim.SGD, momentum=0.9, weight_decay=1.0), lambda p: 0 * p),
        (partial(torch.optim.Adagrad, lr=1e-3), lambda p: p.abs() ** 1.5 / 1.5),
    ],
)
def test_a_gradient_that_looks_like_the_parameter_proves_nothing(wrap, make, loss):
    """As under a penalty of its square: a moment would begin as the parameter's copy."""
    net = make_net()
    weight = nn.init.uniform_(net[0].weight)
    optimizer = make(net.parameters())
    wrap(net, optimizer)
    before = weight.detach().clone()
    sum(loss(each).sum() for each in net.parameters()).backward()
    optimizer.step()
    assert any(torch.allclose(each, before) for each in optimizer.state[weight].values())


def test_a_copy_lies_between_the_values_before_and_after_the_step():
    """But for a hundredth of their spread, which is the length of this step."""
    before = torch.tensor([3.0, -3.0, 4.0, -4.0], dtype=torch.float64)
    step = before.flip(0)
    for at, is_copy in ((-0.02, False), (-0.005, True), (0.5, True), (1.005, True), (1.02, False)):
        assert _is_between(before + at * step, before, before + step) is is_copy, at
    for size, proves in ((1.0, True), (1.01, False)):  # a step is no larger than the parameter
        assert _is_telling(nn.Parameter(before), 0.0, before, before + size * step) is proves
    assert not _is_telling(nn.Parameter(before[:3]), 0.0, before[:3], before[:3]), "by chance"
    assert _sample(torch.arange(1000.0)).tolist() == [*range(0, 1000, 4)], "256 values at most"


@pytest.mark.parametrize(("scale", "is_telling"), [(None, True), (2.0, False), (2.5, True)])
def test_a_gradient_hides_a_copy_only_where_it_looks_like_the_parameter(scale, is_telling):
    """``scale``: of the parameter to the gradient; None: they are orthogonal."""
    before = torch.tensor([3.0, -3.0, 4.0, -4.0], dtype=torch.float64)
    parameter = nn.Parameter(before.clone())
    parameter.grad = before.new_tensor([1, 1, -1, -1]) if scale is None else before / scale
    assert _is_telling(parameter, 0.0, before, before - 0.1 * parameter.grad) is is_telling
    parameter.grad = before.roll(2)  # its fit, 0.96 of it, lies half way to this end of the step
    assert not _is_telling(parameter, 0.0, before, 1.92 * parameter.grad - before)


def test_a_first_step_without_an_effect_gets_a_warning(wrap_sgd, caplog):
    """So steps of an optimizer that holds the memory of parameters from before the wrapping."""
    _, optimizer = wrap_sgd(make_net())
    for _ in range(2):
        optimizer.step()  # without a gradient
    (record,) = caplog.records
    assert record.getMessage().startswith("the first step of the SGD changed no parameter")
