"""One suite for everything that computes exchanges, against the float64 reference."""

import math

import pytest
import torch
from bitwise import assert_bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import MomentumState
from torch import Tensor

from gossipdp.dynamics.chunks import Chunk, Role
from gossipdp.dynamics.state import Segment, State
from gossipdp.dynamics.update import KERNELS, choose_kernels, take_operations

MOST = 1001
LENGTHS = (0, 1, 2, 15, 16, 17, 255, MOST)
ALPHA_TILDE = 1.9
F32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = ((F32, F32), (F32, BF16), (BF16, BF16))  # of parameters and snapshots
POISON = (math.nan, math.inf, -math.inf)

each_precision = pytest.mark.parametrize(("dtype", "wire"), PRECISIONS)
each_momentum = pytest.mark.parametrize("momentum", [True, False])
each_phase = pytest.mark.parametrize("theta", [0.0, 0.2, math.inf])


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


def random_chunk(
    kernels: str, length: int, seed: int, dtype: torch.dtype, momentum: bool = True
) -> Chunk:
    """Return a chunk at phase 0, where its momentum was written."""
    generator = torch.Generator().manual_seed(seed)
    x, pending, c = (torch.randn(length, generator=generator) for _ in range(3))
    chunk = Chunk(Role.TRAINED, x.to(dtype), pending, c if momentum else None)
    chunk.is_compiled = kernels == "numba"
    chunk.has_pending, chunk.theta_c = True, 0.0
    return chunk


def copy_of(chunk: Chunk) -> Chunk:
    c = None if chunk.c is None else chunk.c.clone()
    return Chunk(chunk.role, chunk.x.clone(), chunk.pending.clone(), c)


def snapshot_of(length: int, seed: int, wire: torch.dtype) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(wire)


def tensors(chunk: Chunk) -> list[Tensor]:
    return [chunk.x, chunk.pending, *([] if chunk.c is None else [chunk.c])]


def reference_of(chunk: Chunk, left: float = 1.0) -> MomentumState:
    x = chunk.x.double() + chunk.pending.double()
    return MomentumState(x, torch.zeros_like(x) if chunk.c is None else left * chunk.c.double())


def assert_close(chunk: Chunk, expected: MomentumState, left: float = 1.0) -> None:
    """Compare with the reference; ``left`` is the share of c that is left of it."""
    found = reference_of(chunk, left)
    assert torch.allclose(found.x, expected.x, atol=1e-5, rtol=0)
    if chunk.c is not None:
        assert torch.allclose(found.c, expected.c, atol=1e-5, rtol=0, equal_nan=True)


