"""Traces: slopes, columns, digests."""

from __future__ import annotations

import numpy as np
import pytest

from gossipdp.simulate.trace import Interval, Record, Trace, decay_per_exchange


def record(**changes: float) -> Record:
    values: dict[str, float] = dict.fromkeys(Record._fields, 0.0) | changes
    return Record(**values)  # type: ignore[arg-type]


def test_the_slope_is_exact_on_an_exponential() -> None:
    exchanges = np.linspace(0.0, 100.0, 51)
    distances = 5.0 * np.exp(-0.37 * exchanges)
    assert decay_per_exchange(exchanges, distances, highest=0.1, lowest=1e-9) == pytest.approx(0.37)


def test_transient_and_floor_are_left_out() -> None:
    exchanges = np.arange(60.0)
    distances = np.maximum(np.exp(-1.0 * exchanges), 1e-12)
    distances[:3] = 1.0
    slope = decay_per_exchange(exchanges, distances, highest=0.1, lowest=1e-11)
    assert slope == pytest.approx(1.0)
    assert decay_per_exchange(exchanges, distances, highest=1.0, lowest=1e-30) < 0.8


def test_too_short_a_run_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"fell to 0\.5 .* simulate more steps"):
        decay_per_exchange([0, 1, 2], [2.0, 1.5, 1.0], highest=0.1, lowest=1e-9)


def test_a_run_that_diverges_has_no_slope() -> None:
    with pytest.raises(ValueError, match="a slope needs 3"):
        decay_per_exchange([0, 1, 2, 3], [1.0, 2.0, 9.0, 99.0], highest=0.1, lowest=1e-9)


def test_columns_and_rates() -> None:
    trace = Trace("gossip", 4, 0.1, records=[record(), record(exchanges=30, gradient_steps=60)])
    assert trace.column("exchanges").tolist() == [0.0, 30.0]
    assert trace.achieved_comm_rate == 1.0


def test_the_digest_covers_what_happened_and_not_how_long_it_took() -> None:
    def make(**changes: object) -> Trace:
        trace = Trace("gossip", 2, 0.1, records=[record(loss=float("nan"), drift=1.0)])
        for name, value in changes.items():
            setattr(trace, name, value)
        return trace

    assert make().digest() == make(wall_s=9.0).digest()
    others = [
        make(method="none"),
        make(records=[record(loss=float("nan"), drift=2.0)]),
        make(worker_exchanges=[1, 1]),
        make(num_messages={"Busy": 1}),
        make(intervals=[Interval(0, "waiting", 0.0, 1.0)]),
    ]
    assert len({trace.digest() for trace in [make(), *others]}) == 6
