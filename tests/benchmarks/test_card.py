"""card.py: its parts work on the CPU, so that the minutes of a card are not lost to a mistake."""

import json
import sys
import time

import pytest
from card import PARTS, Settings, run_apart


@pytest.mark.processes
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_each_part_measures_and_shows(part):
    found = json.loads(json.dumps(part.measure(Settings("cpu", quick=True))))
    table = part.show(found)
    assert table.rows
    assert all(len(row) == len(table.head) for row in table.rows)
    match part.name:
        case "training":
            assert all(run["steps_per_s"] > 0 for row in found["rows"] for run in row["runs"])
        case "rejoin":
            assert found["averaged"] == 2
            assert 0 < found["lost_s"] < found["restarted_s"]


def test_a_part_that_fails_or_hangs_says_why():
    assert run_apart([sys.executable, "-c", "pass"], 60.0) is None
    failing = "raise ValueError('no such kernel')"
    assert run_apart([sys.executable, "-c", failing], 60.0) == "ValueError: no such kernel"
    began_s = time.monotonic()
    # Its child holds standard error open.
    hanging = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    assert run_apart([sys.executable, "-c", hanging], 0.5) == "not done after 0 s"
    assert time.monotonic() - began_s < 300.0
