import io
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from gossipdp.gossip.counters import Counters
from gossipdp.launcher.supervisor import Ending, Failure
from gossipdp.observe.log import (
    BeganRecord,
    EndRecord,
    RunLog,
    RunLogWriter,
    worker_file,
)
from gossipdp_lab.demo.watch import (
    Fault,
    FaultInjector,
    LiveView,
    WorkerProgress,
    fault_results,
    least_duration_s,
    parse_faults,
)


def parse(kill: str | None = None, stop: str | None = None, **options: Any) -> tuple[Fault, ...]:
    return parse_faults(kill, stop, **{"num_workers": 4, **options})


def test_faults_are_read_in_order_of_time() -> None:
    assert parse("3@9s, 0@5", "2@4.5s:8s") == (
        Fault(2, "stop", 4.5, 8.0),
        Fault(0, "kill", 5.0),
        Fault(3, "kill", 9.0),
    )
    assert parse() == ()


def test_the_run_is_longer_than_its_faults_and_what_they_bring() -> None:
    assert least_duration_s((), restart=False) == 0
    killed, stopped = Fault(0, "kill", 5.0), Fault(1, "stop", 4.0, 20.0)
    assert least_duration_s((killed,), restart=False) > 6
    assert least_duration_s((killed,), restart=True) > least_duration_s((killed,), restart=False)
    assert least_duration_s((killed, stopped), restart=False) > 24
    assert least_duration_s((Fault(1, "stop", 4.0, 0.5),), restart=False) > 10


class Scene:
    """Three workers, a clock and the signals that were sent."""

    def __init__(self, *faults: Fault) -> None:
        self.now = 100.0
        self.workers = [WorkerProgress() for _ in range(3)]
        self.sent: list[tuple[int, int]] = []
        self.lines: list[str] = []
        self.gone: set[int] = set()
        self.injector = FaultInjector(
            faults, self.workers, self.lines.append, send=self.send, clock=lambda: self.now
        )

    def send(self, process_id: int, number: int) -> None:
        if process_id in self.gone:
            raise ProcessLookupError
        self.sent.append((process_id, number))

    def begin(self, rank: int, at_s: float, process_id: int) -> None:
        self.workers[rank].take(BeganRecord(process_id, at_s))

    def begin_all(self) -> None:
        for rank in range(3):
            self.begin(rank, 100.0 + rank, 1000 + rank)

    def poll(self, now: float) -> None:
        self.now = now
        self.injector.poll()

    def fail(self, rank: int, reason: str = "died of signal 9 (SIGKILL)") -> bool:
        return self.injector.ended(Failure(rank, Ending(reason)))

    def missed(self) -> list[str | None]:
        self.injector.close()
        return [injection.missed for injection in self.injector.injections]


def test_times_count_from_the_first_step_of_any_worker_once_all_train() -> None:
    scene = Scene(Fault(0, "kill", 5.0), Fault(1, "kill", 7.0))
    scene.begin(2, 100.0, 1002)
    scene.poll(106.0)
    assert scene.sent == []
    scene.begin(0, 104.0, 1000)
    scene.begin(1, 106.0, 1001)
    scene.poll(106.1)
    assert scene.sent == [(1000, signal.SIGKILL)]
    scene.poll(106.9)
    scene.poll(107.0)
    assert scene.sent[1:] == [(1001, signal.SIGKILL)]
    assert scene.lines == ["  6.1 s  worker 0 killed", "  7.0 s  worker 1 killed"]
    assert scene.fail(0)
    assert scene.fail(1)
    assert scene.missed() == [None, None]


def test_a_stopped_worker_goes_on_after_its_time() -> None:
    scene = Scene(Fault(1, "stop", 2.0, 3.0))
    scene.begin_all()
    scene.poll(102.5)
    scene.poll(105.4)
    assert scene.sent == [(1001, signal.SIGSTOP)]
    scene.poll(105.5)
    assert scene.sent[1:] == [(1001, signal.SIGCONT)]
    scene.poll(120.0)
    assert len(scene.sent) == 2
    assert scene.missed() == [None]


def test_a_worker_that_is_stopped_at_the_end_goes_on_too() -> None:
    scene = Scene(Fault(1, "stop", 2.0, 60.0))
    scene.begin_all()
    scene.poll(102.0)
    assert scene.missed() == ["the run ended while the worker was stopped"]
    assert scene.sent[1:] == [(1001, signal.SIGCONT)]


def test_faults_that_did_not_happen_say_why() -> None:
    scene = Scene(
        Fault(0, "kill", 1.0), Fault(1, "kill", 1.0), Fault(2, "kill", 1.0), Fault(2, "stop", 9.0)
    )
    scene.begin_all()
    scene.workers[0].take(EndRecord(1.0, 1, 1, 0.0))
    scene.gone.add(1001)
    scene.poll(102.0)
    # A process that has ended may still take a signal, which kills no other.
    assert scene.sent == [(1002, signal.SIGKILL)]
    ended = "the worker had ended by then"
    assert scene.missed() == [ended, ended, ended, "the run had ended by then"]


def test_an_unplanned_death_is_a_failure() -> None:
    scene = Scene(Fault(0, "kill", 1.0), Fault(1, "kill", 5.0))
    scene.begin_all()
    scene.poll(101.0)
    assert not scene.fail(1)
    assert not scene.fail(0, "raised ValueError")
    assert scene.fail(0)
    assert not scene.fail(0)
    scene.poll(105.0)
    assert scene.missed() == [None, "the worker had died by then"]


