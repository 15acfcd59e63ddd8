from pathlib import Path

import pytest

from gossipdp.observe.run_log import (
    EndRecord,
    ExchangeRecord,
    RunLog,
    RunLogTail,
    RunLogWriter,
    StartRecord,
    StepRecord,
    worker_file,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def no_exchanges(time_s: float) -> ExchangeRecord:
    return ExchangeRecord(time_s, 0, 0, 0, {}, None, 0.0, 0.0, 0, 0)


def some_exchanges(time_s: float) -> ExchangeRecord:
    return ExchangeRecord(time_s, 3, 4, 1, {1: 2, 3: 5}, 0.25, 1.5, 0.0, 1000, 2000)


def write_run(directory: Path, rank: int = 0, num_steps: int = 10) -> None:
    clock = Clock()
    with RunLogWriter(worker_file(directory, rank), interval_s=1.0, clock=clock) as log:
        log.start(rank=rank, num_workers=2, configuration={"graph": "ring"})
        for step in range(num_steps):
            clock.now += 0.5
            log.step(float(step), samples=8, exchanges=some_exchanges)
        log.end(metric_name="test_accuracy", metric_before_average=0.9, consensus_distance=0.1)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    write_run(tmp_path, 1)
    run_log = RunLog.read(tmp_path)
    assert list(run_log.workers) == [0, 1]
    assert run_log.num_workers == 2
    worker = run_log.workers[1]
    assert run_log.started_at <= worker.start.started_at
    assert worker.start.configuration == {"graph": "ring"}
    assert worker.exchanges[-1] == some_exchanges(5.0)
    assert worker.end == EndRecord(5.0, 10, 80, "test_accuracy", 0.9, 0.1)


def test_records_are_throttled_and_carry_means_since_the_last(tmp_path: Path) -> None:
    write_run(tmp_path)
    steps = RunLog.read(tmp_path).workers[0].steps
    assert steps[:2] == (
        StepRecord(1.0, 2, 16, loss=0.5, samples_per_second=16.0),
        StepRecord(2.0, 4, 32, loss=2.5, samples_per_second=16.0),
    )
    assert len(steps) == 5


def test_statistics_are_asked_for_only_when_a_record_is_written(tmp_path: Path) -> None:
    asked: list[float] = []

    def exchanges(time_s: float) -> ExchangeRecord:
        asked.append(time_s)
        return no_exchanges(time_s)

    clock = Clock()
    with RunLogWriter(worker_file(tmp_path, 0), interval_s=1.0, clock=clock) as log:
        log.start(rank=0, num_workers=1, configuration={})
        for _ in range(7):
            clock.now += 0.25
            log.step(1.0, samples=1, exchanges=exchanges)
        assert asked == [1.0]
        log.flush(exchanges)
        assert asked == [1.0, 1.75]
        log.flush(exchanges)
        assert asked == [1.0, 1.75]


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = worker_file(tmp_path, 0)
    whole = RunLog.read(tmp_path).workers[0]
    path.write_bytes(path.read_bytes()[:-7])
    cut = RunLog.read(tmp_path).workers[0]
    assert cut.end is None
    assert cut.steps == whole.steps


def test_a_worker_killed_within_its_first_line_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0)
    worker_file(tmp_path, 1).write_bytes(b'{"kind":"start","ra')
    assert list(RunLog.read(tmp_path).workers) == [0]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = worker_file(tmp_path, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"kind":"step"}\n', *lines[1:]]))
    with pytest.raises(ValueError, match=r"worker-0\.jsonl, line 2 is no record"):
        RunLog.read(tmp_path)


def test_a_log_without_its_start_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = worker_file(tmp_path, 0)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    with pytest.raises(ValueError, match="does not begin with a start record"):
        RunLog.read(tmp_path)


def test_a_directory_without_logs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no log of a worker"):
        RunLog.read(tmp_path)


def test_the_tail_follows_a_growing_file_line_by_line(tmp_path: Path) -> None:
    path = worker_file(tmp_path, 0)
    tail = RunLogTail(path)
    assert tail.read_new() == []
    clock = Clock()
    with RunLogWriter(path, interval_s=1.0, clock=clock) as log:
        log.start(rank=0, num_workers=1, configuration={})
        assert [type(record) for record in tail.read_new()] == [StartRecord]
        clock.now += 2
        log.step(1.0, samples=1, exchanges=no_exchanges)
        assert [type(record) for record in tail.read_new()] == [StepRecord, ExchangeRecord]
        assert tail.read_new() == []
    with path.open("ab") as file:
        file.write(b'{"kind":"step",')
    assert tail.read_new() == []


def test_the_log_of_a_worker_that_was_started_again_goes_on(tmp_path: Path) -> None:
    path = worker_file(tmp_path, 0)
    for life in range(2):
        clock = Clock()
        with RunLogWriter(path, interval_s=0.0, clock=clock, goes_on=life > 0) as log:
            assert log.first_began_s == (None if life == 0 else 100.0)
            log.start(rank=0, num_workers=2, configuration={})
            log.began()
            log.step(1.0, samples=8, exchanges=some_exchanges)
            log.notice(1, "dead", 101.5)
        with path.open("ab") as file:
            file.write(b'{"kind": "st')  # killed in mid-write
    worker = RunLog.read(tmp_path).workers[0]
    assert [life.at_s for life in worker.lives] == [100.0, 100.0]
    assert [step.gradient_steps for step in worker.steps] == [1, 2]
    assert worker.steps[-1].samples == 16
    assert worker.exchanges[-1].exchanges_by_neighbour == {1: 4, 3: 10}
    assert worker.exchanges[-1].exchanges_initiated == 6
    assert [(notice.rank, notice.what) for notice in worker.notices] == [(1, "dead")] * 2
