"""``gossipdp bench consensus`` with real processes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gossipdp.cli.bench_consensus import ConsensusBenchmark, make_task
from gossipdp.cli.bench_consensus_worker import NUM_OBSERVED, run_worker, start_vector
from gossipdp.cli.bench_series import NetworkSeries
from gossipdp.cli.main import main

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("method", ["a2cid2", "gossip"])
def test_workers_start_apart_and_agree_on_the_mean_of_their_starts(
    workers: Callable, method: str
) -> None:
    arguments = ConsensusBenchmark(method=method, comm_rate=2, steps=80, step_ms=10, floats=3_000)
    task = make_task(arguments, seed=5)
    series = workers(run_worker, 4, (task,))
    starts = np.stack([start_vector(task, rank).numpy()[::3] for rank in range(4)])
    for rank, each in enumerate(series):
        assert each.rank == rank
        assert each.values.shape == (81, NUM_OBSERVED)
        assert np.array_equal(each.values[0], starts[rank])
        # Nobody asks before it knows its own pace: all had their vectors by then.
        assert not each.initiated[:4].any()
        assert (np.diff(each.times_s) >= task.step_s).all()
        assert (np.diff(each.initiated) >= 0).all()
        assert min(each.exchange_s) > 0
        assert each.num_failed == 0
    ended = sum(each.initiated[-1] for each in series)
    # Both ends count an exchange, but for those after the last step of the one that ends first.
    assert sum(len(each.exchange_s) for each in series) >= 1.8 * ended > 50
    network = NetworkSeries.of_workers(series, task.step_s)
    assert network.distances[-1] < 1e-6 * network.distances[0]
    # Exchanges and flow conserve the mean of x + c/2, and c goes where the differences go.
    np.testing.assert_allclose(series[0].values[-1], starts.mean(axis=0), atol=1e-2)


def test_the_command_on_slow_links(
    workers: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = "bench consensus --workers 3 --graph complete --method gossip --steps 60 --step-ms 20"
    options = ["--link-mbytes", "20", "--seeds", "2,", "--json", str(path)]
    assert main([*words.split(), *options]) == 0
    written = json.loads(path.read_text())
    measured, simulated = written["measured"], written["simulated"]
    # 400 kB at 20 MB/s; the first segments of each connection are not paced.
    assert measured["exchange_s"]["p90"] > 0.015
    assert measured["failed_exchanges"] == 0
    # How close the two are on a quiet machine is for the docs; here only that both are sane.
    assert 0.3 < measured["decay_per_exchange"] / simulated["decay_per_exchange"] < 3
    assert "ratio" in capsys.readouterr().out
