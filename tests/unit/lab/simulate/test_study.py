"""Many runs over processes, means and spreads over seeds, and the length of runs that agree."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import joblib
import pytest
import torch

from gossipdp_lab.simulate import study
from gossipdp_lab.simulate.objectives import Consensus
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.study import (
    LEAST_STEPS,
    Ensemble,
    Estimate,
    Job,
    affordable_steps,
    run_all,
    simulate,
    simulate_all,
    steps_to_agree,
)
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Record, Trace, lowest_share

Progress = Callable[[float], None]


def jobs() -> list[Job]:
    """Return runs of different lengths; none for which numba has to compile."""
    return [
        Job(Scenario(graph=graph, num_workers=8, num_steps=steps, seed=seed), method)
        for seed, steps in ((0, 30), (1, 10), (2, 20))
        for graph, method in (("ring", "dpsgd"), ("star", "dpsgd"))
    ]


def test_traces_do_not_depend_on_the_number_of_processes() -> None:
    alone = [trace.digest() for trace in simulate_all(jobs(), processes=1)]
    together = [trace.digest() for trace in simulate_all(jobs(), processes=2)]
    assert together == alone
    assert len(set(alone)) == len(alone)  # so that the order of the jobs shows


@pytest.mark.parametrize("processes", [1, 2])
def test_progress_rises_to_one_and_counts_by_cost(processes: int) -> None:
    def task(name: str, progress: Progress) -> str:
        progress(0.5)
        return name

    shares: list[float] = []
    answers = run_all(
        task, ["a", "b", "c"], processes=processes, costs=[1, 2, 5], on_progress=shares.append
    )
    assert answers == ["a", "b", "c"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    if processes == 1:  # the cheapest first
        assert shares == pytest.approx([0.5 / 8, 1 / 8, 2 / 8, 3 / 8, 5.5 / 8, 1])


@pytest.mark.parametrize("processes", [1, 2])
def test_torch_computes_with_one_thread_meanwhile(processes: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        answers = run_all(
            lambda task, progress: torch.get_num_threads(), [0, 1], processes=processes
        )
        assert answers == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_jobs_and_no_processes() -> None:
    assert simulate_all([]) == []
    with pytest.raises(ValueError, match="processes is 0"):
        simulate_all(jobs(), processes=0)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_keeps_its_type_and_message(processes: int) -> None:
    bad = [*jobs(), Job(Scenario(num_workers=4), "telepathy")]
    with pytest.raises(ValueError, match="there is no method 'telepathy'") as caught:
        simulate_all(bad, processes=processes)
    if processes == 2:
        assert "in simulate\n" in str(caught.value.__cause__)


def test_a_killed_process_is_an_error() -> None:
    def die(task: int, progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(joblib.externals.loky.process_executor.TerminatedWorkerError):
        run_all(die, [0, 1], processes=2)


@pytest.mark.parametrize(("seconds_each", "num_here"), [(0.1, 4), (60.0, 1)])
def test_processes_are_started_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch, seconds_each: float, num_here: int
) -> None:
    now_s = 0.0
    monkeypatch.setattr(joblib, "cpu_count", lambda: 2)
    monkeypatch.setattr("gossipdp_lab.simulate.study.monotonic", lambda: now_s)
    here = os.getpid()

    def task(number: int, progress: Progress) -> int:
        nonlocal now_s
        if os.getpid() == here:
            now_s += seconds_each
        return os.getpid()

    answers = run_all(task, [0, 1, 2, 3])
    assert answers.count(here) == num_here
    assert study.WORTH_PROCESSES_S < 60


def trace(distances: list[float], *, steps: list[int] | None = None) -> Trace:
    """Make a trace of four workers, with one exchange a worker between two records."""
    records = [
        Record(
            time_s=0.1 * number,
            loss=math.nan,
            batch_loss=math.nan,
            metric=math.nan,
            consensus_distance=distance,
            exchanges=2 * number,
            gradient_steps=4 * number,
            idle_share=0.0,
            drift=0.0,
        )
        for number, distance in enumerate(distances)
    ]
    return Trace("gossip", 4, 0.1, records, worker_steps=steps or [0] * 4)


def test_estimate() -> None:
    assert Estimate.of([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)), (1.0, 3.0))
    assert Estimate.of([1.0]) == (1.0, 0.0, (1.0,))
    assert math.isnan(Estimate.of([1.0, math.nan]).mean)


def test_series_go_as_far_as_all_traces() -> None:
    ensemble = Ensemble("two", [trace([4.0, 2.0, 1.0]), trace([8.0, 6.0])])
    assert ensemble.mean("consensus_distance").tolist() == [6.0, 4.0]
    assert ensemble.spread("consensus_distance") == pytest.approx([math.sqrt(8)] * 2)
    assert ensemble.last("consensus_distance").by_seed == (1.0, 6.0)
    assert ensemble.over_seeds(lambda trace: trace.achieved_comm_rate).by_seed == (1.0, 1.0)
    assert Ensemble("one", [trace([4.0, 2.0])]).spread("consensus_distance").tolist() == [0, 0]


def test_steps_of_the_slowest_and_the_fastest() -> None:
    simulated = Ensemble("a", [trace([1.0, 1.0], steps=[1, 5, 3, 3]), trace([1.0], steps=[3] * 4)])
    assert simulated.gradient_steps == (2.0, 4.0)
    counted = Ensemble("b", [trace([1.0] * 8)])
    assert counted.gradient_steps == (7.0, 7.0)


@pytest.mark.parametrize(
    ("graph", "method"),
    [
        ("ring", "a2cid2"),
        ("ring", "gossip"),
        ("complete", "a2cid2"),
        ("complete", "allreduce"),
        ("star", "gossip"),
        ("star", "dpsgd"),
    ],
)
def test_runs_are_long_enough_to_agree(graph: str, method: str) -> None:
    scenario = Scenario(
        graph=graph, num_workers=8, objective=Consensus(16), stop_below=TAIL_LOWEST, seed=1
    )
    num_steps = steps_to_agree(scenario, method)
    assert num_steps <= affordable_steps(scenario, method, values_per_worker=16)
    run = simulate(replace(scenario, num_steps=num_steps), method)
    assert lowest_share(run.column("consensus_distance")) < TAIL_LOWEST
    if num_steps > LEAST_STEPS:  # and not many times too long
        assert run.records[-1].time_s > 0.2 * num_steps * run.unit_s


def test_a_length_has_a_limit() -> None:
    scenario = Scenario(graph="ring", num_workers=4096)
    most = affordable_steps(scenario, "gossip", values_per_worker=64)
    assert most < steps_to_agree(scenario, "gossip")
    longer_rows = affordable_steps(scenario, "gossip", values_per_worker=640)
    assert longer_rows == pytest.approx(most / 10, rel=0.01)
    by_links = replace(scenario, fidelity="links")
    assert affordable_steps(by_links, "gossip", values_per_worker=64) < most / 10
    assert affordable_steps(scenario, "none", values_per_worker=64) == math.inf
