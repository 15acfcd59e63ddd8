"""The 8-bit codes: of differences exact or found out, with its steps; of squares within bounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.dynamics import lattice, update
from gossipdp.dynamics.lattice import LatticeSteps, difference, num_blocks, squares_bytes
from gossipdp.dynamics.machine_code import BLOCK

ALL = slice(None)


def encoded(x, exponents):
    """Return checksum, codes and sizes."""
    codes, sizes = torch.full((len(x),), 7, dtype=torch.uint8), x.new_empty(num_blocks(len(x)))
    return lattice.encode(x, exponents, codes, sizes), codes, sizes


def code(x, y, exponents):
    """Return the difference as the holder of y decodes it, and whether the checksums agree."""
    checksum, codes, _ = encoded(x, exponents)
    differences = torch.empty(len(y), dtype=torch.int8)
    agrees = lattice.decode(codes, exponents, y, differences) == checksum
    return difference(differences, exponents), agrees


def steps_of(exponents, like):
    powers = torch.tensor([2.0**each for each in exponents.tolist()], dtype=torch.float64)
    return powers.repeat_interleave(BLOCK)[: len(like)]


def points(x, exponents):
    step = steps_of(exponents, x)
    return (x.double() / step).round() * step


def reference(x, exponents):
    """Return checksum and codes, in Python's own numbers."""
    k = (points(x, exponents) / steps_of(exponents, x)).long().tolist()
    first, second = (part.tolist() for part in lattice.weights().split(BLOCK))
    total = 0
    for start in range(0, len(k), BLOCK):
        above = [each >> 8 for each in k[start : start + BLOCK]]
        sums = [
            sum(each * weight for each, weight in zip(values, of, strict=False)) % 2**32
            for values, of in ((above, first), ([each ^ each >> 13 for each in above], second))
        ]
        signed = sums[1] - 2**32 if sums[1] >= 2**31 else sums[1]
        total = (total * lattice.CARRY + (sums[0] << 32) + signed) % 2**64
    return total - 2**64 if total >= 2**63 else total, [each % 256 for each in k]


@given(
    seed=st.integers(0, 2**32 - 1),
    num_values=st.integers(1, 3 * BLOCK),
    exponent=st.integers(-20, 5),
    reach=st.floats(0, 126),
    size=st.floats(0, 1e3),
)
@settings(max_examples=100, deadline=None)
def test_within_reach_the_difference_of_the_points_is_exact(
    seed, num_values, exponent, reach, size
):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.arange(exponent, exponent + num_blocks(num_values)).to(torch.int8)
    y = size * torch.randn(num_values, generator=generator)
    apart = 2 * torch.rand(num_values, generator=generator) - 1
    x = y + reach * 2.0**exponent * apart
    checksum, codes, sizes = encoded(x, exponents)
    if None in {checksum, encoded(y, exponents)[0]}:
        return
    assert (checksum, codes.tolist()) == reference(x, exponents)
    assert sizes.tolist() == [float(part.abs().max()) for part in x.split(BLOCK)]
    step = steps_of(exponents, x)
    found, agrees = code(x, y, exponents)
    if bool(((x.double() - y.double()).abs() < 127 * step).all()):
        assert agrees
    if agrees:
        exact = points(y, exponents) - points(x, exponents)
        assert torch.equal(found.double(), exact)
        negative, agrees_there = code(y, x, exponents)
        # Of 128 steps apart, one end alone can decode: -128 fits a byte and 128 does not.
        assert agrees_there or bool((found.double() == -128 * step).any())
        assert not agrees_there or torch.equal(found, -negative)
        error = (found.double() - (y.double() - x.double())).abs()
        assert bool((error <= step).all())


def test_the_weights_are_made_of_splitmix64_s_numbers():
    """Both ends need the same. These are the upper halves of the first three, as published."""
    upper = 0xE220A839, 0x6E789E6A, 0x06C45D18
    assert lattice.weights()[:3].tolist() == [(each | 1) - 2**31 for each in upper]


@pytest.mark.parametrize("wraps", [(1,), (1, -1), (1, -2, 1), (1, -1, -1, 1), (256, -256)])
def test_wraps_side_by_side_do_not_cancel(wraps):
    """One value beyond reach, and neighbours in turn, which weights of 2i + 1 miss."""
    exponents, y = torch.zeros(1, dtype=torch.int8), 3000 * torch.rand(BLOCK).round()
    for first in range(BLOCK - len(wraps) + 1):
        x = y.clone()
        x[first : first + len(wraps)] += 256 * torch.tensor(wraps)
        assert not code(x, y, exponents)[1], first


def test_what_does_not_fit_is_said():
    """A block of 2**30 steps does not, and is not coded; one of half as many is."""
    values = torch.full((BLOCK + 3,), 4.0)
    for exponents in ((-28, -27), (-27, -28), (-27, -27)):
        fine = torch.tensor(exponents, dtype=torch.int8)
        checksum, codes, sizes = encoded(values, fine)
        assert (checksum is None) == (-28 in exponents)
        assert sizes.tolist() == [4.0, 4.0]
        assert codes[[0, -1]].tolist() == [7 if each == -28 else 0 for each in exponents]
    for place, bad in ((BLOCK, torch.nan), (BLOCK + 1, torch.inf), (-1, -torch.inf)):
        values.fill_(3.0)[place] = bad
        checksum, _, sizes = encoded(values, fine)
        assert checksum is None
        assert sizes.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("has_c", [True, False])
