"""consensus.py: its arguments, and how two figures come out of what workers saw."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import consensus
import numpy as np
import pytest
from consensus import ConsensusBenchmark, run
from support.consensus_series import LOWEST_SHARE, NetworkSeries
from support.consensus_worker import WorkerSeries
from support.report import quantile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"graph": "circle"}, "circle"),
        ({"workers": 1}, "--workers is 1"),
        ({"link_mbytes": 1e-9}, "--link-mbytes"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(consensus, "measure")
    with pytest.raises(ValueError, match=message):
        run(replace(ConsensusBenchmark(), **changes))


def worker(rank: int, starts_s: float, values: list[float], initiated: list[int]) -> WorkerSeries:
    """Return a worker that takes a step a second and holds one value."""
    return WorkerSeries(
        rank,
        starts_s + np.arange(len(values), dtype=np.float64),
        np.array(initiated),
        np.array(values, dtype=np.float32)[:, None],
        [],
        0,
    )


def test_workers_are_put_together_by_what_they_saw_last() -> None:
    network = NetworkSeries.of_workers(
        [
            worker(0, 10.0, [2.0, 2.0, 1.0, 1.0], [0, 1, 1, 2]),
            worker(1, 10.5, [0.0, 1.0, 1.0, 3.0], [0, 0, 3, 3]),
        ],
        step_s=1.0,
    )
    # At 10.5, 11.5 and 12.5; the first has ended at 13.
    assert network.exchanges.tolist() == [0.0, 1.0, 4.0]
    assert network.gradient_steps.tolist() == [0.0, 2.0, 4.0]
    # Two values that are d apart have the consensus distance d^2 / 4.
    assert network.distances.tolist() == [1.0, 0.25, 0.0]


def falling(decay: float, num_records: int, transient: float = 0.0) -> NetworkSeries:
    """4 workers, one exchange a worker and step, after five steps without."""
    steps = np.arange(num_records, dtype=np.float64)
    exchanges_per_worker = np.maximum(0.0, steps - 5)
    distances = 7.0 * np.exp(-decay * exchanges_per_worker)
    distances *= 1.0 + transient * np.exp(-3.0 * steps)
    return NetworkSeries(4, 2.0 * exchanges_per_worker, 4.0 * steps, distances)


def test_the_figures_of_a_run() -> None:
    outcome = falling(0.25, 200).outcome()
    assert outcome.decay_per_exchange == pytest.approx(0.25)
    assert outcome.achieved_comm_rate == pytest.approx(1.0)
    assert outcome.lowest_share < LOWEST_SHARE
    # Another start, and rounding at the end, leave the slope.
    series = falling(0.25, 300, transient=5.0)
    rounded = replace(series, distances=np.maximum(series.distances, 1e-14))
    assert rounded.outcome().decay_per_exchange == pytest.approx(0.25, rel=1e-3)


@pytest.mark.processes
def test_real_workers_on_slow_links_mix_as_simulated_ones(tmp_path: Path) -> None:
    path = tmp_path / "consensus.json"
    benchmark = ConsensusBenchmark(
        workers=3, graph="complete", method="gossip", steps=60, step_ms=20.0, seeds=1,
        link_mbytes=20.0, json=path,
    )  # fmt: skip
    run(benchmark)
    written = json.loads(path.read_text())
    (measured,), simulated = written["measured"], written["simulated"]
    # 400 kB at 20 MB/s; the first segments of each connection are not paced.
    assert quantile(written["exchange_s"], 0.9) > 0.015
    assert written["failed_exchanges"] == 0
    decay = fmean(one["decay_per_exchange"] for one in simulated)
    assert 0.8 < measured["decay_per_exchange"] / decay < 1.25
