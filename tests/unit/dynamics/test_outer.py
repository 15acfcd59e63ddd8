"""The outer step of whole chunks: what it equals, what leaves it alone, and what may run beside."""

import math
import threading

import pytest
import torch
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, Outer, Role
from gossipdp.dynamics.outer import OuterStep
from gossipdp.dynamics.state import Segment, State

NUM_VALUES = 50
ALPHA_TILDE = 1.7


def state_of(x: Tensor, rule: OuterStep | None, *, momentum: bool = False) -> State:
    return State([Segment(x, Role.TRAINED, momentum=momentum, outer=rule, chunk_bytes=64)])


def outer_of(chunk: Chunk) -> Outer:
    assert chunk.outer is not None
    return chunk.outer


def take_snapshots(state: State, theta: float) -> list[Tensor]:
    """Take each chunk's outer step, then its snapshot, as an exchange begins."""
    snapshots = []
    for chunk in state.chunks:
        chunk.outer_step()
        snapshots.append(torch.empty_like(chunk.x))
        assert chunk.snapshot(theta, snapshots[-1])
    return snapshots


def meet(one: State, other: State, theta: float = 0.0, alpha_tilde: float = 0.5) -> None:
    """Make one whole exchange."""
    ours, theirs = take_snapshots(one, theta), take_snapshots(other, theta)
    for state, mine, peers in ((one, ours, theirs), (other, theirs, ours)):
        for chunk, a, b in zip(state.chunks, mine, peers, strict=True):
            chunk.exchange(theta, a, b, alpha_tilde)


def gradient(x: Tensor, worker: int, step: int) -> Tensor:
    """Return the gradient of a loss that differs between the workers."""
    generator = torch.Generator().manual_seed(100 * worker + step)
    centre = torch.randn(NUM_VALUES, generator=generator, dtype=x.dtype)
    return torch.tanh(x - centre)


# What it equals.


def diloco(start: Tensor, rule: OuterStep, rounds: int, inner_steps: int) -> Tensor:
    """Run two workers under DiLoCo, SGD within and Nesterov's momentum without, as published.

    Where outer steps are rarer than exchanges, the workers' mean is all that these are.
    """
    x, anchor, velocity = start.clone(), start, torch.zeros_like(start)
    for number in range(rounds):
        ends = []
        for worker in range(2):
            end = x.clone()
            for step in range(inner_steps):
                end -= 0.1 * gradient(end, worker, number * inner_steps + step)
            ends.append(end)
        x = (ends[0] + ends[1]) / 2
        if (number + 1) % rule.every == 0:
            outer_gradient = anchor - x
            velocity = rule.momentum * velocity + outer_gradient
            x = anchor = anchor - rule.lr * (outer_gradient + rule.momentum * velocity)
    return x


