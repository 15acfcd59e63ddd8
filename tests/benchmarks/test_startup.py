"""startup.py: a worker that is killed comes back."""

import math

import pytest
from startup import measure_back


@pytest.mark.processes
def test_a_killed_worker_is_timed_until_it_exchanges_again():
    assert 0.1 < measure_back(num_workers=2, spare_s=0.5) < math.inf  # it starts after 0.1 s
