import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.cli.plan_network import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
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


def by_buckets(conditions: TrainingConditions, num_workers: int, share: float) -> float:
    """When the last all-reduce has ended, bucket after bucket."""
    full_bytes, ended_s, capacity = 0.0, 0.0, FIRST_BUCKET_BYTES
    slowest_s, total = conditions.slowest_step_s(num_workers), conditions.model_bytes
    latency_s = conditions.all_reduce_s(num_workers, 0.0)
    while full_bytes < total:
        size, capacity = min(capacity, total - full_bytes), BUCKET_BYTES
        full_bytes += size
        full_s = slowest_s * (1 / 3 + 2 / 3 * full_bytes / total)
        sending_s = conditions.all_reduce_s(num_workers, share * size / total) - latency_s
        ended_s = max(ended_s, full_s) + sending_s
    return ended_s + latency_s


@given(
    megabytes=st.floats(1e-3, 2000.0),
    mbps=st.floats(10.0, 1e6),
    num_workers=st.integers(2, 64),
    share=st.sampled_from([0.5, 1.0]),
)
def test_ddp_sends_each_bucket_once_it_is_full(megabytes, mbps, num_workers, share):
    conditions = TrainingConditions(1e6 * megabytes, 0.1, 125e3 * mbps, latency_s=0.001)
    step_s = conditions.overlapped_step_s(num_workers, share)
    assert step_s == pytest.approx(by_buckets(conditions, num_workers, share))
    all_reduce_s = conditions.all_reduce_s(num_workers, share)
    assert max(0.1, all_reduce_s) <= step_s * (1 + 1e-9)
    assert step_s <= (0.1 + all_reduce_s) * (1 + 1e-9)


def test_the_rivals_by_hand():
    # 2 workers, a model of 26 MiB in buckets of 1 and 25, no latency: the model takes 0.26 s.
    conditions = TrainingConditions(26 * 2**20, 0.3, 100 * 2**20, latency_s=0.0, sync_every=10)
    first_s, pace_s = 0.1 + 0.2 / 26, 0.01
    rivals_s = conditions.rivals_s(2)
    assert rivals_s["ddp"] == pytest.approx(1000 * (0.3 + 25 * pace_s))
    assert rivals_s["ddp_bf16"] == pytest.approx(1000 * (0.3 + 25 * pace_s / 2))
    assert rivals_s["local_averaging"] == pytest.approx(1000 * (0.3 + 0.26 / 10))
    # Where links are what everybody waits for, the first bucket is waited for, and then all bytes.
    slow = replace(conditions, bytes_per_s=2**20)
    assert slow.rivals_s(2)["ddp"] == pytest.approx(1000 * (first_s + 26))


def test_a_barrier_that_is_rare_waits_for_less():
    conditions = TrainingConditions(1e6, 2.0, 1e9, step_spread=0.3)
    random = np.random.default_rng(0)
    times = 2.0 * np.exp(0.3 * random.standard_normal((4000, 8, 16)) - 0.3**2 / 2)
    mean_of_slowest = times.mean(2).max(1).mean()
    assert conditions.slowest_step_s(8, 16) == pytest.approx(mean_of_slowest, rel=0.01)


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
