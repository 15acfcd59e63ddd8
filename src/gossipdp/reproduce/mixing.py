"""Communications per e-fold of the consensus distance, measured; and how they grow with n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from gossipdp.graph import build_graph
from gossipdp.graph.planning import plan
from gossipdp.reproduce import mixing_text
from gossipdp.reproduce.jobs import run_jobs
from gossipdp.reproduce.mixing_text import MixingPoint, MixingResult
from gossipdp.reproduce.section import Effort, Section
from gossipdp.simulate.consensus import Consensus
from gossipdp.simulate.mixing import (
    ChebyshevWeights,
    consensus_rounds,
    mixing_matrix,
    second_eigenvalue,
)
from gossipdp.simulate.scenario import Scenario
from gossipdp.simulate.simulation import ASYNCHRONOUS, simulate
from gossipdp.simulate.trace import decay_per_exchange

GRAPHS = ("star", "ring", "complete")
METHODS = ("dpsgd", "dpsgd-chebyshev", "gossip", "a2cid2")
TAIL = (1e-6, 1e-12)
"""The part of a run whose slope counts, as shares of the first consensus distance."""
DIMENSION = 16
NUM_RECORDS = 800


@final
class Mixing(Section[MixingResult]):
    """The paper's table of communications, on star, ring and complete graph."""

    name = "mixing"
    title = "Communications to agree"
    result_type = MixingResult

    def measure(self, effort: Effort) -> MixingResult:
        """Measure every graph, method and size."""
        sizes = (8, 16) if effort.quick else (8, 16, 32, 64, 128, 256)
        jobs = [
            MixingJob(
                graph, method, num_workers, 2 if effort.quick else num_seeds(method, num_workers)
            )
            for graph in GRAPHS
            for method in METHODS
            for num_workers in sizes
        ]
        points = run_jobs(measure_point, jobs, effort, "mixing", cost=_cost)
        return MixingResult(points=points, dimension=DIMENSION, tail=TAIL)

    def draw(self, result: MixingResult, path: Path) -> None:
        """One panel a graph."""
        mixing_text.draw(result, path)

    def write(self, result: MixingResult) -> list[str]:
        """Exponents first, then all points."""
        return mixing_text.write(result)


def num_seeds(method: str, num_workers: int) -> int:
    """Seeds a point: more of small networks, whose few exchanges leave more to chance.

    Synchronous rounds leave nothing to chance but the start, which the tail has forgotten.
    """
    return min(64, max(6, 1024 // num_workers)) if method in ASYNCHRONOUS else 3


@dataclass(frozen=True)
class MixingJob:
    """One point, over the seeds 0, 1, .., num_seeds - 1."""

    graph: str
    method: str
    num_workers: int
    num_seeds: int


def measure_point(job: MixingJob) -> MixingPoint:
    """Communications per e-fold, measured with each seed, and what theory predicts."""
    is_asynchronous = job.method in ASYNCHRONOUS
    measure = _asynchronous if is_asynchronous else _synchronous
    return MixingPoint(
        graph=job.graph,
        method=job.method,
        num_workers=job.num_workers,
        communications=[measure(job, seed) for seed in range(job.num_seeds)],
        prediction=_predict(job),
    )


def _asynchronous(job: MixingJob, seed: int) -> float:
    """Pairwise exchanges over the whole network per e-fold."""
    promise = plan(build_graph(job.graph, job.num_workers))
    bound = _decay_bound(job)
    exchanges_per_worker = promise.exchanges_per_unit_time * 2.0 / job.num_workers
    # The bound only says how long to simulate at most: long enough for a slow seed, too.
    num_steps = 1.5 * -math.log(TAIL[1]) / (bound * exchanges_per_worker)
    scenario = Scenario(
        graph=job.graph,
        num_workers=job.num_workers,
        objective=Consensus(DIMENSION),
        num_steps=num_steps,
        num_records=NUM_RECORDS,
        stop_below=TAIL[1],
        seed=seed,
    )
    trace = simulate(scenario, job.method)
    slope = trace.decay_per_exchange(highest=TAIL[0], lowest=TAIL[1])
    return job.num_workers / 2.0 / slope


def _synchronous(job: MixingJob, seed: int) -> float:
    """Rounds per e-fold, times |E|."""
    graph = build_graph(job.graph, job.num_workers)
    start = np.random.default_rng(seed).standard_normal((job.num_workers, DIMENSION))
    distances = consensus_rounds(
        mixing_matrix(graph, lazy=True),
        start,
        chebyshev=job.method == "dpsgd-chebyshev",
        until=TAIL[1],
    )
    communications = np.arange(len(distances)) * float(graph.number_of_edges())
    return 1.0 / decay_per_exchange(
        communications.tolist(), distances.tolist(), highest=TAIL[0], lowest=TAIL[1]
    )


def _predict(job: MixingJob) -> float:
    """From chi1 and chi2, an upper bound in expectation; from the spectral gap, exact."""
    if job.method in ASYNCHRONOUS:
        return job.num_workers / 2.0 / _decay_bound(job)
    graph = build_graph(job.graph, job.num_workers)
    gamma = second_eigenvalue(mixing_matrix(graph, lazy=True))
    per_round = gamma**2 if job.method == "dpsgd" else ChebyshevWeights(gamma).limit
    return graph.number_of_edges() / -math.log(per_round)


def _decay_bound(job: MixingJob) -> float:
    promise = plan(build_graph(job.graph, job.num_workers))
    is_plain = job.method == "gossip"
    return promise.gossip_decay_bound if is_plain else promise.a2cid2_decay_bound


def _cost(job: MixingJob) -> float:
    """Roughly proportional to the time that the point takes."""
    return 1e4 + _predict(job) * job.num_seeds
