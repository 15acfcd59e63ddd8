"""``make chaos``: replicas of two processes: more of them, killed, asked to end, by real commands.

.venv/bin/python -m pytest -s tests/chaos/shards.py
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sharded_runs
import torch
from run_processes import VARIABLES, run_python
from sharded_runs import BUDGET, all_train, check_saved, dying_replica, three_by_two
from torch import Tensor
from waiting import LONGEST_S, wait_until

# On a busy machine five interpreters that import torch take their time.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_gpt.py"
ENVIRONMENT = VARIABLES | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
# The functions of the tests, as a program.
ASKED = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(sharded_runs.__file__).parent)!r})
from sharded_runs import until_asked
until_asked(Path(sys.argv[1]), is_one_slow=False)
"""


def test_three_by_two(workers: Callable) -> None:
    found = workers(three_by_two, 6, nproc_per_replica=2)
    first: Tensor = found[0].values
    assert [seen.replica for seen in found] == [0, 0, 1, 1, 2, 2]
    for seen in found:
        assert seen.num_replicas == seen.num_averaged == 3
        assert seen.exchanges > 0
        assert torch.equal(seen.values, first)


def test_a_replica_that_does_not_come_back(workers: Callable, tmp_path: Path) -> None:
    """Without restarts the other replica trains on, and ends with a result."""
    with pytest.raises(Exception, match=r"lost its process 1, which died of signal 9"):
        workers(dying_replica, 4, (9, tmp_path), nproc_per_replica=2)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == ["0.0", "0.1"]
    first, second = map(torch.load, written)
    assert first["num_averaged"] == second["num_averaged"] == 1
    assert first["samples"] >= 2 * BUDGET
    assert torch.equal(first["values"], second["values"])


def test_gossipdp_run_ends_all_replicas_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKED)
    words = ["-m", "gossipdp", "run", "-n", "4", "--nproc-per-replica", "2"]
    with subprocess.Popen(
        [sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path)], env=ENVIRONMENT
    ) as run:
        wait_until(lambda: all_train(tmp_path) or run.poll() is not None, "all train")
        run.send_signal(signal.SIGTERM)
        assert run.wait(LONGEST_S) == 128 + signal.SIGTERM
    check_saved(tmp_path)


@pytest.mark.parametrize("launcher", ["gossipdp", "torchrun"])
def test_the_example(launcher: str) -> None:
    if launcher == "gossipdp":
        words = ["gossipdp", "run", "-n", "4", "--nproc-per-replica", "2", str(EXAMPLE)]
    else:
        words = ["torch.distributed.run", "--nproc-per-node", "4", str(EXAMPLE), "--shards", "2"]
    words += ["--samples", "600", "--width", "32"]
    done = run_python("-m", *words, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if "average of 2 replicas" in line]
    assert len(shown) == 2, done.stdout
