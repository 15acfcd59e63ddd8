import math
from dataclasses import replace

import numpy as np
import pytest

from gossipdp_lab.simulate.trace import Interval, Record, Trace, decay_per_exchange


def test_transient_and_floor_are_left_out():
    exchanges = np.arange(60.0)
    distances = np.maximum(np.exp(-1.0 * exchanges), 1e-12)
    distances[:3] = 1.0
    assert decay_per_exchange(exchanges, distances, lowest=1e-11) == pytest.approx(1.0)
    assert decay_per_exchange(exchanges, distances) < 0.8  # rounding counts


def test_the_tail_is_what_lasts():
    # A fast mode that is most of the start, and a slow one that lasts.
    two_modes = [math.exp(-2.0 * k) + 1e-2 * math.exp(-0.5 * k) for k in range(200)]
    assert decay_per_exchange(range(200), two_modes) == pytest.approx(0.5, rel=1e-3)
    # Rounding at the end plays no part.
    rounded = [max(distance, 1e-30) for distance in two_modes]
    assert decay_per_exchange(range(200), rounded) == decay_per_exchange(range(200), two_modes)


@pytest.mark.parametrize(
    "distances",
    [
        [math.exp(-0.5 * k) for k in range(8)],  # not below a hundredth
        [1.0, 1e-32, 1e-32],  # within one record
        [0.0, 0.0],  # nothing to agree about
        [1.0, 2.0, 9.0, 99.0],  # it diverges
    ],
)
def test_without_two_decades_there_is_no_slope(distances):
    assert math.isnan(decay_per_exchange(range(len(distances)), distances))


def test_the_digest_covers_what_happened_and_not_how_long_it_took():
    record = Record(0.0, math.nan, 0.0, 0.0, 0, 0, 0.0, drift=1.0)
    trace = Trace("gossip", 2, 0.1, [record])
    assert trace.digest() == replace(trace, wall_s=9.0).digest()
    changes = [
        {"method": "none"},
        {"records": [record._replace(drift=2.0)]},
        {"worker_steps": [1, 1]},
        {"num_messages": {"Busy": 1}},
        {"intervals": [Interval(0, "waiting", 0.0, 1.0)]},
    ]
    digests = {replace(trace, **each).digest() for each in changes}
    assert len(digests | {trace.digest()}) == 6
