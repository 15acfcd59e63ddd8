"""adapters.py: what the workers' lines say, and how many steps fit into the time."""

import math

import pytest
from adapters import Job, figures, in_time


def test_a_restarted_worker_s_lines_are_counted_anew_and_its_return_is_timed():
    # Time, exchanges, bytes, steps, loss, process.
    one = [[0.0, 0, 100, 0, math.nan, 7], [9.0, 2, 300, 1, 2.0, 7], [21.0, 5, 900, 3, 1.0, 7]]
    other = [[1.0, 0, 50, 0, math.nan, 8], [4.0, 1, 60, 1, 4.0, 8]]
    other += [[12.0, 0, 70, 0, math.nan, 9], [14.0, 0, 75, 1, 3.0, 9], [16.0, 2, 80, 2, 3.0, 9]]
    found = figures([one, other], ended_s=23.0, killed_s=6.0)
    assert found["trained_s"] == 20.0  # from when the last one began
    assert (found["ended_s"], found["killed_s"], found["back_s"]) == (22.0, 5.0, 10.0)
    assert (found["steps"], found["exchanges"]) == ([3.0, 3.0], [5.0, 3.0])
    assert found["sent_bytes"] == [800, 30]
    assert found["exchanges_over_time"] == [[2.0, 3.0], [1.0, 2.0]]
    assert found["losses_over_time"] == [3.0, pytest.approx(7 / 3)]


def test_as_many_units_are_taken_as_fit_into_the_time():
    job = Job(row="ddp", rate=0.1, seed=0, seconds=60.0)
    assert in_time(job, {"units": 12, "ended_s": 25.0}).units == 28
    ours = Job(row="gossipdp", rate=0.1, seed=0, seconds=180.0)
    trial = {"units": 0, "steps": [100.0, 60.0, 30.0], "ended_s": 60.0}
    assert in_time(ours, trial).plan(rank=0).samples == 570 * 8
    assert ours.plan(rank=0).samples == 720 * 8  # what fits if nothing delays
    assert in_time(job, {"units": 12, "ended_s": 25.0}).plan(rank=2).own_steps == 28
