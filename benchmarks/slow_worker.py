"""What a slow worker costs the others: `gossipdp demo` with and without one, in turn.

Prints a table and writes benchmarks/results/slow_worker.{json,md}. The slow worker waits (it does
not burn CPU), so on shared cores the others may get faster; pinned workers have a core each.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SETTINGS = {
    "4 workers, shared cores": ["--workers", "4"],
    "2 workers, a core each": ["--workers", "2", "--pin"],
}
SLOW = {"4 workers, shared cores": 2, "2 workers, a core each": 1}


def demo(arguments: list[str], samples: int) -> dict:
    """Run the demo once and return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo.json"
        command = [sys.executable, "-m", "gossipdp.cli.main", "demo", *arguments]
        command += ["--samples", str(samples), "--json", str(path), "--output", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="interleaved pairs of runs")
    parser.add_argument("--samples", type=int, default=24_000, help="samples a run")
    options = parser.parse_args()
    rows = []
    for name, arguments in SETTINGS.items():
        slow_rank = SLOW[name]
        speeds: dict[str, list[float]] = {"without": [], "with": []}
        waited: list[float] = []
        for _ in range(options.rounds):
            for case, extra in (("without", []), ("with", ["--slow-worker", f"{slow_rank}:4"])):
                result = demo([*arguments, *extra], options.samples)
                others = [w for w in result["workers"] if w["rank"] != slow_rank]
                speeds[case].append(min(w["samples_per_second"] for w in others))
                waited.append(max(w["waited_seconds"] for w in others) / result["train_seconds"])
        ratios = [b / a for a, b in zip(speeds["without"], speeds["with"], strict=True)]
        rows.append(
            {
                "setting": name,
                "slow_worker": f"rank {slow_rank}, 4 times, by waiting",
                "slowest_other_without": statistics.median(speeds["without"]),
                "slowest_other_with": statistics.median(speeds["with"]),
                "ratio_median": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "largest_waited_share": max(waited),
            }
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {
        "command": "python benchmarks/slow_worker.py "
        f"--rounds {options.rounds} --samples {options.samples}",
        "commit": commit,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}",
        "rows": rows,
    }
    lines = [
        f"`{report['command']}`, commit {commit}, {report['hardware']}.",
        "",
        "| setting | slow worker | samples/s of the slowest other, without | with | ratio "
        "(median, min to max) | largest share of time waited |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['setting']} | {r['slow_worker']} | {r['slowest_other_without']:.0f} | "
        f"{r['slowest_other_with']:.0f} | {r['ratio_median']:.2f} ({r['ratio_min']:.2f} to "
        f"{r['ratio_max']:.2f}) | {r['largest_waited_share']:.4f} |"
        for r in rows
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "slow_worker.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "slow_worker.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
