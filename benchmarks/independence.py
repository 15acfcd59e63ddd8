"""The exchanges of the others while one worker misbehaves: simulated, and with real processes.

    python benchmarks/independence.py                simulated: results/independence.{json,md,png}
    python benchmarks/independence.py --real         four processes: results/independence_real.{…}

Each row compares the other workers with the same run in which that worker does not take part, on
the graph over the others. Simulated workers are the real protocol on a virtual clock: steps of 50
ms, 0.5 ms from worker to worker, 3 ms for a model. Counted from half a second after the event; a
bad link, on which an exchange takes a second, from when each neighbour has had three: a single long
one may be chance. Windows of half a second; medians of three seeds.

Real processes step every 50 ms (they sleep; the exchanges are real), all neighbours of one another.
SIGSTOP stops one for 8 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from misbehaving import BAD_TRANSFER_S, WHATS, WINDOW_S, Course, Event, What, watch
from support.report import Report, Spread, Table, results_folder

from gossipdp.graph.topology import build_graph

GRAPHS = [
    ("complete", 3), ("complete", 4), ("ring", 4), ("ring", 16), ("exponential", 8),
    ("exponential", 16),
]  # fmt: skip
OF_64: tuple[What, ...] = ("stop", "slow 16")  # of the exponential graph: each takes minutes
RATES: tuple[float | None, ...] = (1.0, None)
BEGINS_S, AFTER_S = 4.0, 4.0
LASTS_S: dict[What, float] = {"stop": 8.0, "bad link": 40.0}
OTHERS_LAST_S = 4.0
SHOWN_S = 20.0
SHARE, LEAST_SHARE = 0.9, 0.8
SPARE = 1.5
"""A worker that chooses its rate exchanges at most so many times that rate in all."""

STOP_S, STEP_S, NUM_WORKERS = 8.0, 0.05, 4
REAL_BEGINS_S, REAL_LASTS_S = 4.0, 16.0


def begins_to_count_s(graph: str, num_workers: int, event: Event) -> float:
    """Return from when on the others are to exchange as if the worker were not there."""
    if event.what != "bad link":
        return event.begins_s + 0.5
    num_neighbours = build_graph(graph, num_workers).degree[event.rank]
    return event.begins_s + 1.0 + 3 * BAD_TRANSFER_S * num_neighbours


def bound(graph: str, num_workers: int, event: Event, comm_rate: float | None) -> float:
    """Return the share of the worst one that the graph allows.

    On a ring of four the two neighbours of a worker that cannot exchange have one neighbour left,
    and the same one. If it chooses its rate, it makes no more than ``SPARE`` times as many.
    """
    still = event.what in ("stop", "held", "poisoned", "bad link")
    return SPARE / 2 if still and (graph, num_workers, comm_rate) == ("ring", 4, None) else 1.0


def simulated(row: tuple[What, str, int, float | None, int]) -> Course:
    """Run one row with one seed."""
    what, graph, num_workers, comm_rate, seed = row
    event = Event(what, num_workers - 1, BEGINS_S, LASTS_S.get(what, OTHERS_LAST_S))
    return watch(graph, num_workers, event, comm_rate=comm_rate, seed=seed, after_s=AFTER_S)


def simulate(num_seeds: int, report: Report) -> list[dict[str, Any]]:
    """Run all rows, and fill in the table."""
    cases = [
        (what, graph, num_workers, comm_rate)
        for what in WHATS
        for graph, num_workers in (*GRAPHS, *([("exponential", 64)] if what in OF_64 else ()))
        for comm_rate in RATES
    ]
    jobs = [(*case, seed) for case in cases for seed in range(num_seeds if case[2] < 64 else 1)]
    courses: dict[tuple[Any, ...], list[Course]] = {case: [] for case in cases}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for number, (job, course) in enumerate(zip(jobs, pool.map(simulated, jobs), strict=True)):
            courses[job[:4]].append(course)
            print(f"{number + 1} of {len(jobs)}: {job}", flush=True)
    found = []
    for (what, graph, num_workers, comm_rate), each in courses.items():
        event = each[0].event
        begins_s = begins_to_count_s(graph, num_workers, event)
        ends_s = event.begins_s + event.lasts_s
        least = bound(graph, num_workers, event, comm_rate)
        row = {
            "what": what,
            "graph": f"{graph} {num_workers}",
            "comm_rate": "auto" if comm_rate is None else f"{comm_rate:g}",
            "all": Spread.of(course.share(begins_s, ends_s) for course in each),
            "least": Spread.of(course.least_share(begins_s, ends_s) for course in each),
            "after": Spread.of(course.share(ends_s + 1.0, ends_s + AFTER_S) for course in each),
            "bound_of_least": least,
            "course": _over_time(each),
        }
        is_met = row["all"].median >= SHARE and row["least"].median >= LEAST_SHARE * least
        found.append({**row, "is_met": is_met and (what == "kill" or row["after"].median >= SHARE)})
    report.tables.append(
        Table(
            "Exchanges of the others, of what they make without that worker",
            ("event", "graph", "rate", "all", "the worst one", "again, 1 s after", ""),
            [
                (
                    row["what"],
                    row["graph"],
                    row["comm_rate"],
                    row["all"].text(),
                    row["least"].text(),
                    row["after"].text(),
                    "" if row["is_met"] else "below",
                )
                for row in found
            ],
            "Medians of the seeds (least to greatest). `below`: all under 0.9, or the worst one "
            "under 0.8 (of 0.75 on the ring of four that chooses its rate, where two workers have "
            "one neighbour left, which makes at most 1.5 times its rate).",
        )
    )
    return found


def _over_time(courses: Sequence[Course]) -> list[float]:
    """Return the others' share in each window, over all seeds, from 2 s before the event."""
    event = courses[0].event
    first = round((event.begins_s - 2.0) / WINDOW_S)
    last = round((event.begins_s + min(event.lasts_s + AFTER_S, SHOWN_S)) / WINDOW_S)
    shares = []
    for window in range(first, last):
        pooled = [
            (c.seen[rank][window], c.removed[rank][window]) for c in courses for rank in c.others
        ]
        shares.append(sum(seen for seen, _ in pooled) / max(1, sum(alone for _, alone in pooled)))
    return shares


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the others' exchanges over time: a panel for each event, a line for each graph."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey=True)
    shown = ("complete 3", "complete 4", "ring 4", "ring 16", "exponential 16")
    for panel, what in zip(panels.flat, WHATS, strict=True):
        for graph, rate in ((graph, rate) for rate in ("1", "auto") for graph in shown):
            row = next(
                row
                for row in found
                if (row["what"], row["graph"], row["comm_rate"]) == (what, graph, rate)
            )
            times_s = [WINDOW_S * (index + 0.5) - 2.0 for index in range(len(row["course"]))]
            style = {"color": f"C{shown.index(graph)}", "linestyle": "-" if rate == "1" else ":"}
            panel.plot(times_s, row["course"], linewidth=1.2, **style)
        panel.axvspan(0.0, min(LASTS_S.get(what, OTHERS_LAST_S), SHOWN_S), color="0.92", zorder=0)
        panel.axhline(SHARE, color="0.6", linewidth=0.8, linestyle="--")
        panel.set_title(what, fontsize=10)
        panel.set_ylim(0.0, 1.8)
    for graph in shown:
        panels.flat[0].plot([], [], color=f"C{shown.index(graph)}", label=graph)
    panels.flat[0].plot([], [], color="0.3", label="one a step")
    panels.flat[0].plot([], [], color="0.3", linestyle=":", label="auto")
    figure.legend(loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.supxlabel("seconds since the event (grey: while it lasts)", fontsize=10)
    figure.supylabel("exchanges of the others, of those without that worker", fontsize=10)
    figure.savefig(path, dpi=110)


# --- real processes ------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
import torch
from gossipdp import GossipDataParallel
folder, until_s, comm_rate = sys.argv[1], float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
net = torch.nn.Linear(500, 500)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
rate = comm_rate if comm_rate == "auto" else float(comm_rate)
model = GossipDataParallel(net, optimizer, graph="complete", comm_rate=rate)
rank, counts = int(os.environ["RANK"]), []
begun = time.monotonic()
with open(f"{folder}/{rank}.pid", "w") as file:
    file.write(str(os.getpid()))
while time.monotonic() < begun + until_s:
    optimizer.zero_grad()
    net(torch.randn(1, 500)).square().mean().backward()
    optimizer.step()
    counts.append((time.monotonic(), model.stats().exchanges))
    time.sleep(0.05)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(counts, file)
os._exit(0)
"""


def real(num_workers: int, comm_rate: str, stops: bool) -> dict[str, Any]:
    """Run real workers, the last of which may be stopped; return the others' exchanges by window.

    Windows count from the stop, or from the same moment of a run without it.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        until_s = REAL_BEGINS_S + REAL_LASTS_S
        command = [sys.executable, "-m", "gossipdp.cli.main", "run", "-n", str(num_workers)]
        command += [str(script), folder, str(until_s), comm_rate]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pids = [Path(folder) / f"{rank}.pid" for rank in range(num_workers)]
        _until(lambda: all(pid.exists() and pid.read_text() for pid in pids), 120.0)
        time.sleep(REAL_BEGINS_S)
        began_s = time.monotonic()
        if stops:
            pid = int(pids[-1].read_text())
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(pid, signal.SIGCONT)
        others = range(num_workers - 1) if stops else range(num_workers)
        files = [Path(folder) / f"{rank}.json" for rank in others]
        _until(lambda: all(file.exists() for file in files) and process.poll() is not None, 60.0)
        counts = [json.loads(file.read_text()) for file in files]
    windows = range(round(-2.0 / WINDOW_S), round((STOP_S + AFTER_S) / WINDOW_S))
    return {
        "workers": num_workers,
        "comm_rate": comm_rate,
        "stops": stops,
        "by_window": [
            [_between(each, began_s + WINDOW_S * window) for window in windows] for each in counts
        ],
    }


def _between(counts: Sequence[tuple[float, int]], begin_s: float) -> int:
    """Return the exchanges of a worker in one window."""
    at = partial(_count_at, counts)
    return at(begin_s + WINDOW_S) - at(begin_s)


def _count_at(counts: Sequence[tuple[float, int]], time_s: float) -> int:
    return max((count for at_s, count in counts if at_s <= time_s), default=0)


def _until(holds: Callable[[], bool], longest_s: float) -> None:
    ends_s = time.monotonic() + longest_s
    while not holds():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the workers were not ready within {longest_s:g} s")
        time.sleep(0.05)


def measure_real(rounds: int, report: Report) -> list[dict[str, Any]]:
    """Stop one of four, in turn with runs of three; pool the rounds, window by window."""
    runs = []
    for number in range(rounds):
        for comm_rate in ("1", "auto"):
            for num_workers, stops in ((NUM_WORKERS, True), (NUM_WORKERS - 1, False)):
                print(f"round {number + 1}: {num_workers} workers, {comm_rate}", flush=True)
                runs.append(real(num_workers, comm_rate, stops))
    rows = []
    for comm_rate in ("1", "auto"):
        own = [run for run in runs if run["comm_rate"] == comm_rate]
        alone = [sum(map(sum, run["by_window"])) for run in own if not run["stops"]]
        num_windows = len(own[0]["by_window"][0])
        usual = sum(alone) / len(alone) / num_windows
        seen = [
            sum(worker[window] for run in own if run["stops"] for worker in run["by_window"])
            / rounds
            / usual
            for window in range(num_windows)
        ]
        begin = round(2.0 / WINDOW_S)
        during = seen[begin + 1 : begin + round(STOP_S / WINDOW_S)]
        after = seen[begin + round((STOP_S + 1.0) / WINDOW_S) :]
        shares = [sum(seen[:begin]) / begin, sum(during) / len(during), min(during)]
        shares.append(sum(after) / len(after))
        rows.append([comm_rate, *(f"{share:.2f}" for share in shares)])
    report.tables.append(
        Table(
            f"SIGSTOP of one of four for {STOP_S:g} s: the other three, of three alone",
            ("rate", "before", "while it is stopped", "the worst half second", "1 s after"),
            rows,
            f"{rounds} runs pooled.",
        )
    )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--real", action="store_true", help="four real processes")
    parser.add_argument("--rounds", type=int, help="seeds (3), or runs of real processes (5)")
    parser.add_argument("--quick", action="store_true", help="one of them, to see that it works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds or (5 if options.real else 3)
    name = "independence_real" if options.real else "independence"
    report = Report(name, "One worker misbehaves: the others' exchanges", quick=options.quick)
    if options.real:
        report.write({"runs": measure_real(rounds, report)})
        return
    found = simulate(rounds, report)
    report.write({"rows": found})
    draw(found, results_folder(options.quick) / f"{name}.png")


if __name__ == "__main__":
    main()
