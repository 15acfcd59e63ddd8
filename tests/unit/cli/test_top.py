import dataclasses
import io
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gossipdp.cli.top import Top, TopArguments, draw, progress_facts
from gossipdp.observe.board import JobStatus, JobWorker, StatusBoard
from gossipdp.observe.events import Event
from gossipdp.observe.status import MemberStatus, WorkerStatus

ADDRESS = "127.0.0.1:9400"


def status(rank: int, samples: int, **facts: Any) -> WorkerStatus:
    places = enumerate((ADDRESS, "127.0.0.1:9401"))
    members = tuple(MemberStatus(each, 0, "training", status_address=it) for each, it in places)
    about = 0, "7f", "a2cid2", "ring", 1.0, "node", 1, "training", 2 * samples
    counts = {"gradient_steps": 9, "samples": samples, "step_seconds": 0.01 * (1 + rank)}
    known = {"rank": rank, "world_size": 2, "logged": {"loss": 0.5}, "members": members}
    return WorkerStatus(*about, **counts | known | facts)


class World:
    """Workers that train 100 samples a second until they end, and a clock that sleeping moves."""

    def __init__(self, ends_s: float = 1e9, begins_s: float = 0.0, **facts: Any) -> None:
        self.begins_s, self.ends_s, self.now_s = begins_s, ends_s, 0.0
        self.facts, self.output = facts, io.StringIO()

    def ask(self, addresses: Iterable[str], wait_s: float) -> Mapping[str, Any]:
        if not self.begins_s <= self.now_s < self.ends_s:
            return {each: ConnectionRefusedError(111, "refused") for each in addresses}
        samples = int(100 * self.now_s)
        return {each: status(int(each[-1]), samples, **self.facts) for each in addresses}

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.01)
        if self.now_s > 1000:
            raise KeyboardInterrupt

    def top(self, *, is_terminal: bool = False, **options: Any) -> int:
        console = Console(file=self.output, force_terminal=is_terminal, width=130, height=30)
        arguments = dataclasses.replace(TopArguments(ADDRESS), **options)
        times = {"clock": lambda: 1e3 + self.now_s, "sleep": self.sleep}
        return Top(arguments, StatusBoard([ADDRESS]), self.ask, console=console, **times).run()


def test_once_prints_one_table_with_all_workers():
    world = World()
    assert world.top(once=True) == 0
    lines = world.output.getvalue().splitlines()
    assert lines[0] == "run 7f: a2cid2 on ring, comm rate 1"
    assert lines[1] == "2 workers: 1 training, 1 slow"
    rows = [line.split() for line in lines if line[:1] in ("0", "1")]
    assert rows[0][:6] == ["0", "training", "9", "10.0", "ms", "100"]
    assert rows[1][:4] == ["1", "slow", "2.0x", "9"]
    assert world.output.getvalue().count("worker ") == 1


def test_json_is_one_line_a_look(capsys):
    assert World().top(once=True, json=True) == 0
    job = json.loads(capsys.readouterr().out)
    assert [each["samples_per_second"] for each in job["workers"]] == [100.0, 100.0]
    assert World(ends_s=3.5, budget_samples=600).top(json=True) == 0
    out = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["num_answering"] for line in out] == [1, 2, 2, 2, 0]


def test_live_it_draws_again_and_ends_with_the_run(capsys):
    world = World(ends_s=5.0, budget_samples=800)
    assert world.top(is_terminal=True) == 0
    assert capsys.readouterr().err == "gossipdp: the run has ended\n"
    text = world.output.getvalue()
    assert text.count("samples/s") >= 10
    assert "100%" in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_without_a_terminal_or_on_a_dumb_one_it_prints_tables(is_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    world = World(ends_s=2.5, budget_samples=400)
    assert world.top(is_terminal=is_terminal) == 0
    assert world.output.getvalue().count("run 7f") == 4


def test_when_all_are_gone_before_the_end_it_says_so(capsys):
    world = World(ends_s=5.0)
    assert world.top() == 1
    assert "no worker answers since 9 s" in world.output.getvalue()
    error = capsys.readouterr().err
    assert error.startswith("gossipdp: no worker answers any more (127.0.0.1:9400: [Errno 111]")
    assert 14 <= world.now_s <= 16


def test_a_job_that_has_not_begun_is_waited_for(capsys):
    assert World(begins_s=8.0, ends_s=12.0, budget_samples=1000).top() == 0
    world = World(begins_s=60.0)
    assert world.top() == 1
    assert 10 <= world.now_s <= 12
    assert World(begins_s=5.0).top(once=True) == 1
    assert "no worker answers (127.0.0.1:9400: [Errno 111] refused)" in capsys.readouterr().err


@pytest.mark.parametrize(("answers_after_s", "code"), [(0.7, 0), (9.0, 0), (30.0, 1)])
def test_once_waits_for_a_slow_answer(answers_after_s, code):
    world = World()
    answer = world.ask

    def ask(addresses: Iterable[str], wait_s: float) -> Mapping[str, Any]:
        if world.now_s + wait_s < answers_after_s:
            world.now_s += wait_s
            return {}
        return answer(addresses, wait_s)

    world.ask = ask  # type: ignore[method-assign]
    assert world.top(once=True) == code
    assert world.now_s <= 12


def test_what_others_answer_commands_no_terminal(capsys):
    def ask(addresses: Iterable[str], wait_s: float) -> Mapping[str, Any]:
        return {each: ValueError(f"{each} answers 500 \x1b]0;x\x07") for each in addresses}

    world = World()
    world.ask = ask  # type: ignore[method-assign]
    assert world.top(once=True) == 1
    error = capsys.readouterr().err
    assert "answers 500 ?]0;x?" in error
    assert "\x1b" not in error


def test_ctrl_c_is_how_one_leaves():
    assert World().top(interval=100.0) == 0


def job(num_workers: int, ill: Mapping[int, str] | None = None, **facts: Any) -> JobStatus:
    states = dict.fromkeys(range(num_workers), "training") | dict(ill or {})
    known = True, ADDRESS, 123_456, 4_000_000
    speeds = {"samples_per_second": 9876.0, "bytes_sent_per_second": 1.234e8}
    times = {"step_seconds": 1.234, "since_step_s": 12.0, "waited_seconds": 3.0}
    exchanges = {"edge_distance": 1.2e-05, "exchanges": 123_456, "achieved_comm_rate": 0.97}
    neighbours = tuple(range(min(5, num_workers)))
    figures = speeds | times | exchanges | {"loss": 0.1234, "neighbours": neighbours}
    workers = tuple(JobWorker(rank, 0, state, *known, **figures) for rank, state in states.items())
    about = "7f", "a2cid2", "ring", 1.0, num_workers
    return JobStatus(*about, 0.0, 100, 0.5, num_workers, workers=workers, **facts)


def drawn(job: JobStatus, width: int, height: int | None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(draw(job, width, height))
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "num_columns"), [(66, 7), (80, 9), (100, 11), (120, 12), (160, 13)]
)
def test_columns_are_left_out_rather_than_cut(width, num_columns):
    lines = drawn(job(3, {1: "idle"}), width, None)
    assert max(map(len, lines)) <= width
    (row,) = (line for line in lines if line.startswith("1 "))
    assert "idle 12 s" in row
    for cell in ("123,456", "1.23 s", "9,876", "0.1234", "0.97"):
        assert cell in row
    assert "…" not in row
    (headings,) = (line for line in lines if line.startswith("worker "))
    assert len(headings.split()) == num_columns


