"""``gossipdp bench``: finds the benchmark and runs it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

# A benchmark NAME is the module gossipdp.cli.bench_NAME, which holds the dataclass NameBenchmark
# (its docstring is the help) and run(benchmark) -> exit code, and imports nothing slow by itself.
BENCHMARKS = (
    "consensus",
    "exchange",
    "update",
)


def _any_benchmark() -> Any:
    union: Any = None
    for name in BENCHMARKS:
        module = importlib.import_module(f"gossipdp.cli.bench_{name}")
        kind = getattr(module, f"{name.capitalize()}Benchmark")
        option = _annotated[kind, tyro.conf.subcommand(name)]
        union = option if union is None else union | option
    return union


_annotated: Any = Annotated  # to mypy, a class in a variable is no type
_Benchmark: Any = _annotated[_any_benchmark(), tyro.conf.arg(name="")]


@dataclass(frozen=True)
class BenchArguments:
    """Measure on this machine; each benchmark has options of its own."""

    benchmark: _Benchmark


def run(arguments: BenchArguments) -> int:
    """Run the benchmark that was chosen; returns the exit status."""
    status: int = sys.modules[type(arguments.benchmark).__module__].run(arguments.benchmark)
    return status
