"""``gossipdp run --nnodes``: one call a host; here hosts are loopback addresses."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from run_processes import VARIABLES
from waiting import LONGEST_S

pytestmark = pytest.mark.processes

SCRIPT = """
from gossipdp.launcher.environment import Environment
from gossipdp.launcher.rendezvous import Rendezvous
from gossipdp.launcher.rendezvous import Settings

environment = Environment.read()
rendezvous = Rendezvous.open(environment, timeout_s=100)
settings = Settings((("weight", (2,)),), "a2cid2", "ring", "1", "float32")
host = environment.choose_host()
meeting = rendezvous.meet((host, 1000 + environment.rank), settings)
rendezvous.mark_ready()
hosts = [meeting.addresses[rank][0] for rank in sorted(meeting.addresses)]
print("met", environment.rank, environment.local_rank, len(meeting.secret), *hosts)
"""


def start(node_rank: int, rendezvous: str, script: Path) -> subprocess.Popen[str]:
    options = ["--nnodes", "2", "--node-rank", str(node_rank), "--rendezvous", rendezvous]
    options += ["--host", f"127.0.0.{node_rank + 1}"]
    return subprocess.Popen(
        [sys.executable, "-m", "gossipdp.cli.main", "run", "-n", "1", *options, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=VARIABLES,
    )


def free_rendezvous() -> str:
    """Return a free port of those that no process is given that asks for any."""
    for port in range(20000 + os.getpid() % 10000, 32768):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise AssertionError("no free port")


def outcome(*runs: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run)
            stack.callback(run.kill)
        outputs = [run.communicate(timeout=LONGEST_S) for run in runs]
        return [(run.returncode, *output) for run, output in zip(runs, outputs, strict=True)]


def test_the_workers_of_two_hosts_meet(tmp_path):
    script, rendezvous = tmp_path / "script.py", free_rendezvous()
    script.write_text(SCRIPT)
    first, second = outcome(*(start(rank, rendezvous, script) for rank in range(2)))
    said = "gossipdp: starting 1 worker; importing torch takes some seconds\n"
    assert first == (0, "met 0 0 32 127.0.0.1 127.0.0.2\n", said)
    assert second == (0, "met 1 0 32 127.0.0.1 127.0.0.2\n", said)
