"""What all benchmarks share (spreads, turns, meetings, missing rows), and startup.py."""

import math
import subprocess
import threading
from pathlib import Path

import pytest
from startup import measure_kill
from support.finished_runs import FinishedRuns
from support.meeting import Meeting
from support.report import Spread, commit_of, interleaved


def finished(path: Path | None) -> FinishedRuns[dict[str, object]]:
    return FinishedRuns(path, dict[str, object], lambda run: run["seed"])


def test_finished_runs_are_found_again_and_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    runs = finished(path)
    runs.keep({"seed": 1, "loss": 3.0})
    runs.keep({"seed": 2, "loss": math.nan})
    again = finished(path).known
    assert again[1] == {"seed": 1, "loss": 3.0}
    assert math.isnan(again[2]["loss"])
    with path.open("a") as file:
        file.write('{"loss": 3.0}\n')
    with pytest.raises(ValueError, match=r"line 3 is no finished run.*delete that line"):
        finished(path)


def test_a_spread_is_that_of_the_numbers_alone():
    """A ratio is NaN where a row has run in a round and the other not yet."""
    spread = Spread.of([math.nan, 1.3, 1.1])
    assert (spread.median, spread.least, spread.greatest) == pytest.approx((1.2, 1.1, 1.3))
    assert math.isnan(Spread.of([math.nan]).median)


def test_every_case_begins_a_round_in_turn():
    calls: list[str] = []
    found = interleaved(["a", "b", "c"], 3, lambda case: calls.append(case) or len(calls))
    assert calls == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_commit_is_marked_where_what_measures_was_changed(tmp_path):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit_of(tmp_path) == "unknown"
    for name in ("src/gossipdp/__init__.py", "benchmarks/mine.py", "benchmarks/results/mine.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    commit = git("rev-parse", "--short", "HEAD")
    assert commit_of(tmp_path) == commit
    (tmp_path / "benchmarks/results/mine.md").write_text("2\n")
    assert commit_of(tmp_path) == commit  # results are what benchmarks write
    (tmp_path / "benchmarks/mine.py").write_text("2\n")
    assert commit_of(tmp_path) == f"{commit}+"


def test_a_meeting_lasts_until_all_have_come(tmp_path):
    path = tmp_path / "meeting"
    Meeting.create(path, 2)
    first, second = Meeting(path, 0), Meeting(path, 1)
    first.say(7.0)
    left = threading.Event()
    waiting = threading.Thread(target=lambda: (first.meet(), left.set()))
    waiting.start()
    assert not left.is_set()
    second.meet()
    waiting.join(10)
    assert left.is_set()
    assert second.heard(0) == 7.0


@pytest.mark.processes
def test_a_killed_worker_is_timed_until_it_exchanges_again():
    back_s, (noticed_s,) = measure_kill(num_workers=2, spare_s=0.5)
    assert 0.0 < noticed_s < back_s < math.inf
