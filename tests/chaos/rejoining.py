"""``make chaos``: who comes into a run that goes on trains with it, also without its store."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from run_processes import RunCommand, free_port
from waiting import LONGEST_S

from gossipdp.gossip.loop import REPORT_INTERVAL_S

pytestmark = pytest.mark.processes

# The loop of a real worker; it leaves a file for each event.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from gossipdp import GossipDataParallel, Network

directory = Path(sys.argv[1])
def note(event, word=""):
    (directory / f"{event}-{os.getpid()}").write_text(str(word))

torch.manual_seed(0)
net = nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = GossipDataParallel(net, optimizer, graph="complete", network=Network(start_timeout_s=60))
note("joined", model.rank)
while not (directory / "end").exists():
    loss = nn.functional.mse_loss(model(torch.randn(8, 16)), torch.zeros(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.005)
    if model.stats().exchanges:
        note("exchanged")
note("consolidated", model.consolidate().world_size)
"""


class Host(RunCommand):
    """One ``gossipdp run`` of the script in a directory."""

    def __init__(self, directory: Path, name: str, *options: str) -> None:
        self.directory = directory
        words = [*options, str(directory / "script.py"), str(directory)]
        super().__init__(directory / f"{name}.output", words)

    def workers(self) -> list[int]:
        """Return the processes of this host that have exchanged."""
        here = [child.pid for child in psutil.Process(self.process.pid).children()]
        return [pid for pid in here if (self.directory / f"exchanged-{pid}").exists()]

    def rank_of(self, pid: int) -> str:
        return (self.directory / f"joined-{pid}").read_text()


def test_restarts_and_joins_without_the_host_of_the_store(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    rendezvous = f"127.0.0.1:{free_port()}"
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    common = ["--secret-file", str(secret)]

    def start(node: int, num_restarts: int) -> Host:
        options = ["-n", "1", "--nnodes", "2", "--node-rank", str(node), *common]
        options += ["--max-restarts", str(num_restarts), "--rendezvous", rendezvous]
        return Host(tmp_path, str(node), *options, "--host", f"127.0.0.{node + 1}")

    with start(0, 0) as first, start(1, 2) as second:
        second.wait_for(lambda: first.workers() and second.workers())
        # A third comes by the word that the first host gave.
        line = next(line for line in first.output.read_text().splitlines() if "--join" in line)
        assert f"--secret-file {secret}" in line
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        (survivor,) = second.workers()
        connections = psutil.Process(survivor).net_connections(kind="tcp")
        (port,) = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
        with Host(tmp_path, "joiner", "--join", f"127.0.0.2:{port}", *common) as joiner:
            joiner.wait_for(joiner.workers)
            assert [joiner.rank_of(pid) for pid in joiner.workers()] == ["2"]
            assert "refused" not in first.output.read_text() + second.output.read_text()
            # Now the only one of the second host dies, and finds the joiner; its supervisor has
            # been told where that is, at the latest so much after it came.
            time.sleep(REPORT_INTERVAL_S + 1.0)
            os.kill(survivor, signal.SIGKILL)
            second.wait_for(lambda: {*second.workers()} - {survivor})
            (back,) = {*second.workers()} - {survivor}
            assert second.rank_of(back) == "1"
            (tmp_path / "end").touch()
            for host in (second, joiner):
                assert host.process.wait(LONGEST_S) == 0, host.output.read_text()
    assert [path.read_text() for path in tmp_path.glob("consolidated-*")] == ["2", "2"]
