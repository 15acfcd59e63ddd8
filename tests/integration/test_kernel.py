import json
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from waiting import LONGEST_S, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
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


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))


CHECK = """
import json
print(json.dumps({
    "digests": len({result["digest"] for result in results}),
    "exchanges": [result["stats"].exchanges for result in results],
    "steps": [result["stats"].gradient_steps for result in results],
    "accuracy": results[0]["accuracy"],
}))"""


def test_a_first_run_in_a_kernel():
    notebook = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    (run,) = [cell for cell in notebook.cells if "args=(24_000,)" in cell.source]
    run.source = run.source.replace("24_000", "12_000")
    notebook.cells.append(nbformat.v4.new_code_cell(CHECK))
    NotebookClient(notebook, timeout=270, resources={"metadata": {"path": EXAMPLES}}).execute()
    found = json.loads("".join(output.text for output in notebook.cells[-1].outputs))
    assert found["digests"] == 1
    assert all(exchanges > 0 for exchanges in found["exchanges"])
    assert found["steps"][2] < min(found["steps"][rank] for rank in (0, 1, 3))
    assert found["accuracy"] > 0.8


def test_train_look_train_on_and_interrupt(tmp_path):
    kernel = KernelManager(kernel_name="python3")
    kernel.start_kernel(cwd=str(tmp_path))
    client = kernel.blocking_client()
    client.start_channels()

    def result(request: str) -> str:
        """Return what a cell shows at its end, or its error."""
        while True:
            message = client.get_iopub_msg(timeout=LONGEST_S)
            is_of_it = message["parent_header"].get("msg_id") == request
            content = message["content"]
            if is_of_it and message["msg_type"] == "execute_result":
                return str(content["data"]["text/plain"])
            if is_of_it and message["msg_type"] == "error":
                return f"{content['ename']}: {content['evalue']}"

    def run(code: str) -> str:
        return result(client.execute(code, stop_on_error=False))

    try:
        client.wait_for_ready(timeout=LONGEST_S)
        assert run(f"{WRAP}\ntrain(2)") == "[0, 1]"
        assert run("with model.averaged(): look = net.weight.shape\nlook") == "torch.Size([2, 4])"
        cell = client.execute("pause = True\ntrain(2)", stop_on_error=False)
        wait_until((tmp_path / "paused").exists, "the cell runs")
        kernel.interrupt_kernel()
        assert result(cell).startswith("KeyboardInterrupt")
        assert run("pause = False\ntrain(2)") == "[2, 3]"
        assert run("model.consolidate().samples") == "256"
        assert run("train(1)").startswith("RuntimeError: the run has ended with consolidate()")
        once_more = WRAP.replace("saved", "saved elsewhere")
        assert run(f"{once_more}\ntrain(1)") == "[0]"
        assert run("model.consolidate().samples") == "64"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
        kernel.cleanup_resources()
