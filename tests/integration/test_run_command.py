import json
import os
import signal

import psutil
import pytest
from run_processes import RunCommand, free_port, runs
from waiting import LONGEST_S

pytestmark = pytest.mark.processes

# Light: says that it trains, notes how it joined, and waits for the end.
TRAINING = """
import os, sys, time
from pathlib import Path
from gossipdp.launcher.reports import Report, send_report

files, rank = Path(sys.argv[1]), int(os.environ["RANK"])
send_report(Report(begins=True, addresses={rank: ("127.0.0.1", 1000 + rank)}))
send_report(Report(trains=True))
life = f"{rank}-{os.getpid()}"
known = Path(os.environ.get("GOSSIPDP_JOIN_FILE", os.devnull)).read_text()
(files / f"joined-{life}").write_text(known)
(files / f"life-{life}").touch()
while not (files / "end").exists():
    time.sleep(0.01)
(files / f"done-{rank}").touch()
"""


def test_a_killed_worker_is_started_again_in_the_spare_and_told_where_the_others_are(
    tmp_path, without_torch
):
    script, files = tmp_path / "train.py", tmp_path / "files"
    files.mkdir()
    script.write_text(TRAINING)
    words = ["-n", "3", "--max-restarts", "4", str(script), str(files)]
    with RunCommand(tmp_path / "output", words, environment=without_torch) as run:
        supervisor = psutil.Process(run.process.pid)

        def live() -> dict[int, int]:
            lives = [tuple(map(int, path.name.split("-")[1:])) for path in files.glob("life-*")]
            return {rank: pid for rank, pid in lives if runs(pid)}

        def spare() -> int | None:
            """Return the process that is kept, once all workers train."""
            workers = set(live().values())  # once, and first: one may write its file now
            others = {each.pid for each in supervisor.children()} - workers
            return others.pop() if len(workers) == 3 and len(others) == 1 else None

        for victim, others in ((2, {0, 1}), (1, {0, 2}), (1, {0, 2})):
            kept = run.wait_for(spare)
            os.kill(live()[victim], signal.SIGKILL)
            run.wait_for((files / f"life-{victim}-{kept}").exists)
            joins = json.loads((files / f"joined-{victim}-{kept}").read_text())
            assert all(joins[str(rank)][1] == 1000 + rank for rank in others)
            assert os.getpgid(kept) == kept
            assert psutil.Process(kept).ppid() == run.process.pid
        left = run.wait_for(spare)
        (files / "end").touch()
        assert run.process.wait(LONGEST_S) == 0, run.output.read_text()
    assert not runs(left)
    said = run.output.read_text()
    assert "worker 2 died of signal 9 (SIGKILL); the others go on\n" in said
    assert said.splitlines()[-1].endswith("worker 1 is started again (restarts left: 1)")


MEETING = """
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.rendezvous import Rendezvous, Settings

environment = Environment.read()
rendezvous = Rendezvous.open(environment, timeout_s=100)
settings = Settings((("weight", (2,)),), "a2cid2", "ring", "1", "float32")
meeting = rendezvous.meet((environment.choose_host(), 1000 + environment.rank), settings)
rendezvous.mark_ready()
hosts = [meeting.addresses[rank][0] for rank in sorted(meeting.addresses)]
print("met", environment.rank, environment.local_rank, len(meeting.secret), *hosts)
"""


def test_the_workers_of_two_hosts_meet(tmp_path):
    """One call a host; here hosts are loopback addresses."""
    script, rendezvous = tmp_path / "script.py", f"127.0.0.1:{free_port()}"
    script.write_text(MEETING)

    def start(node: int) -> RunCommand:
        words = ["-n", "1", "--nnodes", "2", "--node-rank", str(node), "--rendezvous", rendezvous]
        words += ["--host", f"127.0.0.{node + 1}", str(script)]
        return RunCommand(tmp_path / f"output-{node}", words)

    with start(0) as first, start(1) as second:
        for rank, run in enumerate((first, second)):
            assert run.process.wait(LONGEST_S) == 0, run.output.read_text()
            assert run.output.read_text() == (
                "gossipdp: starting 1 worker; importing torch takes some seconds\n"
                f"met {rank} 0 32 127.0.0.1 127.0.0.2\n"
            )
