import dataclasses
import json
import math
import re
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from gossipdp.gossip.counters import Counters
from gossipdp.observe import log as logs
from gossipdp.observe.goodput import Part
from gossipdp.observe.log import CountsRecord, ProcessEndRecord, RunLogWriter, StartRecord
from gossipdp.protocol.actions import Notice
from gossipdp_lab.report.command import render
from gossipdp_lab.report.run_log import RunLog, WorkerLog
from gossipdp_lab.report.view import RunView, spans_of

SECTIONS = [
    "timeline", "loss", "consensus", "exchanges", "links", "faults", "workers", "configuration",
]  # fmt: skip
NUMBERS = {"d", "points", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements nest, and gathers what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.numbers: list[str] = []
        self.data: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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
            exchanges = {"exchanges_by_neighbour": counts, "exchange_seconds": 0.002 * total}
            exchanges |= {"exchanges_initiated": total // 2, "exchanges_answered": total // 2}
            exchanges |= {"bytes_sent": 1000 * total, "bytes_received": 1000 * total}
            exchanges |= {"edge_distance": 0.1 / index if neighbours else math.nan}
            steps = {"gradient_steps": 10 * index, "samples": 80 * index}
            steps |= {"rank": rank, "at_s": 50.0 + time_s, "waited_seconds": 0.01 * index}
            logged = {"note": "</script><b>", "accuracy": None} if index == 5 else {}
            recent = tuple((peer, 0.002) for peer in neighbours)
            mean_loss = 2.0 / index if loss else math.nan
            records.append(CountsRecord(time_s, mean_loss, logged, recent, **steps | exchanges))
        settings = {"graph": "ring <4>", "method": method, "comm_rate": 1.0, "parameters": 1234}
        start = StartRecord(rank, num_workers, 100 + rank, 1.7e9 + 0.1 * rank, settings, 50.0, 2)
        unknown = {"loss": math.nan, "edge_distance": math.nan, "recent": ()}
        averaging = replace(records[-1], time_s=12.1, at_s=62.1, state="averaging", **unknown)
        end = {"consensus_distance": 0.002, "num_averaged": num_workers}
        records += [averaging, replace(averaging, time_s=13.0, at_s=63.0, state="left", **end)]
        if rank == 1:
            records.insert(20, replace(start, process_id=200, time_s=7.9))
        workers[rank] = WorkerLog()
        workers[rank].take([start, *records])
        if rank != 1 and num_workers > 1:
            tell(workers[rank], Notice(1, "lost", 54.2), Notice(1, "restarted", 58.0))
    return RunLog(workers)


def tell(worker: WorkerLog, *notices: Notice) -> None:
    """Let a worker have noticed this, and nothing else."""
    silent = [replace(each, noticed=()) for each in worker.counts]
    worker.counts = [*silent[:-1], replace(silent[-1], noticed=notices)]


def words_of(log: RunLog) -> str:
    return " ".join(Page(render(log, "run")).words.split())


def test_the_page_is_whole_refers_to_nothing_outside_and_describes_the_run():
    text = render(a_run(), "runs/<ring>")
    page = Page(text)
    assert [each for each in page.ids if each in SECTIONS] == SECTIONS
    assert page.links == [f"#{section}" for section in SECTIONS]
    assert not re.search(r"https?:|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert text.count("<svg") == 4
    for each in [*page.numbers, *page.data[:-1]]:
        assert not re.search(r"nan|inf", each, re.I), each
    data = [json.loads(each) for each in page.data[:-1]]
    assert sum("rows" in each for each in data) == 1
    assert sum("lines" in each for each in data) == 2
    for expected in (
        "ring <4>",
        "4 of 4 workers came to the end",
        "is no longer heard; the others go on without it",
        "worker 0, 2, 3",
        "was restarted: a new process takes part",
        "a new process took its place 3.8 s later",
        "made the first gradient step of its new process",
        "exact, at the end",
        "</script><b>",
        "1234",
    ):
        assert expected in page.words, expected


def without_end(*counts: CountsRecord) -> RunLog:
    """Make the logs of two workers that start at once and end after these records."""
    starts = {rank: worker.start for rank, worker in a_run(2).workers.items()}
    return RunLog(
        {rank: WorkerLog([replace(starts[rank], started_at=0.0)], [*counts]) for rank in starts}
    )


@pytest.mark.parametrize(
    ("run_log", "expected"),
    [
        (a_run(1), "nobody to exchange with"),
        (a_run(4, loss=False), "The run logged no loss"),
        (a_run(70), "The first 64 of 70 workers"),
        (without_end(), "no worker came to the end"),
        (without_end(), "Without an end in the log: worker 0"),
        (without_end(CountsRecord(0.0, gradient_steps=10)), "No exchanges."),
    ],
)
def test_missing_data_are_named(run_log, expected):
    page = Page(render(run_log, "run"))
    assert expected in page.words
    assert [each for each in page.ids if each in SECTIONS] == SECTIONS


def test_a_worker_that_joined_without_a_log_here_is_named():
    log = a_run(2)
    first = log.workers[0]
    joined = replace(first.counts[-1], exchanges_by_neighbour={1: 240, 2: 9})
    first.counts[-1] = joined
    words = words_of(log)
    assert "No log here of worker 2." in words
    assert "0 – 2: 9 exchanges" in words


def test_a_run_that_one_worker_began_and_another_joined():
    log = a_run(2)
    for worker in log.workers.values():
        worker.starts = [replace(worker.start, num_workers=1)]
    words = words_of(log)
    assert "nobody to exchange with" not in words
    assert "0 – 1: 240 exchanges" in words
    assert "comm rate 0.40 asked for 1" in words
    assert "2 workers" in words


def assert_spans_are_whole(view: RunView) -> None:
    for rank in view.ranks:
        spans = view.spans(rank)
        assert spans[-1].end_s == pytest.approx(view.duration_s)
        for before, after in pairwise(spans):
            assert after.start_s == pytest.approx(before.end_s)
        for span in spans:
            assert span.computing + span.waiting + span.idle + span.away == pytest.approx(1)


def test_time_is_shared_out_whole():
    view = RunView(a_run())
    assert_spans_are_whole(view)
    assert [view.spans(rank)[0].start_s for rank in view.ranks] == [0] * 4
    away_s = sum(one.away * (one.end_s - one.start_s) for one in view.spans(1))
    assert away_s == pytest.approx(7.9 - 4.0, abs=0.21)
    assert view.starts_of_pieces(view.over_time("loss")) == [[], [pytest.approx(8.1)], [], []]
    waiting_s = sum(one.waiting * (one.end_s - one.start_s) for one in view.spans(0))
    assert waiting_s == pytest.approx(0.9 + 0.6, abs=0.11)


def test_a_long_gradient_step_is_no_pause():
    """Steps of a second, records five times as often, and ten seconds of something else."""
    first = a_run(1).workers[0]
    records = []
    for index in range(1, 151):
        time_s = 0.2 * index
        count = int(time_s + 1e-9) if time_s < 10 else 10 + max(0, int(time_s - 20 + 1e-9))
        records.append(CountsRecord(time_s, gradient_steps=count, samples=8 * count))
    spans = spans_of(WorkerLog(first.starts, records))
    idle = [span for span in spans if span.idle]
    assert sum(span.end_s - span.start_s for span in idle) == pytest.approx(0.8 + 11, abs=0.5)
    assert sum(span.end_s - span.start_s for span in spans if span.computing == 1) > 17


def lost_one(*notices: tuple[str, float, float | None], **changes: object) -> RunView:
    """Return a run of three in which worker 0 noticed this of worker 1, whose log has no end."""
    log = a_run(3)
    one = log.workers[1]
    counts = [each for each in one.counts if each.time_s <= 4]
    usual = {"end": None, "averaging": None, "lives": one.lives[:1], "counts": counts}
    usual |= {"last_s": 4.0, "processes": [(0.0, 4.0)]}
    log.workers[1] = dataclasses.replace(one, **usual | changes)
    tell(log.workers[0], *(Notice(1, kind, 50 + at, 0, silent_s) for kind, at, silent_s in notices))
    tell(log.workers[2])
    return RunView(log)


LOST = ("silent", 8.0, 4.0), ("lost", 8.5, 4.5)
KILLED = ProcessEndRecord(4.1, "died of signal 9 (SIGKILL)")


@pytest.mark.parametrize(
    ("notices", "changes", "known"),
    [
        (LOST, {}, "its log ends at 4.1 s, and the run went on"),
        (LOST, {"process_ends": [KILLED]}, "its process died of signal 9 (SIGKILL)"),
        (
            (*LOST, ("answered", 12.0, 8.0)),
            {"last_s": 13.0},
            "the same process answered again after 8.0 s of silence",
        ),
        (
            (*LOST, ("restarted", 9.5, None)),
            {"process_ends": [KILLED], "last_s": 13.0},
            "its process died of signal 9 (SIGKILL); a new process took its place 1.0 s later",
        ),
        # It died of something else, in another life.
        (
            (*LOST, ("answered", 9.0, 5.0)),
            {"process_ends": [ProcessEndRecord(12.0, "ended with exit code 1")], "last_s": 12.0},
            "the same process answered again after 5.0 s of silence",
        ),
        (LOST, {"last_s": 13.0}, "its own log goes on until 13.1 s: it ran, and was not heard"),
        (LOST, {"end": CountsRecord(13.0)}, "it came to the end of the run"),
    ],
)
def test_what_became_of_one_that_fell_silent_is_named_where_it_is_known(notices, changes, known):
    view = lost_one(*notices, **changes)
    silent, lost, *_ = (event for event in view.events if event.rank == 1)
    assert view.known_of(silent) == "", "more is known of its loss"
    assert view.known_of(lost) == known
    words = words_of(RunLog(view.workers))
    assert known in words
    assert "hangs" not in words


def test_a_worker_without_an_end_is_shown_with_what_is_known():
    def unended(**changes: object) -> str:
        words = words_of(RunLog(lost_one(*LOST, **changes).workers))
        return words.partition("Without an end in the log: ")[2].partition(".")[0]

    assert unended(process_ends=[KILLED]) == "worker 1 (its process died of signal 9 (SIGKILL))"
    assert unended() == "worker 1 (its log ends at 4"
    view = lost_one()
    assert view.unended() == {1: ""}
    words = words_of(RunLog(view.workers))
    assert "Of worker 1 nothing more is known: the run may go on" in words


def two_lives(directory: Path) -> None:
    """Write the logs of two workers that train for 20 s, and 88 s later for 20 s more."""
    began_s, now = 1.7e9, [0.0]
    for rank in range(2):
        for life, start_s in enumerate((50.0, 158.0)):
            now[0] = start_s + rank
            times = {"clock": lambda: now[0], "date": lambda: began_s + now[0]}
            path = logs.worker_file(directory, rank)
            log = RunLogWriter(path, run_id=str(life), resumes=True, **times)
            log.start(rank=rank, num_workers=2, configuration={"method": "gossip"})
            for step in range(1, 101):
                now[0] = start_s + 0.2 * step
                if now[0] > start_s + rank:
                    counters = Counters(gradient_steps=step, samples=8 * step, bytes_sent=step)
                    log.counts(counters, loss=1.0)
            log.close()


def test_time_in_which_no_worker_ran_is_no_run_time(tmp_path):
    two_lives(tmp_path)
    run_log = RunLog.read(tmp_path)
    view = RunView(run_log)
    assert view.duration_s == pytest.approx(40)
    assert [part.seconds for part in view.parts.values()] == pytest.approx([39.8, 38.8])
    assert [worker.num_restarts for worker in view.workers.values()] == [0, 0], "they were resumed"
    assert [(pause.at_s, pause.length_s) for pause in view.pauses] == [
        (pytest.approx(20), pytest.approx(88))
    ]
    assert [event.at_s for event in view.events] == [pytest.approx(20.2), pytest.approx(21.2)]
    text = render(run_log, "run")
    words = " ".join(Page(text).words.split())
    dates = [time.strftime("%H:%M:%S", time.localtime(1.7e9 + at)) for at in (70, 158)]
    assert f"Paused for 88 s between {dates[0]} and {dates[1]}: no worker ran." in words
    assert words.count("Paused for") == 1
    assert "duration 40 s" in words
    assert "80 a second" in words  # 2 workers, 2 lives, 100 steps of 8
    assert text.count('class="cut"') == 1
    lines = view.over_time("loss")
    starts = view.starts_of_pieces(lines)
    assert [[round(start, 1) for start in each] for each in starts] == [[20.2], [21.2]]
    assert_spans_are_whole(view)


def test_a_run_that_somebody_carried_on_was_not_paused(tmp_path):
    two_lives(tmp_path)
    log = RunLog.read(tmp_path)
    log.workers[1].processes = [(0.0, 127.0)]
    assert RunView(log).pauses == ()
    assert RunView(log).duration_s == pytest.approx(128)


def test_a_record_that_was_lost_moves_no_other():
    log = a_run(2)
    del log.workers[0].counts[0]
    view = RunView(log)
    distances, _ = view.over_time("edge_distance")
    assert distances == [(pytest.approx(0.2 * index), 0.1 / index) for index in range(2, 61)]
    (first, *_) = (span for span in view.spans(0) if span.exchanging)
    assert (first.start_s, first.end_s) == (pytest.approx(0.2), pytest.approx(0.4))


def goodput_run(*, is_dead: bool = False) -> RunLog:
    """Make 12 s of two workers, 400 samples/s each; worker 1 is away from 4 to 8 s."""
    log = a_run(2)
    zero, one = log.workers.values()
    for worker in (zero, one):
        worker.counts = [
            replace(each, samples=80 * index) for index, each in enumerate(worker.counts, 1)
        ]
    tell(zero, *zero.noticed, Notice(0, "stopped", 59.0, silent_s=6.0))
    if is_dead:
        del one.counts[-7:]
        one.end = one.averaging = None
        one.last_s = one.counts[-1].time_s
    return log


def test_goodput_counts_absence_and_not_what_came_before_the_first_step():
    view = RunView(goodput_run())
    # From the first record, at 0.2 s, to the last step, at 12 s; of worker 1 nineteen are missing.
    num_records = len(view.workers[1].counts) - 2
    assert view.parts[0] == Part(4720, pytest.approx(11.8), 400.0)
    assert view.parts[1] == Part(80 * (num_records - 1), pytest.approx(11.8), 400.0)
    assert view.num_faults == 2, "a restart, and a standstill that worker 0 told"
    expected = (4720 + 80 * (num_records - 1)) / 9440
    words = words_of(RunLog(view.workers))
    assert f"goodput {expected:.1%} " in words
    assert f"{(1 - expected) * 23.6 / 2:.1f} s lost a fault, of 2" in words


def test_a_worker_that_died_for_good_loses_time_until_the_others_end():
    view = RunView(goodput_run(is_dead=True))
    # The last record of the other is a tenth of a second earlier on the clock of this one.
    assert view.parts[1].seconds == pytest.approx(11.7)
    assert view.num_faults == 2, "the loss that others noticed ended with the restart"


def test_a_run_resumed_with_more_workers_has_the_new_graph():
    """The logs of the first two go on from a run of two; the others begin with this one."""
    log = a_run(4)
    for rank in (0, 1):
        first = log.workers[rank].starts[0]
        began_s, configuration = first.started_at - 100, first.configuration | {"graph": "ring <2>"}
        first = replace(first, num_workers=2, configuration=configuration, started_at=began_s)
        log.workers[rank].starts.insert(0, first)
    words = words_of(log)
    assert "ring <4>" in words
    assert "(differs)" not in words
