import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gossipdp_lab.simulate import study
from gossipdp_lab.simulate.objectives import Evaluation, Gradients, GradientSource, Objective
from gossipdp_lab.simulate.scenario import Scenario
from gossipdp_lab.simulate.study import Job, simulate, simulate_all

PAGE = (Path(__file__).parents[4] / "docs" / "simulator.md").read_text()
Progress = Callable[[float], None]


def test_the_cheapest_job_is_first_and_progress_is_by_cost(monkeypatch):
    def fake(scenario: Scenario, method: str, progress: Progress) -> str:
        progress(0.5)
        progress(1.0)
        return method

    monkeypatch.setattr(study, "simulate", fake)
    shares: list[float] = []
    jobs = [Job(Scenario(num_steps=steps), name) for steps, name in ((2, "a"), (1, "b"), (5, "c"))]
    assert simulate_all(jobs, processes=1, on_progress=shares.append) == ["a", "b", "c"]
    assert shares == pytest.approx([0.5 / 8, 1 / 8, 2 / 8, 3 / 8, 5.5 / 8, 1])
    assert simulate_all([]) == []
    with pytest.raises(ValueError, match="processes is 0"):
        simulate_all(jobs, processes=0)


def asking(*, fails: bool = False) -> Scenario:
    """Return a scenario whose loss is the number of torch's threads, and its metric the process.

    Its classes are those of no module, which other processes could not import.
    """

    class Source(GradientSource):
        start, num_trained = torch.zeros(1, 1), 1

        def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
            return Gradients(torch.zeros_like(x), x[:, :0])

        def evaluate(self, x: Tensor) -> Evaluation:
            return Evaluation(torch.get_num_threads(), os.getpid())

    class Asking(Objective):
        name = "asking"

        def begin(self, num_workers: int, seed: int) -> GradientSource:
            if fails:
                raise ValueError("the user's own error")
            return Source()

    return Scenario(objective=Asking(), num_workers=1, num_steps=2, num_records=2)


def test_a_run_computes_with_one_thread_and_restores_their_number():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert simulate(asking(), "none").records[-1].loss == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_scenario_of_the_docs_trains_alike_in_other_processes():
    section = PAGE.split("## From Python")[1]
    program = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)[0]
    names: dict[str, Any] = {}
    exec(program.partition("trace = ")[0], names)
    job = names["Job"](replace(names["scenario"], num_steps=10), "gossip")
    jobs = [job, job._replace(scenario=replace(job.scenario, seed=1))]
    (trace,) = simulate_all([job])
    assert trace.records[-1].loss < trace.records[0].loss
    # The functions are those of no module, which other processes could not import.
    again, other = simulate_all(jobs, processes=2)
    assert again.digest() == trace.digest() != other.digest()


def test_runs_in_other_processes():
    """Those of the test above, which are kept until one has an error."""
    shares: list[float] = []
    jobs = [Job(asking(), "none")] * 3
    traces = simulate_all(jobs, processes=2, on_progress=shares.append)
    assert [trace.records[-1].loss for trace in traces] == [1] * 3
    assert os.getpid() not in {trace.records[-1].metric for trace in traces}
    assert shares == pytest.approx([1 / 3, 2 / 3, 1.0])
    with pytest.raises(ValueError, match="the user's own error") as caught:
        simulate_all([jobs[0], Job(asking(fails=True), "none")], processes=2)
    assert "in simulate\n" in str(caught.value.__cause__)
