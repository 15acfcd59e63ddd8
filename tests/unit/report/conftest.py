"""A run that looks like a real one, made without training."""

import math
from random import Random

import pytest

from gossipdp.observe.log import (
    EndRecord,
    ExchangeRecord,
    RunLog,
    StartRecord,
    StepRecord,
    WorkerLog,
)


def make_run_log(num_workers: int, *, exchanging: bool = True, num_records: int = 60) -> RunLog:
    """Workers on a ring whose loss falls from 2.3, with a little noise."""
    random = Random(0)
    workers = {}
    for rank in range(num_workers):
        neighbours = {(rank + 1) % num_workers, (rank - 1) % num_workers} - {rank}
        steps, exchanges = [], []
        for index in range(num_records):
            time_s = 0.4 * index
            loss = 2.3 * math.exp(-0.1 * index) * random.uniform(0.8, 1.2) + 0.01
            steps.append(StepRecord(time_s, 10 * index, 320 * index, loss, 800.0))
            each = 5 * index if exchanging else 0
            exchanges.append(
                ExchangeRecord(
                    time_s,
                    each,
                    each,
                    0,
                    dict.fromkeys(neighbours, each) if exchanging else {},
                    loss * 0.01 if exchanging and index else None,
                    0.01 * index,
                    0.0,
                    1000 * index,
                    1000 * index,
                    5000 * index,
                    5000 * index,
                )
            )
        end = EndRecord(24.0, 600, 19200, 0.002, num_workers)
        start = StartRecord(rank, num_workers, 100 + rank, 1.7e9 + 0.1 * rank, {"graph": "ring"})
        workers[rank] = WorkerLog(start, tuple(steps), tuple(exchanges), end)
    return RunLog(workers)


@pytest.fixture
def run_log() -> RunLog:
    return make_run_log(4)
