"""The mean of x + c/2, under our exchange and under that of the authors' released code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from gossipdp.reproduce import invariant_text
from gossipdp.reproduce.invariant_text import InvariantResult, InvariantRun
from gossipdp.reproduce.jobs import run_jobs
from gossipdp.reproduce.section import Effort, Section
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import simulate

METHODS = ("a2cid2", "released", "gossip")
DIMENSION = 64
NUM_RECORDS = 200


@final
class Invariant(Section[InvariantResult]):
    """What an exchange that conserves nothing costs."""

    name = "invariant"
    title = "The invariant"
    result_type = InvariantResult

    def measure(self, effort: Effort) -> InvariantResult:
        """Run both exchanges, and plain gossip, from the same starts."""
        num_workers, num_steps = (8, 60.0) if effort.quick else (64, 500.0)
        seeds = range(2 if effort.quick else 5)
        jobs = [
            InvariantJob(method, num_workers, num_steps, seed)
            for method in METHODS
            for seed in seeds
        ]
        runs = run_jobs(measure_run, jobs, effort, "invariant")
        return InvariantResult(
            runs=runs,
            num_workers=num_workers,
            num_steps=num_steps,
            seeds=list(seeds),
            dimension=DIMENSION,
        )

    def draw(self, result: InvariantResult, path: Path) -> None:
        """Distance and drift over exchanges."""
        invariant_text.draw(result, path)

    def write(self, result: InvariantResult) -> list[str]:
        """What both reach."""
        return invariant_text.write(result)


@dataclass(frozen=True)
class InvariantJob:
    """One run on a ring, without gradients."""

    method: str
    num_workers: int
    num_steps: float
    seed: int


def measure_run(job: InvariantJob) -> InvariantRun:
    """Both time series of a run, relative to its start."""
    scenario = Scenario(
        graph="ring",
        num_workers=job.num_workers,
        objective=Consensus(DIMENSION),
        num_steps=job.num_steps,
        num_records=NUM_RECORDS,
        seed=job.seed,
    )
    trace = simulate(scenario, job.method)
    distances = trace.column("consensus_distance")
    return InvariantRun(
        method=job.method,
        seed=job.seed,
        exchanges_per_worker=(trace.column("exchanges") * 2.0 / job.num_workers).tolist(),
        distances=(distances / distances[0]).tolist(),
        drifts=(trace.column("drift") / distances[0] ** 0.5).tolist(),
    )
