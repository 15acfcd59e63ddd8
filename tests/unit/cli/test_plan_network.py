import math

import numpy as np
import pytest

from gossipdp.cli.plan_network import (
    GraphPrediction,
    TrainingConditions,
    candidates,
    predict,
    recommended,
)
from gossipdp.graph import Constants, build_graph
from gossipdp.graph.network_plan import NOISE_MODELS, stationary_distance

RESNET = TrainingConditions(model_bytes=1e8, step_s=0.1, bytes_per_s=1e9, latency_s=0.001)


def test_durations_by_hand():
    assert RESNET.exchange_s == pytest.approx(0.101)
    assert RESNET.all_reduce_s(4) == pytest.approx(6 / 4 * 0.1 + 6 * 0.001)
    assert RESNET.all_reduce_s(1) == 0.0
    assert RESNET.slowest_step_s(64) == 0.1


@pytest.mark.parametrize(("num_workers", "spread"), [(1, 0.3), (2, 0.3), (64, 0.1), (512, 1.0)])
def test_the_barrier_waits_for_the_mean_maximum(num_workers, spread):
    conditions = TrainingConditions(1e6, 2.0, 1e9, step_spread=spread)
    random = np.random.default_rng(0)
    times = 2.0 * np.exp(spread * random.standard_normal((4000, num_workers)) - spread**2 / 2)
    assert conditions.slowest_step_s(num_workers) == pytest.approx(times.max(1).mean(), rel=0.03)


def test_a_prediction_by_hand():
    constants = Constants.of(build_graph("ring", 8), 2.0)
    half = predict("ring", constants, RESNET, NOISE_MODELS["white"], served_share=0.25)
    assert half.nominal_comm_rate == pytest.approx(2.0)
    assert half.achieved_comm_rate == pytest.approx(0.5)
    # Five exchanges of 1e8 bytes a second, over two links.
    assert half.worker_bytes_per_s == pytest.approx(5e8)
    assert half.link_bytes_per_s == pytest.approx(2.5e8)
    at_half = Constants.of(build_graph("ring", 8), 0.5)
    expected = stationary_distance(at_half, NOISE_MODELS["white"])
    assert half.consensus_distance == pytest.approx(expected)


def test_graphs_that_exist_once():
    assert list(candidates(64)) == ["ring", "exponential", "torus", "complete"]
    assert list(candidates(7)) == ["ring", "exponential"]  # complete is the exponential graph
    assert list(candidates(2)) == ["ring"]
    assert list(candidates(13)) == ["ring", "exponential", "complete"]


def test_the_recommended_graph():
    def prediction(name, num_edges, distance):
        return GraphPrediction(name, num_edges, 1.0, 1.0, distance, 0.0, 0.0)

    ring = prediction("ring", 8, 2.0)
    torus = prediction("torus", 16, 1.05)
    complete = prediction("complete", 28, 1.0)
    assert recommended([ring, torus, complete]) is torus
    assert recommended([ring, complete]) is complete


@pytest.mark.parametrize("served_share", [0.0, math.nan])
def test_without_exchanges_nothing_is_predicted(served_share):
    constants = Constants.of(build_graph("ring", 4))
    with pytest.raises(ValueError, match="never agree"):
        predict("ring", constants, RESNET, NOISE_MODELS["white"], served_share=served_share)
