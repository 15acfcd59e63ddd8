"""The fast in-place state against the float64 references, under random sequences of events."""

import math

import pytest
import torch
from bitwise import assert_bitwise
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import MomentumState, PaperState
from torch import Tensor

from gossipdp.dynamics.chunks import Moment, Role
from gossipdp.dynamics.state import Segment, State

ETA = 0.37
ALPHA_TILDE = 1.9
NUM_WORKERS = 4
NUM_ELEMENTS = 23
CHUNK_BYTES = 40
F32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = [(F32, F32), (F32, BF16), (BF16, BF16)]
"""Of what a worker holds, and of what travels."""


# (kind, worker, peer, amount): amount is a flow's duration or a seed.
def scripts(*kinds: str) -> st.SearchStrategy[list[tuple[str, int, int, float]]]:
    event = st.tuples(
        st.sampled_from(["flow", "step", "exchange", "boundary", "restore", *kinds]),
        st.integers(0, NUM_WORKERS - 1),
        st.integers(1, NUM_WORKERS - 1),
        st.floats(0.0, 3.0, allow_subnormal=False),
    )
    return st.lists(event, min_size=20 if kinds else 0, max_size=40)


events = scripts()


def start_values(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)
        for _ in range(NUM_WORKERS)
    ]


class FastWorker:
    def __init__(self, values: Tensor, dtype: torch.dtype, wire: torch.dtype) -> None:
        self.segment = Segment(values.to(dtype), Role.TRAINED, chunk_bytes=CHUNK_BYTES)
        self.state = State([self.segment])
        self.wire = wire
        self.theta = self.theta_before = 0.0

    def flow(self, duration: float) -> None:
        """Leave the flow to the next exchange, boundary or copy."""
        self.theta_before = self.theta
        self.theta += ETA * duration

    def step(self, increment: Tensor) -> None:
        self.segment.x += increment.to(self.segment.x.dtype)

    def boundary(self, *, is_late: bool) -> None:
        """Let one come; a late one has read the phase before an exchange or a flow moved it on."""
        for chunk in self.state.chunks:
            chunk.boundary(self.theta_before if is_late else self.theta)
        if self.segment.x.dtype == self.segment.pending.dtype:
            assert not self.segment.pending.any()

    def restore(self, seed: float) -> None:
        """Go on from a copy, of which some parts are pending, as from a checkpoint."""
        values, c = self.segment.copy(self.theta)
        waits = torch.where(torch.arange(NUM_ELEMENTS) % 3 == 0, increment_of(seed), 0.0)
        self.segment = Segment(
            (values - waits).to(self.segment.x.dtype), Role.TRAINED, chunk_bytes=CHUNK_BYTES
        )
        self.segment.pending.copy_(values - self.segment.x)
        self.segment.c.copy_(c)
        self.state = State([self.segment])
        for chunk in self.state.chunks:
            chunk.restored()
            assert chunk.has_pending == chunk.pending.any()
        self.theta = self.theta_before = 0.0

    def take(self, other: "FastWorker") -> None:
        """Begin with another worker's z, as a joiner does."""
        values = torch.empty_like(other.segment.pending)
        for chunk, part in other.segment.split(values):
            chunk.read_z(part)
        for chunk, part in self.segment.split(values):
            chunk.replace(part)
        self.theta = self.theta_before = 0.0

    def snapshots(self) -> list[Tensor]:
        outs = []
        for chunk in self.state.chunks:
            outs.append(torch.empty(chunk.num_elements, dtype=self.wire))
            assert chunk.snapshot(self.theta, outs[-1])
        return outs

    def exchange(self, mine: list[Tensor], peers: list[Tensor]) -> None:
        for chunk, one, other in zip(self.state.chunks, mine, peers, strict=True):
            chunk.exchange(self.theta, one, other, ALPHA_TILDE)

    @property
    def held(self) -> MomentumState:
        """Return what it holds, at the phase to which its chunks have been flowed."""
        values, c = self.segment.copy()
        return MomentumState(values.double(), c.double())


