import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from run_processes import RunCommand, free_port, run_python, runs
from waiting import LONGEST_S

from gossipdp_lab.report.run_log import RunLog

pytestmark = pytest.mark.processes

# Both begin; then worker 0 fails, and worker 1 goes on until the launcher has written so.
FAILING = """
import os, pathlib, sys, time
from gossipdp.launcher.reports import Report, send_report
from gossipdp.observe.log import RunLogWriter, worker_file

rank = int(os.environ["RANK"])
log = RunLogWriter(worker_file(pathlib.Path(os.environ["GOSSIPDP_LOG_DIR"]), rank))
log.start(rank=rank, num_workers=2, configuration={})
send_report(Report(begins=True, unsaved="no room"))
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
"""


@pytest.mark.parametrize("by_option", [True, False])
def test_after_the_start_a_failure_ends_no_other_and_is_shown_at_the_end(
    tmp_path, without_torch, by_option
):
    script, logs = tmp_path / "failing.py", str(tmp_path / "logs")
    script.write_text(FAILING)
    call = "from gossipdp.cli.main import main; print('before'); raise SystemExit(main())"
    words = ["-c", call, "run", "-n", "2", *["--log-dir", logs] * by_option]
    variables = without_torch | ({} if by_option else {"GOSSIPDP_LOG_DIR": logs})
    done = run_python(*words, str(script), str(tmp_path / "begun"), environment=variables)
    assert done.stderr.startswith("gossipdp: starting 2 workers; importing torch takes")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (1, ["before", "went on"])
    assert "gossipdp: worker 0 ended with exit code 1; the others go on" in done.stderr
    traceback, _, last = done.stderr.rpartition("gossipdp: at the end: worker 0 ")
    assert traceback.count("ValueError: no good") == 1
    assert last == "ended with exit code 1\n" + (2 * "gossipdp: worker {}: no room\n").format(0, 1)
    # The report says how it ended: the process itself could not.
    workers = RunLog.read(Path(logs)).workers
    assert [each.reason for each in workers[0].process_ends] == ["ended with exit code 1"]
    assert workers[1].process_ends == []


def test_a_full_disk_under_its_own_lines_ends_no_run(tmp_path, without_torch):
    script, lines = tmp_path / "train.py", tmp_path / "lines"
    lines.mkdir()
    script.write_text(
        "import os, sys\n"
        "with open(sys.argv[1] + '/' + os.environ['RANK'], 'w') as file:\n"
        "    file.write('to the end')\n"
    )
    words = ["-n", "2", str(script), str(lines)]
    run = RunCommand(Path("/dev/full"), words, environment=without_torch)
    assert run.process.wait(LONGEST_S) == 0
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
known = Path(os.environ.get("GOSSIPDP_JOIN_FILE", os.devnull)).read_text()
(files / f"joined-{life}").write_text(known)
(files / f"life-{life}").touch()
while not (files / "end").exists():
    time.sleep(0.01)
(files / f"done-{rank}").touch()
"""


def prepared(directory: Path, text: str) -> tuple[Path, Path]:
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


def test_faults_may_kill_all(tmp_path, without_torch):
    script, files = prepared(tmp_path, TRAINING)
    plan = "stop 0.2s 0; slow 2x 2; kill 0 at 1s; kill 1 at 1s; kill 2 at 1s; kill 1 at 1h"
    words = ["-n", "3", "--max-restarts", "1", "--faults", plan, str(script), str(files)]
    with RunCommand(tmp_path / "output", words, environment=without_torch) as run:
        assert run.process.wait(LONGEST_S) == 1
    assert {path.read_text() for path in files.glob("joined-*")} == {""}
    said = run.output.read_text()
    for line in (
        *("worker 1 killed", "worker 0 stopped for 0.2 s", "worker 2 2 times slower"),
        *("that was --faults, and no other worker runs here", "faults: 5 done, 1 missed"),
    ):
        assert line in said
    assert "started again" not in said
    assert said.endswith(
        "gossipdp: at the end: workers 0, 1, 2 died of signal 9 (SIGKILL)\n"
        "gossipdp: no worker is left, and no checkpoint was saved: all that they trained is lost\n"
    )


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
