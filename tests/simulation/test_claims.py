"""The paper's claims, and the distance that theory says, on small simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from gossipdp_lab.simulate import Quadratic, Scenario, Sgd, simulate

MOMENTUM = 0.9


def stationary_distance(method: str, comm_rate: float, momentum: float, noise: Quadratic) -> float:
    """Mean consensus distance per coordinate over the second half of a run on a ring of 64."""
    scenario = Scenario(
        graph="ring",
        num_workers=64,
        objective=noise,
        # The same movement in the long run, whatever the momentum.
        optimizer=Sgd(learning_rate=1.0 - momentum, momentum=momentum),
        comm_rate=comm_rate,
        num_steps=800,
    )
    distances = simulate(scenario, method).column("consensus_distance")
    return float(np.mean(distances[len(distances) // 2 :])) / noise.dimension


WHITE = Quadratic(dimension=8, mu=0.0, smoothness=0.0, noise_variance=8.0)


def test_on_a_ring_a2cid2_is_worth_more_than_twice_the_exchanges() -> None:
    """The paper's claim (its figure 1 and section 4), with SGD momentum 0.9."""
    accelerated = stationary_distance("a2cid2", 1.0, MOMENTUM, WHITE)
    doubled = stationary_distance("gossip", 2.0, MOMENTUM, WHITE)
    plain = stationary_distance("gossip", 1.0, MOMENTUM, WHITE)
    assert accelerated < doubled < plain


@pytest.mark.parametrize(("method", "expected"), [("gossip", 11.633), ("a2cid2", 9.700)])
def test_simulated_noise_keeps_workers_as_far_apart_as_theory_says(
    method: str, expected: float
) -> None:
    # The covariance of the ideal network with white noise of variance 1, solved exactly. Without
    # momentum it makes no difference that simulated steps are regular, those of theory Poisson.
    # Eight coordinates over 400 units of time; the slowest mode of gossip forgets within 200.
    assert stationary_distance(method, 1.0, 0.0, WHITE) == pytest.approx(expected, rel=0.25)
