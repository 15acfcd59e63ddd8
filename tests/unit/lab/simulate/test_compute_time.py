"""Durations of gradient steps."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from statistics import fmean, pstdev

import pytest

from gossipdp_lab.simulate.scenario import (
    ComputeTime,
    ConstantTime,
    LognormalTime,
    SlowedTime,
)

MODELS = [
    ConstantTime(0.2),
    LognormalTime(0.2, spread=0.5),
    SlowedTime(LognormalTime(0.2, spread=0.3), {7: 3.0}),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_model_has_its_mean_and_draws_by_seed_and_rank(model: ComputeTime) -> None:
    model = pickle.loads(pickle.dumps(model))
    assert model.nominal_s == pytest.approx(0.2)
    draw = model.begin(1)
    times_s = [draw(0) for _ in range(10_000)]
    assert fmean(times_s) == pytest.approx(0.2, rel=0.03)
    assert min(times_s) > 0
    # What one rank draws does not depend on how often another does.
    draw = model.begin(1)
    between = []
    for _ in range(50):
        draw(1)
        between.append(draw(0))
    assert between == times_s[:50]
    if not isinstance(model, ConstantTime):
        other_seed, other_rank = model.begin(2), model.begin(1)
        assert [other_seed(0) for _ in range(50)] != between
        assert [other_rank(1) for _ in range(50)] != between


def test_lognormal_has_its_spread() -> None:
    draw = LognormalTime(1.0, spread=0.5).begin(0)
    logarithms = [math.log(draw(0)) for _ in range(10_000)]
    assert pstdev(logarithms) == pytest.approx(0.5, rel=0.03)


def test_slow_ranks_take_their_factor() -> None:
    base = LognormalTime(0.1, spread=0.2)
    slowed, plain = SlowedTime(base, {2: 4.0}).begin(0), base.begin(0)
    for rank, factor in ((1, 1.0), (2, 4.0)):
        assert [slowed(rank) for _ in range(5)] == [factor * plain(rank) for _ in range(5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantTime(0.0), "step_s is 0.0"),
        (lambda: ConstantTime(math.inf), "step_s is inf"),
        (lambda: LognormalTime(-1.0), "step_s is -1.0"),
        (lambda: LognormalTime(1.0, spread=-0.1), "spread is -0.1"),
        (lambda: LognormalTime(1.0, spread=10.0), "spread is 10, but must be from 0 to 3"),
        (lambda: SlowedTime(ConstantTime(), {3: 0.0}), "the slow factor of rank 3 is 0.0"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], ComputeTime], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
