"""Moments in flat memory: the optimizer sees no difference, and what cannot travel is said."""

import copy
import io
import logging
from functools import partial

import pytest
import torch
from calling_back import CallingLock
from flattened import flatten
from own_optimizer import OwnOptimizer
from torch import Tensor, nn

from gossipdp import Counting, Exchange, GossipDataParallel
from gossipdp.dynamics.chunks import Moment
from gossipdp.dynamics.state import Segment
from gossipdp.parallel.moments import DEFAULT_PERIOD, chosen_moments

ADAMW = torch.optim.AdamW


def make_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a convolution in channels_last, and a layer that is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 3), nn.Linear(3, 2))
    net[3].requires_grad_(False)
    return net.to(dtype).to(memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        images = torch.randn(4, 3, 4, 4, generator=generator).to(dtype)
        model(images).square().mean().backward()
        optimizer.step()


def train_twins(wrap, steps: int, make=ADAMW, dtype=torch.float32, **options):
    """Train a net alone and an equal one under the wrapper; return each with its optimizer."""
    plain, net = make_net(dtype), make_net(dtype)
    theirs = make([p for p in plain.parameters() if p.requires_grad])
    ours = make([p for p in net.parameters() if p.requires_grad])
    model = wrap(net, ours, **options)
    train(plain, theirs, steps)
    train(model, ours, steps)
    return plain, theirs, model, ours


def kept(optimizer: torch.optim.Optimizer, name: str = "exp_avg_sq") -> list[Tensor]:
    return [state[name] for state in optimizer.state.values() if isinstance(state, dict)]


def moments_of(model: GossipDataParallel) -> list[Segment]:
    return model._worker._state.moments


def age_of(model) -> int:
    return model._worker._state.moments[0].moment.steps


def is_within(tensor: Tensor, segment: Segment) -> bool:
    start = segment.x.data_ptr()
    return start <= tensor.data_ptr() < start + segment.x.nbytes


def exchange(chunk, value: float) -> tuple[float, Tensor]:
    """Exchange with a worker that holds ``value`` everywhere; return distance and what was sent."""
    sent = torch.empty_like(chunk.x)
    chunk.snapshot(0.0, sent)
    return chunk.exchange(0.0, sent, torch.full_like(sent, value), 0.5), sent


def give(model: GossipDataParallel, value: float) -> None:
    """Exchange with a worker whose optimizer makes ``value`` of its moment everywhere."""
    for segment in moments_of(model):
        for chunk in segment.chunks:
            exchange(chunk, value)


def averaged(own: Tensor, value: float, age: int, decay: float = 0.999) -> Tensor:
    return (own + (1 - decay**age) * value) / 2


@pytest.mark.parametrize(
    ("make", "choice", "dtype"),
    [
        (ADAMW, True, torch.float32),
        (ADAMW, True, torch.bfloat16),
        (lambda p: ADAMW(p, foreach=False), True, torch.float64),
        (lambda p: ADAMW(p, foreach=True, amsgrad=True), {"exp_avg_sq": 1}, torch.float32),
        (lambda p: ADAMW(p, fused=True), {"exp_avg_sq": 1, "exp_avg": 3}, torch.bfloat16),
        (torch.optim.NAdam, True, torch.bfloat16),
        (torch.optim.RAdam, True, torch.float64),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer": 2}, torch.float64),
        (torch.optim.RMSprop, {"square_avg": 2}, torch.float32),
    ],
)
def test_without_an_exchange_training_is_bitwise_the_plain_loop(wrap, make, choice, dtype):
    sent = Exchange(moments=choice)
    plain, theirs, model, ours = train_twins(wrap, 20, make, dtype, exchange=sent)
    torch.testing.assert_close([*plain.parameters()], [*model.parameters()], rtol=0, atol=0)
    torch.testing.assert_close([*theirs.state.values()], [*ours.state.values()], rtol=0, atol=0)
    for segment in moments_of(model):
        tensors = kept(ours, segment.moment.name)
        assert all(is_within(tensor, segment) for tensor in tensors)
        assert [each.stride() for each in tensors] == [each.stride() for each in ours.state]


@pytest.mark.parametrize("names", [["exp_avg"], ["exp_avg_sq"], ["exp_avg", "exp_avg_sq"]])
@pytest.mark.parametrize("num_exchanges", [1, 3])
def test_exchanges_reach_the_next_step_and_its_gradient_counts_whole(wrap, names, num_exchanges):
    """If they were added after it, 3 exchanges would leave an eighth of that step's gradient."""
    make, sent = partial(ADAMW, lr=0.1), Exchange(moments=dict.fromkeys(names, 1))
    plain, theirs, model, ours = train_twins(wrap, 5, make, exchange=sent)
    for _ in range(num_exchanges):
        give(model, 0.5)
        for name in names:
            for value in kept(theirs, name):
                value.copy_(averaged(value, 0.5, age=5, decay={"exp_avg": 0.9}.get(name, 0.999)))
    for each, optimizer in ((model, ours), (plain, theirs)):
        train(each, optimizer, 4, seed=2)
    torch.testing.assert_close([*plain.parameters()], [*model.parameters()])
    for name in names:
        torch.testing.assert_close(kept(theirs, name), kept(ours, name))


def test_while_a_loaded_state_is_taken_in_nothing_of_it_is_sent(wrap, monkeypatch):
    """All gradients are 1, so 1 is sent at any age: 4999 steps taken for 6 would be 170."""
    nets = [nn.Linear(3, 3) for _ in range(2)]
    optimizer, old = (ADAMW(net.parameters()) for net in nets)
    model = wrap(nets[0], optimizer, counting=Counting(samples_per_step=1))
    stepped(optimizer, 5)
    stepped(old, 4999)
    (chunk,) = moments_of(model)[0].chunks
    sent, copy_ = [], Tensor.copy_

    def copy_and_send(values, *args, **kwargs):
        copy_(values, *args, **kwargs)
        sent.append(torch.empty_like(chunk.x))
        assert chunk.snapshot(0.0, sent[-1])
        return values

    optimizer.load_state_dict(copy.deepcopy(old.state_dict()))
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", copy_and_send)
        stepped(optimizer, 1)
    assert sent
    assert not any(values.any() for values in sent)
    assert age_of(model) == 5000
    _, out = exchange(chunk, 1.0)
    held = chunk.x != 0.0
    torch.testing.assert_close(out[held], torch.ones_like(out[held]))


def test_a_loaded_state_waits_for_the_snapshot_that_is_being_taken(wrap):
    """It has read the age already: values of another must not come under it."""
    net = nn.Linear(3, 3)
    optimizer = ADAMW(net.parameters())
    model = wrap(net, optimizer, counting=Counting(samples_per_step=1))
    stepped(optimizer, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    stepped(optimizer, 5)
    (chunk,) = moments_of(model)[0].chunks
    optimizer.load_state_dict(saved)
    before = chunk.x.clone()
    seen = []
    chunk.lock = CallingLock(before=lambda: seen.append((age_of(model), chunk.x.clone())))
    stepped(optimizer, 1)
    ((age, values),) = seen
    assert age == 0
    assert torch.equal(values, before)
    assert age_of(model) == 6
    assert not torch.equal(chunk.x, before)


def test_a_saved_state_holds_nothing_else_and_copies_stand_alone(wrap):
    _, theirs, model, ours = train_twins(wrap, 2)
    sizes = []
    for optimizer in (theirs, ours):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        sizes.append(file.tell())
    assert abs(sizes[1] - sizes[0]) < 1000
    copied = copy.deepcopy(ours)
    moments_of(model)[0].x.zero_()
    assert all(value.any() for value in kept(copied))
    assert not any(value.any() for value in kept(ours))


def test_a_checkpoint_loses_nothing_of_what_exchanges_brought_even_after_a_load(wrap, monkeypatch):
    """Until its next step, with which that is added, the optimizer reads the loaded memory."""
    monkeypatch.setattr("gossipdp.parallel.flat_parameters.chunk_bytes_for", lambda *_, **__: 576)
    plain, theirs, model, optimizer = train_twins(wrap, 5)
    exchange(moments_of(model)[0].chunks[0], 3.0)  # of the first parameter alone
    model._worker.capture()
    first, *_ = kept(theirs)
    first.copy_(averaged(first, 3.0, age=5))
    torch.testing.assert_close(kept(optimizer), kept(theirs))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    give(model, 3.0)
    loaded = [value.clone() for value in kept(optimizer)]
    model._worker.capture()
    torch.testing.assert_close(kept(optimizer), loaded, rtol=0, atol=0)
    train(plain, theirs, 1, seed=2)
    train(model, optimizer, 1, seed=2)
    expected = [averaged(own, 3.0, age=6) for own in kept(theirs)]
    torch.testing.assert_close(kept(optimizer), expected)


def test_a_parameter_that_has_its_first_gradient_later_is_taken_in(wrap, monkeypatch):
    monkeypatch.setattr("gossipdp.parallel.moments.MOST_REPLACED", 1)  # it replaces no tensor
    net = make_net()
    used, late = net[0].weight, net[2].bias
    optimizer = ADAMW([used, late])
    model = wrap(net, optimizer)
    for parameter in (used, late):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    give(model, 3.0)
    optimizer.step()
    (segment,) = moments_of(model)
    assert all(is_within(value, segment) for value in kept(optimizer))
    own = torch.full_like(late, 0.001 * (1 + 0.999))  # of two steps with gradient 1
    held = optimizer.state[late]["exp_avg_sq"]
    torch.testing.assert_close(held, averaged(own, 3.0, age=3))
    assert age_of(model) == 3


def test_what_travels_by_default():
    def names(*optimizers, choice=True):
        periods = chosen_moments(choice, optimizers)
        moments = flatten(net, *optimizers, moments=periods).state.moments
        return [(each.moment.name, each.moment.period, each.optimizer_index) for each in moments]

    net = make_net()
    first, second = [net[0].weight], [net[2].weight]
    sgd = torch.optim.SGD(first, 0.1)
    assert names(ADAMW(first)) == [("exp_avg_sq", 4, 0)]
    assert names(ADAMW(first), choice=False) == []
    assert (names(sgd), names(torch.optim.RMSprop(first))) == ([], [])
    assert names(sgd, ADAMW(second)) == [("exp_avg_sq", 4, 1)]
    # One worker's largest gradient would stay in the maxima of its peers.
    amsgrad = ADAMW([{"params": first}, {"params": second, "amsgrad": True}])
    assert names(amsgrad) == []
    assert names(amsgrad, choice={"exp_avg_sq": 4}) == [("exp_avg_sq", 4, 0)]
    # A name goes for those that keep it, and for those of which nothing is known.
    choice = {"exp_avg_sq": 2, "exp_avg": 3}
    both = [("exp_avg", 3, 1), ("exp_avg_sq", 2, 1)]
    assert names(sgd, ADAMW(second), choice=choice) == both
    assert names(sgd, torch.optim.RMSprop(second), choice=choice) == both


def test_nothing_is_laid_out_for_what_no_optimizer_holds(wrap):
    net = make_net()
    head = list(net[2].parameters())
    optimizer = ADAMW(head)
    model = wrap(net, optimizer, exchange=Exchange(frozen=True))
    (segment,) = moments_of(model)
    assert segment.x.numel() <= sum(each.numel() for each in head) + 2 * 64, "in pieces of 64 bytes"
    assert sum(chunk.num_elements for chunk in model._worker._state.chunks) > segment.x.numel()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for chunk in model._worker._state.chunks:  # all is exchanged all the same
        exchange(chunk, 0.0)
    stepped(optimizer, 1, gradient=0.0)
    halves = [old / 2 for old in before]
    torch.testing.assert_close([*net.parameters()], halves, rtol=0.01, atol=0)
    assert all(is_within(value, segment) for value in kept(optimizer))


def test_parameters_without_values_and_workers_apart_have_no_moment(wrap):
    for chosen in (True, {}):
        net, sent = make_net(), Exchange(moments=chosen)
        model = wrap(net, ADAMW(net.parameters()), method="none", exchange=sent)
        assert moments_of(model) == []
    net = nn.Module()
    net.empty = nn.Parameter(torch.empty(0))
    optimizer = ADAMW(net.parameters())
    model = wrap(net, optimizer, counting=Counting(samples_per_step=1))
    stepped(optimizer, 2)
    assert not any(segment.chunks for segment in moments_of(model))


def test_workers_with_other_moments_or_periods_are_refused():
    def description(periods):
        net = make_net()
        return flatten(net, ADAMW(net.parameters()), moments=[periods]).state.description()

    given = [{"exp_avg_sq": 16}, {"exp_avg_sq": 8}, {"exp_avg": 16}, {}]
    described = [description(each) for each in given]
    assert all(one != other for i, one in enumerate(described) for other in described[:i])
    both = {"exp_avg": 1, "exp_avg_sq": 2}
    assert description(both) == description(dict(reversed(both.items())))


@pytest.mark.parametrize(
    ("beta_2", "moments", "expected"),
    [
        (0.99, True, [4, 8, 12]),  # one in four, or one in a quarter of their memory
        (0.875, True, [2, 4, 6, 8, 10, 12]),  # a quarter is 2 steps
        (0.88, True, [3, 6, 9, 12]),  # a quarter is 2.1 steps
        (0.9, {"exp_avg_sq": 5}, [5, 10]),  # periods that are named count exchanges
    ],
)
@pytest.mark.parametrize("comm_rate", [1.0, "auto"])
def test_how_often_exchanges_carry_moments(wrap, comm_rate, beta_2, moments, expected):
    net = make_net()
    first, *others = net.parameters()
    groups = [{"params": first}, {"params": others, "betas": (0.9, 0.5)}]
    optimizer = ADAMW(groups, betas=(0.9, beta_2))  # the first group's counts
    worker = wrap(net, optimizer, comm_rate=comm_rate, exchange=Exchange(moments=moments))._worker
    state, due, carrying = worker._state, worker._protocol.pairing.moments_due, []
    for count in range(1, 13):  # one a step
        due.step()
        if len(state.carried(due.now())) > len(state.chunks):
            carrying.append(count)
        due.exchanged(due.now())
    assert carrying == expected


def stepped(optimizer: torch.optim.Optimizer, times: int, gradient: float = 1.0) -> None:
    for _ in range(times):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("momentum_buffer", None, r"the SGD keeps no 'momentum_buffer' .* keeps nothing"),
        ("sums", torch.ones_like, "keeps no 'sums' of its parameters; it keeps kept"),
        ("kept", lambda p: torch.ones(3, 7), r"'0\.weight' \(3, 7\), not a tensor of its shape"),
        ("kept", lambda p: "text", r"'0\.weight' str, not a tensor"),
        ("kept", lambda p: torch.ones_like(p).double(), r"torch\.float64 on cpu, not"),
    ],
)
def test_what_is_named_and_cannot_travel_is_an_error(wrap, name, make, message):
    net = make_net()
    parameters = list(net.parameters())[:2]
    optimizer = OwnOptimizer(parameters, make) if make else torch.optim.SGD(parameters, 0.1)
    wrap(net, optimizer, exchange=Exchange(moments={name: 4}))
    parameters[0].grad = torch.ones_like(parameters[0])  # the other one was not used
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            optimizer.step()


