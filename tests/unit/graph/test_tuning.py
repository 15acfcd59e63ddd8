import dataclasses

import pytest

from gossipdp.graph import Constants, build_graph
from gossipdp.graph.gradient_noise import NOISE_MODELS, GradientNoise
from gossipdp.graph.second_moments import Modes, SecondMoments
from gossipdp.graph.tuning import LARGEST_FACTOR, MAX_FEEDBACK, tune

RING_64 = Constants.of(build_graph("ring", 64))


@pytest.mark.parametrize(
    ("noise", "evidence_paper", "evidence_tuned", "tolerance"),
    [("white", 9.1, 5.9, 0.07), ("momentum", 2.16, 2.15, 0.03)],
)
def test_first_evidence_on_a_ring_of_64(noise, evidence_paper, evidence_tuned, tolerance):
    tuning = tune(RING_64, NOISE_MODELS[noise])
    assert tuning.distance_paper == pytest.approx(evidence_paper, rel=tolerance)
    assert tuning.distance_tuned == pytest.approx(evidence_tuned, rel=tolerance)
    assert not tuning.is_at_limit


def test_drift_pushes_the_factors_to_the_border_of_the_search():
    tuning = tune(RING_64, NOISE_MODELS["drift"])
    assert tuning.is_at_limit
    assert tuning.eta_factor == 1 / LARGEST_FACTOR
    # eta/4 and a doubled excess, from the first evidence, leave more than the tuned ones.
    by_hand = SecondMoments(
        Modes.of(RING_64), RING_64.eta / 4, 0.5 + 2 * (RING_64.alpha_tilde - 0.5)
    ).stationary_distance(NOISE_MODELS["drift"])
    assert tuning.distance_tuned < by_hand < tuning.distance_paper / 3
    assert tuning.decay_tuned < tuning.decay_paper


@pytest.mark.parametrize("noise", [*NOISE_MODELS.values(), GradientNoise(white=1.0, drift=0.01)])
@pytest.mark.parametrize(("name", "num_workers"), [("path", 9), ("star", 6), ("torus", 12)])
def test_the_tuned_are_the_best_in_their_neighbourhood(name, num_workers, noise):
    constants = Constants.of(build_graph(name, num_workers))
    evaluations = []
    tuning = tune(constants, noise, on_evaluation=lambda: evaluations.append(None))
    assert 25 <= len(evaluations) <= 200
    assert tuning.gain >= 1.0
    excess = tuning.alpha_tilde - 0.5
    tuned = SecondMoments(Modes.of(constants), tuning.eta, tuning.alpha_tilde)
    assert tuned.feedback <= MAX_FEEDBACK
    assert tuned.stationary_distance(noise) == tuning.distance_tuned
    for eta_factor, excess_factor in ((1.1, 1.0), (1 / 1.1, 1.0), (1.0, 1.1), (1.0, 1 / 1.1)):
        inside = (
            1 / LARGEST_FACTOR <= tuning.eta_factor * eta_factor <= LARGEST_FACTOR
            and 1 / LARGEST_FACTOR <= tuning.alpha_tilde_factor * excess_factor <= LARGEST_FACTOR
        )
        near = SecondMoments(
            Modes.of(constants), tuning.eta * eta_factor, 0.5 + excess * excess_factor
        )
        if inside and near.feedback <= MAX_FEEDBACK:
            assert near.stationary_distance(noise) > tuning.distance_tuned * (1 - 1e-4)


@pytest.mark.parametrize(("name", "num_workers"), [("complete", 6), ("ring", 1)])
def test_without_an_excess_there_is_nothing_to_tune(name, num_workers):
    tuning = tune(Constants.of(build_graph(name, num_workers)), NOISE_MODELS["white"])
    assert (tuning.eta_factor, tuning.alpha_tilde_factor, tuning.gain) == (1.0, 1.0, 1.0)
    assert not tuning.is_at_limit


def test_frozen():
    tuning = tune(Constants.of(build_graph("path", 4)), NOISE_MODELS["white"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuning.eta = 0.0
