import errno
import itertools
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from clocks import Clock
from msgspec.structs import replace

from gossipdp.gossip.counters import Counters
from gossipdp.links.clock import since_boot_s
from gossipdp.observe import log as logs
from gossipdp.observe.log import CountsRecord, RunLogWriter, StartRecord, worker_file
from gossipdp.protocol.actions import Notice
from gossipdp_lab.report.run_log import LogReader, RunLog

RECENT = ((1, 0.002), (3, 0.003))
NOTICE = Notice(1, "answered", 101.5, 7, 8.2)
COUNTS = {"gradient_steps": 1, "samples": 8, "edge_distance": 0.25, "exchange_seconds": 1.5}
COUNTS |= {"exchanges_initiated": 3, "exchanges_answered": 4, "exchanges_failed": 1}
COUNTS |= {"bytes_sent": 1000, "shared_bytes_sent": 10, "shared_bytes_received": 20}
SOME = Counters(exchanges_by_neighbour={1: 2, 3: 5}, at_s=101.6, noticed=(NOTICE,), **COUNTS)


def write_run(directory: Path, rank: int = 0) -> None:
    clock = Clock(100.0)
    with closing(RunLogWriter(worker_file(directory, rank), interval_s=1.0, clock=clock)) as log:
        log.start(rank=rank, num_workers=2, configuration={"graph": "ring"})
        for index in range(1, 6):
            clock.now_s += 1
            counters = replace(SOME, gradient_steps=2 * index, samples=16 * index)
            log.counts(counters, loss=0.5, recent=RECENT)
        log.counts(counters, logged={"accuracy": 0.5, "note": "first"})
        log.counts(counters, logged={"accuracy": 0.75, "loss": float("nan")})
        log.counts(counters, state="averaging")
        clock.now_s += 1
        log.counts(counters, state="left", consensus_distance=0.1, num_averaged=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return worker_file(tmp_path, 0)


@contextmanager
def started(path: Path, **options: Any) -> Iterator[RunLogWriter]:
    with closing(RunLogWriter(path, **{"clock": Clock(100.0)} | options)) as log:
        log.start(rank=0, num_workers=2, configuration={})
        yield log


def test_what_was_written_is_read_back(tmp_path):
    write_run(tmp_path, 0)
    write_run(tmp_path, 1)
    run_log = RunLog.read(tmp_path)
    assert list(run_log.workers) == [0, 1]
    worker = run_log.workers[1]
    assert worker.start.configuration == {"graph": "ring"}
    assert worker.start.started_s == 100.0
    expected = msgspec.structs.asdict(SOME) | {"gradient_steps": 4, "samples": 32}
    known = {name: value for name, value in expected.items() if value == value}  # noqa: PLR0124
    seen = msgspec.structs.asdict(worker.counts[1])
    assert seen | known == seen
    assert (seen["time_s"], seen["loss"], seen["recent"]) == (2.0, 0.5, RECENT)
    assert len(worker.counts) == 9
    assert worker.last_values() == {"accuracy": 0.75, "note": "first", "loss": None}
    assert worker.averaging.time_s == 5.0
    assert (worker.end.time_s, worker.end.gradient_steps) == (6.0, 10)
    assert (worker.end.consensus_distance, worker.end.num_averaged) == (0.1, 2)
    assert worker.last_s == 6.0


def test_records_come_ever_less_often(path):
    clock, num_records = Clock(100.0), 0
    with started(path, interval_s=100.0, clock=clock) as log:
        while clock.now_s < 30 * 86400:
            assert log.wait_s() > 0
            clock.now_s += log.wait_s()
            log.counts(SOME)
            num_records += 1
        assert log.wait_s() == pytest.approx((clock.now_s - 100) / 2000)
    # 2000 (1 + ln(30 days / 2000 intervals)) of them.
    assert num_records == pytest.approx(2000 * (1 + 2.56), rel=0.01)


def test_a_last_line_cut_short_is_left_out(tmp_path, path):
    write_run(tmp_path)
    whole = RunLog.read(tmp_path).workers[0]
    path.write_bytes(path.read_bytes()[:-7])
    worker_file(tmp_path, 1).write_bytes(b'{"kind":"start","ra')  # killed within its first line
    workers = RunLog.read(tmp_path).workers
    assert list(workers) == [0]
    assert workers[0].end is None
    assert workers[0].counts == whole.counts[:-1]


def start_line(**changes: object) -> bytes:
    whole = {"kind": "start", "rank": 0, "num_workers": 2, "process_id": 1, "started_at": 1.0}
    return msgspec.json.encode(whole | {"configuration": {}, "format": logs.FORMAT} | changes)


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], r"holds no log of a worker.*--log-dir"),
        ([start_line(), b'{"kind":"counts"}'], r"worker-0\.jsonl, line 2 is no record"),
        (
            [start_line(), b'{"kind":"counts","time_s":1,"logged":{"a":"\xff"}}'],
            "line 2 is no record",
        ),
        ([start_line(), b'{"kind":"start","configuration":{"a":' + b"[" * 100_000], "line 2 is"),
        ([b'{"kind":"counts","time_s":1}'], "does not begin with a start record"),
        ([start_line(format=1)], "log of format 1, and this version of gossipdp reads"),
        ([start_line(rank=10**6)], "line 1"),
        ([start_line(configuration={"parameters": "many"})], "line 1"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value[:30],
)
def test_a_log_that_is_none_is_refused(tmp_path, path, lines, fault):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(ValueError, match=fault):
        RunLog.read(tmp_path)


