"""One run of `gossipdp demo`, for the benchmarks that are made of such runs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def demo(arguments: list[str]) -> dict[str, Any]:
    """Run the demo once and return its JSON; a run that fails ends the benchmark with its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "gossipdp.cli.main", "demo", *arguments]
        command += ["--json", str(path), "--output", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"gossipdp demo {' '.join(arguments)} failed:\n{done.stderr}")
        result: dict[str, Any] = json.loads(path.read_text())
        return result