@each_precision
@each_momentum
@each_phase
def test_an_exchange_is_the_reference_s(kernels, dtype, wire, momentum, theta):
    for length in LENGTHS:
        chunk = random_chunk(kernels, length, length, dtype, momentum)
        expected = reference_of(chunk).flow(1.0, theta)
        mine, peers = torch.empty(length, dtype=wire), snapshot_of(length, 7, wire)
        before = copy_of(chunk)
        assert chunk.snapshot(theta, mine)
        assert_bitwise(tensors(chunk), tensors(before))
        rtol = 2**-8 if wire is torch.bfloat16 else 0
        assert torch.allclose(mine.double(), expected.x, atol=1e-5, rtol=rtol)
        delta = mine.double() - peers.double()
        squared_norm = chunk.exchange(theta, mine, peers, ALPHA_TILDE)
        assert squared_norm == pytest.approx(float(delta.square().sum()), rel=1e-5)
        assert_close(chunk, expected.exchange(delta, ALPHA_TILDE))
        assert torch.equal(chunk.x, before.x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_pending", [True, False])
@each_momentum
@each_phase
def test_a_boundary_moves_everything_and_keeps_the_remainder(
    kernels, dtype, has_pending, momentum, theta
):
    for length in LENGTHS:
        chunk = random_chunk(kernels, length, length, dtype, momentum)
        if not has_pending:
            chunk.pending.zero_()
            chunk.has_pending = False
        expected = reference_of(chunk).flow(1.0, theta)
        for c in (chunk.c, expected.c) if momentum and theta == 0.0 else ():
            c.fill_(math.nan)  # it has nothing to flow, so no pass reads it
        assert chunk.snapshot(theta, torch.empty(length, dtype=dtype))
        assert chunk.boundary(theta)
        assert_close(chunk, expected, left=math.exp(-2.0 * theta))
        if dtype is torch.float32:
            assert not chunk.pending.any()
        else:
            total = chunk.x.float() + chunk.pending
            assert torch.equal(total.bfloat16(), chunk.x)


@each_precision
@pytest.mark.parametrize("names", [("numba", "numba"), ("numba", "torch")])  # torch follows
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), alpha_tilde=st.floats(0.6, 40.0))
def test_both_ends_apply_exact_negatives(names, dtype, wire, seed, alpha_tilde):
    """Whatever each end computes with: what one adds to c and pending, the other takes away."""
    chunks = [random_chunk(name, MOST, seed + end, dtype) for end, name in enumerate(names)]
    chunks[0].x.mul_(1e3)  # of different size, so that every rounding shows
    snapshots = [torch.empty(MOST, dtype=wire) for _ in chunks]
    for chunk, snapshot in zip(chunks, snapshots, strict=True):
        chunk.snapshot(0.1, snapshot)
        for tensor in tensors(chunk)[1:]:
            tensor.zero_()
    chunks[0].exchange(0.0, *snapshots, alpha_tilde)
    chunks[1].exchange(0.0, *snapshots[::-1], alpha_tilde)
    for ours, theirs in zip(tensors(chunks[0])[1:], tensors(chunks[1])[1:], strict=True):
        assert ours.any()
        assert torch.equal(ours, -theirs)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, MOST),
    place=st.integers(0, MOST - 1),
    case=st.tuples(st.booleans(), st.sampled_from(POISON)),
)
def test_a_peer_s_poison_is_not_applied(name, wire, length, place, case):
    momentum, value = case
    chunk = random_chunk(name, length, 3, torch.float32, momentum)
    before = copy_of(chunk)
    mine, peers = torch.empty(length, dtype=wire), snapshot_of(length, 7, wire)
    peers[place % length] = value
    assert chunk.snapshot(0.2, mine)
    assert not math.isfinite(chunk.exchange(0.2, mine, peers, ALPHA_TILDE))
    assert_bitwise(tensors(chunk), tensors(before))
    assert chunk.theta == 0.0, "the next boundary flows"


@pytest.mark.parametrize(
    ("dtype", "wire", "where"),
    [(*each, where) for each, where in zip(PRECISIONS, ("c", "x", "pending"), strict=True)],
)
def test_our_own_poison_is_found_and_not_applied(kernels, dtype, wire, where):
    for place, value in zip((0, 500, MOST - 1), POISON, strict=True):
        chunk = random_chunk(kernels, MOST, 3, dtype)
        getattr(chunk, where)[place] = value
        before = copy_of(chunk)
        out, peers = torch.empty(MOST, dtype=wire), snapshot_of(MOST, 7, wire)
        assert not chunk.snapshot(0.2, out)
        assert not math.isfinite(chunk.exchange(0.2, out, peers, ALPHA_TILDE))
        assert torch.isfinite(out).sum() == MOST - 1
        assert_bitwise(tensors(chunk), tensors(before))


