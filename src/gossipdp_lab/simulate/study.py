"""Runs: one, and many over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple, TypeVar

import joblib
import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from gossipdp.rules import at_least_1
from gossipdp_lab.simulate.ideal import run_ideal
from gossipdp_lab.simulate.links import run_links
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.synchronous import AllReduce, Rounds
from gossipdp_lab.simulate.trace import Trace

Task = TypeVar("Task")
Answer = TypeVar("Answer")
Progress = Callable[[float], None]
"""Takes, from time to time, the share of the run that is done, 0 to 1."""

ASYNCHRONOUS = ("a2cid2", "gossip", "none", "released")
ROUNDS: dict[str, type[Rounds]] = {"allreduce": AllReduce}
SYNCHRONOUS = tuple(ROUNDS)
METHODS = ASYNCHRONOUS + SYNCHRONOUS

WORTH_PROCESSES_S = 10.0
"""Processes take seconds to start: torch is imported, and numba compiles in each."""


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
    =================  ==========================================================================

    Raises:
        ValueError: the method is unknown, or the scenario's graph or rates are not valid.

    Example:
        >>> from gossipdp_lab.simulate import Scenario, simulate
        >>> trace = simulate(Scenario(graph="ring", num_workers=16, num_steps=50), "a2cid2")
        >>> trace.records[-1].consensus_distance < 1e-3 * trace.records[0].consensus_distance
        True
    """
    check_method(method)
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


def check_method(method: str) -> None:
    """Raise ValueError for a method that does not exist."""
    if method not in ASYNCHRONOUS and method not in ROUNDS:
        raise ValueError(f"there is no method {method!r}; choose among {', '.join(METHODS)}")


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
