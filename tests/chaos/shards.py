"""``make chaos``: the example of shards under both launchers, by real commands.

.venv/bin/python -m pytest -s tests/chaos/shards.py
"""

from pathlib import Path

import pytest
from run_processes import VARIABLES, run_python

# On a busy machine five interpreters that import torch take their time.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_gpt.py"
ENVIRONMENT = VARIABLES | {"PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}


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
