"""Exact second moments against closed forms, dense algebra and a simulation of their own.

Figures marked "first evidence" were simulated before there was exact algebra, with a spread of
some 5% (drift: one draw of the drift, so that its error does not average out).
"""

import math

import numpy as np
import pytest

from gossipdp.graph import Constants, build_graph
from gossipdp.graph.gradient_noise import NOISE_MODELS, GradientNoise
from gossipdp.graph.second_moments import Modes, SecondMoments

WHITE, MOMENTUM, DRIFT = (NOISE_MODELS[name] for name in ("white", "momentum", "drift"))
RING_64 = Constants.of(build_graph("ring", 64))


def with_factors(constants, eta_factor, excess_factor):
    excess = constants.alpha_tilde - 0.5
    return SecondMoments(
        Modes.of(constants), eta_factor * constants.eta, 0.5 + excess_factor * excess
    )


@pytest.mark.parametrize("num_workers", [3, 8, 64])
def test_plain_gossip_on_a_ring_under_white_noise_is_the_closed_form(num_workers):
    constants = Constants.of(build_graph("ring", num_workers))
    trace = np.trace(np.linalg.pinv(constants.laplacian, hermitian=True))
    expected = trace / num_workers + ((num_workers - 1) / num_workers) ** 2
    distance = SecondMoments.gossip(constants).stationary_distance(WHITE)
    assert distance == pytest.approx(expected, rel=1e-9)


def test_two_workers():
    # Each exchange makes them equal, so the distance is what grew since the last one, at rate 1.
    moments = SecondMoments.gossip(Constants.of(build_graph("path", 2), comm_rate=0.25))
    assert moments.stationary_distance(WHITE) == pytest.approx(0.5 / 0.25)
    assert moments.decay_rate == pytest.approx(0.25)
    assert moments.decay_per_exchange == pytest.approx(1.0)


def test_complete_graph_by_hand():
    # d E|x|^2 = -(n lambda / 2) E|x|^2 with lambda = 1 / (n - 1).
    moments = SecondMoments.of(Constants.of(build_graph("complete", 10)))
    assert moments.decay_rate == pytest.approx(10 / 9 / 2)
    assert moments.stationary_distance(WHITE) == pytest.approx(0.9 / (10 / 9 / 2))


@pytest.mark.parametrize(
    ("noise", "factors", "evidence", "tolerance"),
    [
        (WHITE, None, 11.7, 0.01),
        (WHITE, (1.0, 1.0), 9.1, 0.07),
        (WHITE, (1.0, 0.5), 5.9, 0.02),
        (MOMENTUM, None, 9.6, 0.01),
        (MOMENTUM, (1.0, 1.0), 2.16, 0.02),
        (DRIFT, None, 6087.0, 0.04),
        (DRIFT, (1.0, 1.0), 140.0, 0.21),
        (DRIFT, (0.25, 2.0), 45.0, 0.21),
    ],
)
def test_first_evidence_on_a_ring_of_64(noise, factors, evidence, tolerance):
    moments = SecondMoments.gossip(RING_64) if factors is None else with_factors(RING_64, *factors)
    assert moments.stationary_distance(noise) == pytest.approx(evidence, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "num_workers", "gossip", "a2cid2"),
    [
        ("ring", 16, 0.078, 0.234),
        ("ring", 64, 0.0048, 0.059),
        ("path", 64, 0.0013, 0.032),
        ("torus", 64, 0.148, 0.282),
        ("exponential", 64, 0.39, 0.44),
        ("complete", 64, 0.515, 0.515),
    ],
)
def test_the_mean_decays_a_little_slower_than_single_runs(name, num_workers, gossip, a2cid2):
    # Simulated decays are slopes of the logarithm of single runs; by Jensen these are steeper.
    constants = Constants.of(build_graph(name, num_workers))
    for moments, simulated in (
        (SecondMoments.gossip(constants), gossip),
        (SecondMoments.of(constants), a2cid2),
    ):
        assert 0.82 * simulated < moments.decay_per_exchange < 1.02 * simulated


def test_without_edges_nothing_happens():
    moments = SecondMoments.of(Constants.of(build_graph("ring", 1)))
    assert (moments.stationary_distance(DRIFT), moments.decay_per_exchange) == (0.0, 0.0)
    assert moments.is_stable


def test_too_large_a_gain_is_unstable():
    moments = with_factors(RING_64, 1.0, 3.0)
    assert moments.feedback > 1
    assert not moments.is_stable
    assert moments.stationary_distance(WHITE) == math.inf
    assert moments.decay_rate < 0


