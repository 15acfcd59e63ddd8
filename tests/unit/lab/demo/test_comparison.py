"""The picture of several trainings holds what their logs say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from gossipdp.observe.log import BeganRecord, CountsRecord, StartRecord
from gossipdp_lab.demo import comparison
from gossipdp_lab.demo.comparison import Compared, loss_curve, present, waiting_shares
from gossipdp_lab.report.run_log import RunLog, WorkerLog


def worker(rank: int, waits: float, until_s: float = 4.0) -> WorkerLog:
    """Two steps of 8 samples a second until ``until_s``, then a second of evaluation."""
    seconds = range(1, int(until_s) + 2)
    steps = [min(2 * second, int(2 * until_s)) for second in seconds]
    return WorkerLog(
        start=StartRecord(rank, 2, 1, 0.0, {}),
        counts=tuple(
            CountsRecord(
                float(second),
                8.0 / second,
                16.0,
                gradient_steps=count,
                samples=8 * count,
                waited_seconds=waits * count / 2,
            )
            for second, count in zip(seconds, steps, strict=True)
        ),
    )


def run(waits: float, until_s: float = 4.0) -> RunLog:
    return RunLog({0: worker(0, waits, until_s), 1: worker(1, 0.0, until_s)})


def test_a_training_ends_with_its_last_step():
    assert worker(0, 0.0).trained_s == 4.0
    assert Compared("a", run(0.5), 2.0).train_seconds == 4.0
    assert Compared("a", run(0.5), 2.0).waiting == pytest.approx(0.25)
    assert WorkerLog(worker(0, 0.0).start).trained_s == 0.0


def test_the_share_that_a_worker_waited():
    edges, shares = waiting_shares(worker(0, waits=0.75), piece_s=1.5)
    assert list(edges) == [0.0, 1.5, 3.0, 4.0]
    assert list(shares) == pytest.approx([0.75] * 3)
    # A wait of more than a second is logged with the second in which it ended.
    _, longer = waiting_shares(worker(0, waits=1.25), piece_s=1.5)
    assert list(longer) == [1.0] * 3


def test_the_loss_is_the_mean_of_the_workers_batches(monkeypatch):
    monkeypatch.setattr(comparison, "NUM_POINTS", 2)
    slow = worker(1, 0.0)
    fewer = tuple(
        replace(each, gradient_steps=each.gradient_steps // 2, samples=each.samples // 2, loss=2.0)
        for each in slow.counts
    )
    both = RunLog({0: worker(0, 0.0), 1: WorkerLog(slow.start, fewer)})
    # Worker 0 has 16 samples a second at loss 8 / t, worker 1 has 8 at loss 2; the halves are the
    # first two seconds and the last two.
    first, second = loss_curve(both)
    assert first == pytest.approx((1.5, (16 * 8 + 8 * 2 + 16 * 4 + 8 * 2) / 48))
    assert second == pytest.approx((3.5, (16 * 8 / 3 + 8 * 2 + 16 * 2 + 8 * 2) / 48))
    assert loss_curve(RunLog({0: WorkerLog(slow.start)})) == []


def test_a_killed_worker_is_away_until_it_trains_again():
    killed = dataclasses.replace(
        worker(0, 0.0, until_s=8.0),
        processes=((0.0, 2.1), (3.0, 5.2), (5.6, 9.0)),
        lives=(BeganRecord(1, 100.5, 0.5), BeganRecord(2, 104.0, 4.0), BeganRecord(3, 106.5, 6.5)),
    )
    edges = np.arange(0.0, 9.0)
    # Pieces at 0.5, 1.5, ..: the second life trains from 4.0 to 5.2, the third from 6.5 on.
    assert present(killed, edges).tolist() == [
        True, True, False, False, True, False, True, True,
    ]  # fmt: skip
    assert present(worker(0, 0.0), edges).all()
