import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.reproduce.fits import fit_power_law, spread

SIZES = [8, 16, 32, 64, 128, 256]


@given(exponent=st.floats(-4, 4), factor=st.floats(1e-3, 1e3))
def test_an_exact_power_law_is_found(exponent, factor):
    fit = fit_power_law(SIZES, [factor * n**exponent for n in SIZES])
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.factor == pytest.approx(factor, rel=1e-9)
    assert fit.standard_error < 1e-6


def test_the_standard_error_is_that_of_repeated_fits():
    random = np.random.default_rng(0)
    fits = [
        fit_power_law(SIZES, [n**2 * math.exp(0.1 * random.standard_normal()) for n in SIZES])
        for _ in range(400)
    ]
    spread_of_fits = np.std([fit.exponent for fit in fits])
    assert np.mean([fit.exponent for fit in fits]) == pytest.approx(2.0, abs=0.01)
    assert np.sqrt(np.mean([fit.standard_error**2 for fit in fits])) == pytest.approx(
        spread_of_fits, rel=0.1
    )


def test_two_points_have_no_standard_error():
    fit = fit_power_law([2, 4], [3, 24])
    assert fit.exponent == pytest.approx(3.0)
    assert math.isnan(fit.standard_error)


@pytest.mark.parametrize(("x", "y"), [([2], [1]), ([2, 2], [1, 3]), ([1, 2], [1, 0])])
def test_what_is_no_power_law_is_refused(x, y):
    with pytest.raises(ValueError, match="positive points at two or more x"):
        fit_power_law(x, y)


def test_spread():
    assert spread([1.0, 3.0]) == pytest.approx((2.0, math.sqrt(2.0)))
    assert spread([5.0]) == (5.0, 0.0)
    assert spread([0.058, 0.060]).text == "0.059 ± 0.0014"
    assert spread([12345.0, 12345.0]).text == "12,345"
