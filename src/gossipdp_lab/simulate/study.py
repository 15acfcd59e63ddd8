"""Runs: one, many over processes, and their means and spreads over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple, TypeVar

import joblib
import numpy as np
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from gossipdp.rules import at_least_1
from gossipdp_lab.simulate.ideal import run_ideal
from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.synchronous import (
    AllReduce,
    DiLoCo,
    Dpsgd,
    Rounds,
    mixing_matrix,
    second_eigenvalue,
)
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Series, Trace, lowest_share

Task = TypeVar("Task")
Answer = TypeVar("Answer")
Progress = Callable[[float], None]
"""Takes, from time to time, the share of the run that is done, 0 to 1."""

ASYNCHRONOUS = ("a2cid2", "gossip", "none", "released")
ROUNDS: dict[str, type[Rounds]] = {
    "allreduce": AllReduce,
    "dpsgd": Dpsgd,
    "diloco": DiLoCo,
}
SYNCHRONOUS = tuple(ROUNDS)
METHODS = ASYNCHRONOUS + SYNCHRONOUS

WORTH_PROCESSES_S = 10.0
"""Processes take seconds to start: torch is imported, and numba compiles in each."""

MARGIN = 1.3
"""The bounds are about expectations; single runs lie on both sides of them."""
LEAST_STEPS = 20.0
STEPS_WITHOUT_AGREEMENT = 100.0
MOST_VALUES = {"ideal": 2.5e8, "links": 3e6, "rounds": 2.5e8}
"""Values that may be exchanged in one run, so that it takes some seconds at most."""


# --- one run -------------------------------------------------------------------------------


def simulate(scenario: Scenario, method: str, on_progress: Progress | None = None) -> Trace:
    """Simulate one run.

    =================  ==========================================================================
    a2cid2             accelerated asynchronous gossip
    gossip             plain asynchronous pairwise averaging: eta = 0
    none               no exchanges
    released           a2cid2 with the exchange of the authors' released code, for comparison
                       only: each end subtracts its own live, flowed value from what the other
                       sent before flowing, so that the two deltas are not negatives of each other
    allreduce          synchronous: gradients averaged over all by a ring all-reduce at each step
    dpsgd              synchronous: each round averages with all neighbours, Metropolis weights
    diloco             local steps, then an all-reduce and an outer step
    =================  ==========================================================================

    Raises:
        ValueError: the method is unknown, or the scenario's graph or rates are not valid.

    Example:
        >>> from gossipdp_lab.simulate import Scenario, simulate
        >>> trace = simulate(Scenario(graph="ring", num_workers=16, num_steps=50), "a2cid2")
        >>> trace.records[-1].consensus_distance < 1e-3 * trace.records[0].consensus_distance
        True
    """
    check_method(scenario, method)
    on_progress = on_progress or (lambda share: None)
    started = perf_counter()
    with one_thread():
        if method in ROUNDS:
            trace = ROUNDS[method](scenario, method, on_progress).run()
        elif scenario.fidelity == "ideal":
            trace = run_ideal(scenario, method, on_progress)
        else:
            trace = run_links(scenario, method, on_progress)
    trace.wall_s = perf_counter() - started
    return trace


def check_method(scenario: Scenario, method: str) -> None:
    """Raise ValueError for a method that does not exist, or cannot run on this scenario."""
    if method not in ASYNCHRONOUS and method not in ROUNDS:
        raise ValueError(f"there is no method {method!r}; choose among {', '.join(METHODS)}")
    if method == "diloco" and not scenario.objective.has_gradients:
        raise ValueError(
            f"method {method} averages what gradient steps did, and {scenario.objective.name} has "
            "none: choose another objective"
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch and numpy compute with one thread, and restore the former number afterwards.

    The tensors of simulations are small, and teams of threads cost more than they bring. Measured
    on two busy cores: a digits gradient of 0.07 ms took 3.4 ms with a team of two.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(num_threads)


def steps_to_agree(scenario: Scenario, method: str) -> float:
    """Return the steps that theory gives a consensus run to fall to 1e-24 of its first distance.

        expected distance <= 2 exp(-rate t),     t = log(2 / 1e-24) / rate

    with a rate of 1 / (2 chi1) for gossip and eta for a2cid2, at the paper's constants, and for
    D-PSGD of -2 log(gamma) a round, where gamma is the second eigenvalue of its mixing matrix. The
    scenario's ``num_steps`` has no effect.
    """
    constants = scenario.make_constants()
    if method == "none" or not constants.edges:
        return STEPS_WITHOUT_AGREEMENT
    gamma = 0.0
    if method == "dpsgd":
        gamma = second_eigenvalue(mixing_matrix(scenario.make_graph()))
    if method in SYNCHRONOUS and gamma == 0.0:
        return LEAST_STEPS
    rate = {
        "gossip": lambda: 1.0 / (2.0 * constants.chi1),
        "dpsgd": lambda: -2.0 * math.log(gamma),
    }.get(method, lambda: constants.eta)()
    return max(LEAST_STEPS, math.ceil(MARGIN * math.log(2.0 / TAIL_LOWEST) / rate))


def affordable_steps(scenario: Scenario, method: str, *, values_per_worker: int) -> float:
    """Return the steps of a consensus run that take some seconds at most."""
    constants = scenario.make_constants()
    if method == "none" or not constants.edges:
        return math.inf
    is_synchronous = method in SYNCHRONOUS
    most = MOST_VALUES["rounds" if is_synchronous else scenario.fidelity]
    per_step = len(constants.edges) if is_synchronous else constants.exchanges_per_unit_time
    return max(LEAST_STEPS, math.floor(most / (per_step * max(values_per_worker, 64))))


# --- many runs -----------------------------------------------------------------------------


class Job(NamedTuple):
    """One run."""

    scenario: Scenario
    method: str


def simulate_all(
    jobs: Sequence[Job],
    *,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> list[Trace]:
    """Simulate every job, and return the traces in the order of the jobs.

    The traces do not depend on how many processes there are.

    Args:
        jobs: the runs.
        processes: how many at once; None: as many as there are cores, if that is quicker.
        on_progress: called in this thread with the share of all jobs that is done, 0 to 1.

    Raises:
        ValueError: as :func:`simulate`, or ``processes`` is not positive.

    Example:
        >>> from gossipdp_lab.simulate import Job, Scenario, simulate_all
        >>> scenario = Scenario(graph="ring", num_workers=8, num_steps=20)
        >>> jobs = [Job(scenario, method) for method in ("a2cid2", "gossip")]
        >>> [trace.method for trace in simulate_all(jobs, processes=1)]
        ['a2cid2', 'gossip']
    """
    costs = [job.scenario.num_workers * job.scenario.num_steps for job in jobs]
    return run_all(
        lambda job, progress: simulate(job.scenario, job.method, progress),
        jobs,
        processes=processes,
        costs=costs,
        on_progress=on_progress,
    )


def run_all(
    function: Callable[[Task, Progress], Answer],
    tasks: Sequence[Task],
    *,
    processes: int | None = None,
    costs: Sequence[float] | None = None,
    on_progress: Progress | None = None,
) -> list[Answer]:
    """Return ``[function(task, progress) for task in tasks]``, computed over processes.

    Torch and numpy compute with one thread in each process, even if this is the only one, so that
    sums do not depend on the number of cores. With ``processes=None`` the cheapest tasks, by
    ``costs``, are done here first, to see how long they take. If the rest would take long, there
    are then as many processes as cores. A function may call its ``progress`` with the share of its
    task that is done, which has an effect in this process alone; ``on_progress`` gets the share of
    all costs.

    Functions, tasks and answers must be picklable, by cloudpickle at least. An error of a task in
    another process has joblib's traceback as its cause.
    """
    if processes is not None:
        at_least_1("processes", processes)
    costs = costs or [1.0] * len(tasks)
    on_progress = on_progress or (lambda share: None)
    num_processes = min(processes or joblib.cpu_count(), len(tasks))
    left = sorted(range(len(tasks)), key=lambda place: costs[place])
    answers: dict[int, Answer] = {}
    done, total, began_s = 0.0, sum(costs), monotonic()

    def advance(cost: float, share: float = 0.0) -> None:
        on_progress(min(1.0, (done + share * cost) / total))

    with one_thread():
        while left and (num_processes == 1 or processes is None):
            place = left.pop(0)
            answers[place] = function(tasks[place], partial(advance, costs[place]))
            done += costs[place]
            advance(0.0)
            seconds_left = (monotonic() - began_s) * (total - done) / done
            if num_processes > 1 and seconds_left > WORTH_PROCESSES_S:
                break
    if left:
        pool = joblib.Parallel(
            n_jobs=min(num_processes, len(left)), batch_size=1, return_as="generator_unordered"
        )
        calls = (joblib.delayed(_run_one)(function, place, tasks[place]) for place in left[::-1])
        for place, answer in pool(calls):
            answers[place] = answer
            done += costs[place]
            advance(0.0)
    return [answers[place] for place in range(len(tasks))]


def _run_one(
    function: Callable[[Task, Progress], Answer], place: int, task: Task
) -> tuple[int, Answer]:
    with one_thread():
        return place, function(task, lambda share: None)


# --- over seeds ----------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A figure over seeds; NaN if a seed has none."""

    mean: float
    spread: float
    """Sample standard deviation over seeds; 0 for one seed."""
    by_seed: tuple[float, ...]

    @classmethod
    def of(cls, figures: Sequence[float]) -> Estimate:
        """Return mean and spread of one figure a seed; NaN if one of them is."""
        spread = float(np.std(figures, ddof=1)) if len(figures) > 1 else 0.0
        return cls(float(np.mean(figures)), spread, tuple(figures))