def test_large_values_are_no_poison_until_their_difference_is(kernels):
    """Squares beyond float32 are applied, at both ends alike; an infinite delta by neither."""
    for size, is_applied in ((1e25, True), (1.7e38, True), (1.8e38, False)):
        mine = torch.full((MOST,), size)
        chunk = Chunk(Role.TRAINED, mine.clone(), torch.zeros(MOST), None)
        chunk.is_compiled = kernels == "numba"
        assert chunk.snapshot(0.0, mine), "although their sum overflows"
        norm = chunk.exchange(0.0, mine, -mine, 0.5)
        assert bool(chunk.pending.any()) is is_applied
        expected = MOST * 4 * size**2 if is_applied else math.inf
        assert norm == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_numba_rounds_to_bfloat16_as_torch_does(bits):
    """Any bits: subnormals, ties, overflow to infinity, NaN of every kind."""
    ties = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F7F8000, 0x7FFFFFFF, 0xFFFFFFFF, 0x00008000]
    values = torch.tensor(bits + ties, dtype=torch.int64).to(torch.uint32).view(torch.float32)
    chunk = Chunk(Role.TRAINED, values, torch.zeros_like(values), None)
    outs = [torch.empty(values.numel(), dtype=torch.bfloat16) for _ in KERNELS]
    finite = []
    for name, out in zip(KERNELS, outs, strict=True):
        chunk.is_compiled = name == "numba"
        finite.append(chunk.snapshot(0.0, out))
    assert finite[0] == finite[1]
    nans = [torch.isnan(out) for out in outs]
    assert torch.equal(*nans)
    assert torch.equal(*(out[~nans[0]].view(torch.uint16) for out in outs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_of_long_ago_is_none(dtype):
    """The flow that leaves a last trace of it takes that too: no number grows too small."""
    (chunk,) = State([Segment(torch.zeros(7, dtype=dtype), Role.TRAINED)]).chunks
    mine, peers = torch.ones(7, dtype=dtype), torch.zeros(7, dtype=dtype)
    chunk.exchange(0.0, mine, peers, ALPHA_TILDE)
    chunk.boundary(0.0)
    z, c = torch.empty_like(mine), torch.empty_like(mine)
    for theta in (20.79, 20.8):  # at 20.794 a share of 2**-60 is left
        chunk.read(z, c, theta)
        assert bool(c.any()) is (theta == 20.79)
    chunk.read_z(z)
    theta = 0.0
    while theta < 400.0:  # exp(-800) is no number of 64 bits any more
        theta += 0.7
        chunk.boundary(theta)
        assert not chunk.pending.any()
        x = chunk.x.clone()
    assert torch.allclose(x, z, atol=1e-6 if dtype is torch.float32 else 1e-15, rtol=0)
    values, c = torch.empty_like(mine), torch.full_like(mine, 7.0)
    chunk.read(values, c)
    assert not c.any()
    chunk.exchange(1000.0, peers, mine, ALPHA_TILDE)
    chunk.read(values, c)
    assert torch.equal(c, (ALPHA_TILDE - 0.5) * mine)
    assert torch.equal(values, x + 0.5 * mine)


def test_to_take_many_values_needs_no_more_scratch_than_16_million():
    for length, num_operations in ((1 << 24, 3), ((1 << 24) + 1, 6)):
        x, taken = (torch.empty(length, dtype=dtype, device="meta") for dtype in (BF16, F32))
        assert len(take_operations(x, taken)) == num_operations


def state_of(*dtypes: torch.dtype) -> State:
    return State([Segment(torch.zeros(3, dtype=dtype), Role.TRAINED) for dtype in dtypes])


def test_numba_is_chosen_if_it_pays(monkeypatch):
    monkeypatch.delenv("GOSSIPDP_KERNELS", raising=False)
    assert [choose_kernels(number) for number in (1_000_000, 999_999)] == ["numba", "torch"]
    assert choose_kernels(1, "numba") == "numba"
    monkeypatch.setenv("GOSSIPDP_KERNELS", "torch")
    assert choose_kernels(10**9) == "torch"
    monkeypatch.setenv("GOSSIPDP_KERNELS", "cuda")
    with pytest.raises(ValueError, match="GOSSIPDP_KERNELS is 'cuda'; choose one of auto, numba"):
        choose_kernels(10**9)


def test_what_computes_is_visible_and_torch_computes_what_loops_do_not_know():
    state = state_of(torch.float32, torch.bfloat16)
    for requested, kernels in (("auto", "torch"), ("numba", "numba")):
        state.compile(requested)
        assert state.kernels == kernels
    mixed = state_of(torch.float32, torch.float16, torch.float64)
    mixed.compile("numba")
    for wire in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        mixed.compile_for(wire)
    assert mixed.kernels == "numba, torch"
    assert [chunk.is_compiled for chunk in mixed.chunks] == [True, False, False]
