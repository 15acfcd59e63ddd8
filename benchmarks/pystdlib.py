"""Does exchanging help when no two workers see the same data? `gossipdp demo` on pystdlib.

Each method and seed is one run of the byte-level transformer on disjoint packages of Python's
standard library; the figure is the validation bits per byte of the final average. Prints a table
and writes benchmarks/results/pystdlib.{json,md}.
"""

import argparse
import statistics

from demo_runs import demo, write_report


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="a2cid2,gossip,none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=6_000)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    methods = options.methods.split(",")
    bits: dict[str, list[float]] = {method: [] for method in methods}
    distances: dict[str, list[float]] = {method: [] for method in methods}
    for seed in range(options.seeds):
        for method in methods:
            task = f"--workload pystdlib --disjoint --method {method} --seed {seed}"
            size = f"--workers {options.workers} --samples {options.samples}"
            result = demo(f"{task} {size}".split())
            bits[method].append(result["validation_bits_per_byte"])
            distances[method].append(result["consensus_distance"])
            print(f"seed {seed}, {method}: {bits[method][-1]:.4f} bits per byte", flush=True)
    rows = []
    for method in methods:
        gains = [none - own for none, own in zip(bits["none"], bits[method], strict=True)]
        rows.append(
            {
                "method": method,
                "bits_per_byte": bits[method],
                "mean": statistics.mean(bits[method]),
                "standard_error": standard_error(bits[method]),
                "gain_over_none": statistics.mean(gains),
                "gain_standard_error": standard_error(gains),
                "consensus_distance": distances[method],
            }
        )
    table = [
        "| method | bits per byte, mean ± standard error | gain over none ± standard error | "
        "consensus distance, median |",
        "|---|---|---|---|",
    ]
    table += [
        f"| {r['method']} | {r['mean']:.4f} ± {r['standard_error']:.4f} | "
        f"{r['gain_over_none']:.4f} ± {r['gain_standard_error']:.4f} | "
        f"{statistics.median(r['consensus_distance']):.3g} |"
        for r in rows
    ]
    command = (
        f"python benchmarks/pystdlib.py --methods {options.methods} --seeds {options.seeds} "
        f"--samples {options.samples} --workers {options.workers}"
    )
    write_report("pystdlib", command, rows, table)


if __name__ == "__main__":
    main()
