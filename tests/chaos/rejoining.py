"""``make chaos``: who comes into a run that goes on trains with it, also without its store.

.venv/bin/python -m pytest -s tests/chaos/rejoining.py
"""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_processes import RunCommand
from waiting import LONGEST_S

from gossipdp.gossip.loop import REPORT_INTERVAL_S

pytestmark = pytest.mark.processes

# The loop of a real worker; each line of its file says what it noticed, and when.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from gossipdp import GossipDataParallel, Network
from gossipdp.links.clock import since_boot_s

directory = Path(sys.argv[1])
log = open(directory / str(os.getpid()), "w", buffering=1)
torch.manual_seed(0)
net = nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = GossipDataParallel(net, optimizer, graph="complete", network=Network(start_timeout_s=60))
print("joined", since_boot_s(), model.rank, file=log)
has_exchanged = False
while not (directory / "end").exists():
    loss = nn.functional.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.005)
    if not has_exchanged and model.stats().exchanges:
        has_exchanged = True
        print("exchanged", since_boot_s(), file=log)
result = model.consolidate()
print("consolidated", since_boot_s(), result.world_size, file=log)
"""


class Host(RunCommand):
    """One ``gossipdp run`` of the script."""

    def __init__(self, directory: Path, name: str, *options: str) -> None:
        script = directory / "script.py"
        script.write_text(SCRIPT)
        self.logs = directory / "logs"
        self.logs.mkdir(exist_ok=True)
        words = [*options, str(script), str(self.logs)]
        super().__init__(directory / f"{name}.output", words)

    def events(self, pid: int) -> dict[str, list[str]]:
        lines = (self.logs / str(pid)).read_text().splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines}

    def lives(self, event: str = "exchanged") -> list[int]:
        """Return the processes, of any host, that came as far as this, the earliest first."""
        pids = [int(path.name) for path in self.logs.glob("[0-9]*")]
        reached = [(self.events(pid)[event][0], pid) for pid in pids if event in self.events(pid)]
        return [pid for _, pid in sorted(reached, key=lambda each: float(each[0]))]

    def workers(self) -> list[int]:
        """Return the processes of this host that train."""
        here = {child.pid for child in psutil.Process(self.process.pid).children()}
        return [pid for pid in self.lives() if pid in here]

    def kill_and_await_the_next_life(self, pid: int) -> None:
        before = self.lives()
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: len(self.lives()) > len(before))


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.stop()


def end(*runs: Host) -> None:
    (runs[0].logs / "end").touch()
    for host in runs:
        assert host.process.wait(LONGEST_S) == 0, host.output.read_text()


def test_restarts_and_joins_without_the_host_of_the_store(tmp_path, hosts):
    with socket.create_server(("127.0.0.1", 0)) as free:
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    common = ["--secret-file", str(secret)]
    for node, count in enumerate(("0", "2")):
        options = ["-n", "1", "--nnodes", "2", "--node-rank", str(node), "--max-restarts", count]
        options += ["--rendezvous", rendezvous, "--host", f"127.0.0.{node + 1}", *common]
        hosts.append(Host(tmp_path, str(node), *options))
    first, second = hosts
    second.wait_for(lambda: len(second.lives()) == 2)
    # A third comes by the word that the first host gave.
    line = next(line for line in first.output.read_text().splitlines() if "--join" in line)
    assert f"--secret-file {secret}" in line
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    survivor = second.workers()[0]
    assert psutil.pid_exists(survivor)
    connections = psutil.Process(survivor).net_connections(kind="tcp")
    (port,) = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    joiner = Host(tmp_path, "joiner", "--join", f"127.0.0.2:{port}", *common)
    hosts.append(joiner)
    joiner.wait_for(lambda: len(joiner.workers()) == 1)
    assert joiner.events(joiner.workers()[0])["joined"][1] == "2"
    assert "refused" not in first.output.read_text() + second.output.read_text()
    # Now the only one of the second host dies, and finds the joiner; its supervisor has been told
    # where that is, at the latest so much after it came.
    time.sleep(REPORT_INTERVAL_S + 1.0)
    second.kill_and_await_the_next_life(survivor)
    (back,) = second.workers()
    assert second.events(back)["joined"][1] == "1"
    end(second, joiner)
    last = [second.events(pid)["consolidated"][1] for pid in second.lives("consolidated")]
    assert last == ["2", "2"]
