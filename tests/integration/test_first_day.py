"""Real scripts under ``gossipdp run``, and the lines that their users read."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_processes import VARIABLES
from waiting import wait_until

pytestmark = pytest.mark.processes

HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
from gossipdp import Checkpoints, Counting, GossipDataParallel, Network

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
directory = Path(sys.argv[1])

def wrap(**options):
    return GossipDataParallel(net, optimizer, network=Network(timeout_s=1.0), **options)

def step():
    optimizer.zero_grad()
    net(torch.ones(8, 4)).sum().backward()
    optimizer.step()
"""

FORGETS = """
model = wrap(budget_samples=64)
for batch in model.batches([torch.ones(8, 4)]):
    step()
print("ended", model.rank)
"""

AVERAGES_BEFORE = """
model = wrap(budget_samples=64)
for batch in model.batches([torch.ones(8, 4)]):
    step()
model.save_averaged(directory / f"{model.rank}.pt")
"""

RESUMES = """
model = wrap(budget_samples=64, checkpoints=Checkpoints(directory, resume="auto"))
for batch in model.batches([torch.ones(8, 4)]):
    step()
model.save_checkpoint()
print("ended", model.consolidate().samples >= 64)
"""

LEADS = """
model = wrap(counting=Counting(samples_per_step=8))
moved = directory / "moved"
deadline_s = time.monotonic() + 120
if model.rank == 0:
    while not model.stats().exchanges:
        step()
        assert model.is_lead
    os.kill(os.getpid(), signal.SIGKILL)
while not moved.exists():
    assert time.monotonic() < deadline_s
    step()
    if model.is_lead:
        assert model.rank == 1
        moved.touch()
model.consolidate()
print("lead", model.rank, model.is_lead)
"""


DIES_AT_THE_END = """
again, deadline_s = directory / "again", time.monotonic() + 120
if os.environ.get("GOSSIPDP_RESTARTS", "0") != "0":
    again.touch()
    time.sleep(1000)  # as slow to start as a large model
model = wrap(budget_samples=400)
for batch in model.batches([torch.ones(8, 4)]):
    step()
if model.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not again.exists():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
print(model.rank, model.consolidate().world_size)
"""

GOES_ON = """
model = wrap(budget_samples=8_000_000, checkpoints=Checkpoints(directory, resume="auto"))
for batch in model.batches([torch.ones(8, 4)]):
    step()
    (directory / f"trains-{model.rank}").touch()
    time.sleep(0.01)
"""


def command(tmp_path: Path, script: str, n: int, *options: str) -> list[str]:
    """Write the script; return the command that runs it on ``n`` workers."""
    path, directory = tmp_path / "train.py", tmp_path / "files"
    path.write_text(HEAD + script)
    directory.mkdir(exist_ok=True)
    start = [sys.executable, "-m", "gossipdp", "run", "-n", str(n)]
    return [*start, *options, str(path), str(directory)]


def run(tmp_path: Path, script: str, n: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script by ``gossipdp run`` to its end."""
    return subprocess.run(
        command(tmp_path, script, n, *options),
        capture_output=True,
        text=True,
        env=VARIABLES,
        check=False,
        timeout=200,
    )


def test_a_forgotten_consolidate_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, FORGETS, 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ends without consolidate(): its module holds its own") == 1
    done = run(tmp_path, AVERAGES_BEFORE, 2)
    assert "ends without" not in done.stderr


def test_a_resumed_run_says_where_it_goes_on_and_that_nothing_is_left(tmp_path: Path) -> None:
    first, second = (run(tmp_path, RESUMES, 2) for _ in range(2))
    assert first.stdout == second.stdout == "ended True\n" * 2, second.stderr
    assert "goes on" not in first.stderr
    files = tmp_path / "files"
    assert second.stderr.count("the run goes on from step ") == 1
    assert f"in {files}\n" in second.stderr
    assert second.stderr.count("batches() of 64 samples yields nothing: the workers have") == 1


def test_the_lead_moves_when_it_dies(tmp_path: Path) -> None:
    done = run(tmp_path, LEADS, 3)
    assert sorted(done.stdout.splitlines()) == ["lead 1 True", "lead 2 False"], done.stderr


def test_a_death_near_the_end_leaves_the_run_complete(tmp_path: Path) -> None:
    done = run(tmp_path, DIES_AT_THE_END, 2, "--max-restarts", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1\n"
    assert "is started again in 0.1 s (restart 1 of 3)" in done.stderr
    assert "gossipdp: worker 1 is ended: the run is complete without it\n" in done.stderr
    assert "restart 2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_saves_and_says_so_in_one_line(tmp_path: Path) -> None:
    files = tmp_path / "files"
    launcher = subprocess.Popen(
        command(tmp_path, GOES_ON, 2), stderr=subprocess.PIPE, text=True, env=VARIABLES
    )
    try:
        wait_until(lambda: len(list(files.glob("trains-*"))) == 2, "both workers train")
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=100)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGINT, said
    assert "Traceback" not in said
    starting, stopped = said.splitlines()
    assert starting.startswith("gossipdp: starting 2 workers")
    assert stopped.startswith("gossipdp: stopped at step")
    assert stopped.endswith(f'; start it again with resume="auto" to go on from {files}')
    assert len(list(files.glob("worker-*/step-*.safetensors"))) == 2
