"""Time until a death is noticed and until a killed worker is back, with real processes.

    python benchmarks/faults.py                    writes benchmarks/results/faults.{json,md}

Runs of `gossipdp demo --faults "kill RANK at TIME" --restart`: kill -9 of another rank in each.
Noticed: from the kill to the notice of each worker that lives; back: until another worker noticed
that the killed one takes part again, after a start of Python, the import of torch and a neighbour's
state.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from support.report import Report, Spread, Table

NUM_WORKERS = 4
KILLED_AT_S = 4.0


def kill(rank: int, seed: int) -> dict[str, Any]:
    """Run the demo once and return the fault; a run that fails ends the benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "gossipdp.cli.main", "demo", "--restart"]
        command += ["--workers", str(NUM_WORKERS), "--seed", str(seed)]
        command += ["--faults", f"kill {rank} at {KILLED_AT_S:g}s"]
        subprocess.run([*command, "--json", str(path), "--output", folder], check=True)
        fault: dict[str, Any]
        (fault,) = json.loads(path.read_text())["faults"]
        return fault


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs, a kill in each")
    parser.add_argument("--quick", action="store_true", help="one run, to see that it works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    report = Report("faults", "A worker is killed", quick=options.quick)
    kills = [kill(number % NUM_WORKERS, seed=number) for number in range(rounds)]
    # Who noticed nothing counts as never.
    noticed = Spread.of(
        float("inf") if seconds is None else seconds
        for fault in kills
        for seconds in fault["detected_s"].values()
    )
    back = Spread.of(
        float("inf") if fault["rejoined_s"] is None else fault["rejoined_s"] for fault in kills
    )
    report.tables.append(
        Table(
            f"{rounds} kills, {NUM_WORKERS} workers on a ring",
            ("", "seconds"),
            [
                ("noticed, each worker that lived", noticed.text(".3f")),
                ("back in the run", back.text(".1f")),
            ],
            "Medians (least to greatest).",
        )
    )
    report.write({"kills": kills, "noticed_s": noticed, "back_s": back})


if __name__ == "__main__":
    main()
