"""The event heap: order, ties, cancelling, the clock."""

from __future__ import annotations

import math

import pytest

from gossipdp_lab.simulate.engine import Engine


def test_events_run_in_order_of_time_priority_and_scheduling() -> None:
    engine = Engine()
    log: list[str] = []
    engine.at(2.0, lambda: log.append("late"))
    engine.at(1.0, lambda: log.append("low"), priority=1)
    engine.at(1.0, lambda: log.append("first"))
    engine.at(1.0, lambda: log.append("second"))
    engine.run(until=1.5)
    assert log == ["first", "second", "low"]
    assert engine.now == 1.5
    engine.run(until=2.0)
    assert log[-1] == "late"
    assert engine.num_events == 4


def test_an_event_may_schedule_another_at_its_own_time() -> None:
    engine = Engine()
    times: list[float] = []
    engine.at(1.0, lambda: engine.at(1.0, lambda: times.append(engine.now)) and None)
    engine.run(until=1.0)
    assert times == [1.0]


def test_cancelled_events_do_not_run() -> None:
    engine = Engine()
    log: list[int] = []
    event = engine.at(1.0, lambda: log.append(1))
    event.cancel()
    engine.run(until=2.0)
    assert log == []
    assert engine.num_events == 0


@pytest.mark.parametrize("time", [0.5, math.nan, math.inf])
def test_the_past_and_no_time_are_refused(time: float) -> None:
    engine = Engine()
    engine.run(until=1.0)
    with pytest.raises(ValueError, match="cannot be scheduled"):
        engine.at(time, lambda: None)
