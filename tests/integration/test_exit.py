"""However ``gossipdp run`` ends, nothing of it is left."""

import signal
import socket
from pathlib import Path

import psutil
import pytest
from run_processes import VARIABLES, RunCommand, runs, wait_until_gone
from waiting import LONGEST_S

pytestmark = pytest.mark.processes

# Light: no torch. Each worker starts a process of its own, and says where everybody is.
SCRIPT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from gossipdp.launcher.reports import Report, send_report

directory, ending = Path(sys.argv[1]), sys.argv[2]
if ending == "stubborn" and os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
send_report(Report(begins=True, addresses={0: ("127.0.0.1", 1), 1: ("127.0.0.1", 2)}))
if ending != "end":
    subprocess.Popen(["sleep", "3600"])
name = directory / f"{os.environ['RANK']}-{os.getpid()}"
name.with_suffix(".part").write_text(os.environ["MASTER_PORT"])
name.with_suffix(".part").rename(name.with_suffix(".here"))
while not (directory / "go").exists():
    time.sleep(0.01)
if ending in ("signal", "stubborn"):
    time.sleep(3600)
"""


class Run(RunCommand):
    """A ``gossipdp run`` of two workers, all of whose processes are known."""

    def __init__(self, directory: Path, ending: str, *options: str) -> None:
        self.directory, self.temporary = directory / "marks", directory / "tmp"
        for each in (self.directory, self.temporary):
            each.mkdir()
        script = directory / "script.py"
        script.write_text(SCRIPT)
        words = ["-n", "2", *options, str(script), str(self.directory), ending]
        environment = {**VARIABLES, "TMPDIR": str(self.temporary)}
        super().__init__(directory / "output", words, environment=environment)
        self.wait_for(lambda: len(list(self.directory.glob("*.here"))) == 2)
        self.port = int(next(self.directory.glob("*.here")).read_text())
        supervisor = psutil.Process(self.process.pid)
        self.processes = [supervisor, *supervisor.children(recursive=True)]

    def workers(self) -> list[psutil.Process]:
        """Those that run, by rank."""
        found = [(path.stem.split("-")) for path in sorted(self.directory.glob("*.here"))]
        return [psutil.Process(int(pid)) for _, pid in found if runs(int(pid))]

    def go(self) -> None:
        (self.directory / "go").touch()

    def assert_nothing_is_left(self) -> None:
        self.process.wait(LONGEST_S)
        wait_until_gone([process.pid for process in self.processes])
        with socket.create_server(("127.0.0.1", self.port)):
            pass
        assert list(self.temporary.iterdir()) == []

    def stop(self) -> None:
        for process in self.processes:
            if process.is_running():
                process.kill()
        self.process.wait()


def test_nothing_is_left_at_the_end(tmp_path):
    with Run(tmp_path, "end", "--max-restarts", "1") as run:
        run.go()
        run.assert_nothing_is_left()
        assert run.process.wait() == 0


def test_nothing_is_left_after_sigterm_not_even_workers_that_heed_no_signal(tmp_path):
    """One ignores them, and one is stopped."""
    with Run(tmp_path, "stubborn") as run:
        run.workers()[1].suspend()
        run.process.send_signal(signal.SIGTERM)
        run.assert_nothing_is_left()
        assert run.process.wait() == 128 + signal.SIGTERM


def test_the_workers_of_a_supervisor_that_is_killed_end(tmp_path):
    with Run(tmp_path, "signal") as run:
        workers = run.workers()
        run.process.kill()
        wait_until_gone([worker.pid for worker in workers])
