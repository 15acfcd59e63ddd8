"""How pairing depends on the duration of exchanges, for every neighbour policy; and a search."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import final

import numpy as np

from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES
from gossipdp.protocol.worker import Method
from gossipdp.reproduce import pairing_text
from gossipdp.reproduce.candidates import CANDIDATES
from gossipdp.reproduce.jobs import run_jobs
from gossipdp.reproduce.pairing_run import run_watched
from gossipdp.reproduce.pairing_text import PairingResult, PairingRun
from gossipdp.reproduce.section import Effort, Section
from gossipdp.simulate.compute_time import ConstantTime, LognormalTime
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.link_model import Link, LinkModel
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.trace import Trace

GRAPHS = ("ring", "torus", "exponential", "complete")
DURATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
SATURATED = 1.5
STEP_S = 1.0
LATENCY_S = 0.001
EXCHANGE_JITTER, STEP_JITTER = 0.3, 0.1
DIMENSION = 16
NUM_RECORDS = 600


@final
class PairingSection(Section[PairingResult]):
    """Whom to ask, when exchanges take as long as gradient steps."""

    name = "pairing"
    title = "Whom to exchange with"
    result_type = PairingResult

    def measure(self, effort: Effort) -> PairingResult:
        """Every policy, duration and graph; then the candidates."""
        policies, candidates = tuple(NEIGHBOUR_POLICIES), tuple(CANDIDATES)
        size, num_steps = (8, 40.0) if effort.quick else (16, 200.0)
        seeds = range(1 if effort.quick else 2)
        graphs = ("ring",) if effort.quick else GRAPHS
        durations = (0.0, SATURATED) if effort.quick else DURATIONS
        small: list[tuple[Method, str, int]] = [("a2cid2", graph, size) for graph in graphs]
        small.append(("gossip", "ring", size))
        jobs = [
            PairingJob("duration", method, graph, n, policy, duration, jitter, seed, num_steps)
            for (method, graph, n), policy, duration, jitter, seed in product(
                small, policies, durations, (False, True), seeds
            )
        ]
        if not effort.quick:
            jobs += [
                PairingJob(
                    "duration", "a2cid2", "torus", 64, policy, SATURATED, jitter, seed, 200.0
                )
                for policy, jitter, seed in product(("fresh", "available"), (False, True), seeds)
            ]
        jobs += [
            PairingJob("search", "a2cid2", graph, size, name, duration, True, seed, num_steps)
            for graph, name, duration, seed in product(
                graphs,
                candidates[:2] if effort.quick else candidates,
                (SATURATED,) if effort.quick else (0.5, SATURATED),
                range(1 if effort.quick else 3),
            )
        ]
        runs = run_jobs(measure_run, jobs, effort, "pairing", cost=lambda job: job.num_workers)
        return PairingResult(runs=runs, num_steps=num_steps, dimension=DIMENSION)

    def draw(self, result: PairingResult, path: Path) -> None:
        """A panel a graph."""
        pairing_text.draw(result, path)

    def write(self, result: PairingResult) -> list[str]:
        """The policies, the lock-in, then the candidates."""
        return pairing_text.write(result)


@dataclass(frozen=True)
class PairingJob:
    """One run of the section."""

    part: str
    method: Method
    graph: str
    num_workers: int
    policy: str
    duration: float
    is_jittered: bool
    seed: int
    num_steps: float


def measure_run(job: PairingJob) -> PairingRun:
    """Simulate one run without gradients over links."""
    scenario = Scenario(
        graph=job.graph,
        num_workers=job.num_workers,
        objective=Consensus(DIMENSION),
        fidelity="links",
        compute_time=LognormalTime(STEP_S, STEP_JITTER)
        if job.is_jittered
        else ConstantTime(STEP_S),
        links=LinkModel(
            every=Link(LATENCY_S, 1.0 / job.duration if job.duration else math.inf),
            jitter=EXCHANGE_JITTER if job.is_jittered else 0.0,
        ),
        model_bytes=STEP_S,
        num_steps=job.num_steps,
        num_records=NUM_RECORDS,
        stop_below=1e-12,
        seed=job.seed,
    )
    make_policy = (CANDIDATES if job.part == "search" else NEIGHBOUR_POLICIES)[job.policy]
    watched = run_watched(scenario, job.method, make_policy)
    per_step, rate = late_decay(watched.trace)
    return PairingRun(
        part=job.part,
        method=job.method,
        graph=job.graph,
        num_workers=job.num_workers,
        policy=job.policy,
        duration=job.duration,
        is_jittered=job.is_jittered,
        seed=job.seed,
        decay_per_exchange=per_step / rate,
        decay_per_step=per_step,
        comm_rate=rate,
        repeated_share=watched.repeated_share,
    )


def late_decay(trace: Trace) -> tuple[float, float]:
    """Slope of -log(consensus distance) over time in steps, and the comm rate, both late.

    Over the second half of the run. Unlike a slope between two levels that exists also for a
    network that does not mix; and the start, when workers do not yet ask, plays no part.
    """
    half = len(trace.records) // 2
    steps = trace.column("time_s")[half:] / trace.unit_s
    exchanges = trace.column("exchanges")[half:] * 2.0 / trace.num_workers
    logarithms = np.log(trace.column("consensus_distance")[half:])
    rate = float((exchanges[-1] - exchanges[0]) / (steps[-1] - steps[0]))
    return float(np.polyfit(steps, -logarithms, 1)[0]), rate
