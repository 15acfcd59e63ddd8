"""A user's script, unchanged, under both launchers; and the errors that a user may see."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_processes import VARIABLES

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
# Two workers: each is a new interpreter, seconds of CPU time until it has torch.
RUN = [str(BIN / "gossipdp"), "run", "-n", "2"]
TORCHRUN = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
TORCHRUN += ["--rdzv-endpoint", "127.0.0.1:0"]


def run(
    command: list[str], variables: dict[str, str] = VARIABLES, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    options = {"env": variables, "cwd": directory, "timeout": 280}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.parametrize("command", [RUN, TORCHRUN], ids=["gossipdp run", "torchrun"])
def test_the_first_script_of_a_page_runs_without_a_warning(command, page, tmp_path):
    """Warnings of Python's are errors; those of the library's log go to the standard error."""
    script = tmp_path / "train.py"
    first, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)
    script.write_text(first)
    variables = VARIABLES | {"OMP_NUM_THREADS": "1"}  # else torchrun says that it sets it
    done = run([*command, str(script)], variables, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stderr.splitlines()
    assert len(said) == (command is RUN), said
    assert all(line.startswith("gossipdp: starting 2 workers; ") for line in said)
    assert all(f"worker {rank}: " in done.stdout for rank in range(2))


@pytest.mark.parametrize("launcher", ["gossipdp run", "torchrun"])
def test_two_replicas_train_the_example_of_shards(launcher):
    example = str(ROOT / "examples" / "fsdp2_gpt.py")
    if launcher == "torchrun":
        command = [TORCHRUN[0], "--nproc-per-node", "4", *TORCHRUN[3:], example, "--shards", "2"]
    else:
        command = [*RUN[:2], "-n", "4", "--nproc-per-replica", "2", example]
    # Importing FSDP2 warns.
    variables = VARIABLES | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    done = run([*command, "--samples", "600", "--width", "32"], variables)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "average of 2 replicas" in line]
    assert len(shown) == 2, done.stdout


DROPPED = """
import threading
import torch
from gossipdp import GossipDataParallel

net = torch.nn.Linear(2, 1)
model = GossipDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
worker = model._worker
end = worker.leave

def close():
    for _ in range(100):
        torch.randn(300, 300) @ torch.randn(300, 300)  # the interpreter's lock is given away
    end()
    print("closed")

worker.leave = close
held = [model]
del model
collector = threading.Thread(target=held.clear, name="gossipdp-0")
collector.start()
collector.join()
"""


def test_exit_waits_for_a_model_that_the_gossip_thread_collected(tmp_path):
    """Python ends a daemon at exit; within torch that would end the process, by SIGABRT."""
    script = tmp_path / "dropped.py"
    script.write_text(DROPPED)
    done = run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "closed\n"
