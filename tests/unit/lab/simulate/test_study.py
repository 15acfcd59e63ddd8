"""Many runs over processes, means and spreads over seeds, and the length of runs that agree."""

import math
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gossipdp_lab.simulate.objectives import Consensus
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.study import (
    LEAST_STEPS,
    Ensemble,
    Estimate,
    affordable_steps,
    run_all,
    simulate,
    simulate_all,
    steps_to_agree,
)
from gossipdp_lab.simulate.trace import TAIL_LOWEST, Record, Trace, lowest_share

Progress = Callable[[float], None]


def test_tasks_in_this_process() -> None:
    def task(name: str, progress: Progress) -> str:
        progress(0.5)
        return f"{name} {torch.get_num_threads()}"

    shares: list[float] = []
    names, before = ["a", "b", "c"], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        answers = run_all(task, names, processes=1, costs=[2, 1, 5], on_progress=shares.append)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert answers == ["a 1", "b 1", "c 1"]
    # The cheapest first.
    assert shares == pytest.approx([0.5 / 8, 1 / 8, 2 / 8, 3 / 8, 5.5 / 8, 1])
    assert simulate_all([]) == []
    with pytest.raises(ValueError, match="processes is 0"):
        run_all(task, names, processes=0)


def test_tasks_in_other_processes() -> None:
    def task(number: int, progress: Progress) -> tuple[int, int, int]:
        progress(0.5)
        if number < 0:
            raise ValueError("the user's own error")
        return number, torch.get_num_threads(), os.getpid()

    shares: list[float] = []
    costs = [1.0, 5.0, 2.0]
    answers = run_all(task, [0, 1, 2], processes=2, costs=costs, on_progress=shares.append)
    assert [answer[:2] for answer in answers] == [(0, 1), (1, 1), (2, 1)]
    assert os.getpid() not in {answer[2] for answer in answers}
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with pytest.raises(ValueError, match="the user's own error") as caught:
        run_all(task, [0, -1], processes=2)
    assert "in task\n" in str(caught.value.__cause__)


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
