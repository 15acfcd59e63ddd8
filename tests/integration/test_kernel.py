"""A notebook as its user goes through it: train, look, train on, interrupt a cell, run it again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from waiting import LONGEST_S, wait_until

pytestmark = [
    pytest.mark.processes,
    # jupyter_client's sockets, which it closes when the interpreter collects them.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WRAP = """
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from gossipdp import Checkpoints, GossipDataParallel

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = GossipDataParallel(net, optimizer, checkpoints=Checkpoints("saved"))
loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=8)
pause = False

def train(num_epochs):
    seen = []
    for epoch, batches in model.epochs(loader, num_epochs):
        seen.append(epoch)
        for (x,) in batches:
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
            while pause:
                Path("paused").touch()
    return seen
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelManager]:
    """Start a kernel in a directory of its own."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    yield manager
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def test_train_look_train_on_and_interrupt(kernel, tmp_path):
    client = kernel.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=LONGEST_S)

    def result(request: str) -> str:
        """Return what a cell shows at its end, or its error."""
        while True:
            message = client.get_iopub_msg(timeout=LONGEST_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "execute_result":
                return str(content["data"]["text/plain"])
            if message["msg_type"] == "error":
                return f"{content['ename']}: {content['evalue']}"

    def run(code: str) -> str:
        return result(client.execute(code, stop_on_error=False))

    try:
        assert run(f"{WRAP}\ntrain(2)") == "[0, 1]"
        assert run("with model.averaged(): look = net.weight.shape\nlook") == "torch.Size([2, 4])"
        cell = client.execute("pause = True\ntrain(2)", stop_on_error=False)
        wait_until((tmp_path / "paused").exists, "the cell runs")
        kernel.interrupt_kernel()
        assert result(cell).startswith("KeyboardInterrupt")
        assert run("pause = False\ntrain(2)") == "[2, 3]"
        assert run("model.consolidate().samples") == "256"
        assert run("train(1)").startswith("RuntimeError: the run has ended with consolidate()")
        assert run(f"{WRAP}\ntrain(1)") == "[0]"  # wrapped once more
        assert run("model.consolidate().samples") == "64"
    finally:
        client.stop_channels()
