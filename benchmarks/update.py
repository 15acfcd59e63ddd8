"""The arithmetic of an exchange beside the speed of memory, in one process on one core.

    python benchmarks/update.py                    writes benchmarks/results/update.{json,md}
    python benchmarks/update.py --dtype bfloat16   writes update_bfloat16 there
    python benchmarks/update.py --json PATH        writes the figures to PATH alone

Wants a quiet machine: all is measured on one core, but memory is shared by all of them.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import tyro
from support.provenance import Provenance
from support.report import Report, Spread, Table, Target, run_script
from update_runs import UpdateRuns, start_up_s

from gossipdp.rules import at_least_1, check_flags, option, output_file

QUICK_PARAMETERS = 300_000


@dataclass(frozen=True)
class UpdateBenchmark:
    """Measure the arithmetic of an exchange, in one process on one core.

    Flow, snapshot, difference and averaging of a whole model, in the library's chunks, with each
    arithmetic there is; beside a plain copy, and beside the operations of the paper's released
    code. The runs are interleaved.
    """

    parameters: int = option(11_250_000, at_least_1)
    """Number of parameters."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of parameters and snapshots."""

    runs: int = option(5, at_least_1)
    """Measurements of each; the figures are medians."""

    json: Path | None = option(None, output_file)
    """Write the results to this file instead of benchmarks/results."""

    quick: bool = False
    """A small model, to see that it works; results go to runs/benchmarks."""


def main() -> None:
    benchmark = tyro.cli(UpdateBenchmark, config=(tyro.conf.FlagCreatePairsOff,))
    name = "update" if benchmark.dtype == "float32" else f"update_{benchmark.dtype}"
    report = Report(name, "The arithmetic of an exchange", quick=benchmark.quick)
    result = measure(benchmark)
    rows = [
        (row["name"], Spread.of(row["runs_ms"]).text(), f"{row['over_copy_bound']:.2f}")
        for row in result["rows"]
    ]
    rows.append(("copy bound", f"{result['copy_bound_ms']:.2f}", "1.00"))
    report.tables.append(
        Table(
            f"{result['configuration']['parameters']:,} parameters, {benchmark.dtype}, one core, "
            "one thread",
            ("", "ms", "over the copy bound"),
            rows,
            f"Medians of {benchmark.runs} interleaved runs (least to greatest), one more "
            f"uncounted. The copy moves {result['copy_gb_per_s']:.1f} GB/s, read and written. The "
            f"copy bound is the time of that copy for the bytes of one update. The library "
            f"computes with {result['kernels']}, ready {result['start_up_ms']:.0f} ms after torch "
            f"is imported, {result['first_start_up_ms']:.0f} ms where nothing was compiled before.",
        )
    )
    report.targets += [
        Target("update over the copy bound", result["update_over_copy_bound"], 1.3),
        Target("released code over update", result["released_over_update"], 4.0, at_most=False),
    ]
    report.write(result, benchmark.json)


def measure(benchmark: UpdateBenchmark) -> dict[str, Any]:
    """All figures, as ``--json`` writes them.

    Raises:
        ValueError: There is nothing to measure.
    """
    check_flags(benchmark)
    started_s = time.monotonic()
    num_parameters = QUICK_PARAMETERS if benchmark.quick else benchmark.parameters
    runs = UpdateRuns(num_parameters, benchmark.dtype)
    rows = runs.measure(benchmark.runs)
    name = runs.kernels
    medians = {row.name: row.median_ms for row in rows}
    update_ms = medians[f"{name}: one pass"]
    copy_ms = min(row.median_ms for row in rows if row.name.startswith("copy"))
    copy_bound_ms = copy_ms * runs.bound_bytes / runs.copied_bytes
    start_up_ms, first_start_up_ms = (
        1e3 * seconds for seconds in start_up_s(name, benchmark.dtype)
    )
    return {
        "update_ms": update_ms,
        "copy_bound_ms": copy_bound_ms,
        "released_sequence_ms": medians["released code's sequence"],
        "start_up_ms": start_up_ms,
        "first_start_up_ms": first_start_up_ms,
        "boundary_ms": medians[f"{name}: boundary"],
        "update_over_copy_bound": update_ms / copy_bound_ms,
        "released_over_update": medians["released code's sequence"] / update_ms,
        "copy_gb_per_s": runs.copied_bytes / copy_ms / 1e6,
        "kernels": name,
        "core": runs.core,
        "rows": [
            {
                **asdict(row),
                "median_ms": row.median_ms,
                "over_copy_bound": row.median_ms / copy_bound_ms,
            }
            for row in rows
        ],
        "configuration": {
            "parameters": num_parameters,
            "dtype": benchmark.dtype,
            "runs": benchmark.runs,
        },
        "provenance": msgspec.structs.asdict(Provenance.here(time.monotonic() - started_s)),
    }


if __name__ == "__main__":
    run_script(main)
