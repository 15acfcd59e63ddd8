"""The exchanges of the others while one worker misbehaves: simulated, and with real processes.

    python benchmarks/independence.py                simulated: results/independence.{json,md,png}
    python benchmarks/independence.py --real         four processes: results/independence_real.{…}
    python benchmarks/independence.py --real --rate auto                      …_real_auto.{…}

Each row compares the other workers with the same run without the one that misbehaves, on the graph
over the others. Simulated workers are the real protocol on a virtual clock: steps of 50 ms, 0.5 ms
from worker to worker, 3 ms for a model. Real processes step every 50 ms (they sleep; the exchanges
are real), all neighbours of one another. Windows of half a second; medians of the seeds.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import psutil
from misbehaving import BAD_TRANSFER_S, SLOW, WHATS, WINDOW_S, Course, Event, What, watch
from run_processes import RunCommand
from support.report import Report, Spread, Table, interleaved, results_folder
from waiting import wait_until

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
ENDLESS: tuple[What, ...] = (*SLOW, "poisoned")
OTHERS_LAST_S, SHOWN_S = 4.0, 20.0

NUM_WORKERS, BEFORE_S, REAL_BEGINS_S, EVENT_S, FIRST_STEP_S = 4, 2.0, 4.0, 8.0, 30.0
# A spare interpreter imports torch first, and a rate that sets itself leaves it the processor.
RESTARTS, SPARE_IS_READY_S = ("--max-restarts", "1", "--spares", "1"), 16.0


def begins_to_count_s(graph: str, num_workers: int, event: Event) -> float:
    """Return from when on the others are to exchange as if the worker were not there.

    Half a second after the event; on a bad link, where an exchange takes a second, once each
    neighbour has had three: a single long one may be chance.
    """
    if event.what != "bad link":
        return float(event.begins_s + 0.5)
    num_neighbours = len(Constants.of(build_graph(graph, num_workers)).neighbours(event.rank))
    return float(event.begins_s + 1.0 + 3 * BAD_TRANSFER_S * num_neighbours)


def simulated(row: tuple[What, str, int, float | None, int]) -> Course:
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
    found: list[dict[str, Any]] = []
    for (what, graph, num_workers, comm_rate), each in courses.items():
        event = each[0].event
        begins_s = begins_to_count_s(graph, num_workers, event)
        ends_s = event.begins_s + event.lasts_s
        found.append(
            {
                "what": what,
                "graph": f"{graph} {num_workers}",
                "comm_rate": "auto" if comm_rate is None else f"{comm_rate:g}",
                "all": Spread.of(course.share(begins_s, ends_s) for course in each),
                "least": Spread.of(course.least_share(begins_s, ends_s) for course in each),
                "after": Spread.of(course.share(ends_s + 1.0, ends_s + AFTER_S) for course in each),
                "course": _over_time(each),
            }
        )
    cells = [
        (
            *(row[key] for key in ("what", "graph", "comm_rate")),
            *(row[key].text() for key in ("all", "least", "after")),
        )
        for row in found
    ]
    report.tables.append(
        Table(
            "Exchanges of the others, of what they make without that worker",
            ("event", "graph", "rate", "all", "the worst one", "again, 1 s after"),
            cells,
            "Medians of the seeds (least to greatest). On the ring of four the neighbours of the "
            "bad one share the fourth, which makes at most 1.5 times its rate if it chooses it. "
            "tests/property/test_independence.py holds the figures to bounds.",
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
        panel.axhline(0.9, color="0.6", linewidth=0.8, linestyle="--")
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
import os, sys, time
import torch
from gossipdp import GossipDataParallel
folder, begins_s, lasts_s, comm_rate, event = sys.argv[1:]
torch.set_num_threads(1)
net = torch.nn.Linear(500, 500)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
rate = comm_rate if comm_rate == "auto" else float(comm_rate)
model = GossipDataParallel(net, optimizer, graph="complete", comm_rate=rate)
rank, begun = model.rank, time.monotonic()
counts = open(f"{folder}/{rank}", "a", buffering=1)
is_bad, step_s = rank == 3 and counts.tell() == 0, 0.05
print(begun, 0, os.getpid(), file=counts)
if is_bad and event == "first step":
    time.sleep(float(lasts_s))
while True:
    optimizer.zero_grad()
    net(torch.randn(1, 500)).square().mean().backward()
    if is_bad and time.monotonic() > begun + float(begins_s):
        if event == "kill":
            os._exit(1)
        step_s = 0.8 if event == "slow 16" else 0.05
    optimizer.step()
    print(time.monotonic(), model.stats().exchanges, file=counts)
    time.sleep(step_s)
"""
REAL_EVENTS = ("stop", "slow 16", "kill", "first step", "join")