@pytest.mark.parametrize(
    ("rule", "momentum"), [(OuterStep(), True), (OuterStep(0.9, 0.7, 1), False)]
)
def test_two_workers_in_lock_step_are_diloco(rule, momentum):
    """On a complete graph alpha_tilde is 1/2, so that c, where it is held, stays zero."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUM_VALUES, generator=generator, dtype=torch.float64)
    states = [state_of(start.clone(), rule, momentum=momentum) for _ in range(2)]
    rounds, inner_steps = 12, 5
    for number in range(rounds):
        for worker, state in enumerate(states):
            for step in range(inner_steps):
                x = state.segments[0].x
                x -= 0.1 * gradient(x, worker, number * inner_steps + step)
                state.boundary(float(number))
        meet(*states, theta=float(number))
        for state in states:
            state.boundary(float(number))
    expected = diloco(start, rule, rounds, inner_steps)
    assert not torch.allclose(expected, diloco(start, OuterStep(0.0, 1.0, 1), rounds, inner_steps))
    for state in states:
        torch.testing.assert_close(state.segments[0].x, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kernels", "dtype", "momentum"),
    [
        ("torch", torch.float64, True),
        ("torch", torch.bfloat16, True),
        ("numba", torch.float32, True),
        ("numba", torch.bfloat16, False),
    ],
)
def test_without_momentum_at_rate_1_the_bits_are_those_without(kernels, dtype, momentum):
    ends: list[list[Tensor | None]] = []
    for rule in (None, OuterStep(0.0, 1.0, 1)):
        torch.manual_seed(3)
        states = [
            state_of(torch.randn(NUM_VALUES).to(dtype), rule, momentum=momentum) for _ in range(2)
        ]
        for state in states:
            state.compile(kernels)
        for number in range(40):
            for state in states:
                state.segments[0].x += 0.1 * torch.randn(NUM_VALUES).to(dtype)
                state.boundary(0.1 * number)
            if number % 3 == 0:
                meet(*states, 0.1 * number, ALPHA_TILDE)
        segments = [state.segments[0] for state in states]
        ends.append([values for s in segments for values in (s.x, s.pending, s.c)])
    for without, with_outer in zip(*ends, strict=True):
        assert without is with_outer is None or torch.equal(without, with_outer)


def test_the_mean_of_z_moves_by_optimizer_and_outer_steps_alone():
    torch.manual_seed(5)
    rule = OuterStep(every=1)
    starts = [torch.randn(NUM_VALUES, dtype=torch.float64) for _ in range(4)]
    states = [state_of(x.clone(), rule, momentum=True) for x in starts]
    expected = sum(starts)
    theta = 0.0
    for number in range(60):
        theta += 0.1
        for state in states:
            step = 0.1 * torch.randn(NUM_VALUES, dtype=torch.float64)
            state.segments[0].x += step
            expected = expected + step
            if number % 3:
                state.boundary(theta)
            else:
                state.flow(theta)
        one, other = (states[i] for i in torch.randperm(4)[:2])
        befores = [state.segments[0].pending.clone() for state in (one, other)]
        snapshots = [take_snapshots(state, theta) for state in (one, other)]
        for state, before in zip((one, other), befores, strict=True):
            expected = expected + (state.segments[0].pending - before)
        for state, mine, peers in zip((one, other), snapshots, snapshots[::-1], strict=True):
            for chunk, a, b in zip(state.chunks, mine, peers, strict=True):
                chunk.exchange(theta, a, b, ALPHA_TILDE)
    total = torch.zeros(NUM_VALUES, dtype=torch.float64)
    for state in states:
        z = torch.empty_like(total)
        for chunk, room in state.segments[0].split(z):
            chunk.read_z(room)
        total += z
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-11)


# What it counts.


def test_what_exchanges_and_flows_bring_is_no_step_of_the_optimizer():
    torch.manual_seed(6)
    one, other = (state_of(torch.randn(8), OuterStep(every=1), momentum=True) for _ in range(2))
    meet(one, other, 0.0, ALPHA_TILDE)
    theta = 0.0
    for flow in (one.flow, one.boundary, one.boundary, one.flow, one.boundary):
        theta += 0.3
        flow(theta)
    (chunk,) = one.chunks
    _, base, m = outer_of(chunk)
    torch.testing.assert_close(base, chunk.x, rtol=0, atol=1e-6)
    assert not m.any()


def test_every_so_many_exchanges_begin_with_one():
    """An outer step is taken on all steps of the optimizer since the last one."""
    state = state_of(torch.zeros(3, dtype=torch.float64), OuterStep(0.5, 1.0, 3))
    (chunk,) = state.chunks
    found = []
    for _ in range(7):
        chunk.x += 1.0
        chunk.outer_step()
        found.append(outer_of(chunk).m[0].item())
    assert found == [0, 0, 3, 3, 3, 4.5, 4.5]
    chunk.replace(chunk.x)
    chunk.outer_step()
    assert not outer_of(chunk).m.any()


def test_what_takes_another_state_begins_anew():
    state = state_of(torch.zeros(3), OuterStep(every=1))
    (chunk,) = state.chunks
    _, base, m = outer_of(chunk)
    for begins_anew in (
        lambda: chunk.replace(torch.full((3,), 7.0)),
        lambda: (chunk.x.fill_(7.0), chunk.forget(slice(None))),
    ):
        chunk.x.fill_(2.0)
        take_snapshots(state, 0.0)
        assert m.any()
        begins_anew()
        assert base.tolist() == chunk.x.tolist() == [7.0] * 3
        assert not m.any()
        assert not chunk.pending.any()


def test_only_trained_values_have_one():
    roles = [role for role in Role if role is not Role.TRAINED]
    state = State([Segment(torch.ones(3), role, outer=OuterStep(every=1)) for role in roles])
    assert all(chunk.outer is None for chunk in state.all_chunks)
    for chunk in state.chunks:
        chunk.outer_step()


# What may run beside it.


@pytest.mark.parametrize(
    ("kernels", "dtype"), [("torch", torch.float32), ("numba", torch.bfloat16)]
)
def test_no_part_of_a_step_is_lost_or_counted_twice(kernels, dtype):
    """Steps and boundaries in one thread, outer steps and exchanges in another, for real.

    All values are small whole numbers, so every sum is exact. At rate 2 without momentum each outer
    step adds its g once more: in the end all steps count twice, but for those not yet seen by one.
    """
    length, num_steps = 100_000, 60
    segment = Segment(torch.zeros(length, dtype=dtype), Role.TRAINED, outer=OuterStep(0.0, 2.0, 1))
    state = State([segment])
    state.compile(kernels)
    ends, num_outer_steps = threading.Event(), 0

    def gossip() -> None:
        nonlocal num_outer_steps
        rooms = [torch.empty_like(chunk.x) for chunk in state.chunks]
        while not ends.is_set():
            for chunk, room in zip(state.chunks, rooms, strict=True):
                chunk.outer_step()
                assert chunk.snapshot(0.0, room)
                chunk.exchange(0.0, room, room, 0.5)  # with an equal: a delta of zero
            num_outer_steps += 1

    thread = threading.Thread(target=gossip)
    thread.start()
    try:
        for _ in range(num_steps):
            segment.x += 1.0
            state.boundary(0.0)
        while num_outer_steps < 3:
            state.boundary(0.0)
    finally:
        ends.set()
        thread.join()
    state.boundary(0.0, wait=True)
    assert segment.outer is not None
    held = segment.x.double() + segment.pending.double()
    held += segment.x.double() - segment.outer.base.double()
    assert torch.equal(held, torch.full((length,), 2.0 * num_steps, dtype=torch.float64))


# What may be asked for.


REFUSED = {
    "momentum": (-0.1, 1.0, math.nan, "high", None),
    "lr": (0.0, -1.0, math.inf, math.nan, "high"),
    "every": (0, -1, 1.5, True, "2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_invalid_value_is_refused(name):
    for value in REFUSED[name]:
        with pytest.raises(ValueError, match=f"^{name} is"):
            OuterStep(**{name: value})
