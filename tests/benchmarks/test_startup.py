"""startup.py: a worker that is killed comes back."""

import math

import pytest
from startup import measure_kill


@pytest.mark.processes
def test_a_killed_worker_is_timed_until_it_exchanges_again():
    back_s, (noticed_s,) = measure_kill(num_workers=2, spare_s=0.5)
    assert 0.0 < noticed_s < back_s < math.inf
