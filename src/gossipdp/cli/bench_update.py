"""``gossipdp bench update``: the arithmetic of an exchange beside the speed of memory."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gossipdp.cli.output_files import check_output

if TYPE_CHECKING:
    from rich.table import Table

DtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class UpdateBenchmark:
    """Measure the arithmetic of an exchange, in one process on one core.

    Flow, snapshot, difference and averaging of a whole model, in the library's chunks, with each
    arithmetic there is; beside a plain copy, and beside the operations of the paper's released
    code. The runs are interleaved.
    """

    parameters: int = 11_250_000
    """How many."""

    dtype: DtypeName = "float32"
    """Precision of parameters and snapshots."""

    runs: int = 5
    """How often each is measured; the figures are medians."""

    json: Path | None = None
    """Also write the results to this file."""


def run(benchmark: UpdateBenchmark) -> int:
    """Measure, show and write the file; returns the exit status.

    Raises ValueError for bad input, before anything is measured.
    """
    check(benchmark)

    from rich.console import Console

    result = measure(benchmark, "gossipdp " + shlex.join(sys.argv[1:]))
    console = Console()
    console.print(_table(result))
    console.print(
        f"the library's update ({result['kernels']}) takes {result['update_ms']:.1f} ms, "
        f"{result['update_over_copy_bound']:.2f} times the copy bound of "
        f"{result['copy_bound_ms']:.1f} ms; the released code's sequence takes "
        f"{result['released_over_update']:.1f} times as long; ready to run "
        f"{result['start_up_ms']:.0f} ms after torch is imported, "
        f"{result['first_start_up_ms']:.0f} ms where nothing was compiled before",
        highlight=False,
        soft_wrap=True,
    )
    if benchmark.json is not None:
        benchmark.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        console.print(f"results: {benchmark.json}", highlight=False, soft_wrap=True, markup=False)
    return 0


def check(benchmark: UpdateBenchmark) -> None:
    """Raise ValueError for what cannot be meant."""
    if benchmark.dtype not in get_args(DtypeName):
        raise ValueError(
            f"there is no dtype {benchmark.dtype!r}; choose one of {', '.join(get_args(DtypeName))}"
        )
    for option, number in (("--parameters", benchmark.parameters), ("--runs", benchmark.runs)):
        if number < 1:
            raise ValueError(f"{option} is {number}; it must be at least 1")
    check_output("--json", benchmark.json)


def measure(benchmark: UpdateBenchmark, command: str) -> dict[str, Any]:
    """All figures, as ``--json`` writes them.

    Args:
        benchmark: what to measure.
        command: what the user ran, for the record.
    """
    import msgspec

    from gossipdp.cli.bench_update_runs import UpdateRuns, start_up_s
    from gossipdp.reproduce.stored import Provenance

    started_s = time.monotonic()
    runs = UpdateRuns(benchmark.parameters, benchmark.dtype)
    rows = runs.measure(benchmark.runs)
    name = runs.kernels
    medians = {row.name: row.median_ms for row in rows}
    update_ms = medians[f"{name}: one pass"]
    copy_ms = min(row.median_ms for row in rows if row.name.startswith("copy"))
    copy_bound_ms = copy_ms * runs.bound_bytes / runs.copied_bytes
    start_up_ms, first_start_up_ms = (1e3 * seconds for seconds in start_up_s(name, benchmark))
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
            "parameters": benchmark.parameters,
            "dtype": benchmark.dtype,
            "runs": benchmark.runs,
        },
        "provenance": msgspec.structs.asdict(
            Provenance.here(command, time.monotonic() - started_s)
        ),
    }


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("", "median (ms)", "least to largest", "over the copy bound"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['median_ms']:.2f}",
            f"{min(row['runs_ms']):.2f} to {max(row['runs_ms']):.2f}",
            f"{row['over_copy_bound']:.2f}",
        )
    table.add_row("copy bound", f"{result['copy_bound_ms']:.2f}", "", "1.00")
    return table
