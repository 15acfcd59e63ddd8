"""The step clock: virtual time, the running median, ticks that meet their rate."""

import math
from random import Random
from statistics import median_low

import pytest
from driven_worker import InPhase
from hypothesis import example, given
from hypothesis import strategies as st

from gossipdp.protocol.step_clock import StepClock


@pytest.mark.parametrize("rate_per_step", [0.25, 1.0, 5.0])
def test_even_ticks_meet_the_rate_whatever_the_durations(rate_per_step):
    random = Random(2)
    clock = StepClock(rate_per_step, random)
    num_steps, num_ticks, now = 10_000, 0, 0.0
    for step in range(num_steps):
        now += random.lognormvariate(0.0, 1.0) + (100.0 if step % 97 == 0 else 0.0)
        clock.step(now)
        num_ticks += clock.ticks_due(now)
        if now < (due := clock.next_tick_at) < math.inf:
            assert clock.ticks_due(math.nextafter(due, 0.0)) == 0
            assert clock.ticks_due(due) == 1, "it is due when it says"
            num_ticks += 1
    expected = rate_per_step * (num_steps - 4)
    # The variance of a gap is a twelfth of its mean squared; that of Poisson ticks is all of it.
    assert num_ticks == pytest.approx(expected, abs=4 * math.sqrt(expected / 12) + 1)


class Quarter(Random):
    def random(self) -> float:
        return 0.25


def test_a_draw_says_how_much_of_a_gap_it_takes():
    """So one seed of the simulator gives the same run."""
    clock = StepClock(0.0, Quarter())
    for now in range(5):
        clock.step(now)
    clock.set_rate(0.5)
    assert clock.next_tick_at == 4.0 + 0.25 / 0.5
    assert clock.ticks_due(4.5) == 1
    clock.step(5)
    assert clock.next_tick_at == 4.5 + 0.75 / 0.5


clock_event = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.0, 4.0, allow_subnormal=False)),
    st.tuples(st.sampled_from(["step", "step", "pause", "resume"]), st.none()),
    st.tuples(st.just("rate"), st.sampled_from([0.0, 0.25, 1.0, 3.0])),
)
clock_events = st.lists(clock_event, min_size=30, max_size=100)


# The median forgets: 20 quick steps after 40 slow ones.
QUICKER = [("wait", 5.0), ("step", None)] * 40 + [("wait", 1.0), ("step", None)] * 20


@example(QUICKER, 0.5)
@given(clock_events, st.sampled_from([0.0, 0.5, 2.0]))
def test_ticks_come_due_in_the_virtual_time_of_the_text_after_every_event(events, rate):
    """With gaps of 1 / rate; the time of a pause does not pass, and a step is worth one unit."""
    clock, now = StepClock(rate, InPhase()), 0.0
    passed = last_step = 0.0  # without pauses
    steps, num_ticks, next_tick, is_paused = 0, 0, math.inf, False
    durations = list[float]()
    for kind, value in events:
        match kind:
            case "wait":
                now += value
                passed += 0.0 if is_paused else value
            case "pause":
                clock.pause(now)
                is_paused = True
            case "resume":
                clock.resume(now)
                is_paused = False
            case "step":
                clock.step(now)
                if steps > 2 and not is_paused:
                    durations.append(passed - last_step)
                    if len(durations) == 1:
                        next_tick = steps + 1 + (1.0 / rate if rate else math.inf)
                steps, last_step = steps + 1, passed
            case "rate":
                clock.set_rate(value)
                if durations and value != rate:
                    ahead = max(0.0, next_tick - steps) * rate if rate and value else 1.0
                    next_tick = steps + (ahead / value if value else math.inf)
                rate = value
        assert (clock.step_seconds is None) == (not durations)
        if is_paused or not durations:
            first_timed = max(3, steps) + 1
            assert clock.timed_from_step == (math.inf if is_paused else first_timed)
            assert clock.next_tick_at == math.inf
            assert clock.ticks_due(now) == 0
            continue
        median = max(median_low(durations[-32:]), 1e-9)
        assert clock.step_seconds == pytest.approx(median, abs=1e-12 + 1e-12 * now)
        u = steps + min(1.0, (passed - last_step) / median)
        due = clock.next_tick_at
        if next_tick > steps + 1.0 + 1e-6:
            assert due == math.inf
        elif next_tick < steps + 1.0 - 1e-6:
            assert max(now, due) == pytest.approx(
                now + max(0.0, (next_tick - u) * median), abs=1e-6
            )
        if (found := clock.ticks_due(now)) == 0:
            assert next_tick > u - 1e-6
        else:
            next_tick += found / rate
            assert u - 1e-6 < next_tick <= u + 1.0 / rate + 1e-6
        num_ticks += found
        assert clock.num_ticks == num_ticks
        assert clock.timed_from_step == pytest.approx(next_tick - 1.0)


@pytest.mark.parametrize("rate_per_step", [-1.0, math.nan, math.inf])
def test_bad_rates_are_refused(rate_per_step):
    with pytest.raises(ValueError, match="rate_per_step"):
        StepClock(rate_per_step, Random(0))
