"""The exchanges of the others while one worker misbehaves: simulated, and with real processes.

    python benchmarks/independence.py                simulated: results/independence.{json,md,png}
    python benchmarks/independence.py --real         four processes: results/independence_real.{…}

Each row compares the other workers with the same run in which that worker does not take part, on
the graph over the others. Simulated workers are the real protocol on a virtual clock: steps of 50
ms, 0.5 ms from worker to worker, 3 ms for a model. Counted from half a second after the event; a
bad link, on which an exchange takes a second, from when each neighbour has had three: a single long
one may be chance. Windows of half a second; medians of the seeds.

Real processes step every 50 ms (they sleep; the exchanges are real), all neighbours of one another.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from misbehaving import BAD_TRANSFER_S, SLOW, WHATS, WINDOW_S, Course, Event, What, watch
from support.report import Report, Spread, Table, results_folder

from gossipdp.graph.constants import Constants
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
ENDLESS: tuple[What, ...] = (*SLOW, "poisoned", "kill")
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
    num_neighbours = len(Constants.of(build_graph(graph, num_workers)).neighbours(event.rank))
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
        begins_s = -2.0 if what in (*SLOW, "first step") else 0.0  # those begin with the run
        lasts_s = SHOWN_S if what in ENDLESS else LASTS_S.get(what, OTHERS_LAST_S)
        panel.axvspan(begins_s, min(lasts_s, SHOWN_S), color="0.92", zorder=0)
        panel.axhline(SHARE, color="0.6", linewidth=0.8, linestyle="--")
        panel.set_title(what, fontsize=10)
        panel.set_ylim(0.0, 1.8)
    for graph in shown:
        panels.flat[0].plot([], [], color=f"C{shown.index(graph)}", label=graph)
    panels.flat[0].plot([], [], color="0.3", label="one a step")
    panels.flat[0].plot([], [], color="0.3", linestyle=":", label="auto")
    figure.legend(loc="outside upper center", ncols=7, fontsize=9, frameon=False)
    figure.supxlabel("seconds since the event (grey: while it lasts)", fontsize=10)
    figure.supylabel("exchanges of the others, of those without that worker", fontsize=10)
    figure.savefig(path, dpi=110)


# --- real processes ------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
import torch
from gossipdp import GossipDataParallel
folder, until_s, comm_rate, event, begins_s = sys.argv[1:]
torch.set_num_threads(1)
net = torch.nn.Linear(500, 500)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
rate = comm_rate if comm_rate == "auto" else float(comm_rate)
model = GossipDataParallel(net, optimizer, graph="complete", comm_rate=rate)
rank, counts, step_s = int(os.environ["RANK"]), [], 0.05
is_bad = rank == 3
begun = time.monotonic()
with open(f"{folder}/{rank}.pid", "w") as file:
    file.write(str(os.getpid()))
while time.monotonic() < begun + float(until_s):
    optimizer.zero_grad()
    net(torch.randn(1, 500)).square().mean().backward()
    if is_bad and time.monotonic() > begun + float(begins_s):
        if event == "kill":
            os._exit(1)
        if event == "poison":
            net.weight.data.fill_(float("nan"))
        step_s = 0.8 if event == "slow 16" else 0.05
    try:
        optimizer.step()
    except Exception:
        time.sleep(float(until_s))  # poisoned: it is there, and exchanges no more
    counts.append((time.monotonic(), model.stats().exchanges))
    time.sleep(step_s)
with open(f"{folder}/{rank}.part", "w") as file:
    json.dump(counts, file)
os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
os._exit(0)
"""
EVENTS = ("stop", "slow 16", "poison", "kill")


