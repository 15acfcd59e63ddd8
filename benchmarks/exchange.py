"""How fast two workers of one machine exchange: `gossipdp bench exchange`, as a report.

    python benchmarks/exchange.py

Writes benchmarks/results/exchange.{json,md}. Two processes, each pinned to a core of its own: wants
two quiet cores.
"""

import argparse

from common import Report, Spread, Table, Target

from gossipdp.cli.bench_exchange import ExchangeBenchmark, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="little data, to see that it works")
    options = parser.parse_args()
    megabytes = 2.0 if options.quick else options.megabytes
    report = Report("exchange", "Exchange between two processes", quick=options.quick)
    result = measure(ExchangeBenchmark(megabytes, options.rounds), "exchange")
    rows = [
        (row["text"], Spread.of(row["gbps"]).text(), f"{row['median_cpu_ms']:.0f}")
        for row in result["rows"]
    ]
    report.tables.append(
        Table(
            f"{megabytes:g} MB of float32 each way",
            ("", "GB/s each way", "CPU ms"),
            rows,
            f"Medians of {options.rounds} interleaved rounds (least to greatest), one more "
            "uncounted; GB/s over the wall time of the slower process, CPU time of that process. "
            "What every round brought was verified.",
        )
    )
    gloo, updated = result["gloo_gbps"], result["gloo_with_update_gbps"]
    report.targets += [
        Target(f"{what} over {beside}", value, limit, at_most=False)
        for what, beside, value, limit in (
            ("shared memory", "gloo", result["shared_memory_gbps"] / gloo, 3.0),
            ("TCP", "gloo", result["tcp_gbps"] / gloo, 1.3),
            ("TCP", "a bare socket", result["tcp_gbps"] / result["bare_socket_gbps"], 0.9),
            (
                "shared memory with update",
                "gloo with update",
                result["shared_memory_with_update_gbps"] / updated,
                1.5,
            ),
            (
                "TCP with update",
                "gloo with update",
                result["tcp_with_update_gbps"] / updated,
                1.1,
            ),
        )
    ]
    report.write(result)


if __name__ == "__main__":
    main()
