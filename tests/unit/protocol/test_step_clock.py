"""The step clock: virtual time, the running median, ticks that meet their rate."""

import math
from random import Random

import pytest
from driven_worker import InPhase

from gossipdp.protocol.step_clock import MEDIAN_WINDOW, SKIPPED_STEPS, StepClock


def started(rate_per_step: float, step_s: float = 1.0) -> tuple[StepClock, float]:
    """Return a clock just after the step that gave it its first duration, and the time."""
    clock = StepClock(rate_per_step, InPhase())
    for step in range(SKIPPED_STEPS + 1):
        clock.step(step * step_s)
    return clock, SKIPPED_STEPS * step_s


def test_no_tick_before_there_is_a_step_duration():
    clock = StepClock(10.0, Random(0))
    for step in range(SKIPPED_STEPS):
        clock.step(float(step))
        assert clock.step_seconds is None
        assert clock.timed_from_step == SKIPPED_STEPS + 1
        assert clock.ticks_due(step + 0.9) == 0
        assert clock.next_tick_at(step + 0.9) is None
    clock.step(float(SKIPPED_STEPS))
    assert clock.step_seconds == 1.0
    assert math.isfinite(clock.timed_from_step)


def test_median_forgets():
    clock, now = started(1.0, step_s=5.0)
    for _ in range(MEDIAN_WINDOW):
        now += 1.0
        clock.step(now)
    assert clock.step_seconds == 1.0


def test_ticks_come_due_in_virtual_time():
    clock, now = started(2.0, step_s=4.0)
    assert clock.next_tick_at(now) == now + 2.0
    assert clock.ticks_due(now + 1.9) == 0
    assert clock.ticks_due(now + 2.0) == 1
    assert clock.ticks_due(now + 2.0) == 0
    assert clock.next_tick_at(now + 3.0) == now + 4.0
    assert clock.next_tick_at(now + 5.0) == now + 5.0


def test_a_long_step_is_worth_one_unit():
    clock, now = started(2.0)
    assert clock.ticks_due(now + 1000.0) == 2
    assert clock.next_tick_at(now + 1000.0) is None
    clock.step(now + 1000.0)
    assert clock.ticks_due(now + 1000.4) == 0
    assert clock.ticks_due(now + 1000.5) == 1


def test_next_tick_is_due_when_it_says():
    random = Random(1)
    clock = StepClock(3.0, random)
    now = 0.0
    for _ in range(300):
        now += random.uniform(0.01, 0.3)
        clock.step(now)
        clock.ticks_due(now)
        due = clock.next_tick_at(now)
        if due is not None:
            assert clock.ticks_due(math.nextafter(due, -math.inf)) == 0 or due == now
            assert clock.ticks_due(due) >= 1


@pytest.mark.parametrize("rate_per_step", [0.25, 1.0, 5.0])
def test_even_ticks_meet_the_rate_whatever_the_durations(rate_per_step):
    random = Random(2)
    clock = StepClock(rate_per_step, random)
    num_steps, num_ticks, now = 10_000, 0, 0.0
    for step in range(num_steps):
        now += random.lognormvariate(0.0, 1.0) + (100.0 if step % 97 == 0 else 0.0)
        clock.step(now)
        num_ticks += clock.ticks_due(now)
    expected = rate_per_step * (num_steps - SKIPPED_STEPS - 1)
    # The variance of a gap is a twelfth of its mean squared; that of Poisson ticks is all of it.
    assert num_ticks == pytest.approx(expected, abs=4 * math.sqrt(expected / 12) + 1)


def test_pause_stops_time_and_resume_goes_on():
    clock, now = started(2.0)
    clock.pause(now + 0.4)
    assert clock.ticks_due(now + 50.0) == 0
    assert clock.next_tick_at(now + 50.0) is None
    clock.pause(now + 60.0)  # already paused: nothing new
    clock.resume(now + 100.4)
    assert clock.next_tick_at(now + 100.4) == pytest.approx(now + 100.5)
    clock.step(now + 101.0)
    assert clock.step_seconds == 1.0
    clock.resume(now + 500.0)  # not paused: nothing happens
    assert clock.ticks_due(now + 101.0) == 2


def test_set_rate_stretches_what_remains():
    clock, now = started(1.0)
    clock.set_rate(2.0)
    assert clock.next_tick_at(now) == now + 0.5
    clock.set_rate(0.0)
    clock.step(now + 1.0)
    assert clock.ticks_due(now + 1.0) == 0
    clock.set_rate(4.0)
    assert clock.next_tick_at(now + 1.0) == now + 1.25


@pytest.mark.parametrize("rate_per_step", [-1.0, math.nan, math.inf])
def test_bad_rates_are_refused(rate_per_step):
    with pytest.raises(ValueError, match="rate_per_step"):
        StepClock(rate_per_step, Random(0))