def real(event: str, comm_rate: str) -> dict[str, Any]:
    """Run four real workers, or three if ``event`` is ``alone``; count exchanges by window.

    Those of the first three; windows count from the event, or from the same moment without it.
    """
    num_workers = NUM_WORKERS - (event == "alone")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        until_s = REAL_BEGINS_S + REAL_LASTS_S
        command = [sys.executable, "-m", "gossipdp.cli.main", "run", "-n", str(num_workers)]
        command += [str(script), folder, str(until_s), comm_rate, event, str(REAL_BEGINS_S)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        pids = [Path(folder) / f"{rank}.pid" for rank in range(num_workers)]
        _until(lambda: all(pid.exists() and pid.read_text() for pid in pids), 120.0)
        time.sleep(REAL_BEGINS_S)
        began_s = time.monotonic()
        if event == "stop":
            pid = int(pids[-1].read_text())
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(pid, signal.SIGCONT)
        files = [Path(folder) / f"{rank}.json" for rank in range(NUM_WORKERS - 1)]
        _until(lambda: all(file.exists() for file in files), 60.0)
        counts = [json.loads(file.read_text()) for file in files]
        process.terminate()
        process.wait(60.0)
    windows = range(round(-2.0 / WINDOW_S), round((STOP_S + AFTER_S) / WINDOW_S))
    by_window = [
        [
            _count_at(each, began_s + WINDOW_S * (window + 1))
            - _count_at(each, began_s + WINDOW_S * window)
            for window in windows
        ]
        for each in counts
    ]
    return {"event": event, "comm_rate": comm_rate, "by_window": by_window}


def _count_at(counts: Sequence[tuple[float, int]], time_s: float) -> int:
    return max((count for at_s, count in counts if at_s <= time_s), default=0)


def _until(holds: Callable[[], bool], longest_s: float) -> None:
    ends_s = time.monotonic() + longest_s
    while not holds():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the workers were not ready within {longest_s:g} s")
        time.sleep(0.05)


def measure_real(rounds: int, events: Sequence[str], report: Report) -> list[dict[str, Any]]:
    """Let four workers meet each event, in turn with three alone; pool the rounds by window."""
    runs = []
    for number in range(rounds):
        for comm_rate in ("1", "auto"):
            for event in ("alone", *events):
                print(f"round {number + 1} of {rounds}: {event}, {comm_rate}", flush=True)
                runs.append(real(event, comm_rate))
    pooled = {
        (event, comm_rate): _pooled(runs, event, comm_rate)
        for event in ("alone", *events)
        for comm_rate in ("1", "auto")
    }
    begin, end = round(2.0 / WINDOW_S), round((2.0 + STOP_S) / WINDOW_S)
    rows = []
    for event in events:
        for comm_rate in ("1", "auto"):
            alone = pooled["alone", comm_rate]
            usual = sum(alone) / len(alone)
            shares = [count / usual for count in pooled[event, comm_rate]]
            during = shares[begin + 1 : end]
            cells = [sum(shares[:begin]) / begin, sum(during) / len(during), min(during)]
            after = shares[end + round(1.0 / WINDOW_S) :]
            cells.append(sum(after) / len(after))
            rows.append([event, comm_rate, *(f"{share:.2f}" for share in cells)])
    report.tables.append(
        Table(
            f"One of four real processes; stop: SIGSTOP for {STOP_S:g} s",
            ("event", "rate", "before", f"for {STOP_S:g} s", "the worst half second", "later"),
            rows,
            f"Exchanges of the other three, of those of three alone; {rounds} runs pooled. The "
            "first half second after the event does not count, nor the second after SIGCONT.",
        )
    )
    return runs


def _pooled(runs: Sequence[dict[str, Any]], event: str, comm_rate: str) -> list[int]:
    """Return the exchanges of the others in each window, over all rounds."""
    own = [run for run in runs if (run["event"], run["comm_rate"]) == (event, comm_rate)]
    columns = zip(*(worker for run in own for worker in run["by_window"]), strict=True)
    return [sum(column) for column in columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--real", action="store_true", help="four real processes")
    parser.add_argument("--events", default=",".join(EVENTS), help="those of real processes")
    parser.add_argument("--rounds", type=int, help="seeds (3), or runs of real processes (5)")
    parser.add_argument("--quick", action="store_true", help="one of them, to see that it works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds or (5 if options.real else 3)
    name = "independence_real" if options.real else "independence"
    report = Report(name, "One worker misbehaves: the others' exchanges", quick=options.quick)
    if options.real:
        report.write({"runs": measure_real(rounds, options.events.split(","), report)})
        return
    found = simulate(rounds, report)
    report.write({"rows": found})
    draw(found, results_folder(options.quick) / f"{name}.png")


if __name__ == "__main__":
    main()
