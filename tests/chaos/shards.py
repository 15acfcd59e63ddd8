"""``make chaos``: replicas of two processes, of which one process after the other is killed.

.venv/bin/python -m pytest -s tests/chaos/shards.py
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_processes import VARIABLES
from sharded_runs import BUDGET, dying_replica, three_by_two
from torch import Tensor

pytestmark = pytest.mark.processes
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_gpt.py"


def test_three_by_two(workers: Callable) -> None:
    found = workers(three_by_two, 6, timeout_s=300, nproc_per_replica=2)
    first: Tensor = found[0].values
    assert [seen.replica for seen in found] == [0, 0, 1, 1, 2, 2]
    for seen in found:
        assert seen.num_replicas == seen.num_averaged == 3
        assert seen.exchanges > 0
        assert torch.equal(seen.values, first)


def test_a_replica_that_does_not_come_back(workers: Callable, tmp_path: Path) -> None:
    """Without restarts the other replica trains on, and ends with a result."""
    results = tmp_path / "results"
    results.mkdir()
    with pytest.raises(Exception, match=r"lost its process 1, which died of signal 9"):
        workers(dying_replica, 4, (tmp_path, 9, results), timeout_s=300, nproc_per_replica=2)
    written = sorted(results.iterdir())
    assert [path.name for path in written] == ["0.0", "0.1"]
    first, second = map(torch.load, written)
    assert first["num_averaged"] == second["num_averaged"] == 1
    assert first["samples"] >= 2 * BUDGET
    assert torch.equal(first["values"], second["values"])


@pytest.mark.parametrize("launcher", ["gossipdp", "torchrun"])
def test_the_example(launcher: str) -> None:
    if launcher == "gossipdp":
        words = ["gossipdp", "run", "-n", "4", "--nproc-per-replica", "2", str(EXAMPLE)]
    else:
        words = ["torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLE), "--shards", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--samples", "600", "--width", "32"],
        capture_output=True,
        text=True,
        check=False,
        env=VARIABLES | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "average of 2 replicas" in line]
    assert len(shown) == 2, done.stdout
