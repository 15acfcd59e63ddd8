import msgspec
import pytest

from gossipdp.reproduce.time_model import PAPER_TIMES, TimeModel
from gossipdp.reproduce.training_time import TimeJob, measure_time

MODEL = TimeModel(0.04, 0.6, 0.0, 0.0, 1e-4, 1e-10, 30.0)
ALLREDUCE, OURS = (
    next(time for time in PAPER_TIMES if (time.method, time.num_workers) == (method, 8))
    for method in ("allreduce", "ours")
)


def test_all_reduce_waits_for_its_links():
    found = measure_time(TimeJob(ALLREDUCE, MODEL, 400.0, seed=0))
    round_s = 0.04 + 14 / 8 * ALLREDUCE.model_bytes * 1e-10 + 14 * 1e-4
    expected = (ALLREDUCE.num_steps / 8 * round_s + 30.0) / 60.0
    assert found.minutes == pytest.approx(expected, rel=0.005)
    assert found.idle_share == pytest.approx(1.0 - 0.04 / round_s, rel=0.02)


def test_ours_waits_for_nobody():
    found = measure_time(TimeJob(OURS, MODEL, 800.0, seed=0))
    expected = (OURS.num_steps / 8 * 0.04 + 30.0) / 60.0
    assert found.minutes == pytest.approx(expected, rel=0.01)
    assert 0.7 < (found.comm_rate or 0.0) < 1.2


def test_spread_is_simulated():
    uneven = msgspec.structs.replace(MODEL, between=0.3, latency_s=0.0, s_per_byte=0.0)
    ours = measure_time(TimeJob(OURS, uneven, 800.0, seed=0))
    allreduce = measure_time(TimeJob(ALLREDUCE, uneven, 800.0, seed=0))
    assert ours.slowest_over_fastest < 0.7
    assert allreduce.minutes > 1.1 * ours.minutes
