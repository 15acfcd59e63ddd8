"""Real worker processes mix as fast as theory says, and conserve the mean."""

import numpy as np
import pytest
from mixing_run import Mixed, MixingTask, mix, observed, start_vector

from gossipdp.graph import build_graph, plan

pytestmark = pytest.mark.processes

NUM_WORKERS = 4
AGREED = 1e-6


@pytest.mark.parametrize(
    "task",
    [
        MixingTask("a2cid2"),
        MixingTask("a2cid2", num_floats=1_100_000, step_s=0.03, num_steps=50),
    ],
    ids=["a2cid2", "a2cid2-large"],
)
def test_workers_start_apart_and_agree_on_the_mean_of_their_starts(workers, task, tmp_path):
    series = workers(mix, NUM_WORKERS, (task, tmp_path))
    starts = np.stack([observed(task, start_vector(task, rank)) for rank in range(NUM_WORKERS)])
    for rank, each in enumerate(series):
        assert each.rank == rank
        assert np.array_equal(each.values[0], starts[rank])
        # Nobody asks before it knows its own pace: all had their vectors by then.
        assert not each.initiated[:4].any()
        assert each.num_failed == 0
        assert each.kernels == ("numba" if task.num_floats > 1_000_000 else "torch")
    # Both ends count an exchange, but for one that the end of the run may cut short.
    answered = sum(each.num_answered for each in series)
    assert abs(answered - sum(each.num_initiated for each in series)) <= NUM_WORKERS
    decay, lowest = decay_per_exchange(series, task.step_s)
    assert lowest < AGREED
    promised = plan(build_graph(task.graph, NUM_WORKERS))
    # Theory's bound holds for the expectation; single runs decay one to two times as fast.
    assert decay > 0.8 * promised.a2cid2_decay_bound
    # Exchanges and flow conserve the mean of x + c/2, and c goes where the differences go.
    np.testing.assert_allclose(series[0].values[-1], starts.mean(axis=0), atol=1e-2)


def decay_per_exchange(series: list[Mixed], step_s: float) -> tuple[float, float]:
    """Return the decay of the consensus distance per exchange, and its least share of the first.

    At a row of moments each worker counts by what it saw last.
    """
    moments = np.arange(
        max(each.times_s[0] for each in series), min(each.times_s[-1] for each in series), step_s
    )
    places = [np.searchsorted(each.times_s, moments, side="right") - 1 for each in series]
    both = list(zip(series, places, strict=True))
    values = np.stack([each.values[place] for each, place in both]).astype(np.float64)
    shares = np.square(values - values.mean(axis=0)).sum(axis=(0, 2))
    shares /= shares[0]
    agreed_at = int(np.argmax(shares < AGREED))
    initiated = sum(each.initiated[place][[0, agreed_at]] for each, place in both)
    per_worker = 2.0 * float(initiated[1] - initiated[0]) / len(series)
    # Two rounds of disjoint pairs make four workers exactly equal.
    share = max(shares[agreed_at], np.finfo(np.float32).eps ** 2)
    return float(-np.log(share) / per_worker), float(shares.min())
