"""The arithmetic of an exchange beside the speed of memory: `gossipdp bench update`, as a report.

    python benchmarks/update.py
    python benchmarks/update.py --dtype bfloat16

Writes benchmarks/results/update.{json,md} (update_bfloat16 for that precision). Wants a quiet
machine: all is measured on one core, but memory is shared by all of them.
"""

import argparse

from common import Missing, Report, Spread, Table, Target

from gossipdp.cli.bench_update import UpdateBenchmark, measure
from gossipdp.dynamics.arithmetic import has_numba


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=11_250_000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it works")
    options = parser.parse_args()
    num_parameters = 300_000 if options.quick else options.parameters
    name = "update" if options.dtype == "float32" else f"update_{options.dtype}"
    report = Report(name, "The arithmetic of an exchange", quick=options.quick)
    result = measure(UpdateBenchmark(num_parameters, options.dtype, options.runs), name)
    rows = [
        (row["name"], Spread.of(row["runs_ms"]).text(), f"{row['over_copy_bound']:.2f}")
        for row in result["rows"]
    ]
    rows.append(("copy bound", f"{result['copy_bound_ms']:.2f}", "1.00"))
    report.tables.append(
        Table(
            f"{num_parameters:,} parameters, {options.dtype}, one core, one thread",
            ("", "ms", "over the copy bound"),
            rows,
            f"Medians of {options.runs} interleaved runs (least to greatest), one more uncounted. "
            f"The copy moves {result['copy_gb_per_s']:.1f} GB/s, read and written. The library "
            f"computes with {result['kernels']}, ready {result['start_up_ms']:.0f} ms after torch "
            f"is imported, {result['first_start_up_ms']:.0f} ms where nothing was compiled before.",
        )
    )
    report.targets += [
        Target("update over the copy bound", result["update_over_copy_bound"], 1.3),
        Target("released code over update", result["released_over_update"], 4.0, at_most=False),
    ]
    if not has_numba():
        report.missing.append(Missing("numba", "it is not installed"))
    report.write(result)


if __name__ == "__main__":
    main()
