"""``gossipdp run --nnodes``: one call a host; here hosts are loopback addresses, or namespaces."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
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


def start(
    node_rank: int, rendezvous: str, script: Path, *, before: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    options = ["--nnodes", "2", "--node-rank", str(node_rank), "--rendezvous", rendezvous]
    if not before:
        options += ["--host", f"127.0.0.{node_rank + 1}"]
    command = [sys.executable, "-m", "gossipdp.cli.main", "run", "-n", "1", *options]
    return subprocess.Popen(
        [*before, *command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**VARIABLES, "GOSSIPDP_SECRET": 2 * "sixteen letters."} if before else VARIABLES,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def rendezvous() -> str:
    """A free port of those that are given to nobody who asks for any."""
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


def test_the_workers_of_two_hosts_meet(script: Path, rendezvous: str) -> None:
    first, second = outcome(start(0, rendezvous, script), start(1, rendezvous, script))
    said = "gossipdp: starting 1 worker; importing torch takes some seconds\n"
    assert first == (0, "met 0 0 32 127.0.0.1 127.0.0.2\n", said)
    assert second == (0, "met 1 0 32 127.0.0.1 127.0.0.2\n", said)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts of their own, 10.77.0.1 and 10.77.0.2, joined by a cable."""
    names = (f"gossip{os.getpid()}a", f"gossip{os.getpid()}b")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "gdp0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "gdp1",
            "netns",
            names[1],
        )
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"gdp{number}")
            ip("-n", name, "link", "set", f"gdp{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces do not work here: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_network_namespaces(script: Path, namespaces: tuple[str, str]) -> None:
    first, second = outcome(
        *(
            start(rank, "10.77.0.1:7777", script, before=("ip", "netns", "exec", name))
            for rank, name in enumerate(namespaces)
        )
    )
    # c10d writes to standard error that the addresses have no names.
    assert first[:2] == (0, "met 0 0 32 10.77.0.1 10.77.0.2\n")
    assert second[:2] == (0, "met 1 0 32 10.77.0.1 10.77.0.2\n")