def write_log(directory: Path, rank: int, began_s: float, *notices: tuple[int, str, float]) -> None:
    with closing(RunLogWriter(worker_file(directory, rank), clock=lambda: began_s)) as log:
        log.start(rank=rank, num_workers=3, configuration={})
        log.began()
        for notice in notices:
            log.notice(*notice)


def results_of(scene: Scene, directory: Path) -> list[dict[str, Any]]:
    scene.injector.close()
    return fault_results(scene.injector.injections, RunLog.read(directory))


def test_results_say_who_noticed_when_and_when_the_worker_was_back(tmp_path: Path) -> None:
    scene = Scene(Fault(0, "kill", 5.0))
    scene.begin_all()
    scene.poll(105.05)
    scene.fail(0)
    write_log(tmp_path, 0, 100.0)
    write_log(tmp_path, 1, 101.0, (0, "lost", 103.0), (0, "lost", 105.25), (0, "restarted", 107.05))
    # This one came back later: to it all others are new.
    write_log(tmp_path, 2, 102.0, (0, "restarted", 106.55))
    assert results_of(scene, tmp_path) == [
        {
            "rank": 0,
            "kind": "kill",
            "at_s": 5.05,
            "detected_s": {"1": 0.2, "2": None},
            "rejoined_s": 2.0,
        }
    ]


def test_workers_that_were_away_need_not_notice(tmp_path: Path) -> None:
    scene = Scene(Fault(2, "stop", 5.0, 8.0), Fault(0, "kill", 6.0))
    scene.begin_all()
    scene.poll(105.0)
    scene.poll(106.0)
    scene.fail(0)
    write_log(tmp_path, 0, 100.0)
    write_log(tmp_path, 1, 101.0, (0, "lost", 106.1), (2, "silent", 110.5), (2, "lost", 111.0))
    write_log(tmp_path, 2, 102.0)
    scene.poll(114.0)
    stop, kill = results_of(scene, tmp_path)
    assert stop["detected_s"] == {"1": 5.5}
    assert kill["detected_s"] == {"1": 0.1}
    assert stop["rejoined_s"] is kill["rejoined_s"] is None


# The view.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def log_steps(directory: Path, clock: Clock, num_steps: int) -> None:
    for rank in range(2):
        writer = RunLogWriter(worker_file(directory, rank), clock=clock, run_id="7f")
        with closing(writer) as log:
            asked = {"method": "a2cid2", "graph": "ring", "comm_rate": 1.0}
            log.start(rank=rank, num_workers=2, configuration=asked)
            steps = num_steps + rank
            log.counts(
                Counters(
                    gradient_steps=steps,
                    samples=8 * steps,
                    exchanges_initiated=2,
                    exchanges_answered=4,
                    step_seconds=0.1 * (rank + 1),
                ),
                loss=0.5,
            )


def make_view(directory: Path, clock: Clock, *, terminal: bool) -> tuple[LiveView, io.StringIO]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    return LiveView(
        directory, num_workers=2, budget_samples=100, console=console, clock=clock
    ), output


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    with view:
        view.poll()
        clock.now = 4.0
        view.poll()
        assert output.getvalue() == ""
        clock.now = 5.5
        view.poll()
        log_steps(tmp_path, clock, 3)
        clock.now = 11.0
        view.poll()
    first, second = output.getvalue().splitlines()
    assert first == "   6 s  starting 2 workers"
    assert second.startswith("  11 s  2 workers: 1 training, 1 slow · 56 of 100 samples · ")
    assert "loss 0.5000" in second


def test_the_table_of_top_in_a_terminal(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=True)
    with view:
        log_steps(tmp_path, clock, 3)
        clock.now = 1.0
        view.poll()
    text = output.getvalue()
    for expected in (
        "run 7f: a2cid2 on ring, comm rate 1",
        "2 workers: 1 training, 1 slow",
        "slow 2.0x",
        "samples/s",
        "0.5000",
        "56 of 100 samples",
        "56%",
    ):
        assert expected in text
    assert "where" not in text, "no worker has a status port here"


def test_a_worker_that_waits_for_the_others_averages(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    with view:
        log_steps(tmp_path, clock, 7)
        for rank in range(2):
            writer = RunLogWriter(
                worker_file(tmp_path, rank), clock=clock, run_id="7f", goes_on=True
            )
            with closing(writer) as log:
                log.consolidating()
                if rank:
                    log.end(consensus_distance=0.0)
        clock.now = 6.0
        view.poll()
    assert "2 workers: 1 averaging, 1 left · 120 of 100 samples" in output.getvalue()


def test_the_dead_and_the_silent_are_shown(tmp_path: Path) -> None:
    clock = Clock()
    view, output = make_view(tmp_path, clock, terminal=False)
    log_steps(tmp_path, clock, 1)
    writer = RunLogWriter(worker_file(tmp_path, 0), clock=clock, run_id="7f", goes_on=True)
    with closing(writer) as log, view:
        clock.now = 5.0
        log.notice(1, "silent", 1.0)
        view.poll()
        assert "2 workers: 1 training, 1 silent" in output.getvalue()
        for what, state in (("lost", "lost"), ("restarted", "training"), ("lost", "lost")):
            log.notice(1, what, 2.0)
            view.poll()
            assert view.workers[1].state == state
        clock.now = 10.0
        view.poll()
    assert "2 workers: 1 training, 1 lost" in output.getvalue()