def increment_of(seed: float) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed * 1e6))
    return 0.1 * torch.randn(NUM_ELEMENTS, generator=generator, dtype=torch.float64)


def run_fast(script, dtype=torch.float64, wire=torch.float64):
    workers = [FastWorker(values, dtype, wire) for values in start_values()]
    for kind, worker, offset, amount in script:
        fast, peer = workers[worker], workers[(worker + offset) % NUM_WORKERS]
        if kind == "flow":
            fast.flow(amount)
        elif kind == "step":
            fast.step(increment_of(amount))
        elif kind == "boundary":
            fast.boundary(is_late=amount > 1.5)
        elif kind == "restore":
            fast.restore(amount)
        elif kind == "take":
            fast.take(peer)
        else:
            mine, peers = fast.snapshots(), peer.snapshots()
            if amount > 1.0:
                fast.boundary(is_late=amount > 2.0)
            fast.exchange(mine, peers)
            peer.exchange(peers, mine)
    for each in workers:
        each.boundary(is_late=False)
    return workers


def run_reference(script, make):
    workers = [make(values) for values in start_values()]
    for kind, worker, offset, amount in script:
        other = (worker + offset) % NUM_WORKERS
        if kind == "flow":
            workers[worker] = workers[worker].flow(ETA, amount)
        elif kind == "step":
            workers[worker] = workers[worker].increment(increment_of(amount))
        elif kind == "take":
            workers[worker] = make(workers[other].z)
        elif kind == "exchange":
            delta = workers[worker].x - workers[other].x
            workers[worker] = workers[worker].exchange(delta, ALPHA_TILDE)
            workers[other] = workers[other].exchange(-delta, ALPHA_TILDE)
    return workers


def rounding_bound(script) -> float:
    """Float32 rounding of every event, at the largest values met on the way."""
    largest = 1.0
    for length in range(len(script) + 1):
        workers = run_reference(script[:length], lambda x: MomentumState(x, torch.zeros_like(x)))
        largest = max(largest, *(float(w.x.abs().max() + w.c.abs().max()) for w in workers))
    return (1 + len(script)) * NUM_WORKERS * largest * 2.0**-23


@settings(max_examples=100)
@given(events)
def test_momentum_form_equals_the_papers_equations(script):
    ours = run_reference(script, lambda x: MomentumState(x, torch.zeros_like(x)))
    papers = run_reference(script, lambda x: PaperState(x, x))
    for one, other in zip(ours, papers, strict=True):
        scale = 1.0 + other.x.abs().max() + other.x_tilde.abs().max()
        assert torch.allclose(one.x, other.x, atol=1e-11 * scale, rtol=0)
        assert torch.allclose(one.x + one.c, other.x_tilde, atol=1e-11 * scale, rtol=0)


TAKEN_LATE = [("flow", 0, 1, 1.0), ("exchange", 0, 1, 0.5), ("take", 0, 1, 0.0)]
TAKEN_LATE += [("exchange", 0, 1, 0.5), ("flow", 0, 1, 0.5)]
"""A worker that takes a state flows again from phase 0 on."""
LATE = [("exchange", 0, 1, 0.5), ("flow", 0, 1, 1.0), ("exchange", 0, 1, 0.5)]
LATE += [("boundary", 0, 1, 2.0), ("boundary", 0, 1, 0.0)]
"""A boundary that read the phase before an exchange comes after it."""


@settings(max_examples=100)
@given(scripts("take"))
@example(TAKEN_LATE)
@example(LATE)
def test_fast_version_equals_the_reference(script):
    reference = run_reference(script, lambda x: MomentumState(x, torch.zeros_like(x)))
    for fast, slow in zip(run_fast(script), reference, strict=True):
        scale = 1.0 + slow.x.abs().max() + slow.c.abs().max()
        assert torch.allclose(fast.held.x, slow.x, atol=1e-11 * scale, rtol=0)
        assert torch.allclose(fast.held.z, slow.z, atol=1e-11 * scale, rtol=0)


