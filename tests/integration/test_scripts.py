"""A user's script, unchanged, under both launchers; and the errors that a user may see."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "tied_transformer.py"
BIN = Path(sys.executable).parent
# With how many workers: each is a new interpreter, seconds of CPU time until it has torch.
LAUNCHERS = {
    "gossipdp run": (3, [str(BIN / "gossipdp"), "run", "-n", "3"]),
    "torchrun": (2, [
        str(BIN / "torchrun"), "--nproc-per-node", "2", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "127.0.0.1:0",
    ]),
}  # fmt: skip


def run(command: list[str], timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GOSSIP")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_ends_with_equal_parameters_on_all_workers(launcher: str, tmp_path: Path):
    num_workers, command = LAUNCHERS[launcher]
    done = run([*command, str(EXAMPLE), str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [(tmp_path / f"worker-{rank}.txt").read_text() for rank in range(num_workers)]
    hashes = {line.split()[0] for line in lines}
    assert len(hashes) == 1, lines
    assert all(f"of {num_workers} workers" in line for line in lines)


BAD_SCRIPT = """
import torch, gossipdp
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
gossipdp.GossipDataParallel(net, optimizer, graph="nonsense")
"""


def test_a_mistake_in_a_script_is_shown_once(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(BAD_SCRIPT)
    done = run([str(BIN / "gossipdp"), "run", "-n", "2", str(script)])
    assert done.returncode == 1
    assert "unknown graph 'nonsense'" in done.stderr
    # One summary at the end, whether the launcher ended the second worker before its own error.
    (summary,) = re.findall(r"^workers? [01](?:, 1)? ended .*", done.stderr, re.M | re.S)
    assert summary.count("ValueError: unknown graph 'nonsense'") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--graph", "nonsense"], "nonsense"),
        (["--comm-rate", "0"], "comm-rate"),
        (["--workers", "0"], "workers"),
        (["--slow-worker", "9:2"], "9"),
        (["--slow-worker", "1:0.5"], "0.5"),
        (["--method", "magic"], "magic"),
    ],
)
def test_bad_demo_arguments_are_one_line_and_start_nothing(arguments: list[str], message: str):
    done = run([str(BIN / "gossipdp"), "demo", *arguments], timeout_s=30)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
