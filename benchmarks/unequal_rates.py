"""Does a ring converge, and keep its mean, if some of its workers exchange 16 times as often?

    python benchmarks/unequal_rates.py [--quick]

Simulated at fidelity "links": 64 workers on a ring, whose links are fast, middling and slow, a
third of the ring each. With comm_rate="auto" the workers there take part in 4, 1 and 1/4 exchanges
a step. Beside them: as many exchanges in all, in equal shares over equal links; and the
rate of the slowest for all, over the same unequal links. "consensus" has no gradients: vectors that
only mix. "quadratic": each worker has a least value of its own. Measured are the consensus
distance, the loss of the mean, and the drift: the distance of the mean of x + c/2 from where
gradients alone moved it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from support.report import Report, Spread, Table, run_script

from gossipdp_lab.simulate import (
    Consensus,
    Link,
    LinkModel,
    Objective,
    Quadratic,
    Scenario,
    Sgd,
    Trace,
    simulate,
)

STEP_S = 0.1
DURATIONS = (0.05, 0.5, 2.0)
"""The length of an exchange on a fast, a middling and a slow link, in gradient steps."""
SLOWEST_RATE = 0.25
CASES = ("own rates", "equal rates, as many exchanges", "the slowest's rate for all")
OBJECTIVES = (Consensus(), Quadratic(mu=0.1, noise_variance=1.0, heterogeneity=1.0))


def unequal_ring(num_workers: int) -> LinkModel:
    """Return links of three speeds for a model of one byte, a third of the ring each."""
    return LinkModel(
        overrides={
            (rank, (rank + 1) % num_workers): link_of(DURATIONS[3 * rank // num_workers])
            for rank in range(num_workers)
        }
    )


def link_of(duration_steps: float) -> Link:
    """Return a link on which an exchange takes so many steps."""
    return Link(latency_s=1e-4, bytes_per_s=1 / (duration_steps * STEP_S))


def scenario_of(objective: Objective, num_workers: int, num_steps: float, seed: int) -> Scenario:
    """Return the run of workers that set their own rates."""
    return Scenario(
        graph="ring",
        num_workers=num_workers,
        objective=objective,
        optimizer=Sgd(0.05),
        comm_rate="auto",
        fidelity="links",
        links=unequal_ring(num_workers),
        model_bytes=1.0,
        num_steps=num_steps,
        seed=seed,
    )


def three_cases(scenario: Scenario) -> dict[str, Trace]:
    """Simulate own rates, equal ones of the same total, and the slowest's for all."""
    own = simulate(scenario, "a2cid2")
    equal = replace(
        scenario, comm_rate=own.achieved_comm_rate, links=LinkModel(link_of(DURATIONS[0]))
    )
    slowest = replace(scenario, comm_rate=SLOWEST_RATE)
    traces = own, simulate(equal, "a2cid2"), simulate(slowest, "a2cid2")
    return dict(zip(CASES, traces, strict=True))


def rates_of_thirds(trace: Trace) -> list[float]:
    """Return the exchanges a step of the workers whose two links are equally fast, by third."""
    n = trace.num_workers
    rates = np.array(trace.worker_exchanges) / np.array(trace.worker_steps)
    same = [rank for rank in range(1, n) if 3 * rank // n == 3 * (rank - 1) // n]
    return [fmean(rates[rank] for rank in same if 3 * rank // n == third) for third in range(3)]


def row_of(objective: str, case: str, seed: int, trace: Trace) -> dict[str, Any]:
    """Return the figures of one run."""
    first, last = trace.records[0], trace.records[-1]
    scale = math.sqrt(first.consensus_distance) if objective == "consensus" else 1.0
    return {
        "objective": objective,
        "case": case,
        "seed": seed,
        "comm_rate": trace.achieved_comm_rate,
        "rates_of_thirds": rates_of_thirds(trace),
        "loss": None if math.isnan(last.loss) else last.loss,
        "first_loss": None if math.isnan(first.loss) else first.loss,
        "consensus_distance": last.consensus_distance,
        "first_consensus_distance": first.consensus_distance,
        "drift": float(trace.column("drift").max()) / scale,
    }


def main() -> None:
    """Run all rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    quick = parser.parse_args().quick
    report = Report("unequal_rates", __doc__.split("\n", 1)[0], quick)
    num_workers, num_steps, seeds = (12, 60.0, range(2)) if quick else (64, 400.0, range(3))
    rows = []
    for objective in OBJECTIVES:
        for seed in seeds:
            scenario = scenario_of(objective, num_workers, num_steps, seed)
            for case, trace in three_cases(scenario).items():
                rows.append(row_of(objective.name, case, seed, trace))
                print(rows[-1], flush=True)
    cells = []
    for objective in OBJECTIVES:
        for case in CASES:
            runs = [r for r in rows if (r["objective"], r["case"]) == (objective.name, case)]
            thirds = zip(*(run["rates_of_thirds"] for run in runs), strict=True)
            cells.append(
                (
                    f"{objective.name}, {case}",
                    Spread.of([run["comm_rate"] for run in runs]).text(".2f"),
                    " : ".join(f"{fmean(each):.2f}" for each in thirds),
                    Spread.of([run["consensus_distance"] for run in runs]).text(".2e"),
                    Spread.of([run["loss"] for run in runs]).text(".4f")
                    if objective.has_gradients
                    else "-",
                    f"{max(run['drift'] for run in runs):.0e}",
                )
            )
    head = (
        "workload, rates",
        "exchanges a step",
        "by thirds",
        "consensus distance at last",
        "loss",
        "drift, at most",
    )
    note = (
        f"{num_workers} workers, {num_steps:g} steps, A2CiD2, SGD 0.05; median and range over "
        f"{len(seeds)} seeds. By thirds: the mean of the workers both of whose links are fast, "
        "middling, slow."
    )
    report.tables.append(Table("A ring with links of three speeds", head, cells, note))
    report.write(rows)


if __name__ == "__main__":
    run_script(main)
