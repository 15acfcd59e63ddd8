"""The 8-bit code: exact within its range, found out beyond it, and its steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.dynamics.lattice import BLOCK, Lattice, LatticeSteps, largest, power_of_two

DTYPES = (torch.float32, torch.float64)


def code(dtype, x, y, exponents):
    """Return the difference as the holder of y decodes it, and whether the checksums agree."""
    blocks = len(x)
    sender, receiver = Lattice(blocks, dtype), Lattice(blocks, dtype)
    codes = torch.empty(blocks, BLOCK, dtype=torch.uint8)
    differences = torch.empty(blocks, BLOCK, dtype=torch.int8)
    checksum = sender.encode(x, exponents, codes)
    agrees = receiver.decode(codes, exponents, y, differences) == checksum
    return receiver.difference(differences, exponents, torch.empty_like(y)), agrees


def points(x, exponents):
    step = power_of_two(exponents, torch.float64)
    return (x.double() / step).round() * step


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-20, 5),
    reach=st.floats(0, 126),
    size=st.floats(0, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_within_reach_the_difference_of_the_points_is_exact(seed, dtype, exponent, reach, size):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.tensor([exponent, exponent + 1], dtype=torch.int8)
    step = 2.0**exponent
    y = (size * torch.randn(2, BLOCK, generator=generator)).to(dtype)
    x = y + reach * step * (2 * torch.rand(2, BLOCK, generator=generator).to(dtype) - 1)
    if not Lattice(2, dtype).fits(torch.maximum(largest(x), largest(y)), exponents):
        return
    close = (x.double() - y.double()).abs() < 127 * power_of_two(exponents, torch.float64)
    difference, agrees = code(dtype, x, y, exponents)
    assert agrees == bool(close.all()) or not close.all()
    if agrees:
        exact = points(y, exponents) - points(x, exponents)
        assert torch.equal(difference.double(), exact)
        negative, agrees_there = code(dtype, y, x, exponents)
        # Of 128 steps apart, one end alone can decode: -128 fits a byte and 128 does not.
        assert agrees_there or bool((difference == -128 * power_of_two(exponents, dtype)).any())
        assert not agrees_there or torch.equal(difference, -negative)
        error = (difference.double() - (y.double() - x.double())).abs()
        assert bool((error <= power_of_two(exponents, torch.float64)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_beyond_reach_is_found_out(dtype):
    exponents = torch.tensor([-3, -3], dtype=torch.int8)
    y = torch.linspace(-5, 5, 2 * BLOCK, dtype=dtype).view(2, BLOCK)
    for steps_off in (129, -129, 200, 255, 256, -256, 1000, 65536 * 256):
        x = y.clone()
        x[1, 17] += steps_off / 8
        _, agrees = code(dtype, x, y, exponents)
        assert not agrees, steps_off


@pytest.mark.parametrize(("old", "x", "y"), [(0.5, 0.5, -0.5), (0.9, 1.0, 0.0), (0.1, 1.0, 0.0)])
def test_a_weight_that_changes_after_all_agreed_is_found_out(old, x, y):
    """The step is then the values' own rounding, and they are 2**24 steps apart or more."""
    steps = LatticeSteps(1, torch.float32)
    values = torch.full((1, BLOCK), old)
    for _ in range(60):
        steps.learn(torch.zeros(1, BLOCK), largest(values))
    ours, theirs = values.clone(), values.clone()
    ours[0, :7], theirs[0, :7] = x, y
    exponents = steps.exponents()
    assert Lattice(1, torch.float32).fits(torch.maximum(largest(ours), largest(theirs)), exponents)
    _, agrees = code(torch.float32, ours, theirs, exponents)
    assert not agrees


def test_what_does_not_fit_is_said():
    lattice = Lattice(1, torch.float32)
    assert lattice.fits(torch.tensor([3.0]), torch.tensor([-20], dtype=torch.int8))
    assert not lattice.fits(torch.tensor([3.0]), torch.tensor([-100], dtype=torch.int8))
    assert not lattice.fits(torch.tensor([torch.nan]), torch.tensor([0], dtype=torch.int8))


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 127, dtype=torch.int8)
    for dtype in DTYPES:
        powers = power_of_two(exponents, dtype).squeeze(1).tolist()
        assert powers == [2.0**exponent for exponent in range(-126, 127)]


# Steps.


def test_steps_grow_at_once_and_shrink_slowly():
    steps = LatticeSteps(2, torch.float32)
    size = torch.tensor([1.0, 1.0])
    assert bool((steps.exponents() < -60).all()), "nothing is known: as if the two agreed"
    difference = torch.zeros(2, BLOCK)
    difference[1, 3] = -1.0
    steps.learn(difference, size)
    # 4/127 is between 2**-5 and 2**-4; the other block's values are rounded at 2**-23.
    assert steps.exponents().tolist() == [-23, -4]
    steps.learn(difference / 1000, size)
    assert steps.exponents()[1] == -5
    for _ in range(100):
        steps.learn(difference / 1e9, size)
    assert steps.exponents().tolist() == [-23, -23]
    steps.learn(1000 * difference, size)
    assert steps.exponents()[1] == 5


def test_after_a_repeat_the_step_covers_what_bfloat16_may_hide():
    steps = LatticeSteps(1, torch.float32)
    steps.learn(torch.zeros(1, BLOCK), torch.tensor([3.0]), is_rounded=True)
    assert 127 * 2.0 ** int(steps.exponents()[0]) > 4 * 3 * 2**-8


@pytest.mark.parametrize("size", [1.0, 3e38])
@pytest.mark.parametrize("distance", [8.6e37, 3e38])
def test_one_huge_difference_is_forgotten_in_time(distance, size):
    """Four times it is beyond float32; the steps must not stay there."""
    steps, sizes = LatticeSteps(1, torch.float32), torch.tensor([1.0])
    steps.learn(torch.full((1, BLOCK), distance), torch.tensor([size]))
    assert int(steps.exponents()[0]) == 120
    assert float(steps._reach[0]) == 127 * 2.0**120
    difference = torch.full((1, BLOCK), 0.25)
    for _ in range(500):
        steps.learn(difference, sizes)
    # 4 times 0.25 is 1, and 1/127 is between 2**-7 and 2**-6.
    assert steps.exponents().tolist() == [-6]
