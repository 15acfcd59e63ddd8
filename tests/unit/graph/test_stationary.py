"""The exact stationary distance against closed forms, dense algebra and a simulation of their own.

Figures marked "first evidence" were simulated before there was exact algebra, with a spread of
some 5% (drift: one draw of the drift, so that its error does not average out).
"""

import math

import numpy as np
import pytest

from gossipdp.graph import Constants, build_graph
from gossipdp.graph.network_plan import NOISE_MODELS, GradientNoise, stationary_distance

WHITE, MOMENTUM, DRIFT = (NOISE_MODELS[name] for name in ("white", "momentum", "drift"))
RING_64 = Constants.of(build_graph("ring", 64))


@pytest.mark.parametrize("num_workers", [3, 8, 64])
def test_plain_gossip_on_a_ring_under_white_noise_is_the_closed_form(num_workers):
    constants = Constants.of(build_graph("ring", num_workers))
    trace = np.trace(np.linalg.pinv(constants.laplacian, hermitian=True))
    expected = trace / num_workers + ((num_workers - 1) / num_workers) ** 2
    distance = stationary_distance(constants, WHITE, "gossip")
    assert distance == pytest.approx(expected, rel=1e-9)


def test_two_workers():
    # Each exchange makes them equal, so the distance is what grew since the last one, at rate 1.
    pair = Constants.of(build_graph("path", 2), comm_rate=0.25)
    assert stationary_distance(pair, WHITE, "gossip") == pytest.approx(0.5 / 0.25)


def test_complete_graph_by_hand():
    # d E|x|^2 = -(n lambda / 2) E|x|^2 with lambda = 1 / (n - 1).
    complete = Constants.of(build_graph("complete", 10))
    assert stationary_distance(complete, WHITE) == pytest.approx(0.9 / (10 / 9 / 2))


@pytest.mark.parametrize(
    ("noise", "method", "evidence", "tolerance"),
    [
        (WHITE, "gossip", 11.7, 0.01),
        (WHITE, "a2cid2", 9.1, 0.07),
        (MOMENTUM, "gossip", 9.6, 0.01),
        (MOMENTUM, "a2cid2", 2.16, 0.02),
        (DRIFT, "gossip", 6087.0, 0.04),
        (DRIFT, "a2cid2", 140.0, 0.21),
    ],
)
def test_first_evidence_on_a_ring_of_64(noise, method, evidence, tolerance):
    assert stationary_distance(RING_64, noise, method) == pytest.approx(evidence, rel=tolerance)


def test_without_edges_nothing_happens():
    assert stationary_distance(Constants.of(build_graph("ring", 1)), DRIFT) == 0.0


def test_noises_add_and_the_time_unit_may_be_changed():
    path = Constants.of(build_graph("path", 9))
    both = stationary_distance(path, GradientNoise(white=2.0, drift=0.5, momentum=0.9))
    expected = 2 * stationary_distance(path, MOMENTUM) + 0.5 * stationary_distance(path, DRIFT)
    assert both == pytest.approx(expected)
    faster = Constants.of(build_graph("path", 9), comm_rate=4.0)
    assert stationary_distance(faster, WHITE) == pytest.approx(stationary_distance(path, WHITE) / 4)


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
    exact = stationary_distance(constants, noise)
    assert measured == pytest.approx(exact, rel=0.06)
