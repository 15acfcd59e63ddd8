import importlib.util
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gossipdp.observe.log import (
    EndRecord,
    ExchangeRecord,
    RunLog,
    StartRecord,
    StepRecord,
    WorkerLog,
)
from gossipdp.report.tensorboard import (
    draw_exchanges,
    draw_graph,
    exchange_counts,
    tensorboard_is_installed,
    write_tensorboard,
)


def small_run(counts: dict[int, dict[int, int]], *, num_workers: int) -> RunLog:
    """Two records of each worker, of whose exchanges the second knows: ``counts`` by neighbour."""
    workers = {}
    for rank, row in counts.items():
        steps = (StepRecord(1.0, 1, 8, 1.0, 8.0), StepRecord(2.0, 2, 16, 0.5, 8.0))
        first = ExchangeRecord(1.0, 0, 0, 0, {}, None, 0.0, 0.0, 0, 0)
        last = ExchangeRecord(2.0, 1, 1, 0, row, 0.5, 0.0, 0.0, 1000, 1000, 5000, 5000)
        start = StartRecord(rank, num_workers, 1, 1.7e9 + rank, {})
        end = EndRecord(3.0, 2, 16, 0.002, num_workers)
        workers[rank] = WorkerLog(start, steps, (first, last), end)
    return RunLog(workers)


@pytest.fixture
def run_log() -> RunLog:
    return small_run({0: {1: 2}, 1: {0: 2}}, num_workers=2)


def test_it_says_whether_tensorboard_is_installed(
    run_log: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not tensorboard_is_installed()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gossipdp\[tensorboard\]'"):
        write_tensorboard(run_log, tmp_path)


def test_the_scalars_of_each_worker_are_read_back(run_log: RunLog, tmp_path: Path) -> None:
    write_tensorboard(run_log, tmp_path)
    for rank, worker in run_log.workers.items():
        events = EventAccumulator(str(tmp_path / f"worker-{rank}")).Reload()
        losses = events.Scalars("train/loss")
        assert [event.step for event in losses] == [step.gradient_steps for step in worker.steps]
        assert losses[-1].value == pytest.approx(worker.steps[-1].loss)
        assert losses[-1].wall_time == pytest.approx(
            worker.start.started_at + worker.steps[-1].time_s
        )
        assert events.Scalars("exchanges/completed")[-1].value == 2
        assert [each.value for each in events.Scalars("exchanges/edge_distance")] == [0.5]
        # By sockets and by shared memory.
        assert events.Scalars("exchanges/megabytes_sent")[-1].value == pytest.approx(0.006)
        assert events.Scalars("exchanges/consensus_distance")[0].value == pytest.approx(0.002)
    pictures = EventAccumulator(str(tmp_path / "run")).Reload()
    assert sorted(pictures.Tags()["images"]) == ["run/exchanges", "run/graph"]
    assert pictures.Images("run/graph")[0].width == 550


def test_a_second_call_replaces_the_files_of_the_first(run_log: RunLog, tmp_path: Path) -> None:
    write_tensorboard(run_log, tmp_path)
    write_tensorboard(RunLog({rank: run_log.workers[rank] for rank in range(1)}), tmp_path)
    events = EventAccumulator(str(tmp_path / "worker-0")).Reload()
    assert len(events.Scalars("train/loss")) == len(run_log.workers[0].steps)
    assert not list((tmp_path / "worker-1").iterdir())


def test_counts_are_symmetric_and_the_larger_of_both_ends() -> None:
    counts = exchange_counts(small_run({0: {1: 7}, 1: {0: 6, 2: 4}}, num_workers=3))
    assert counts.tolist() == [[0, 7, 0], [7, 0, 4], [0, 4, 0]]


def test_a_worker_that_joined_and_left_no_log_here_is_counted() -> None:
    run_log = small_run({0: {1: 7, 2: 3}, 1: {0: 7}}, num_workers=2)
    assert exchange_counts(run_log).tolist() == [[0, 7, 3], [7, 0, 0], [3, 0, 0]]


@pytest.mark.parametrize("num_workers", [1, 2, 12, 40])
def test_pictures_of_any_number_of_workers_and_of_none_that_exchange(num_workers: int) -> None:
    apart = np.zeros((num_workers, num_workers), np.int64)
    for counts in (apart, apart + 3):
        for figure in (draw_exchanges(counts), draw_graph(counts)):
            figure.canvas.draw()
            assert figure.axes[0].get_title()
