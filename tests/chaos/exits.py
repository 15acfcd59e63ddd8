"""``make chaos``: however a run that trains ends, nothing of it is left but its checkpoints.

.venv/bin/python -m pytest tests/chaos/exits.py
"""

import signal
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from run_processes import VARIABLES, RunCommand, runs, wait_until_gone
from waiting import LONGEST_S

from gossipdp.parallel.checkpoint import saved_in

pytestmark = pytest.mark.processes

EVERY = 10  # steps from one checkpoint to the next

# A model, a loader process, checkpoints, and much output: at any moment a line is being printed.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from gossipdp import Checkpoints, GossipDataParallel

directory, ending = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
data = TensorDataset(torch.randn(80, 16), torch.randint(0, 4, (80,)))
loader = DataLoader(data, 8, num_workers=1, persistent_workers=True)
net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model = GossipDataParallel(
    net, optimizer, checkpoints=Checkpoints(directory / "checkpoints", 10, resume="auto")
)
note = os.open(directory / f"steps-{rank}", os.O_WRONLY | os.O_CREAT)
number = 0
while not (directory / "go").exists():
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        number += 1
        for part in range(20):
            print("step", number, "part", part)
            time.sleep(0.001)
        os.pwrite(note, b"%9d" % model.stats().gradient_steps, 0)
        if number == 15:
            (directory / f"{rank}-{os.getpid()}.here").touch()
if ending == "exception":
    (directory / f"ends-{rank}").touch()
    raise ValueError("no good")
model.save_averaged(directory / f"average-{rank}.pt")
model.consolidate()
(directory / f"ends-{rank}").touch()
"""


class TrainingRun(RunCommand):
    """A ``gossipdp run`` of two workers; :meth:`look` notes all that is to be gone at its end."""

    def __init__(self, directory: Path, ending: str) -> None:
        self.directory = directory / "run"
        self.directory.mkdir()
        # Loaders listen on Unix sockets there, whose names have at most 107 bytes.
        self._temporary = tempfile.TemporaryDirectory(prefix="exits-", ignore_cleanup_errors=True)
        script = directory / "train.py"
        script.write_text(SCRIPT)
        words = ["-n", "2", str(script), str(self.directory), ending]
        environment = {**VARIABLES, "TMPDIR": self._temporary.name}
        super().__init__(directory / "output", words, environment=environment)
        self.supervisor = psutil.Process(self.process.pid)
        self.processes: list[psutil.Process] = []
        self.ports: set[int] = set()

    def workers(self) -> dict[int, int]:
        """Process id by rank, of those that run and have trained for a while."""
        marks = [path.stem.split("-") for path in self.directory.glob("*.here")]
        return {int(rank): int(pid) for rank, pid in marks if runs(int(pid))}

    def wait_until_all_train(self) -> None:
        self.wait_for(lambda: self.workers().keys() == {0, 1})
        self.wait_for(lambda: all(self.saved(rank) for rank in (0, 1)))

    def saved(self, rank: int) -> list[int]:
        """Return the steps at which there are checkpoints, the newest first."""
        directory = self.directory / "checkpoints"
        found = saved_in(directory) if directory.exists() else {}
        return [file.facts.steps for file in found.get(rank, ())]

    def steps(self, rank: int) -> int:
        """Return the number that it has made in all of its lives."""
        return int((self.directory / f"steps-{rank}").read_bytes())

    def look(self) -> None:
        self.processes = [self.supervisor, *self.supervisor.children(recursive=True)]
        loaders = [psutil.Process(pid).children() for pid in self.workers().values()]
        assert all(loaders), loaders
        for process in self.processes:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    self.ports.add(connection.laddr.port)
        assert len(self.ports) >= 3  # the store's, and one of each worker

    def assert_nothing_is_left(self) -> None:
        self.process.wait(LONGEST_S)
        wait_until_gone([process.pid for process in self.processes])
        for port in self.ports:
            with socket.create_server(("127.0.0.1", port)):
                pass
        shared = [path.name for path in Path("/dev/shm").glob("*")]
        pids = {str(process.pid) for process in self.processes}
        assert not [name for name in shared if pids & set(name.split("_"))], shared
        assert list((self.directory / "checkpoints").rglob("*.tmp*")) == []

    def close(self) -> None:
        started = self.supervisor.children(recursive=True) if runs(self.supervisor.pid) else []
        for process in (*self.processes, *started, self.supervisor):
            if process.is_running():
                process.kill()
        self.process.wait()
        self._temporary.cleanup()


@pytest.mark.parametrize("ending", ["end", "exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(tmp_path: Path, ending: str) -> None:
    run = TrainingRun(tmp_path, ending)
    try:
        run.wait_until_all_train()
        run.look()
        if ending.startswith("SIG"):
            run.process.send_signal(signal.Signals[ending])
        else:
            (run.directory / "go").touch()
            run.wait_for(lambda: len(list(run.directory.glob("ends-*"))) == 2)
        run.assert_nothing_is_left()
        expected = {"end": 0, "exception": 1, "SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}
        assert run.process.wait() == expected[ending], run.output.read_text()[-4000:]
        for rank in (0, 1):
            newest = run.saved(rank)[0]
            if ending in ("SIGTERM", "SIGKILL"):
                assert newest == run.steps(rank)
            else:
                assert newest >= run.steps(rank) - 2 * EVERY
            average = run.directory / f"average-{rank}.pt"
            assert average.exists() == (ending == "end")
    finally:
        run.close()
