"""``gossipdp run``, the real command line: its lines, and its restarts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from run_processes import RunCommand, run_python, runs
from waiting import LONGEST_S, wait_until

from gossipdp_lab.report.run_log import RunLog

pytestmark = pytest.mark.processes

# Both begin; then worker 0 fails, and worker 1 goes on until the launcher has written so. With one
# more argument it fails then.
FAILING = """
import os, pathlib, sys, time
from gossipdp.launcher.reports import Report, send_report
from gossipdp.observe.log import RunLogWriter, worker_file

rank = int(os.environ["RANK"])
log = RunLogWriter(worker_file(pathlib.Path(os.environ["GOSSIPDP_LOG_DIR"]), rank))
log.start(rank=rank, num_workers=2, configuration={})
send_report(Report(begins=True))
if os.environ["RANK"] == "1":
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if rank == 0:
    raise ValueError("no good")
others = worker_file(pathlib.Path(os.environ["GOSSIPDP_LOG_DIR"]), 0)
while not (others.exists() and "process_end" in others.read_text()):
    time.sleep(0.01)
print("went on")
sys.exit(len(sys.argv) - 2)
"""


def run_failing(
    directory: Path, environment: dict[str, str], *more: str
) -> subprocess.CompletedProcess[str]:
    script = directory / "failing.py"
    script.write_text(FAILING)
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", "--log-dir", str(directory / "logs")]
    words += [str(script), str(directory / "begun"), *more]
    return run_python(*words, environment=environment)


def test_after_the_start_a_failure_ends_no_other_and_is_shown_at_the_end(tmp_path, without_torch):
    done = run_failing(tmp_path, without_torch)
    assert done.stderr.startswith("gossipdp: starting 2 workers; importing torch takes")
    assert done.returncode == 1
    assert done.stdout == "went on\n"
    assert "gossipdp: worker 0 ended with exit code 1; the others go on" in done.stderr
    traceback, _, last = done.stderr.rpartition("gossipdp: ")
    assert traceback.count("ValueError: no good") == 1
    assert last == "at the end: worker 0 ended with exit code 1\n"
    # The report says how it ended: the process itself could not.
    workers = RunLog.read(tmp_path / "logs").workers
    assert [each.reason for each in workers[0].process_ends] == ["ended with exit code 1"]
    assert workers[1].process_ends == ()


def test_the_last_failure_says_that_nobody_goes_on(tmp_path, without_torch):
    done = run_failing(tmp_path, without_torch, "too")
    assert "gossipdp: worker 0 ended with exit code 1; the others go on" in done.stderr
    assert "gossipdp: worker 1 ended with exit code 1; no other worker runs here" in done.stderr


def test_a_full_disk_under_its_own_lines_ends_no_run(tmp_path, without_torch):
    script, lines = tmp_path / "train.py", tmp_path / "lines"
    lines.mkdir()
    script.write_text(
        "import os, sys\n"
        "with open(sys.argv[1] + '/' + os.environ['RANK'], 'w') as file:\n"
        "    file.write('to the end')\n"
    )
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", str(script), str(lines)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, *words], stdout=full, stderr=full, env=without_torch, check=False
        )
    assert done.returncode == 0
    assert [path.read_text() for path in lines.iterdir()] == ["to the end"] * 2


# Light: says that it trains, notes how it joined, and waits for the end.
TRAINING = """
import os, sys, time
from pathlib import Path
from gossipdp.launcher.reports import Report, send_report

files, rank = Path(sys.argv[1]), int(os.environ["RANK"])
send_report(Report(begins=True, addresses={rank: ("127.0.0.1", 1000 + rank)}))
send_report(Report(trains=True))
life = f"{rank}-{os.getpid()}"
(files / f"joined-{life}").write_text(os.environ.get("GOSSIPDP_JOIN", ""))
(files / f"life-{life}").touch()
while not (files / "end").exists():
    time.sleep(0.01)
