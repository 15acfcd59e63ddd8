"""What a slow worker costs the others: `gossipdp demo` with and without one, in turn.

Prints a table and writes benchmarks/results/slow_worker.{json,md}. The slow worker waits (it does
not burn CPU), so on shared cores the others may get faster; pinned workers have a core each.
"""

import argparse
import statistics

from demo_runs import demo, write_report

SETTINGS = {
    "4 workers, shared cores": (["--workers", "4"], 2),
    "2 workers, a core each": (["--workers", "2", "--pin"], 1),
}


def measure(name: str, rounds: int, samples: int) -> dict:
    """Interleave runs without and with the slow worker; compare the slowest of the others."""
    arguments, slow_rank = SETTINGS[name]
    speeds: dict[str, list[float]] = {"without": [], "with": []}
    waited: list[float] = []
    for _ in range(rounds):
        for case, extra in (("without", []), ("with", ["--slow-worker", f"{slow_rank}:4"])):
            result = demo([*arguments, *extra, "--samples", str(samples)])
            others = [w for w in result["workers"] if w["rank"] != slow_rank]
            speeds[case].append(min(w["samples_per_second"] for w in others))
            waited.append(max(w["waited_seconds"] for w in others) / result["train_seconds"])
    ratios = [b / a for a, b in zip(speeds["without"], speeds["with"], strict=True)]
    return {
        "setting": name,
        "slow_worker": f"rank {slow_rank}, 4 times, by waiting",
        "slowest_other_without": statistics.median(speeds["without"]),
        "slowest_other_with": statistics.median(speeds["with"]),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "largest_waited_share": max(waited),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved pairs of runs")
    parser.add_argument("--samples", type=int, default=24_000, help="samples a run")
    options = parser.parse_args()
    rows = [measure(name, options.rounds, options.samples) for name in SETTINGS]
    table = [
        "| setting | slow worker | samples/s of the slowest other, without | with | ratio "
        "(median, min to max) | largest share of time waited |",
        "|---|---|---|---|---|---|",
    ]
    table += [
        f"| {r['setting']} | {r['slow_worker']} | {r['slowest_other_without']:.0f} | "
        f"{r['slowest_other_with']:.0f} | {r['ratio_median']:.2f} ({r['ratio_min']:.2f} to "
        f"{r['ratio_max']:.2f}) | {r['largest_waited_share']:.4f} |"
        for r in rows
    ]
    command = (
        f"python benchmarks/slow_worker.py --rounds {options.rounds} --samples {options.samples}"
    )
    write_report("slow_worker", command, rows, table)


if __name__ == "__main__":
    main()
