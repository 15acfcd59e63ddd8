"""The page of a run by its elements: structure, all sections, nothing from outside."""

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from gossipdp.cli.main import main
from gossipdp.observe.log import (
    BeganRecord,
    ConsolidatingRecord,
    CountsRecord,
    EndRecord,
    NoticeRecord,
    RecentExchange,
    RunLog,
    RunLogWriter,
    StartRecord,
    ValuesRecord,
    WorkerLog,
)
from gossipdp_lab.report.charts import Scale, duration, number
from gossipdp_lab.report.page import render
from gossipdp_lab.report.view import RunView, spans_of

SECTIONS = [
    "timeline",
    "loss",
    "consensus",
    "exchanges",
    "throughput",
    "faults",
    "plan",
    "workers",
    "configuration",
]
NUMBERS = {"d", "points", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements nest, and gathers what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.counts: dict[str, int] = {}
        self.numbers: list[str] = []
        self.data: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.links.append(value or "")
            if name in NUMBERS:
                self.numbers.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.data.append(data)
        elif self.open[-1:] != ["style"]:
            self.words += data + " "


def a_run(num_workers: int = 4, *, method: str = "a2cid2", loss: bool = True) -> RunLog:
    """Make a ring on which worker 1 is killed and comes back, and which ends in order."""
    workers = {}
    for rank in range(num_workers):
        neighbours = sorted({(rank + 1) % num_workers, (rank - 1) % num_workers} - {rank})
        records = []
        for index in range(1, 61):
            time_s = 0.2 * index
            if rank == 1 and 4 < time_s < 8:
                continue
            counts = dict.fromkeys(neighbours, 4 * index)
            total = sum(counts.values())
            recent = tuple(
                RecentExchange(peer, peer > rank, time_s - 0.1, 0.002) for peer in neighbours
            )
            records.append(
                CountsRecord(
                    time_s,
                    2.0 / index if loss else math.nan,
                    400.0,
                    recent,
                    gradient_steps=10 * index,
                    samples=80 * index,
                    exchanges_initiated=total // 2,
                    exchanges_answered=total // 2,
                    exchanges_by_neighbour=counts,
                    edge_distance=0.1 / index if neighbours else math.nan,
                    exchange_seconds=0.002 * total,
                    waited_seconds=0.01 * index,
                    bytes_sent=1000 * total,
                    bytes_received=1000 * total,
                )
            )
        following = {frozenset({one, (one + 1) % num_workers}) for one in range(num_workers)}
        edges = sorted(sorted(ends) for ends in following if len(ends) == 2)
        configuration = {
            "graph": "ring <4>",
            "method": method,
            "comm_rate": 1.0,
            "parameters": 1234,
            "edges": edges,
        }
        workers[rank] = WorkerLog(
            StartRecord(rank, num_workers, 100 + rank, 1.7e9 + 0.1 * rank, configuration, 50.0, 2),
            tuple(records),
            EndRecord(13.0, 600, 4800, 0.002, num_workers),
            (BeganRecord(100, 50.1, 0.1), *([BeganRecord(200, 57.9, 7.9)] if rank == 1 else [])),
            ()
            if rank == 1 or num_workers == 1
            else (NoticeRecord(1, "dead", 54.2, 4.2), NoticeRecord(1, "rejoined", 58.0, 8.0)),
            (ValuesRecord(1.0, 10, {"note": "</script><b>", "accuracy": None}),),
            ConsolidatingRecord(12.1),
            13.0,
        )
    return RunLog(workers)


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    text = render(a_run(), "runs/<ring>")
    page = Page(text)
    assert [each for each in page.ids if each in SECTIONS] == SECTIONS
    assert page.links == [f"#{section}" for section in SECTIONS]
    assert "img" not in page.counts
    assert "link" not in page.counts
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert page.counts["svg"] >= 7


def test_no_drawing_holds_nan() -> None:
    page = Page(render(a_run(), "run"))
    for each in [*page.numbers, *page.data[:-1]]:
        assert not re.search(r"nan|inf", each, re.I), each
    data = [json.loads(each) for each in page.data[:-1]]
    assert sum("rows" in each for each in data) == 1
    assert sum("lines" in each for each in data) == 4


def test_the_page_describes_the_run() -> None:
    words = Page(render(a_run(), "run")).words
    for expected in (
        "ring <4>",
        "4 of 4 workers came to the end",
        "taken for dead",
        "worker 0, 2, 3",
        "takes part again",
        "started again",
        "exact, at the end",
        "exchanges per worker per gradient step",
        "</script><b>",
        "1234",
    ):
        assert expected in words, expected


@pytest.mark.parametrize(
    ("run_log", "expected"),
    [
        (a_run(1), "nobody to exchange with"),
        (a_run(4, loss=False), "The run logged no loss"),
        (a_run(4, method="allreduce"), "Nothing was planned"),
        (a_run(70), "The first 64 of 70 workers"),
    ],
)
def test_missing_data_are_named(run_log: RunLog, expected: str) -> None:
    page = Page(render(run_log, "run"))
    assert expected in page.words
    assert [each for each in page.ids if each in SECTIONS] == SECTIONS


def test_a_run_that_ended_before_its_first_record() -> None:
    first = a_run(1).workers[0]
    bare = WorkerLog(first.start)
    words = Page(render(RunLog({0: bare}), "run")).words
    assert "no worker came to the end" in words
    assert "Without an end in the log: worker 0" in words


def test_a_worker_that_joined_without_a_log_here_is_named() -> None:
    log = a_run(2)
    first = log.workers[0]
    joined = replace(first.counts[-1], exchanges_by_neighbour={1: 240, 2: 9})
    log.workers[0] = dataclasses.replace(first, counts=(*first.counts[:-1], joined))
    words = Page(render(log, "run")).words
    assert "No log here of worker 2." in words
    assert "0 – 2: 9 exchanges" in words


def test_a_run_that_one_worker_began_and_another_joined() -> None:
    log = a_run(2)
    for rank, worker in log.workers.items():
        start = replace(worker.start, num_workers=1)
        log.workers[rank] = dataclasses.replace(worker, start=start)
    words = Page(render(log, "run")).words
    assert "nobody to exchange with" not in words
    assert "0 – 1: 240 exchanges" in words
    assert "comm rate 0.40 asked for 1" in words
    assert "2 workers" in words


def test_a_run_without_duration() -> None:
    workers = a_run(2).workers
    steps = CountsRecord(0.0, gradient_steps=10)
    bare = {
        rank: WorkerLog(replace(log.start, started_at=0.0), (steps,))
        for rank, log in workers.items()
    }
    assert RunView(RunLog(bare)).duration_s == 0
    assert "no exchange" in Page(render(RunLog(bare), "run")).words


def test_time_is_shared_out_whole() -> None:
    view = RunView(a_run())
    for rank in view.ranks:
        spans = view.spans(rank)
        assert spans[0].start_s == 0
        assert spans[-1].end_s == pytest.approx(view.duration_s)
        for before, after in pairwise(spans):
            assert after.start_s == pytest.approx(before.end_s)
        for span in spans:
            shares = span.computing + span.waiting + span.idle + span.away
            assert shares == pytest.approx(1)
    away_s = sum(one.away * (one.end_s - one.start_s) for one in view.spans(1))
    assert away_s == pytest.approx(7.9 - 4.0, abs=0.21)
    waiting_s = sum(one.waiting * (one.end_s - one.start_s) for one in view.spans(0))
    assert waiting_s == pytest.approx(0.9 + 0.6, abs=0.11)


def test_a_long_gradient_step_is_no_pause() -> None:
    """Steps of a second, records five times as often, and ten seconds of something else."""
    first = a_run(1).workers[0]
    records = []
    for index in range(1, 151):
        time_s = 0.2 * index
        count = int(time_s + 1e-9) if time_s < 10 else 10 + max(0, int(time_s - 20 + 1e-9))
        records.append(CountsRecord(time_s, gradient_steps=count, samples=8 * count))
    spans = spans_of(WorkerLog(first.start, tuple(records)))
    idle = [span for span in spans if span.idle]
    assert sum(span.end_s - span.start_s for span in idle) == pytest.approx(0.8 + 11, abs=0.5)
    assert sum(span.end_s - span.start_s for span in spans if span.computing == 1) > 17


def test_notices_of_one_death_are_one_event() -> None:
    events = RunView(a_run()).events()
    dead = [event for event in events if event.what == "dead"]
    assert [(event.rank, event.witnesses) for event in dead] == [(1, (0, 2, 3))]
    assert dead[0].time_s == pytest.approx(4.2)
    assert dead[0].last_noticed_s == pytest.approx(4.5)


def test_a_record_that_was_lost_moves_no_other() -> None:
    log = a_run(2)
    worker = log.workers[0]
    log.workers[0] = dataclasses.replace(worker, counts=worker.counts[1:])
    view = RunView(log)
    distances, _ = view.over_time("edge_distance")
    assert distances == [(pytest.approx(0.2 * index), 0.1 / index) for index in range(2, 61)]
    (first, *_) = (span for span in view.spans(0) if span.exchanging)
    assert (first.start_s, first.end_s) == (pytest.approx(0.1), pytest.approx(0.4))


def test_a_worker_that_stood_still_while_it_was_heard_is_named() -> None:
    log = a_run(3)
    for rank, ages in ((0, {2: 12.5}), (1, {2: 34.0})):
        worker = log.workers[rank]
        last = replace(worker.counts[-1], idle_s=ages)
        log.workers[rank] = dataclasses.replace(worker, counts=(*worker.counts[:-1], last))
    assert RunView(log).standstills() == {2: (34.0, [0, 1])}
    words = " ".join(Page(render(log, "run")).words.split())
    assert "Worker 2 made no gradient step for up to 34 s" in words
    assert "as worker 0, 1 logged" in words


def test_loss_is_drawn_over_the_samples_of_all() -> None:
    samples_at = RunView(a_run()).samples_at()
    assert samples_at(0.0) == 0
    assert samples_at(12.1) == pytest.approx(4 * 4800, rel=0.05)
    line = [samples_at(0.1 * index) for index in range(125)]
    assert line == sorted(line)


def test_lines_break_where_a_worker_was_away() -> None:
    """Worker 1 was, from 4 s to 8 s."""
    text = render(a_run(), "run")
    for chart in ("Training loss against time", "Training loss against samples"):
        drawing = text.partition(f'aria-label="{chart}"')[2].partition("</svg>")[0]
        paths = re.findall(r'<path d="([^"]*)" class="series"', drawing)
        assert [path.count("M") for path in paths] == [1, 2, 1, 1], chart


def test_scales_and_numbers() -> None:
    scale = Scale(0, 50, 100, 200)
    assert scale.ticks() == [0, 10, 20, 30, 40, 50]
    assert (scale(25), scale(99)) == (150, 200)
    assert Scale(0.05, 200, 0, 1, is_log=True).ticks() == pytest.approx([0.1, 1, 10, 100])
    assert [number(each) for each in (0, 0.05, 1234567)] == ["0", "0.05", "1.23 M"]
    rounded = [number(each) for each in (999.6, 1234.6, 9999.6, -999_600, 999_999_999)]
    assert rounded == ["1000", "1235", "10 k", "-1 M", "1 G"]
    assert [duration(each) for each in (0.4, 245, 7800)] == ["0.4 s", "4 min 5 s", "2 h 10 min"]


def test_a_run_resumed_with_more_workers_has_the_new_graph() -> None:
    """The logs of the first two go on from a run of two; the others begin with this one."""
    log = a_run(4)
    for rank in (0, 1):
        worker = log.workers[rank]
        small = {"edges": [[0, 1]], "graph": "ring <2>"}
        first = replace(
            worker.start,
            num_workers=2,
            started_at=worker.start.started_at - 100,
            configuration=worker.start.configuration | small,
        )
        log.workers[rank] = dataclasses.replace(worker, start=first, restart=worker.start)
    words = Page(render(log, "run")).words
    assert "ring <4>" in words
    assert "(differs)" not in words
    assert "exchanges per worker per gradient step" in words


def test_a_foreign_directory_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker-0.jsonl").write_text("hello\n")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "line 1 is no record of a run log" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("configuration", [{"comm_rate": "fast"}, {"edges": [[0, 1, 2]]}])
def test_a_configuration_edited_by_hand_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], configuration: dict[str, object]
) -> None:
    whole = {"method": "a2cid2", "comm_rate": 1.0, "edges": [[0, 1]]}
    log = RunLogWriter(tmp_path / "worker-0.jsonl")
    log.start(rank=0, num_workers=2, configuration=whole | configuration)
    log.close()
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "worker-0.jsonl, line 1 holds an invalid configuration: Expected" in error
    assert next(iter(configuration)) in error
    assert error.count("\n") == 1
