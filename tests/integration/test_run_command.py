"""``gossipdp run``, the real command line: its lines, and its restarts."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from run_processes import run_python
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


class Run:
    """A ``gossipdp run`` of the script; ``lives`` are the process ids by rank."""

    def __init__(self, directory: Path, process: subprocess.Popen[str], n: int) -> None:
        self.process, self.errors, self._end = process, directory / "errors", directory / "end"
        self.lives: dict[int, int] = {}
        for _ in range(n):
            self.next_life()

    def next_life(self) -> tuple[int, int, str]:
        """Return (rank, restarts, join addresses) of the next life that begins."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        word, rank, restarts, join, pid = line.split()
        assert word == "life", line
        self.lives[int(rank)] = int(pid)
        return int(rank), int(restarts), join

    def finish(self) -> None:
        self._end.touch()
        assert self.process.wait(LONGEST_S) == 0, self.errors.read_text()


@contextmanager
def running(
    directory: Path, environment: dict[str, str], n: int, max_restarts: int
) -> Iterator[Run]:
    script = directory / "script.py"
    script.write_text(SCRIPT)
    words = ["-m", "gossipdp.cli.main", "run", "-n", str(n), "--max-restarts", str(max_restarts)]
    with (
        (directory / "errors").open("wb") as errors,
        subprocess.Popen(
            [sys.executable, *words, str(script), str(directory / "end")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        watchdog = threading.Timer(LONGEST_S, process.kill)  # else a failure would wait for ever
        watchdog.start()
        try:
            yield Run(directory, process, n)
        finally:
            watchdog.cancel()
            process.kill()


def test_a_killed_worker_is_started_again_and_told_where_the_others_are(tmp_path, without_torch):
    with running(tmp_path, without_torch, 3, max_restarts=3) as run:
        assert run.lives.keys() == {0, 1, 2}
        for victim, others, count in ((2, (1, 0), 1), (1, (2, 0), 1), (1, (2, 0), 2)):
            os.kill(run.lives[victim], signal.SIGKILL)
            joins = ",".join(f"127.0.0.1:{1000 + other}" for other in others)
            assert run.next_life() == (victim, count, joins)
            pid = run.lives[victim]
            assert os.getpgid(pid) == pid
            assert psutil.Process(pid).ppid() == run.process.pid
        run.finish()
    errors = run.errors.read_text()
    assert "worker 2 died of signal 9 (SIGKILL); it is started again in 0.1 s (" in errors
    assert errors.splitlines()[-1].endswith("in 0.2 s (restart 3 of 3)")


def test_where_nobody_can_be_started_the_others_go_on(tmp_path, without_torch):
    with running(tmp_path, without_torch, 2, max_restarts=6) as run:
        supervisor, said = psutil.Process(run.process.pid), run.errors.read_text
        wait_until((tmp_path / "torch" / "distributed.py.imported").exists, "torch is imported")
        limit = supervisor.rlimit(psutil.RLIMIT_NOFILE)
        supervisor.rlimit(psutil.RLIMIT_NOFILE, (3, limit[1]))
        os.kill(run.lives[1], signal.SIGKILL)
        wait_until(lambda: said().count("could not be started") >= 2, said)
        assert psutil.pid_exists(run.lives[0])
        supervisor.rlimit(psutil.RLIMIT_NOFILE, limit)
        rank, restarts, _ = run.next_life()
        assert rank == 1
        assert restarts >= 3
        run.finish()


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
    done = run_python(*words, environment=without_torch)
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
