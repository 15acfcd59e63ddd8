"""Many runs over processes."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gossipdp_lab.simulate.study import run_all, simulate_all

PAGE = (Path(__file__).parents[4] / "docs" / "simulator.md").read_text()
Progress = Callable[[float], None]


def test_tasks_in_this_process():
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


def test_tasks_in_other_processes():
    """Those of the test above, which are kept until one has an error."""

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
