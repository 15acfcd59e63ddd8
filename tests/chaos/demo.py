"""``make chaos``: the demo with faults, as docs/faults.md gives it.

.venv/bin/python -m pytest -s tests/chaos/demo.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.timeout(300)
def test_the_demo_outlives_two_kills_and_a_stop(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    faults = ["--faults", "kill 0 at 5s; kill 3 at 9s; stop 8s 4 at 5s", "--restart"]
    command = [sys.executable, "-m", "gossipdp.cli.main", "demo", "--workers", "6", *faults]
    command += ["--output", str(tmp_path / "run"), "--json", str(results)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=280)
    found = json.loads(results.read_text())
    print(f"test accuracy {found['test_accuracy']}", *found["faults"], sep="\n    ")
    assert found["test_accuracy"] >= 0.97
    for fault in found["faults"]:
        assert None not in fault["detected_s"].values()
        assert fault["rejoined_s"] is not None
