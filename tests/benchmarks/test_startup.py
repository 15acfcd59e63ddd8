"""startup.py: the stages of an interpreter, and the figures."""

import pytest
from startup import Case, Start, measure, summary


def test_the_figures() -> None:
    stages = {
        "torch": [2.0, 2.5],
        "imported": [2.1, 2.7],
        "wrapped": [2.25, 3.0],
        "stepped": [2.5, 3.25],
    }
    start = Start.of(stages)
    assert (start.cpu_s, start.wall_s, start.step_cpu_s, start.whole_cpu_s) == (
        0.25,
        0.5,
        0.25,
        2.5,
    )
    slower = Start(0.35, 0.6, 0.25, 2.6)
    assert summary([start, slower, slower])["cpu_s"].values == (0.25, 0.35, 0.35)


@pytest.mark.processes
def test_an_interpreter_imports_wraps_and_steps() -> None:
    start = measure(Case("wrap"))
    assert 0 < start.cpu_s < start.whole_cpu_s
    assert start.wall_s > 0
    assert start.step_cpu_s > 0
