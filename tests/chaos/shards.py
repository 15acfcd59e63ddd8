"""``make chaos``: the example of shards, and a replica that joins, dies and comes back.

.venv/bin/python -m pytest -s tests/chaos/shards.py
"""

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_processes import VARIABLES, RunCommand, run_python
from waiting import LONGEST_S

# On a busy machine five interpreters that import torch take their time.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_gpt.py"

# Each process writes down who it is when it has come into the run, and what it ended with.
SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from gossipdp import GossipDataParallel

directory = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model = GossipDataParallel(net, optimizer, graph="complete", budget_samples=10**9)
name = f"{model.rank}.{dist.get_rank()}"
directory.joinpath(f"{name} {os.getpid()}").touch()
for (inputs,) in model.batches([[torch.randn(4, 6)]]):
    net(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if (directory / "end").exists():
        model.stop()
print("ended", name, "over", model.consolidate().world_size)
dist.destroy_process_group()
"""
# Importing FSDP2 warns.
ENVIRONMENT = VARIABLES | {"PYTHONWARNINGS": "default"}


@pytest.fixture
def calls() -> Iterator[list[RunCommand]]:
    started: list[RunCommand] = []
    yield started
    for call in started:
        call.stop()


def test_a_replica_joins_by_the_line_that_the_run_prints(tmp_path, calls):
    script, secret, came = tmp_path / "train.py", tmp_path / "secret", tmp_path / "came"
    script.write_text(SCRIPT)
    secret.write_text("a secret of this test")
    secret.chmod(0o600)
    came.mkdir()

    def processes(replica: int) -> list[int]:
        """Return the second shard's lives, of those of this replica that came into the run."""
        return [int(path.name.split()[1]) for path in came.glob(f"{replica}.1 *")]

    def start(name: str, *words: str) -> RunCommand:
        output = tmp_path / f"{name}.output"
        calls.append(RunCommand(output, words, environment=ENVIRONMENT))
        return calls[-1]

    common = ["--nproc-per-replica", "2", "--secret-file", str(secret)]
    run = start("run", "-n", "2", *common, str(script), str(came))
    line = re.compile("to add a replica: gossipdp run (.*) SCRIPT")
    run.wait_for(lambda: processes(0) and line.search(run.output.read_text()))
    (shown,) = line.findall(run.output.read_text())
    words = [*shlex.split(shown), "--max-restarts", "1", str(script), str(came)]
    joiner = start("joiner", *words)
    joiner.wait_for(lambda: processes(1))
    os.kill(processes(1)[0], signal.SIGKILL)
    joiner.wait_for(lambda: len(processes(1)) == 2)
    (came / "end").touch()
    for call in calls:
        assert call.process.wait(LONGEST_S) == 0, call.output.read_text()
    printed = [each for call in calls for each in call.output.read_text().splitlines()]
    ends = sorted(each for each in printed if "ended" in each)
    assert ends == [f"ended {name} over 2" for name in ("0.0", "0.1", "1.0", "1.1")]


@pytest.mark.parametrize("launcher", ["gossipdp", "torchrun"])
def test_the_example(launcher):
    if launcher == "gossipdp":
        words = ["gossipdp", "run", "-n", "4", "--nproc-per-replica", "2", str(EXAMPLE)]
    else:
        words = ["torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLE), "--shards", "2"]
    words += ["--samples", "600", "--width", "32"]
    done = run_python("-m", *words, environment=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "average of 2 replicas" in line]
    assert len(shown) == 2, done.stdout
