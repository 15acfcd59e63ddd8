"""The 8-bit code of squares: errors bounded, never negative."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.dynamics.machine_code import BLOCK
from gossipdp.dynamics.squares import coded_bytes, decode, encode


def there_and_back(values):
    code, out = torch.empty(coded_bytes(len(values)), dtype=torch.uint8), torch.empty_like(values)
    encode(values, code)
    decode(code, out)
    return out


@given(
    seed=st.integers(0, 2**32 - 1),
    num_values=st.integers(1, 3 * BLOCK),
    spread=st.floats(0, 12),
    scale=st.floats(-80, 80),
)
@settings(max_examples=150, deadline=None)
def test_errors_are_those_that_the_module_states(seed, num_values, spread, scale):
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


def test_the_levels_are_evenly_rounded_and_the_largest_number_stays_finite():
    values = torch.tensor([1.0, 1.0624, 1.0626, 1.125, 0.5, 0.0, 3.4e38])
    assert there_and_back(values)[-2:].tolist() == [0.0, 2.0**127 * 1.75]
    assert there_and_back(values[:-1]).tolist() == [1.0, 1.0, 1.125, 1.125, 0.5, 0.0]


def test_a_hostile_code_gives_finite_numbers_that_are_not_negative():
    generator = torch.Generator().manual_seed(1)
    out = torch.empty(2 * BLOCK)
    for _ in range(200):
        code = torch.randint(0, 256, (coded_bytes(len(out)),), generator=generator)
        decode(code.to(torch.uint8), out)
        assert bool(out.isfinite().all())
        assert bool((out >= 0).all())
