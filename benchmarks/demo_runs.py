"""What the benchmarks that run `gossipdp demo` share: one run, and the report of many."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def demo(arguments: list[str]) -> dict:
    """Run the demo once and return its JSON; a run that fails ends the benchmark with its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "gossipdp.cli.main", "demo", *arguments]
        command += ["--json", str(path), "--output", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"gossipdp demo {' '.join(arguments)} failed:\n{done.stderr}")
        return json.loads(path.read_text())


def write_report(name: str, command: str, rows: list[dict], table: list[str]) -> None:
    """Print the table; write it and the rows with command, commit and hardware."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    import torch

    hardware = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
    report = {"command": command, "commit": commit, "hardware": hardware, "rows": rows}
    lines = [f"`{command}`, commit {commit}, {hardware}.", "", *table]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