@pytest.mark.parametrize(("width", "num_facts"), [(66, 3), (80, 4), (100, 5)])
def test_facts_of_the_run_are_left_out_rather_than_cut(width, num_facts):
    facts = {"samples_per_second": 1234.0, "loss": 2.0580, "edge_distance": 0.0094}
    run = msgspec.structs.replace(job(3), samples=108_480, budget_samples=1_200_000, **facts)
    (line,) = (line for line in drawn(run, width, None) if " of 1,200,000 samples" in line)
    assert len(line.split(" · ")) == num_facts
    assert line.rstrip().endswith(" left")
    assert progress_facts(run, 9.0).count(" · ") == 2, "these are never left out"


def test_of_too_many_workers_those_that_are_ill_are_shown():
    many = job(60, {17: "slow", 50: "lost"}, budget_samples=1_200_000)
    lines = drawn(many, 120, 24)
    assert len(lines) == 24
    shown = [int(line.split()[0]) for line in lines if line[:1].isdigit() and "1.23 s" in line]
    assert {17, 50} < set(shown)
    assert shown == sorted(shown)
    assert f"and {60 - len(shown)} more: {60 - len(shown)} training" in lines
    assert sum("1.23 s" in line for line in drawn(many, 120, None)) == 60


def test_stopped_is_not_dead_and_woken_is_not_restarted():
    """Only a new process under a rank is a new life, however high its incarnation is."""
    seen = job(3, {1: "silent"})
    woken = msgspec.structs.replace(seen.workers[0], incarnation=1)
    silent = msgspec.structs.replace(seen.workers[1], silent_s=6.2)
    restarted = msgspec.structs.replace(seen.workers[2], incarnation=2, restarts=1)
    notices = (
        Event(1, "lost", -99.0),
        Event(0, "silent", -9.0, silent_s=5.0),
        Event(0, "lost", -8.0, silent_s=5.5),
        Event(0, "answered", -5.0, silent_s=8.2),
        Event(0, "stopped", -5.0, silent_s=8.1),
        Event(2, "restarted", -2.0),
    )
    seen = msgspec.structs.replace(seen, workers=(woken, silent, restarted), notices=notices)
    lines = [line.rstrip() for line in drawn(seen, 130, None)]
    states = [match[1] for line in lines if (match := re.match(r"\d {2,}(.+?) {2}", line))]
    assert states == ["training", "silent 6 s", "training, life 2"]
    assert lines[-6:] == [
        "",  # the oldest has no place
        "9 s ago: worker 0 fell silent: nothing heard for 5.0 s",
        "8 s ago: worker 0 is no longer heard; the others go on without it",
        "5 s ago: worker 0 answers again after 8.2 s of silence",
        "5 s ago: worker 0 stood still itself for 8.1 s",
        "2 s ago: worker 2 was restarted: a new process takes part",
    ]


@pytest.mark.parametrize("place", ["[fd00::5]:9400", "[/x]", "[bold]:smile:"])
def test_text_from_the_network_is_no_markup_and_commands_no_terminal(place):
    (worker,) = job(1).workers
    named = msgspec.structs.replace(worker, host=place, process_id=7, status_address=place)
    clear = dict.fromkeys(("run_id", "method", "graph"), "\x1b[2J")
    hostile = msgspec.structs.replace(job(1), workers=(named,), **clear)
    lines = drawn(hostile, 200, None)
    assert any(line.endswith(f"{place} (7) {place}") for line in map(str.rstrip, lines))
    assert lines[0].startswith("run ?[2J: ?[2J on ?[2J, comm rate 1")
