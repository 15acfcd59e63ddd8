"""The benchmarks are scripts that import one another from their own directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