def real(event: str, comm_rate: str) -> dict[str, Any]:
    """Run three real workers beside one that meets ``event``; count exchanges by window.

    Without a fourth one if ``event`` is ``alone``. Times count from the event; a first step is one
    from the beginning on, and a worker that joins does so at the event.
    """
    begins_s = {"first step": 0.0, "kill": SPARE_IS_READY_S}.get(event, REAL_BEGINS_S)
    lasts_s = FIRST_STEP_S if event == "first step" else EVENT_S
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "worker.py").write_text(WORKER)
        (folder / "secret").write_text("a secret of this benchmark")
        (folder / "secret").chmod(0o600)
        words = ["--secret-file", f"{folder}/secret", f"{folder}/worker.py"]
        words += [str(folder), str(begins_s), str(lasts_s), comm_rate, event]
        at_first = range(NUM_WORKERS - (event in ("alone", "join")))
        restarts = RESTARTS if event == "kill" else ()
        started = [RunCommand(folder / "run", ["-n", f"{len(at_first)}", *restarts, *words])]
        wait_until(lambda: all((folder / f"{rank}").exists() for rank in at_first), "all workers")
        time.sleep(begins_s)
        began_s = time.monotonic()
        lives = [int((folder / f"{rank}").read_text().split()[2]) for rank in at_first]
        if event == "stop":
            os.kill(lives[-1], signal.SIGSTOP)
        if event == "join":
            of_first = psutil.Process(lives[0]).net_connections(kind="tcp")
            (port,) = {each.laddr.port for each in of_first if each.status == psutil.CONN_LISTEN}
            started.append(RunCommand(folder / "join", ["--join", f"127.0.0.1:{port}", *words]))
        time.sleep(lasts_s)
        if event == "stop":
            os.kill(lives[-1], signal.SIGCONT)
        time.sleep(AFTER_S)
        for each in started:
            each.stop()
        lines = {path.name: path.read_text().splitlines() for path in folder.glob("[0-9]")}
    windows = range(round(-BEFORE_S / WINDOW_S), round((lasts_s + AFTER_S) / WINDOW_S))
    made = {
        rank: [_made(lines.get(f"{rank}", []), began_s + WINDOW_S * each) for each in windows]
        for rank in range(NUM_WORKERS)
    }
    return {"event": event, "comm_rate": comm_rate, "lasts_s": lasts_s, "by_window": made}


def _made(lines: Sequence[str], begin_s: float) -> int:
    """Return the exchanges that a worker, in whichever life, completed in one window."""
    within, before = 0, 0
    for line in lines:
        at_s, count = line.split()[:2]
        if begin_s < float(at_s) <= begin_s + WINDOW_S:
            within += max(0, int(count) - before)
        before = int(count)
    return within


def rate_of(
    runs: Sequence[dict[str, Any]], ranks: Sequence[int], begin_s: float, end_s: float
) -> float:
    """Return the exchanges of a worker in a second, between two times since the event."""
    first, last = (round((at_s + BEFORE_S) / WINDOW_S) for at_s in (begin_s, end_s))
    made = sum(sum(run["by_window"][rank][first:last]) for run in runs for rank in ranks)
    return made / (len(runs) * len(ranks) * (end_s - begin_s))


def measure_real(
    rate: str, rounds: int, events: Sequence[str], report: Report
) -> list[dict[str, Any]]:
    """Let four workers meet each event, in turn with three alone; pool the rounds by window."""
    found = interleaved(["alone", *events], rounds, lambda event: real(event, rate))
    others, rows = range(NUM_WORKERS - 1), []
    usual = rate_of(found["alone"], others, -BEFORE_S, EVENT_S)
    for event in events:
        runs, lasts_s = found[event], found[event][0]["lasts_s"]
        begins_s = [WINDOW_S * number for number in range(1, round(lasts_s / WINDOW_S))]
        rates = [
            math.nan if event == "first step" else rate_of(runs, others, -BEFORE_S, 0.0),
            rate_of(runs, others, WINDOW_S, lasts_s),
            min(rate_of(runs, others, each, each + WINDOW_S) for each in begins_s),
            rate_of(runs, others, lasts_s + 1.0, lasts_s + AFTER_S),
            rate_of(runs, [NUM_WORKERS - 1], lasts_s + 2.0, lasts_s + AFTER_S),
        ]
        cells = ["" if math.isnan(each) else f"{each / usual:.2f}" for each in rates]
        rows.append([event, *cells])
    report.tables.append(
        Table(
            f"One of four real processes misbehaves, comm rate {rate}",
            ("event", "before", "during", "the worst half second", "later", "its own"),
            rows,
            f"Exchanges of the other three, of those of three alone; {rounds} runs pooled. An "
            f"event lasts {EVENT_S:g} s, a first step {FIRST_STEP_S:g}; the killed one is started "
            "again. Its first half second does not count, nor the second after it (for the "
            "worker's own exchanges, two).",
        )
    )
    return [run for runs in found.values() for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--real", action="store_true", help="four real processes")
    parser.add_argument("--rate", default="1", choices=("1", "auto"), help="of real processes")
    parser.add_argument("--events", default=",".join(REAL_EVENTS), help="those of real processes")
    parser.add_argument("--rounds", type=int, help="seeds (3), or runs of real processes (5)")
    parser.add_argument("--quick", action="store_true", help="one of them, to see that it works")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds or (5 if options.real else 3)
    name = "independence" + "_real" * options.real + "_auto" * (options.rate == "auto")
    report = Report(name, "One worker misbehaves: the others' exchanges", quick=options.quick)
    if options.real:
        runs = measure_real(options.rate, rounds, options.events.split(","), report)
        report.write({"runs": runs})
        return
    found = simulate(rounds, report)
    report.write({"rows": found})
    draw(found, results_folder(options.quick) / f"{name}.png")


if __name__ == "__main__":
    main()