@pytest.mark.parametrize(("dtype", "wire"), PRECISIONS)
@settings(max_examples=50)
@given(script=events)
def test_the_mean_of_z_moves_only_by_gradient_steps(dtype, wire, script):
    """Flow and exchange conserve it to rounding, also with snapshots rounded to bfloat16.

    And although x itself holds 8 bits: pending holds the rest. Only an optimizer's step rounds x.
    """
    if dtype == torch.bfloat16:
        script = [event for event in script if event[0] != "step"]
    expected = sum(values.to(dtype).double() for values in start_values())
    expected += sum(increment_of(amount) for kind, _, _, amount in script if kind == "step")
    total = sum(worker.held.z for worker in run_fast(script, dtype, wire))
    assert torch.allclose(total, expected, atol=rounding_bound(script), rtol=0)


ends = st.sampled_from([0, 1])
moment_event = st.one_of(
    st.tuples(st.just("step"), ends, st.floats(2.0**-40, 2.0**40, width=32)),
    st.tuples(st.just("pause"), ends, st.integers(1, 300)),
    st.tuples(st.sampled_from(["boundary", "snapshot", "exchange", "meet"]), ends, st.none()),
)
moment_events = st.lists(moment_event, min_size=20, max_size=60)  # all is looked at after each


@settings(max_examples=80)
@given(
    script=moment_events,
    decay=st.sampled_from([0.5, 0.9, 0.999]),
    dtypes=st.sampled_from(PRECISIONS),
)
def test_second_moments_stay_positive_whatever_steps_come_between(script, decay, dtypes):
    """Snapshots may be old, boundaries late, workers of any age; a pause is steps without gradient.

    What an optimizer makes of its moment stays between the squares that the two have seen. One that
    rounds it to bfloat16 in each step makes less of it, but nothing below zero.
    """
    held_in, wire = dtypes
    kept = [Moment("exp_avg_sq", 1, decay) for _ in range(2)]
    segments = [
        Segment(torch.zeros(32, dtype=held_in), Role.MOMENT, momentum=False, moment=each)
        for each in kept
    ]
    chunks = [State([], moments=[segment]).moment_chunks[0] for segment in segments]
    sent = [torch.zeros(32, dtype=wire) for _ in chunks]
    seen, spread = [], torch.linspace(1.0, 2.0, 32)
    for kind, end, amount in script:
        chunk, moment = chunks[end], kept[end]
        match kind:
            case "step":
                chunk.x.mul_(decay).add_(amount * spread, alpha=1 - decay)
                moment.steps += 1
                seen.append(amount)
            case "pause" if moment.steps:
                chunk.x.mul_(decay**amount)
                moment.steps += amount
                seen.append(0.0)
            case "boundary":
                chunk.boundary(0.0)
            case "snapshot":
                assert chunk.snapshot(0.0, sent[end])
                assert (sent[end] >= 0.0).all()
            case "exchange":
                assert math.isfinite(chunk.exchange(0.0, sent[end], sent[1 - end], 0.5))
            case "meet":
                for each, values in zip(chunks, sent, strict=True):
                    assert each.snapshot(0.0, values)
                    assert (values >= 0.0).all()
                for each, values in zip(chunks, sent, strict=True):
                    each.exchange(0.0, values, sent[each is chunks[0]], 0.5)
                    each.boundary(0.0)
        held = torch.empty(32)
        chunk.read(held)
        if not moment.steps:
            assert not held.any()
            continue
        assert (held >= 0.0).all()
        if held_in == torch.bfloat16:
            continue
        rounded = 1 + len(script) * 2 * torch.finfo(wire).eps
        assert (held >= moment.mass * min(seen) * spread / rounded).all()
        assert (held <= moment.mass * max(seen) * spread * rounded).all()


def test_without_an_exchange_a_boundary_changes_no_bit():
    values = torch.tensor([-0.0, 0.0, 1e-40, 1.0])
    segment = Segment(values.clone(), Role.TRAINED)
    (chunk,) = State([segment]).chunks
    chunk.boundary(2.0)
    chunk.boundary(3.0)
    assert_bitwise(segment.x, values)
