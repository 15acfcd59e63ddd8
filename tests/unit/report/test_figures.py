from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from gossipdp.observe.log import ExchangeRecord, RunLog, StartRecord, StepRecord, WorkerLog
from gossipdp.report.figures import draw_run, exchange_counts, worker_colours


def small_run(counts: dict[int, dict[int, int]], *, num_workers: int) -> RunLog:
    return RunLog(
        {
            rank: WorkerLog(
                StartRecord(rank, num_workers, 1, 1.7e9, {}),
                tuple(StepRecord(time, int(time), 8, 1 / time, 8.0) for time in (1.0, 2.0)),
                (ExchangeRecord(2.0, 1, 1, 0, row, 0.5 if row else None, 0.0, 0.0, 0, 0),),
                None,
            )
            for rank, row in counts.items()
        }
    )


def test_a_png_is_written(run_log: RunLog, tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    draw_run(run_log, path, title="digits: 4 workers")
    pixels = imread(path)
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1200
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 100


@pytest.mark.parametrize("num_workers", [1, 2, 12])
def test_any_number_of_workers_and_none_that_exchange(num_workers: int, tmp_path: Path) -> None:
    run_log = small_run({rank: {} for rank in range(num_workers)}, num_workers=num_workers)
    draw_run(run_log, tmp_path / "figure.png", title="apart")


def test_a_run_that_ended_before_its_first_record(run_log: RunLog, tmp_path: Path) -> None:
    empty = {
        rank: replace(worker, steps=(), exchanges=(), end=None)
        for rank, worker in run_log.workers.items()
    }
    draw_run(RunLog(empty), tmp_path / "figure.png", title="killed")


def test_counts_are_symmetric_and_the_larger_of_both_ends() -> None:
    counts = exchange_counts(small_run({0: {1: 7}, 1: {0: 6, 2: 4}}, num_workers=3))
    assert counts.tolist() == [[0, 7, 0], [7, 0, 4], [0, 4, 0]]


def test_a_worker_that_joined_and_left_no_log_here_is_counted() -> None:
    run_log = small_run({0: {1: 7, 2: 3}, 1: {0: 7}}, num_workers=2)
    assert exchange_counts(run_log).tolist() == [[0, 7, 3], [7, 0, 0], [3, 0, 0]]


@pytest.mark.parametrize("num_workers", [1, 4, 7, 8, 64])
def test_every_worker_has_its_own_colour(num_workers: int) -> None:
    assert len(set(worker_colours(num_workers))) == num_workers