(files / f"done-{rank}").touch()
"""


def prepared(directory: Path, text: str) -> tuple[Path, Path]:
    """Write a script; return its path, and a folder for its files."""
    script, files = directory / "train.py", directory / "files"
    files.mkdir()
    script.write_text(text)
    return script, files


def test_a_killed_worker_is_started_again_in_the_spare_and_told_where_the_others_are(
    tmp_path, without_torch
):
    script, files = prepared(tmp_path, TRAINING)
    words = ["-n", "3", "--max-restarts", "4", str(script), str(files)]
    with RunCommand(tmp_path / "output", words, environment=without_torch) as run:
        supervisor = psutil.Process(run.process.pid)

        def live() -> dict[int, int]:
            """Return the processes of the workers that have begun, by rank."""
            lives = [tuple(map(int, path.name.split("-")[1:])) for path in files.glob("life-*")]
            return {rank: pid for rank, pid in lives if runs(pid)}

        def spare() -> int | None:
            """Return the process that is kept, once all workers train."""
            others = {each.pid for each in supervisor.children()} - set(live().values())
            return others.pop() if len(live()) == 3 and len(others) == 1 else None

        for victim, others in ((2, {0, 1}), (1, {0, 2}), (1, {0, 2})):
            run.wait_for(spare)
            kept = spare()
            assert kept is not None
            os.kill(live()[victim], signal.SIGKILL)
            run.wait_for((files / f"life-{victim}-{kept}").exists)
            joins = (files / f"joined-{victim}-{kept}").read_text().split(",")
            assert set(joins) == {f"127.0.0.1:{1000 + other}" for other in others}
            assert os.getpgid(kept) == kept
            assert psutil.Process(kept).ppid() == run.process.pid
        run.wait_for(spare)
        left = spare()
        assert left is not None
        (files / "end").touch()
        assert run.process.wait(LONGEST_S) == 0, run.output.read_text()
    assert not runs(left)
    said = run.output.read_text()
    assert "worker 2 died of signal 9 (SIGKILL); it is started again in 0.1 s (" in said
    assert said.splitlines()[-1].endswith("in 0.2 s (restart 3 of 4)")


def test_faults_are_done_to_a_script_which_ends_well(tmp_path, without_torch):
    script, files = prepared(tmp_path, TRAINING)
    log = tmp_path / "log"
    plan = "kill 1 at 0.5s; stop 0.5s 0 at 1s; slow 2x 2 at 1s; kill 1 at 1h"
    words = ["-n", "3", "--max-restarts", "1", "--log-dir", str(log), "--faults", plan]
    words += [str(script), str(files)]
    with RunCommand(tmp_path / "output", words, environment=without_torch) as run:
        lines = log / "faults-0.jsonl"
        run.wait_for(lambda: lines.exists() and lines.read_text().count("\n") == 3)
        run.wait_for(lambda: len(list(files.glob("life-1-*"))) == 2)
        (files / "end").touch()
        assert run.process.wait(LONGEST_S) == 0, run.output.read_text()
    assert {path.name for path in files.glob("done-*")} == {"done-0", "done-1", "done-2"}
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert sorted((each["kind"], each["rank"], each["planned_s"]) for each in records) == [
        ("kill", 1, 0.5),
        ("kill", 1, 3600.0),
        ("slow", 2, 1.0),
        ("stop", 0, 1.0),
    ]
    assert records[-1]["missed"] == "the run had ended by then"
    for each in records[:-1]:
        assert each["missed"] is None
        assert each["at_s"] >= each["planned_s"]
    shown = run.output.read_text()
    for line in ("worker 1 killed", "worker 0 stopped for 0.5 s", "worker 2 2 times slower"):
        assert line in shown
    assert "faults: 3 done, 1 missed" in shown


# Both train until SIGTERM comes, and have a long time for what they do then.
ENDLESS = """
import signal, sys, time
from pathlib import Path
from gossipdp.launcher.reports import Report, send_report

def end(*args):
    Path(sys.argv[1]).touch()
    sys.exit()

signal.signal(signal.SIGTERM, end)
send_report(Report(begins=True, saves=True))
send_report(Report(trains=True))
time.sleep(3600)
"""


def test_ctrl_c_ends_a_worker_that_stands_still(tmp_path, without_torch):
    script, ended = tmp_path / "train.py", tmp_path / "ended"
    script.write_text(ENDLESS)
    words = ["-n", "2", "--faults", "stop 1h 1; kill 0", str(script), str(ended)]
    with RunCommand(tmp_path / "output", words, environment=without_torch) as run:
        run.wait_for(lambda: "that was --faults, and the others" in run.output.read_text())
        (worker,) = psutil.Process(run.process.pid).children()
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, "the worker stands still")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(LONGEST_S) == 130
    assert not runs(worker.pid)
    assert ended.exists(), "it was killed, and could not act on SIGTERM"
    assert "without --max-restarts they stay away" in run.output.read_text()
