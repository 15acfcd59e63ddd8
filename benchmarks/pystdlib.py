"""Does exchanging help when no two workers see the same data? `gossipdp demo` on pystdlib.

Each method and seed is one run of the byte-level transformer on disjoint stretches of Python's
standard library. The figures are validation bits per byte: of the final average, and the mean over
the workers before averaging, which is what `none` had before one-shot averaging spoilt it. Prints
a table and writes benchmarks/results/pystdlib.{json,md}.
"""

import argparse
import statistics

from support.demo_runs import demo
from support.report import Report, Table


def shown(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def mean_worker(run: dict) -> float:
    return statistics.mean(worker["metric_before_average"] for worker in run["workers"])


def row(method: str, runs: list[dict], runs_of_none: list[dict]) -> dict:
    """One method's values, one a seed; gains are paired by seed."""
    final = [run["validation_bits_per_byte"] for run in runs]
    none = [run["validation_bits_per_byte"] for run in runs_of_none]
    none_workers = list(map(mean_worker, runs_of_none))
    return {
        "method": method,
        "final": final,
        "gain_over_none": [a - b for a, b in zip(none, final, strict=True)],
        "mean_worker": list(map(mean_worker, runs)),
        "gain_over_mean_worker_of_none": [a - b for a, b in zip(none_workers, final, strict=True)],
        "achieved_comm_rate": [run["achieved_comm_rate"] for run in runs],
        "consensus_distance": [run["consensus_distance"] for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="a2cid2,gossip,none")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=6_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="2 short runs a method")
    options = parser.parse_args()
    methods = options.methods.split(",")
    if "none" not in methods or options.seeds < 2:
        parser.error("a comparison needs the method none, and at least 2 seeds for its error")
    seeds = range(2 if options.quick else options.seeds)
    samples = 300 if options.quick else options.samples
    report = Report("pystdlib", "Does exchanging help on disjoint data?", quick=options.quick)
    runs: dict[str, list[dict]] = {method: [] for method in methods}
    for seed in seeds:
        for method in methods:
            task = f"--workload pystdlib --disjoint --method {method} --seed {seed}"
            size = f"--workers {options.workers} --samples {samples}"
            runs[method].append(demo(f"{task} {size}".split()))
            bits = runs[method][-1]["validation_bits_per_byte"]
            print(f"seed {seed}, {method}: {bits:.4f} bits per byte", flush=True)
    rows = [row(method, runs[method], runs["none"]) for method in methods]
    report.tables.append(
        Table(
            "Validation bits per byte, workers on disjoint stretches",
            ("method", "final average", "gain over none's final average", "mean worker before",
             "gain over none's mean worker", "achieved comm rate", "consensus distance, median"),
            [
                (
                    r["method"],
                    shown(r["final"]),
                    shown(r["gain_over_none"]),
                    shown(r["mean_worker"]),
                    shown(r["gain_over_mean_worker_of_none"]),
                    f"{statistics.mean(r['achieved_comm_rate']):.2f}",
                    f"{statistics.median(r['consensus_distance']):.3g}",
                )
                for r in rows
            ],
            f"Mean ± standard error over {len(seeds)} seeds, gains paired by seed.",
        )
    )  # fmt: skip
    report.write(rows)


if __name__ == "__main__":
    main()
