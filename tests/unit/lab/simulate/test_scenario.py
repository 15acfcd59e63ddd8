import math
import pickle
from functools import partial
from statistics import fmean, pstdev

import pytest

from gossipdp_lab.simulate import ConstantTime, Link, LinkModel, LognormalTime, Scenario, SlowedTime
from gossipdp_lab.simulate.objectives import Quadratic

MODELS = [
    ConstantTime(0.2),
    LognormalTime(0.2, spread=0.5),
    SlowedTime(LognormalTime(0.2, spread=0.3), {7: 3.0}),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_every_model_has_its_mean_and_draws_by_seed_and_rank(model):
    model = pickle.loads(pickle.dumps(model))
    assert model.step_s == pytest.approx(0.2)
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


def test_lognormal_has_its_spread():
    draw = LognormalTime(1.0, spread=0.5).begin(0)
    logarithms = [math.log(draw(0)) for _ in range(10_000)]
    assert pstdev(logarithms) == pytest.approx(0.5, rel=0.03)


def test_slow_ranks_take_their_factor():
    base = LognormalTime(0.1, spread=0.2)
    slowed, plain = SlowedTime(base, {2: 4.0}).begin(0), base.begin(0)
    for rank, factor in ((1, 1.0), (2, 4.0)):
        assert [slowed(rank) for _ in range(5)] == [factor * plain(rank) for _ in range(5)]


def test_some_links_are_different_both_ways():
    links = LinkModel(Link(0.01, 1e6), {(2, 1): Link(0.2, 1e3)})
    transfer_s = links.begin(0, model_bytes=1e3)
    for sender, receiver in ((1, 2), (2, 1)):
        assert links.latency_s(sender, receiver) == 0.2
        assert transfer_s(sender, receiver) == 1.0
    assert links.latency_s(0, 1) == 0.01
    assert transfer_s(0, 1) == 1e-3


def test_jitter_spreads_the_times_about_the_same_mean():
    transfer_s = LinkModel(Link(0.0, 1e6), jitter=0.5).begin(0, model_bytes=1e6)
    times_s = [transfer_s(0, 1) for _ in range(20_000)]
    assert fmean(times_s) == pytest.approx(1.0, rel=0.02)
    assert pstdev(math.log(time_s) for time_s in times_s) == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ConstantTime, {"step_s": 0.0}, "step_s is 0.0"),
        (LognormalTime, {"spread": -0.1}, "spread is -0.1"),
        (LognormalTime, {"spread": 10.0}, "spread is 10.0; it must be .* below 3"),
        (partial(SlowedTime, ConstantTime()), {"factors": {3: 0.0}}, "factor of rank 3 is 0.0"),
        (LinkModel, {"jitter": math.nan}, "jitter is nan"),
        (LinkModel, {"overrides": {(0, 1): Link(), (1, 0): Link()}}, "given twice"),
        (LinkModel, {"overrides": {(1, 1): Link()}}, "joins a rank with itself"),
        (Link, {"latency_s": -1.0}, "latency_s is"),
        (Link, {"bytes_per_s": 0.0}, "bytes_per_s is"),
        (Link, {"bytes_per_s": math.nan}, "bytes_per_s is"),
        (Scenario, {"comm_rate": 0.0}, "comm_rate is 0.0"),
        (Scenario, {"num_steps": math.inf}, "num_steps is inf"),
        (Scenario, {"stop_below": 1.0}, "stop_below is 1.0"),
        (Scenario, {"num_records": 0}, "num_records is 0"),
        (Scenario, {"model_bytes": -1}, "model_bytes is -1"),
        (Scenario, {"fidelity": "real"}, "unknown fidelity 'real'"),
        (Scenario, {"exchange_moments": {"exp_avg_sq": 0}, "fidelity": "links"}, "exp_avg_sq"),
        (Scenario, {"exchange_moments": {"exp_avg_sq": 1}}, "choose fidelity 'links'"),
        (Quadratic, {"dimension": 0}, "dimension is"),
        (Quadratic, {"noise_variance": -1.0}, "noise_variance is"),
        (Quadratic, {"mu": 2.0}, "mu is"),
        (Quadratic, {"mu": 0.0}, "mu is"),
    ],
)
def test_bad_settings_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
