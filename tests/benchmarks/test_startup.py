"""startup.py: the stages of an interpreter, and the figures."""

import math

import pytest
from startup import KILLED, Case, Start, measure, summary


def test_the_figures() -> None:
    stages = {
        "torch": [2.0, 2.5],
        "wrapped": [2.25, 3.0],
    }
    start = Start.of(stages)
    assert (start.cpu_s, start.wall_s) == (0.25, 0.5)
    assert math.isnan(start.exchange_wall_s)
    assert Start.of(stages | {"exchanged": [2.6, 4.0]}).exchange_wall_s == 1.5
    assert Start.of(stages | {"since the kill": [0.0, 1.75]}).back_wall_s == 1.75
    slower = Start(0.35, 0.6)
    assert summary([start, slower, slower])["cpu_s"].values == (0.25, 0.35, 0.35)


@pytest.mark.processes
def test_an_interpreter_imports_and_wraps() -> None:
    start = measure(Case("wrap"))
    assert start.cpu_s > 0
    assert start.wall_s > 0


@pytest.mark.processes
def test_a_killed_worker_is_timed_until_it_exchanges_again() -> None:
    start = measure(Case("killed", KILLED, num_workers=2, spare_s=0.5))
    assert start.wall_s < start.exchange_wall_s < math.inf
    assert start.exchange_wall_s < start.back_wall_s < math.inf