def test_a_name_that_is_meant_for_another_optimizer_does_no_harm_to_an_unknown_one(wrap, caplog):
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    known = ADAMW(net[0].parameters())
    unknown = torch.optim.Adagrad(net[1].parameters())
    model = wrap(net, [known, unknown], exchange=Exchange(moments={"exp_avg_sq": 1}))
    with caplog.at_level(logging.INFO, "gossipdp"):
        for _ in range(3):
            stepped(known, 1)
            stepped(unknown, 1)
    line = "the Adagrad keeps no 'exp_avg_sq' of its parameters; it keeps step, sum, so it is not"
    assert [each.levelname for each in caplog.records if line in each.getMessage()] == ["INFO"]
    first, second = moments_of(model)
    for segment, is_shared in ((first, True), (second, False)):
        distance, sent = exchange(*segment.chunks, 1.0)
        assert (distance, bool(sent.any())) == (0.0, is_shared)
    expected = [value + 1 for value in kept(unknown, "sum")]
    stepped(unknown, 1)
    torch.testing.assert_close(kept(unknown, "sum"), expected)


def test_what_nobody_named_and_cannot_travel_is_left_out_with_a_warning(wrap, caplog):
    class WideAdam(torch.optim.Adam):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["exp_avg_sq"] = torch.ones(parameter.shape)

    net = make_net(torch.bfloat16)
    optimizer = WideAdam(net.parameters())
    model = wrap(net, optimizer)
    stepped(optimizer, 3)
    text = "torch.float32 on cpu, not torch.bfloat16 on cpu, so it is not exchanged"
    assert caplog.text.count(text) == 1
    assert age_of(model) == 0