def test_a_coded_exchange_is_the_reference_s(has_c):
    size, generator = 2 * BLOCK + 7, torch.Generator().manual_seed(3)
    pending, c = torch.randn(2, size, generator=generator)
    differences = torch.randint(-128, 128, (size,), generator=generator).to(torch.int8)
    exponents, distances = torch.tensor([-9, -12, 3], dtype=torch.int8), torch.empty(3)
    delta = difference(differences, exponents).double()
    share, left, alpha_tilde = 0.3, 0.6, 1.7
    wanted = pending.double() - 0.5 * delta + (share * c.double() if has_c else 0.0)
    wanted_c = left * c.double() - (alpha_tilde - 0.5) * delta
    coded = differences, exponents, distances
    numbers = share, left, alpha_tilde
    norm = update.exchange_coded(pending, c if has_c else None, coded, *numbers)
    assert norm == pytest.approx(float(delta @ delta), rel=1e-12)
    torch.testing.assert_close(pending.double(), wanted, rtol=1e-6, atol=1e-6)
    if has_c:
        torch.testing.assert_close(c.double(), wanted_c, rtol=1e-6, atol=1e-6)
    assert distances.tolist() == [float(part.abs().max()) for part in delta.split(BLOCK)]


def test_steps_grow_at_once_and_shrink_slowly():
    steps = LatticeSteps(2)
    size = torch.tensor([1.0, 1.0])
    assert steps.exponents().tolist() == [-120, -120], "nothing is known: as if the two agreed"
    distances = torch.tensor([0.0, 1.0])
    steps.learn(ALL, distances, size)
    # 4/127 is between 2**-5 and 2**-4; the other block's values are rounded at 2**-23.
    assert steps.exponents().tolist() == [-23, -4]
    steps.learn(ALL, distances / 1000, size)
    assert steps.exponents()[1] == -5
    for _ in range(100):
        steps.learn(ALL, distances / 1e9, size)
    assert steps.exponents().tolist() == [-23, -23]
    steps.learn(ALL, 1000 * distances, size)
    assert steps.exponents()[1] == 5
    steps.learn(ALL, torch.zeros(2), 3.0 * size, is_rounded=True)
    # What bfloat16 may hide: 4 times 3/256/127 is between 2**-12 and 2**-11.
    assert steps.exponents()[0] == -11


@pytest.mark.parametrize("size", [1.0, 3e38])
@pytest.mark.parametrize("distance", [8.6e37, 3e38])
def test_one_huge_difference_is_forgotten_in_time(distance, size):
    """Four times it is beyond float32; the steps must not stay there."""
    steps, sizes = LatticeSteps(1), torch.tensor([1.0])
    steps.learn(ALL, torch.tensor([distance]), torch.tensor([size]))
    assert int(steps.exponents()[0]) == 120
    assert float(steps._reach[0]) == 127 * 2.0**120
    distances = torch.tensor([0.25])
    for _ in range(500):
        steps.learn(ALL, distances, sizes)
    # 4 times 0.25 is 1, and 1/127 is between 2**-7 and 2**-6.
    assert steps.exponents().tolist() == [-6]


def there_and_back(values):
    code = torch.empty(squares_bytes(len(values)), dtype=torch.uint8)
    out, behind = torch.full((len(values) + BLOCK,), -7.0).split([len(values), BLOCK])
    lattice.encode_squares(values, code)
    lattice.decode_squares(code, out)
    assert bool((behind == -7.0).all())
    return out


@given(
    seed=st.integers(0, 2**32 - 1),
    num_values=st.integers(1, 3 * BLOCK),
    spread=st.floats(0, 12),
    scale=st.floats(-80, 80),
)
@settings(max_examples=150, deadline=None)
def test_errors_of_squares_are_those_that_are_stated(seed, num_values, spread, scale):
    generator = torch.Generator().manual_seed(seed)
    drawn = spread * torch.randn(num_values, generator=generator, dtype=torch.float64) + scale
    values = drawn.exp().clamp(max=3e38).float()
    values[torch.rand(num_values, generator=generator) < 0.2] = 0.0
    out = there_and_back(values)
    assert torch.equal(out == 0, values == 0)
    assert bool((out >= 0).all())
    assert bool(out.isfinite().all())
    for mine, theirs in zip(values.double().split(BLOCK), out.double().split(BLOCK), strict=True):
        # Below 2**-126 numbers have fewer bits than a level.
        is_coded = mine >= max(2.0**-31 * float(mine.max()), 2.0**-126)
        error = (theirs - mine).abs()[is_coded]
        assert bool((error <= mine[is_coded] / 16).all())
        roots = (theirs.sqrt() - mine.sqrt()).abs()[is_coded]
        assert bool((roots <= mine[is_coded].sqrt() / 30).all())
        assert bool((theirs[~is_coded] <= max(2.0**-30 * float(mine.max()), 2.0**-125)).all())


def test_the_levels_of_squares_are_evenly_rounded_and_the_largest_number_stays_finite():
    values = torch.tensor([1.5, 1.0, 1.0624, 1.0626, 1.125, 0.5, 0.0, 3.4e38])
    assert there_and_back(values)[-2:].tolist() == [0.0, 2.0**127 * 1.75]
    assert there_and_back(values[:-1]).tolist() == [1.5, 1.0, 1.0, 1.125, 1.125, 0.5, 0.0]


def test_a_hostile_code_of_squares_gives_finite_numbers_that_are_not_negative():
    generator = torch.Generator().manual_seed(1)
    out = torch.empty(2 * BLOCK)
    for _ in range(200):
        code = torch.randint(0, 256, (squares_bytes(len(out)),), generator=generator)
        lattice.decode_squares(code.to(torch.uint8), out)
        assert bool(out.isfinite().all())
        assert bool((out >= 0).all())