def test_the_tail_follows_a_growing_file_line_by_line(path):
    tail = LogReader(path)
    assert tail.read_new() == []
    with started(path) as log:
        assert [type(record) for record in tail.read_new()] == [StartRecord]
        log.counts(SOME)
        assert [type(record) for record in tail.read_new()] == [CountsRecord]
        assert tail.read_new() == []
        with path.open("ab") as file:
            file.write(b'{"kind":"counts",')
        assert tail.read_new() == []


def test_the_log_of_a_worker_that_was_started_again_goes_on(tmp_path, path):
    for life in range(2):
        with started(path, goes_on=life > 0) as log:
            log.counts(Counters())
            log.counts(SOME)
        with path.open("ab") as file:
            file.write(b'{"kind": "st')  # killed in mid-write
    worker = RunLog.read(tmp_path).workers[0]
    assert [life.gradient_steps for life in worker.lives] == [1, 2]
    assert [each.gradient_steps for each in worker.counts] == [0, 1, 1, 2]
    last = worker.counts[-1]
    assert (last.samples, last.exchanges_initiated, last.shared_bytes_received) == (16, 6, 40)
    assert last.exchanges_by_neighbour == {1: 4, 3: 10}
    assert last.edge_distance == 0.25, "a gauge is no sum"
    assert worker.noticed == [NOTICE, NOTICE]
    assert worker.lives[1].time_s >= 0


def test_the_launcher_writes_how_a_process_ended(tmp_path, path, caplog, monkeypatch):
    clock = itertools.count(100.0, 0.34567).__next__  # a record at each
    monkeypatch.setattr(logs, "since_boot_s", clock)
    monkeypatch.setattr(logs, "boot_id", lambda: "one")
    logs.write_process_end(path, os.getpid(), "died of signal 9 (SIGKILL)")
    assert not path.exists(), "it had no log"
    for life in range(2):
        with started(path, clock=clock, goes_on=life > 0) as log:
            log.counts(SOME)
        with path.open("ab") as file:
            file.write(b'{"kind": "st')  # killed in mid-write
        if life == 0:
            logs.write_process_end(path, os.getpid() + 1, "is a process of an earlier run")
            logs.write_process_end(path, os.getpid(), "died of signal 9 (SIGKILL)")
    worker = RunLog.read(tmp_path).workers[0]
    (end,) = worker.process_ends
    assert end.reason == "died of signal 9 (SIGKILL)"
    assert worker.processes == [(0.0, 0.6913), (1.037, 1.3827)]
    assert [each.time_s for each in (*worker.counts, end)] == [0.3457, 1.3827, 0.6913]
    path.write_text("hello\n")
    logs.write_process_end(path, os.getpid(), "died of signal 9 (SIGKILL)")
    assert path.read_text() == "hello\n"
    assert "cannot write the end of a worker's process" in caplog.text


