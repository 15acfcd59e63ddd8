import io
from contextlib import closing
from pathlib import Path
from typing import Any

from clocks import Clock
from rich.console import Console

from gossipdp.gossip.counters import Counters
from gossipdp.launcher.faults import FaultRecord
from gossipdp.observe.log import RunLogWriter, worker_file
from gossipdp.protocol.actions import Notice
from gossipdp_lab.demo.watch import LiveView, answers_of, fault_results
from gossipdp_lab.report.run_log import RunLog


def did(kind: Any, rank: int, at_s: float, for_s: float | None = None) -> FaultRecord:
    """Return a fault that came so long after 100 s of the logs' clock."""
    return FaultRecord(int(at_s), at_s, rank, kind, for_s, clock_s=100.0 + at_s)


def write_log(directory: Path, rank: int, began_s: float, *notices: tuple[int, str, float]) -> None:
    with closing(RunLogWriter(worker_file(directory, rank), clock=lambda: began_s)) as log:
        log.start(rank=rank, num_workers=3, configuration={})
        noticed = tuple(Notice(*each) for each in notices)
        log.counts(Counters(rank=rank, gradient_steps=1, at_s=began_s, noticed=noticed))


def test_results_say_who_noticed_when_and_when_the_worker_was_back(tmp_path):
    write_log(tmp_path, 0, 100.0)
    write_log(tmp_path, 1, 101.0, (0, "lost", 103.0), (0, "lost", 105.25), (0, "restarted", 107.05))
    # This one came back later: to it all others are new.
    write_log(tmp_path, 2, 102.0, (0, "restarted", 106.55))
    slow = FaultRecord(2.0, 2.01, 1, "slow", factor=4.0, clock_s=102.0)
    missed = FaultRecord(9.0, None, 1, "kill", missed="it does not run")
    records = [missed, did("kill", 0, 5.05), slow]
    unnoticed = {"rank": 1, "detected_s": {}, "rejoined_s": None}
    noticed = {"rank": 0, "detected_s": {"1": 0.2, "2": None}, "rejoined_s": 2.0}
    assert fault_results(records, RunLog.read(tmp_path)) == [
        unnoticed | {"kind": "slow", "at_s": 2.01, "factor": 4.0},
        noticed | {"kind": "kill", "at_s": 5.05},
        unnoticed | {"kind": "kill", "at_s": 9.0, "missed": "it does not run"},
    ]


def test_workers_that_were_away_need_not_notice(tmp_path):
    write_log(tmp_path, 0, 100.0)
    write_log(tmp_path, 1, 101.0, (0, "lost", 106.1), (2, "silent", 110.5), (2, "lost", 111.0))
    write_log(tmp_path, 2, 102.0)
    records = [did("stop", 2, 5.0, 8.0), did("kill", 0, 6.0)]
    stop, kill = fault_results(records, RunLog.read(tmp_path))
    assert stop["detected_s"] == {"1": 5.5}
    assert kill["detected_s"] == {"1": 0.1}
    assert stop["rejoined_s"] is kill["rejoined_s"] is None


def test_a_notice_belongs_to_the_last_fault_of_its_worker(tmp_path):
    write_log(tmp_path, 0, 100.0)
    write_log(tmp_path, 1, 101.0, (0, "lost", 109.25), (0, "restarted", 111.0))
    write_log(tmp_path, 2, 102.0)
    records = [did("stop", 0, 5.0, 1.0), did("slow", 0, 8.5), did("kill", 0, 9.0)]
    stop, _, kill = fault_results(records, RunLog.read(tmp_path))
    assert (stop["detected_s"], stop["rejoined_s"]) == ({"1": None, "2": None}, None)
    assert (kill["detected_s"], kill["rejoined_s"]) == ({"1": 0.25, "2": None}, 2.0)


def log_steps(directory: Path, clock: Clock, num_steps: int) -> None:
    for rank in range(2):
        writer = RunLogWriter(worker_file(directory, rank), clock=clock, run_id="7f")
        with closing(writer) as log:
            asked = {"method": "a2cid2", "graph": "ring", "comm_rate": 1.0, "budget_samples": 100}
            log.start(rank=rank, num_workers=2, configuration=asked)
            steps, step_s = num_steps + rank, 0.1 * (rank + 1)
            exchanges = {"exchanges_initiated": 2, "exchanges_answered": 4}
            counts = {"gradient_steps": steps, "samples": 8 * steps, "step_seconds": step_s}
            log.counts(Counters(rank=rank, **counts, **exchanges), loss=0.5)


def test_lines_where_there_is_no_terminal(tmp_path):
    clock, output = Clock(), io.StringIO()
    console = Console(file=output, force_terminal=False, width=100)
    view = LiveView(tmp_path, num_workers=2, console=console, clock=clock)
    with view:
        view.poll()
        clock.now_s = 4.0
        view.poll()
        assert output.getvalue() == ""
        clock.now_s = 5.5
        view.poll()
        log_steps(tmp_path, clock, 3)
        clock.now_s = 11.0
        view.poll()
    first, second = output.getvalue().splitlines()
    assert first == "   6 s  starting 2 workers"
    assert second.startswith("  11 s  2 workers: 1 training, 1 slow · 56 of 100 samples · ")
    assert "loss 0.5000" in second


def test_a_worker_that_others_miss_does_not_answer_until_it_is_back(tmp_path):
    lost = (2, "silent", 104.0), (2, "lost", 105.0)
    write_log(tmp_path, 0, 100.0, *lost, (1, "silent", 109.0))
    write_log(tmp_path, 1, 100.0, (2, "lost", 105.1))
    write_log(tmp_path, 2, 100.0)
    answers = answers_of(RunLog.read(tmp_path))
    assert [isinstance(each, Exception) for each in answers.values()] == [False, True, True]
    members = answers["0"].members  # type: ignore[union-attr]
    states = [(each.state, each.is_silent) for each in members]
    assert states == [("training", False), ("training", True), ("lost", True)]
    write_log(tmp_path, 0, 100.0, *lost, (2, "restarted", 107.0))
    write_log(tmp_path, 1, 100.0, *lost, (2, "restarted", 107.2))
    answers = answers_of(RunLog.read(tmp_path))
    assert not any(isinstance(each, Exception) for each in answers.values())
