import math
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.observe.goodput import Part, Progress, goodput_of


def stepped(durations_s: list[float]) -> Progress:
    """Return the records of steps of 8 samples, one each; the first step ended at 100."""
    progress = Progress()
    for number, now in enumerate(accumulate(durations_s, initial=100.0), start=1):
        progress.note(now, number, 8 * number)
    return progress


def own_goodput(durations_s: list[float]) -> float:
    return goodput_of([stepped(durations_s).part()])


def test_a_worker_four_times_slower_for_ten_seconds_loses_three_quarters_of_them():
    part = stepped([0.04] * 750 + [0.16] * 63 + [0.04] * 500).part()
    assert part.full_samples_per_second == pytest.approx(8 / 0.04, rel=0.005)
    assert (1 - goodput_of([part])) * part.seconds == pytest.approx(63 * 0.12, rel=0.03)


@pytest.mark.parametrize("undisturbed", [0.25, 0.5, 0.9])
def test_full_speed_is_found_though_the_worker_is_slow_for_most_of_the_time(undisturbed):
    fast, slow = round(100 * undisturbed / 0.04), round(100 * (1 - undisturbed) / 0.16)
    expected = undisturbed + (1 - undisturbed) / 4
    assert own_goodput([0.04] * fast + [0.16] * slow) == pytest.approx(expected, rel=0.02)
    assert own_goodput([0.16] * slow + [0.04] * fast) == pytest.approx(expected, rel=0.02)


def test_a_few_fast_seconds_are_no_full_speed():
    assert own_goodput([0.02] * 100 + [0.04] * 1000) == pytest.approx(1.0, rel=0.02)


@given(seed=st.integers(0, 10**6), mean_s=st.sampled_from([0.01, 0.05, 0.3, 20.0]))
def test_steps_that_differ_in_length_lower_nothing(seed, mean_s):
    random = Random(seed)
    # Each is 0.5 to 1.5 of the mean, and every third twice as long, as with longer sequences.
    durations_s = [
        mean_s * random.uniform(0.5, 1.5) * (2 if number % 3 == 0 else 1) for number in range(600)
    ]
    assert own_goodput(durations_s) == pytest.approx(1.0, abs=0.04)


@given(
    steps=st.lists(st.tuples(st.floats(0.02, 3.0), st.integers(0, 64)), min_size=1, max_size=200),
    gap=st.integers(0, 199),
)
def test_the_full_speed_lies_between_the_speeds_of_its_windows(steps, gap):
    """Against a plain list of windows, each with its exact speed."""
    progress, now, total = Progress(), 5.0, 9
    progress.note(now, 1, total)
    windows: list[tuple[int, float]] = []
    samples, num, began = 0, 0, now
    for number, (duration_s, of_step) in enumerate(steps):
        duration_s += 30.0 * (number == gap)  # a standstill
        now, total = now + duration_s, total + of_step
        progress.note(now, number + 2, total)
        samples, num = samples + of_step, num + 1
        if now - began >= 1.0 and num >= 8:
            windows.append((samples, now - began))
            samples, num, began = 0, 0, now
    speeds = [n / s for n, s in windows if n]
    full_speed = progress.part().full_samples_per_second
    if len(speeds) < 3:
        assert math.isnan(full_speed)
        return
    assert min(speeds) * 0.999 <= full_speed <= max(speeds) * 1.001
    votes, usual = 0, 0.0
    for n, s in sorted((each for each in windows if each[0]), key=lambda each: -each[0] / each[1]):
        votes, usual = votes + n, n / s
        if 2 * votes >= sum(n for n, _ in windows):
            break
    # Bins of 5% may move a window over the border, and the median by one bin.
    assert full_speed >= usual / 1.5 * 0.9


def test_no_speed_before_three_whole_windows():
    """The third one lacks a step, or a tenth of a second."""
    for durations_s in ([1.0] * 23, [0.01] * 290):
        assert math.isnan(own_goodput(durations_s))
    assert stepped([1.0] * 24).part() == Part(192, 24.0, 8.0)


def test_the_first_step_what_came_before_it_and_what_follows_the_last_count_in_nothing():
    progress = Progress()
    progress.note(50.0, 0, 0)
    assert (progress.part(60.0).samples, progress.part(60.0).seconds) == (0, 0.0)
    progress = stepped([0.25] * 40)
    for later_s in (1.0, 90.0):
        progress.note(110.0 + later_s, 41, 328)
    assert progress.part() == Part(320, 10.0, 32.0)
    assert progress.part(150.0) == Part(320, 50.0, 32.0), "it should have trained until then"


@pytest.mark.parametrize("every_s", [0.2, 1.0, 3.0])
def test_records_that_cut_steps_in_pieces_give_the_same_speed(every_s):
    """Steps of 0.3 s for ten minutes, seen from time to time only."""
    progress = Progress()
    for number in range(1, round(600 / every_s) + 1):
        steps = int(number * every_s / 0.3)
        progress.note(number * every_s, steps, 8 * steps)
    assert goodput_of([progress.part()]) == pytest.approx(1.0, abs=0.01)


def test_a_life_goes_on_where_the_first_one_of_its_rank_began():
    """It was away for 40 s, and the others had not heard of its last steps."""
    progress = stepped([0.8] * 50)
    for number in range(51):
        progress.note(180.0 + 0.8 * number, 50 + number, 8 * (50 + number))
    assert progress.part() == Part(8 * 99, pytest.approx(120.0), pytest.approx(10.0))


def test_a_run_s_goodput_is_by_the_samples_that_each_could_have_made():
    fast, slow_one = Part(500, 10.0, 100.0), Part(50, 10.0, 10.0)
    assert goodput_of([fast, slow_one]) == pytest.approx(550 / 1100)
    assert goodput_of([fast, Part(100, 40.0, 10.0)]) == pytest.approx(600 / 1400)
    assert goodput_of([Part(1020, 10.0, 100.0)]) == 1.0
    # Unknown speed: the median of the others'.
    assert goodput_of([fast, Part(0, 10.0, math.nan)]) == pytest.approx(500 / 2000)
    assert math.isnan(goodput_of([Part(0, 10.0, math.nan)]))
    assert math.isnan(goodput_of([]))