def test_a_death_costs_the_launcher_little_however_long_the_log_is(path):
    """It runs for as long as the run does; a log of a week has twenty megabytes."""
    with started(path, clock=since_boot_s) as log:
        for _ in range(2_000):
            log.counts(SOME)
    tracemalloc.start()
    logs.write_process_end(path, os.getpid(), "died of signal 9 (SIGKILL)")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < path.stat().st_size / 4
    assert len(LogReader(path).read_new()) == 2_002


def test_a_log_goes_on_in_its_own_run_and_where_that_is_resumed(tmp_path, path):
    def live(run_id: str, **options: bool) -> tuple[int, float]:
        """One process that makes a step; all steps in the log then, and its date."""
        nonlocal date_s
        date_s += 100
        with started(path, date=lambda: date_s, run_id=run_id, **options) as log:
            log.counts(SOME)
        worker = RunLog.read(tmp_path).workers[0]
        assert worker.latest_start.run_id == run_id
        return worker.counts[-1].gradient_steps, worker.start.started_at

    date_s = 0.0
    assert live("yesterday's") == (1, 100)
    assert live("yesterday's", goes_on=True) == (2, 100)
    assert live("today's", goes_on=True) == (1, 300), "it joins another run, for the first time"
    assert live("tomorrow's", resumes=True) == (2, 300)
    assert live("tomorrow's", goes_on=True) == (3, 300)
    assert live("tomorrow's") == (1, 600)


@pytest.mark.parametrize(
    ("date_step_s", "boot_id", "begins_s"),
    [
        (-3600.0, "one", 50.0),
        (3600.0, "one", 50.0),
        (0.0, "two", 50.0),
        (-3600.0, "two", 2.0),
        (-3600.0, "", 2.0),
    ],
    ids=["set back", "set forward", "new boot", "new boot, set back", "boot not known, set back"],
)
def test_the_time_of_a_log_that_goes_on_never_goes_back(
    path, monkeypatch, date_step_s, boot_id, begins_s
):
    clock, date_s, boot = Clock(100.0), 1.7e9, "one"
    monkeypatch.setattr("gossipdp.observe.log.boot_id", lambda: boot)
    with started(path, clock=clock, date=lambda: date_s) as log:
        clock.now_s += 2
        log.counts(SOME)
    clock.now_s, date_s, boot = 150.0, 1.7e9 + 50 + date_step_s, boot_id
    with started(path, clock=clock, date=lambda: date_s, goes_on=True) as log:
        clock.now_s += 1
        log.counts(SOME)
    worker = RunLog.read(path.parent).workers[0]
    assert [start.time_s for start in worker.starts] == [0.0, begins_s]
    assert [each.time_s for each in worker.counts] == [2.0, begins_s + 1]


def test_a_full_disk_leaves_lines_out_and_says_so_once(tmp_path, path, caplog):
    fits = iter([5, None, 999, 999, None])  # bytes of each line; None: no byte

    def write(line: bytes) -> int:
        most = next(fits, 999)
        if most is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file.write(line[:most])

    with closing(RunLogWriter(path, clock=Clock(100.0))) as log:
        file = log._file
        log._file = SimpleNamespace(write=write, fileno=file.fileno, close=file.close, closed=False)
        for steps in (1, 3, 5):
            log.start(rank=0, num_workers=2, configuration={})
            log.counts(Counters(gradient_steps=steps))
    assert [each.gradient_steps for each in RunLog.read(tmp_path).workers[0].counts] == [3, 5]
    assert len(caplog.records) == 2, "once each time"
    assert "training goes on" in caplog.text


GOOD = msgspec.json.encode(StartRecord(0, 2, 7, 0.0, {}, 0.0, logs.FORMAT)) + b"\n"


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b'{"kind":"start","rank":-5}\n', b"\xff\n", GOOD + b"hello\n" + GOOD],
)
def test_a_damaged_log_is_set_aside_and_blocks_no_restart(tmp_path, path, caplog, content):
    path.write_bytes(content)
    with started(path, goes_on=True):
        pass
    assert len(RunLog.read(tmp_path).workers) == 1
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes() == content
    assert len(caplog.records) == 1
    assert aside.name in caplog.text