def test_noises_add_and_the_time_unit_may_be_changed():
    moments = SecondMoments.of(Constants.of(build_graph("path", 9)))
    both = moments.stationary_distance(GradientNoise(white=2.0, drift=0.5, momentum=0.9))
    expected = 2 * moments.stationary_distance(MOMENTUM) + 0.5 * moments.stationary_distance(DRIFT)
    assert both == pytest.approx(expected)
    faster = SecondMoments.of(Constants.of(build_graph("path", 9), comm_rate=4.0))
    assert faster.decay_per_exchange == pytest.approx(moments.decay_per_exchange)
    white = moments.stationary_distance(WHITE)
    assert faster.stationary_distance(WHITE) == pytest.approx(white / 4)


def test_regular_steps():
    moments = SecondMoments.of(RING_64)
    regular = {
        name: moments.stationary_distance(
            GradientNoise(noise.white, noise.drift, noise.momentum, "regular")
        )
        for name, noise in NOISE_MODELS.items()
    }
    assert regular["white"] == pytest.approx(moments.stationary_distance(WHITE))
    # Poisson counts make some workers step more often than others.
    assert 0.8 < regular["momentum"] / moments.stationary_distance(MOMENTUM) < 0.95
    assert 0.8 < regular["drift"] / moments.stationary_distance(DRIFT) < 0.95


def simulated(constants, noise, *, num_coordinates, duration, seed):
    """Time average of the consensus distance, event by event; none of the module's algebra."""
    random = np.random.default_rng(seed)
    num_workers = len(constants.workers)
    shape = (num_workers, num_coordinates)
    x, c, buffer = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    drift = math.sqrt(noise.drift) * random.standard_normal(shape)
    flowed = np.zeros(num_workers)
    total = constants.exchanges_per_unit_time
    now, sampled, distances = 0.0, duration / 4, []
    while now < duration:
        now += random.exponential(1 / (total + num_workers))
        while sampled < now:
            decayed = np.exp(-2 * constants.eta * (sampled - flowed))[:, None]
            at_sample = x + 0.5 * (1 - decayed) * c
            distances.append(((at_sample - at_sample.mean(0)) ** 2).sum(0).mean() / num_workers)
            sampled += 0.5
        is_exchange = random.random() < total / (total + num_workers)
        if is_exchange:
            edge = random.choice(len(constants.edges), p=np.array(constants.rates) / total)
            touched = constants.edges[edge]
        else:
            touched = (int(random.integers(num_workers)),)
        for worker in touched:
            decayed = math.exp(-2 * constants.eta * (now - flowed[worker]))
            x[worker] += 0.5 * (1 - decayed) * c[worker]
            c[worker] *= decayed
            flowed[worker] = now
        if is_exchange:
            i, j = touched
            delta = x[i] - x[j]
            x[i] -= 0.5 * delta
            x[j] += 0.5 * delta
            c[i] -= (constants.alpha_tilde - 0.5) * delta
            c[j] += (constants.alpha_tilde - 0.5) * delta
        else:
            gradient = drift[worker] + math.sqrt(noise.white) * random.standard_normal(
                num_coordinates
            )
            buffer[worker] = noise.momentum * buffer[worker] + gradient
            x[worker] -= (1 - noise.momentum) * buffer[worker]
    return np.mean(distances)


@pytest.mark.parametrize(
    "noise", [WHITE, MOMENTUM, GradientNoise(white=1.0, drift=0.3, momentum=0.5)]
)
def test_a_simulation_of_its_own_agrees(noise):
    constants = Constants.of(build_graph("path", 6))
    measured = simulated(constants, noise, num_coordinates=400, duration=500.0, seed=3)
    exact = SecondMoments.of(constants).stationary_distance(noise)
    assert measured == pytest.approx(exact, rel=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"white": -1.0}, "variance white=-1.0"),
        ({"drift": math.inf}, "variance drift=inf"),
        ({}, "without any variance"),
        ({"white": 1.0, "momentum": 1.0}, "momentum 1.0"),
        ({"white": 1.0, "steps": "even"}, "'poisson' or 'regular'"),
    ],
)
def test_bad_noise(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradientNoise(**arguments)


@pytest.mark.parametrize(
    ("eta", "alpha_tilde", "message"), [(-1.0, 1.0, "eta -1"), (1.0, 0.25, "at least 1/2")]
)
def test_bad_constants(eta, alpha_tilde, message):
    with pytest.raises(ValueError, match=message):
        SecondMoments(Modes.of(RING_64), eta, alpha_tilde)
