"""card.py: its parts work on the CPU, so that the minutes of a card are not lost to a mistake."""

import json
import sys
import time

import pytest
from card import PARTS, ROOT, Settings, run_apart
from support.report import Spread


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


def test_the_page_shows_the_measured_figures():
    found = json.loads((ROOT / "benchmarks/results/card.json").read_text())["result"]
    page = (ROOT / "docs/performance.md").read_text().partition("## On a GPU")[2]
    trained = found["training"]["rows"]
    rows = {(row["model"], row["workers"], row["how"]): row["runs"] for row in trained}
    lines = page.partition("## ")[0].splitlines()[9:]
    shown = [line.split("|")[2:-1] for line in lines if "|" in line]
    expected = []
    for (model, num_workers, how), runs in rows.items():
        if how != "none":
            plain, gossip = (
                Spread.of(run["steps_per_s"] for run in each).median
                for each in (rows[model, num_workers, "none"], runs)
            )
            rate = runs[-1]["comm_rate"]
            figures = f"{plain:.1f}", f"{gossip:.1f}", f"{gossip / plain:.2f}", f"{rate:.2f}"
            expected.append([f" {each} " for each in figures])
    assert sorted(shown) == sorted(expected)
    chunks = {size: times for size, _, *times in found["speed"]["rows"]}
    assert f"{chunks[16][3]:.2f} ms on the device" in page
    assert chunks[16][3] <= 2 * found["speed"]["copy_ms"], "as fast as a copy of as many bytes"
    assert f"without a peer: {chunks[32][0]:.0f} ms." in page
    assert f"after {found['rejoin']['lost_s']:.2f} s" in page
    assert f"after {found['rejoin']['restarted_s']:.1f} s" in page


def test_a_part_that_fails_or_hangs_says_why():
    assert run_apart([sys.executable, "-c", "pass"], 60.0) is None
    failing = "raise ValueError('no such kernel')"
    assert run_apart([sys.executable, "-c", failing], 60.0) == "ValueError: no such kernel"
    began_s = time.monotonic()
    # Its child holds standard error open.
    hanging = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    assert run_apart([sys.executable, "-c", hanging], 0.5) == "not done after 0 s"
    assert time.monotonic() - began_s < 300.0