@dataclass(frozen=True)
class Ensemble:
    """Traces of one method that differ by their seeds alone.

    Their time series are taken as far as all of them go: a run may end before others, once the
    workers agree.

    Args:
        label: its name in figures and tables.
        traces: one a seed.
        case: number of the scenario that it belongs to, from 0.
    """

    label: str
    traces: Sequence[Trace]
    case: int = 0

    @property
    def method(self) -> str:
        """Return the method of all traces."""
        return self.traces[0].method

    def column(self, name: str) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return one field of :class:`.trace.Record` over time; (num_seeds, num_records)."""
        columns = [trace.column(name) for trace in self.traces]
        length = min(len(column) for column in columns)
        return np.stack([column[:length] for column in columns])

    def mean(self, name: str) -> Series:
        """Return the mean over seeds; (num_records,)."""
        return np.asarray(self.column(name).mean(axis=0))

    def spread(self, name: str) -> Series:
        """Return the sample standard deviation over seeds, 0 for one seed; (num_records,)."""
        column = self.column(name)
        if len(column) == 1:
            return np.zeros(column.shape[1])
        return np.asarray(column.std(axis=0, ddof=1))

    def over_seeds(self, figure: Callable[[Trace], float]) -> Estimate:
        """Estimate a figure from that of each trace."""
        return Estimate.of([figure(trace) for trace in self.traces])

    def last(self, name: str) -> Estimate:
        """Estimate a column's value at the end of the runs."""
        return self.over_seeds(lambda trace: float(getattr(trace.records[-1], name)))

    @property
    def lowest_share(self) -> float:
        """Return the share of its first value to which the consensus distance fell in all runs."""
        return max(lowest_share(trace.column("consensus_distance")) for trace in self.traces)

    @property
    def gradient_steps(self) -> tuple[float, float]:
        """Return the steps of the slowest and the fastest worker, means over seeds.

        If steps are counted and not simulated, all workers have taken equally many.
        """
        ends = []
        for trace in self.traces:
            per_worker = trace.records[-1].gradient_steps / trace.num_workers
            steps = trace.worker_steps if any(trace.worker_steps) else [per_worker]
            ends.append((min(steps), max(steps)))
        slowest, fastest = np.mean(ends, axis=0)
        return float(slowest), float(fastest)