def test_an_optimizer_that_makes_its_tensors_anew_is_left_out_with_a_warning(wrap, caplog):
    net = make_net()
    optimizer = OwnOptimizer(list(net.parameters())[:4], torch.ones_like, at_step=None)
    model = wrap(net, optimizer, exchange=Exchange(moments={"kept": 4}))
    stepped(optimizer, 3)
    assert age_of(model) > 0
    give(model, 3.0)
    stepped(optimizer, 1)
    assert all(value.eq(1.0).all() for value in kept(optimizer, "kept"))
    assert age_of(model) == 0
    assert "the OwnOptimizer replaces its 'kept' at every step, so it" in caplog.text
    give(model, 3.0)  # such a worker takes nothing
    stepped(optimizer, 2)
    assert all(value.eq(1.0).all() for value in kept(optimizer, "kept"))
    assert caplog.text.count("replaces its") == 1


def test_after_one_huge_gradient_parameters_are_exchanged_as_before(wrap, caplog):
    net = nn.Linear(3, 3)
    optimizer = ADAMW(net.parameters())
    model = wrap(net, optimizer, counting=Counting(samples_per_step=1))
    stepped(optimizer, 5)
    stepped(optimizer, 1, gradient=1e21)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for _ in range(2):
        for chunk in model._worker._state.carried([DEFAULT_PERIOD]):
            exchange(chunk, 0.0)
        stepped(optimizer, 1)
    quarters = [old / 4 for old in before]
    torch.testing.assert_close([*net.parameters()], quarters, rtol=0, atol=0.01)
    assert all(value.isinf().all() for value in kept(optimizer))
    assert caplog.text.count("holds NaN, infinity, or values too large") == 1


def test_an_optimizer_that_counts_no_steps_has_no_bias_to_correct(wrap):
    net = make_net()
    optimizer = OwnOptimizer(net.parameters(), torch.ones_like, key="exp_avg_sq")
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    model = wrap(net, optimizer, exchange=Exchange(moments={"exp_avg_sq": 4}))
    stepped(optimizer, 3)
    moment = moments_of(model)[0].moment
    assert (moment, moment.mass) == (Moment("exp_avg_sq", 4, decay=0.0, steps=3), 1.0)
