"""``examples/clusters/slurm.sbatch``, and the replicas of docs/shards.md, on a Slurm of one node.

``make cluster-test``, as root, with Debian's packages slurm-wlm and munge.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_processes import free_port, path_before
from waiting import wait_until

from gossipdp.links.tls import make_tls_files

# A job that is requeued is eligible again after ten seconds.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SBATCH = Path(__file__).parents[2] / "examples" / "clusters" / "slurm.sbatch"
SUPPORT = Path(__file__).parents[1] / "support"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# The node says that it has eight cores: more tasks than a small machine has are to run.
CONFIGURATION = """
ClusterName=gossipdp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""

# Worker 1 dies once, by itself. All train until a file says that they may end.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from gossipdp import Checkpoints
from small_run import SmallRun

marks = Path(sys.argv[1])
run = SmallRun(graph="complete", checkpoints=Checkpoints(marks / "checkpoints", resume="auto"))
rank, life, stats = run.rank, run.life, run.model.stats
job_life, before = os.environ.get("SLURM_RESTART_COUNT", "0"), stats().gradient_steps
print("begins", rank, job_life, life, "resumed" if before else "afresh", flush=True)

def all_there(*names):
    return all((marks / name).exists() for name in names)

run.train_until(lambda: stats().exchanges_answered >= 2)
(marks / f"{job_life}.{rank}.{life}").touch()
run.train_until(lambda: all_there(*(f"{job_life}.{other}.0" for other in range(3))))
if rank == 1 and life == 0 and job_life == "0":
    os.kill(os.getpid(), signal.SIGKILL)
run.train_until(lambda: all_there("end"))
done = run.model.consolidate()
print("done", rank, job_life, done.world_size, flush=True)
"""


class Slurm:
    """The commands of the Slurm whose files are in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.variables = path_before(SUPPORT) | {
            "SLURM_CONF": str(directory / "slurm.conf"),
            "TLS_DIRECTORY": str(directory / "tls"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def call(self, *words: str) -> str:
        """Return the output of a command."""
        done = subprocess.run(
            words, env=self.variables, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def submit(self, output: Path, *words: str) -> str:
        """Start the example on three tasks; the number of the job."""
        options = ["--nodes=1", "--ntasks-per-node=3", f"--output={output}", "--parsable"]
        return self.call("sbatch", *options, str(SBATCH), *words).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Its daemons run as long as these tests."""
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt install slurm-wlm munge")
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "key").write_bytes(os.urandom(1024))
    (directory / "key").chmod(0o400)
    make_tls_files(directory / "tls")
    (directory / "state").mkdir()
    (directory / "spool").mkdir()
    configuration = CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        directory=directory,
        controller_port=free_port(),
        node_port=free_port(),
    )
    (directory / "slurm.conf").write_text(configuration)
    made = Slurm(directory)
    munge = ["--key-file", "key", "--socket", "munge.socket", "--pid-file", "munged.pid"]
    munge += ["--log-file", "munged.log", "--seed-file", "munged.seed"]
    words = [word if word.startswith("--") else str(directory / word) for word in munge]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", *words],
            ["slurmctld", "-D", "-i", "-c"],
            ["slurmd", "-D", "-c"],
        ):
            with open(directory / f"{command[0]}.out", "wb") as output:
                daemons.append(
                    subprocess.Popen(command, env=made.variables, stdout=output, stderr=output)
                )
            if command[0] == "munged":
                wait_until((directory / "munge.socket").exists, "munged listens")
        wait_until(lambda: "idle" in made.call("sinfo", "-h", "-o", "%t"), lambda: log(directory))
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def log(directory: Path) -> str:
    return "".join(path.read_text() for path in sorted(directory.glob("slurm*.*")))


def test_ranks_restart_and_requeue(slurm, tmp_path):
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text(SCRIPT)

    def lines() -> list[str]:
        text = output.read_text() if output.exists() else ""
        return sorted(line for line in text.splitlines() if line.startswith(("begins ", "done ")))

    def are_there(*names: str) -> bool:
        return all((tmp_path / name).exists() for name in names)

    job = slurm.submit(output, str(script), str(tmp_path))
    # The death of worker 1 is no other's, and it is back.
    wait_until(lambda: are_there("0.0.0", "0.1.1", "0.2.0"), lambda: log(slurm.directory))
    first = [f"begins {rank} 0 0 afresh" for rank in range(3)]
    assert lines() == sorted([*first, "begins 1 0 1 resumed"])
    # As at the end of the job's time.
    slurm.call("scancel", "--signal=TERM", job)
    wait_until(lambda: are_there("1.0.0", "1.1.0", "1.2.0"), output.read_text)
    (tmp_path / "end").touch()
    wait_until(lambda: slurm.state(job) == "COMPLETED", output.read_text)
    second = [f"begins {rank} 1 0 resumed" for rank in range(3)]
    done = [f"done {rank} 1 3" for rank in range(3)]
    assert lines() == sorted([*first, "begins 1 0 1 resumed", *second, *done])


def test_a_job_that_was_cancelled_is_not_requeued(slurm, tmp_path):
    script, output = tmp_path / "train.py", tmp_path / "output"
    script.write_text(SCRIPT)
    job = slurm.submit(output, str(script), str(tmp_path))
    wait_until(
        lambda: output.exists() and "begins" in output.read_text(), lambda: log(slurm.directory)
    )
    slurm.call("scancel", job)
    wait_until(lambda: slurm.state(job) == "CANCELLED", output.read_text)
    wait_until(lambda: "idle" in slurm.call("sinfo", "-h", "-o", "%t"), output.read_text)
    assert slurm.state(job) == "CANCELLED"


def test_replicas_of_two_processes(slurm, tmp_path):
    """The command of docs/shards.md: one supervisor a node."""
    page = (SBATCH.parents[2] / "docs" / "shards.md").read_text()
    (command,) = re.findall(r"^    (srun (?:.*\\\n)*.*)$", page, re.M)
    command = re.sub(r"\\\n\s*", "", command)
    changes = {
        "-n 8 --nproc-per-replica 8": "-n 4 --nproc-per-replica 2",
        "head:29500": f"127.0.0.1:{free_port()}",
        "~/.gossipdp-tls": str(slurm.directory / "tls"),
        "train.py": f"{SBATCH.parents[1] / 'fsdp2_gpt.py'} --samples 2000",
    }
    for shown, used in changes.items():
        assert shown in command
        command = command.replace(shown, used)
    job = tmp_path / "job.sh"
    job.write_text(f"#!/bin/bash\n{command}\n")
    output = tmp_path / "output"
    number = slurm.call("sbatch", "--nodes=1", f"--output={output}", "--parsable", str(job))
    wait_until(lambda: slurm.state(number.strip()) not in ("PENDING", "RUNNING"), output.read_text)
    said = output.read_text()
    assert slurm.state(number.strip()) == "COMPLETED", said
    assert said.count("average of 2 replicas") == 2, said
