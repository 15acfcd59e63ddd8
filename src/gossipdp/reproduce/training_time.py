"""Training time against the number of workers: a model fitted to the paper's, then simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import final

from gossipdp.reproduce import training_time_text
from gossipdp.reproduce.jobs import run_jobs
from gossipdp.reproduce.section import Effort, Section
from gossipdp.reproduce.time_model import (
    FITS,
    PAPER_SLOWEST_OVER_FASTEST,
    PAPER_TIMES,
    Draws,
    Fit,
    Measurement,
    TimeModel,
    fit,
)
from gossipdp.reproduce.training_time_text import SimulatedTime, TimeResult
from gossipdp.simulate.compute_time import LognormalTime, SlowedTime
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.link_model import Link, LinkModel
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import simulate


@final
class TrainingTime(Section[TimeResult]):
    """The paper's training times, explained by waiting and links."""

    name = "time"
    title = "Training time against workers"
    result_type = TimeResult

    def measure(self, effort: Effort) -> TimeResult:
        """Fit, then simulate every time with what was fitted."""
        draws = Draws.of(6, 10) if effort.quick else Draws.of(48, 60)
        fits = run_jobs(_fit, [FitJob(name, draws) for name in FITS], effort, "time: fits")
        times = [time for time in PAPER_TIMES if time.num_workers <= 8 or not effort.quick]
        num_steps, seeds = (400.0, range(1)) if effort.quick else (6400.0, range(4))
        jobs = [TimeJob(time, fits[0].model, num_steps, seed) for time in times for seed in seeds]
        simulated = run_jobs(
            measure_time, jobs, effort, "time: simulations",
            cost=lambda job: 10.0 if job.time.method == "ours" else 1.0,
        )  # fmt: skip
        return TimeResult(
            times=list(PAPER_TIMES),
            slowest_over_fastest=PAPER_SLOWEST_OVER_FASTEST,
            fits=fits,
            simulated=simulated,
            seeds=list(seeds),
            num_steps=num_steps,
        )

    def draw(self, result: TimeResult, path: Path) -> None:
        """Minutes, and what they cost a worker."""
        training_time_text.draw(result, path)

    def write(self, result: TimeResult) -> list[str]:
        """Times, residuals, and what cannot be told apart."""
        return training_time_text.write(result)


@dataclass(frozen=True)
class FitJob:
    """One fit."""

    name: str
    draws: Draws


def _fit(job: FitJob) -> Fit:
    return fit(job.name, PAPER_TIMES, PAPER_SLOWEST_OVER_FASTEST, job.draws)


@dataclass(frozen=True)
class TimeJob:
    """One simulated time; ``num_steps`` of all workers together are simulated, then scaled
    (ten times as many where they are rounds).
    """

    time: Measurement
    model: TimeModel
    num_steps: float
    seed: int


def measure_time(job: TimeJob) -> SimulatedTime:
    """Simulate a stretch of the run and scale it to the paper's number of steps.

    Ours runs a2cid2 on a ring by the real protocol over links; its time is that in which all
    workers together have done the steps.
    """
    model, one = job.model, job.time
    random = Random(f"{job.seed} workers")  # the same networks for every time of a seed
    factors = {
        rank: random.lognormvariate(-(model.between**2) / 2, model.between)
        for rank in range(one.num_workers)
    }
    step_s = model.step_s(one.task)
    bytes_per_s = 1.0 / model.s_per_byte if model.s_per_byte > 0 else math.inf
    # The round that is under way at the end is not counted: with many that is little.
    num_steps = job.num_steps * (10.0 if one.method == "allreduce" else 1.0)
    scenario = Scenario(
        graph="ring",
        num_workers=one.num_workers,
        objective=Consensus(1),
        fidelity="links",
        compute_time=SlowedTime(LognormalTime(step_s, model.within), factors),
        links=LinkModel(every=Link(model.latency_s, bytes_per_s)),
        model_bytes=one.model_bytes,
        num_steps=num_steps / one.num_workers,
        num_records=4,
        seed=job.seed,
    )
    trace = simulate(scenario, "allreduce" if one.method == "allreduce" else "a2cid2")
    if one.method == "allreduce":
        rounds = trace.worker_steps[0]
        round_s = trace.records[-1].time_s / rounds
        seconds, slowest_over_fastest = one.num_steps / one.num_workers * round_s, 1.0
    else:
        seconds = one.num_steps * trace.records[-1].time_s / sum(trace.worker_steps)
        slowest_over_fastest = min(trace.worker_steps) / max(trace.worker_steps)
    return SimulatedTime(
        time=one,
        seed=job.seed,
        minutes=(seconds + model.fixed_s) / 60.0,
        slowest_over_fastest=slowest_over_fastest,
        comm_rate=None if one.method == "allreduce" else trace.achieved_comm_rate,
        idle_share=trace.records[-1].idle_share,
    )
