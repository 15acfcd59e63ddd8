"""Runs: one, and many over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple

import joblib
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from gossipdp.rules import at_least_1
from gossipdp_lab.simulate.ideal import run_ideal
from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.scenario import Fidelity, Scenario
from gossipdp_lab.simulate.synchronous import AllReduce, Rounds
from gossipdp_lab.simulate.trace import Trace

Progress = Callable[[float], None]
"""Takes, from time to time, the share of the run that is done, 0 to 1."""

ASYNCHRONOUS = ("a2cid2", "gossip", "none", "released")
ROUNDS: dict[str, type[Rounds]] = {"allreduce": AllReduce}
METHODS = (*ASYNCHRONOUS, *ROUNDS)

WORTH_PROCESSES_S = 10.0
"""Processes take seconds to start: torch is imported, and numba compiles in each."""


def simulate(scenario: Scenario, method: str, on_progress: Progress | None = None) -> Trace:
    """Simulate one run.

    =================  ==========================================================================
    a2cid2             accelerated asynchronous gossip
    gossip             plain asynchronous pairwise averaging: eta = 0
    none               no exchanges
    released           a2cid2 with the exchange of the authors' released code, for comparison
                       only: each end subtracts its own live, flowed value from what the other
                       sent before flowing, so that the two deltas are not negatives of each
                       other; at fidelity "ideal" alone
    allreduce          synchronous: gradients averaged over all by a ring all-reduce at each step
    =================  ==========================================================================

    Raises:
        ValueError: the method is unknown, or not of this fidelity, or the scenario's graph or rates
            are not valid.

    Example:
        >>> from gossipdp_lab.simulate import Scenario, simulate
        >>> trace = simulate(Scenario(graph="ring", num_workers=16, num_steps=50), "a2cid2")
        >>> trace.records[-1].consensus_distance < 1e-3 * trace.records[0].consensus_distance
        True
    """
    check_method(method, scenario.fidelity)
    on_progress = on_progress or (lambda share: None)
    started = perf_counter()
    # Tensors are small, and teams of threads cost more than they bring: on two busy cores a digits
    # gradient of 0.07 ms took 3.4 ms with a team of two. And sums do not depend on the cores.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            if method in ROUNDS:
                trace = ROUNDS[method](scenario, method, on_progress).run()
            elif scenario.fidelity == "ideal":
                trace = run_ideal(scenario, method, on_progress)
            else:
                trace = run_links(scenario, method, on_progress)
    finally:
        torch.set_num_threads(num_threads)
    trace.wall_s = perf_counter() - started
    return trace


def check_method(method: str, fidelity: Fidelity) -> None:
    """Raise ValueError for a method that does not exist, or not at this fidelity."""
    if method not in ASYNCHRONOUS and method not in ROUNDS:
        raise ValueError(f"there is no method {method!r}; choose among {', '.join(METHODS)}")
    if method == "released" and fidelity != "ideal":
        raise ValueError("the released exchange is simulated at fidelity 'ideal' alone")


class Job(NamedTuple):
    """One run."""

    scenario: Scenario
    method: str

    @property
    def is_synchronous(self) -> bool:
        """Return whether its workers go in step."""
        return self.method in ROUNDS


def simulate_all(
    jobs: Sequence[Job], *, processes: int | None = None, on_progress: Progress | None = None
) -> list[Trace]:
    """Simulate every job, and return the traces in the order of the jobs.

    The traces do not depend on how many processes there are. Jobs must be picklable, by cloudpickle
    at least.

    Args:
        jobs: the runs.
        processes: how many at once; None: as many as there are cores, if that is quicker.
        on_progress: called in this thread with the share of all jobs that is done, 0 to 1, by
            workers times steps.

    Raises:
        ValueError: as :func:`simulate`, or ``processes`` is not positive. That of another process
            has joblib's traceback as its cause.

    Example:
        >>> from gossipdp_lab.simulate import Job, Scenario, simulate_all
        >>> scenario = Scenario(graph="ring", num_workers=8, num_steps=20)
        >>> jobs = [Job(scenario, method) for method in ("a2cid2", "gossip")]
        >>> [trace.method for trace in simulate_all(jobs, processes=1)]
        ['a2cid2', 'gossip']
    """
    if processes is not None:
        at_least_1("processes", processes)
    on_progress = on_progress or (lambda share: None)
    costs = [job.scenario.num_workers * job.scenario.num_steps for job in jobs]
    num_processes = min(processes or joblib.cpu_count(), len(jobs))
    left = sorted(range(len(jobs)), key=lambda place: costs[place])
    traces: dict[int, Trace] = {}
    done, total, began_s = 0.0, sum(costs), monotonic()

    def advance(cost: float, share: float) -> None:
        on_progress(min(1.0, (done + share * cost) / total))

    # The cheapest are done here first, to see how long they take.
    while left and (num_processes == 1 or processes is None):
        place = left.pop(0)
        traces[place] = simulate(*jobs[place], partial(advance, costs[place]))
        done += costs[place]
        seconds_left = (monotonic() - began_s) * (total - done) / done
        if num_processes > 1 and seconds_left > WORTH_PROCESSES_S:
            break
    if left:
        pool = joblib.Parallel(
            n_jobs=min(num_processes, len(left)), batch_size=1, return_as="generator_unordered"
        )
        calls = (joblib.delayed(_simulate_one)(place, jobs[place]) for place in left[::-1])
        for place, trace in pool(calls):
            traces[place] = trace
            done += costs[place]
            advance(0.0, 0.0)
    return [traces[place] for place in range(len(jobs))]


def _simulate_one(place: int, job: Job) -> tuple[int, Trace]:
    return place, simulate(*job)
