"""``gossipdp run``, the real command line: its lines, and its restarts."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest
from waiting import LONGEST_S, wait_until

pytestmark = pytest.mark.processes

# Light: begins without a model.
SCRIPT = """
import os, sys, time
from gossipdp.launcher.reports import Report, send_report

rank = int(os.environ["RANK"])
addresses = {other: ("127.0.0.1", 1000 + other) for other in range(3)}
assert send_report(Report(begins=True, addresses=addresses))
restarts, join = (os.environ.get("GOSSIPDP_" + name, "0") for name in ("RESTARTS", "JOIN"))
print("life", rank, restarts, join, os.getpid(), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


class Lines:
    """The lines of a run."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.source = process.stdout

    def next_life(self) -> tuple[int, int, str, int]:
        """(rank, restarts, join addresses, process id) of the next life that begins."""
        line = self.source.readline()
        word, rank, restarts, join, pid = line.split()
        assert word == "life", line
        return int(rank), int(restarts), join, int(pid)


def test_a_killed_worker_is_started_again_and_told_where_the_others_are(tmp_path, without_torch):
    script, end = tmp_path / "script.py", tmp_path / "end"
    script.write_text(SCRIPT)
    words = ["-m", "gossipdp.cli.main", "run", "-n3", "--max-restarts", "3"]
    with subprocess.Popen(
        [sys.executable, *words, str(script), str(end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=without_torch,
    ) as run:
        watchdog = threading.Timer(LONGEST_S, run.kill)  # else a failure would wait for ever
        watchdog.start()
        lines = Lines(run)
        lives = {rank: pid for rank, _, _, pid in (lines.next_life() for _ in range(3))}
        assert lives.keys() == {0, 1, 2}
        for victim, others, count in ((2, (1, 0), 1), (1, (2, 0), 1), (1, (2, 0), 2)):
            os.kill(lives[victim], signal.SIGKILL)
            rank, restarts, join, pid = lines.next_life()
            assert (rank, restarts) == (victim, count)
            assert join == ",".join(f"127.0.0.1:{1000 + other}" for other in others)
            assert os.getpgid(pid) == pid
            assert psutil.Process(pid).ppid() == run.pid
            lives[victim] = pid
        end.touch()
        _, errors = run.communicate(timeout=LONGEST_S)
        watchdog.cancel()
        assert run.returncode == 0, errors
    assert "worker 2 died of signal 9 (SIGKILL); it is started again in 0.1 s (" in errors
    assert errors.splitlines()[-1].endswith("in 0.2 s (restart 3 of 3)")


def test_where_nobody_can_be_started_the_others_go_on(tmp_path, without_torch):
    script, end, errors = tmp_path / "script.py", tmp_path / "end", tmp_path / "errors"
    script.write_text(SCRIPT)
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", "--max-restarts", "6"]
    with (
        errors.open("wb") as stream,
        subprocess.Popen(
            [sys.executable, *words, str(script), str(end)],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=without_torch,
        ) as run,
    ):
        watchdog = threading.Timer(LONGEST_S, run.kill)
        watchdog.start()
        lines = Lines(run)
        lives = {rank: pid for rank, _, _, pid in (lines.next_life() for _ in range(2))}
        supervisor = psutil.Process(run.pid)
        wait_until((tmp_path / "torch" / "distributed.py.imported").exists, "torch is imported")
        limit = supervisor.rlimit(psutil.RLIMIT_NOFILE)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (3, limit[1]))
        os.kill(lives[1], signal.SIGKILL)
        wait_until(lambda: errors.read_text().count("could not be started") >= 2, errors.read_text)
        assert psutil.pid_exists(lives[0])
        supervisor.rlimit(psutil.RLIMIT_NOFILE, limit)
        rank, restarts, _, _ = lines.next_life()
        assert rank == 1
        assert restarts >= 3
        end.touch()
        assert run.wait(LONGEST_S) == 0, errors.read_text()
        watchdog.cancel()


# Both begin; then worker 0 fails, and worker 1 goes on.
FAILING = """
import os, sys, time
from gossipdp.launcher.reports import Report, send_report

send_report(Report(begins=True))
if os.environ["RANK"] == "1":
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    raise ValueError("no good")
time.sleep(1)
print("went on")
"""


def test_after_the_start_a_failure_ends_no_other_and_is_shown_at_the_end(tmp_path, without_torch):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", str(script), str(tmp_path / "begun")]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=without_torch, check=False
    )
    assert done.stderr.startswith("gossipdp: starting 2 workers; importing torch takes")
    assert done.returncode == 1
    assert done.stdout == "went on\n"
    assert "gossipdp: worker 0 ended with exit code 1; the others go on" in done.stderr
    traceback, _, last = done.stderr.rpartition("gossipdp: ")
    assert traceback.count("ValueError: no good") == 1
    assert last == "at the end: worker 0 ended with exit code 1\n"


def test_a_full_disk_under_its_own_lines_ends_no_run(tmp_path, without_torch):
    script, lines = tmp_path / "train.py", tmp_path / "lines"
    lines.mkdir()
    script.write_text(
        "import os, sys\nopen(sys.argv[1] + '/' + os.environ['RANK'], 'w').write('to the end')\n"
    )
    words = ["-m", "gossipdp.cli.main", "run", "-n", "2", str(script), str(lines)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, *words], stdout=full, stderr=full, env=without_torch, check=False
        )
    assert done.returncode == 0
    assert [path.read_text() for path in lines.iterdir()] == ["to the end"] * 2
