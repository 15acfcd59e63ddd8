import math

import pytest
from calling_back import CallingLock
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.dynamics.phase import MAX_GAP_IN_MEANS, MAX_PERIODS, Phase


def exchange_at(phase: Phase, *starts_s: float, duration_s: float = 0.0) -> list[float]:
    thetas = []
    for start_s in starts_s:
        thetas.append(phase.start_exchange(start_s))
        phase.end_exchange(start_s + duration_s)
    return thetas


def test_the_first_exchange_only_starts_the_clock():
    phase = Phase(eta=0.5, worker_rate=1.0)
    assert phase.at(100.0) == 0.0
    assert exchange_at(phase, 100.0, 102.0) == [0.0, 0.0]
    assert phase._mean_gap_s == 2.0


def test_one_period_is_one_mean_gap_over_the_worker_rate():
    phase = Phase(eta=0.5, worker_rate=0.25)
    thetas = exchange_at(phase, 0.0, 2.0, 4.0, 6.0)
    assert thetas[3] - thetas[2] == pytest.approx(0.5 / 0.25)


def test_the_phase_stands_still_during_an_exchange_and_catches_up_after_it():
    phase = Phase(eta=1.0, worker_rate=1.0)
    exchange_at(phase, 0.0, 1.0)
    frozen = phase.start_exchange(2.0)
    assert phase.at(2.4) == phase.at(2.9) == frozen
    phase.end_exchange(2.9)
    assert phase.at(3.0) == pytest.approx(frozen + 1.0)


def test_a_withdrawn_exchange_leaves_the_phase_as_if_it_had_never_begun():
    phase, without = Phase(eta=1.0, worker_rate=1.0), Phase(eta=1.0, worker_rate=1.0)
    for one in (phase, without):
        exchange_at(one, 0.0, 1.0)
    phase.start_exchange(1.1)
    phase.end_exchange(1.3, is_withdrawn=True)
    assert phase.at(1.6) == pytest.approx(0.6)
    assert exchange_at(phase, 3.0, 4.5) == pytest.approx(exchange_at(without, 3.0, 4.5))


def test_a_stall_flows_at_most_the_cap_and_boundary_flows_count_towards_it():
    phase = Phase(eta=1.0, worker_rate=1.0)
    exchange_at(phase, 0.0, 1.0)
    before = phase.at(1.0)
    assert phase.at(3.0) == pytest.approx(before + 2.0)
    assert phase.at(101.0) == pytest.approx(before + MAX_PERIODS)
    assert phase.start_exchange(201.0) == pytest.approx(before + MAX_PERIODS)


def test_the_mean_gap_is_taken_after_the_flow_and_follows_a_change_of_pace():
    phase = Phase(eta=1.0, worker_rate=1.0)
    exchange_at(phase, 0.0, 1.0)
    assert exchange_at(phase, 3.0) == pytest.approx([2.0])
    assert phase._mean_gap_s == pytest.approx(1.5)
    exchange_at(phase, *(3.0 + 5.0 * k for k in range(1, 60)))
    assert phase._mean_gap_s == pytest.approx(5.0, rel=0.02)


def test_two_exchanges_at_one_moment_do_not_stop_the_phase():
    phase = Phase(1.0, 1.0)
    for now in (1.0, 1.0, 2.0, 3.0):
        phase.start_exchange(now)
        phase.end_exchange(now)
    before = phase.at(3.0)
    assert phase.at(3.5) > before


def test_a_pause_of_any_length_moves_the_mean_gap_by_a_bounded_factor():
    phase = Phase(eta=1.0, worker_rate=1.0)
    exchange_at(phase, *map(float, range(30)))
    exchange_at(phase, 1e9)
    assert phase._mean_gap_s <= 1.0 + 0.1 * (MAX_GAP_IN_MEANS - 1.0) + 1e-9


def test_a_new_graph_changes_the_speed_and_never_the_phase():
    phase = Phase(eta=1.0, worker_rate=1.0)
    exchange_at(phase, 0.0, 1.0)
    before = phase.at(1.5)
    phase.set_speed(0.1, 1.0, 1.5)
    assert phase.at(1.5) == before
    assert phase.at(2.5) == pytest.approx(before + 0.1)
    phase.set_speed(1.0, 1.0, 3.5)  # a period after the last look, at the speed until now
    assert phase.at(3.5) == pytest.approx(before + 0.2)


def test_without_neighbours_or_momentum_nothing_flows():
    for phase in (Phase(0.0, 1.0), Phase(0.0, 0.0)):
        assert exchange_at(phase, 0.0, 1.0, 2.0) == [0.0, 0.0, 0.0]
        assert not math.isnan(phase.at(50.0))


def test_an_exchange_that_starts_under_a_look_freezes_what_the_look_sees():
    phase = Phase(eta=0.5, worker_rate=1.0)
    exchange_at(phase, 0.0, 1.0)
    frozen: list[float] = []
    phase._lock = lock = CallingLock(before=lambda: frozen.append(phase.start_exchange(2.0)))
    assert [phase.at(2.75)] == frozen == [0.5]
    assert lock.has_called


class Guarded(Phase):
    """A phase that refuses to be changed by one that does not hold its lock."""

    def __setattr__(self, name: str, value: object) -> None:
        lock = self.__dict__.get("_lock")
        assert lock is None or lock.locked(), f"{name} changes without the lock"
        super().__setattr__(name, value)


def test_nothing_of_it_changes_without_its_lock():
    phase = Guarded(eta=0.5, worker_rate=1.0)
    for now_s in (0.0, 1.0, 2.0, 3.0):
        phase.start_exchange(now_s)
        phase.end_exchange(now_s + 0.25, is_withdrawn=now_s == 2.0)
        phase.at(now_s + 0.5)
        phase.set_speed(0.3, 2.0, now_s + 0.75)


phase_events = st.lists(
    st.tuples(
        st.sampled_from(["exchange", "exchange", "withdrawn", "look", "look", "early", "graph"]),
        st.floats(0.0, 30.0, allow_subnormal=False),
    ),
    min_size=20,
    max_size=60,
)


@given(phase_events)
def test_the_phase_is_that_of_a_model_after_every_event(events):
    """Each passes once the time since the last start, in mean gaps, up to 4; never backwards."""
    phase, speed = Phase(eta=0.5, worker_rate=2.0), 0.25
    now = theta = counted = 0.0
    last, num_gaps, mean = None, 0, math.nan
    for kind, amount in events:
        if kind == "early":
            assert phase.at(now - amount) == pytest.approx(theta)
            continue
        now += amount
        due = min((now - last) / mean, 4.0) if last is not None and num_gaps else 0.0
        theta += speed * max(0.0, due - counted)
        counted = max(due, counted)
        if kind == "look":
            assert phase.at(now) == pytest.approx(theta)
        elif kind == "graph":
            speed = 0.1 * (1 + int(amount) % 3)
            phase.set_speed(speed, 1.0, now)
        else:
            assert phase.start_exchange(now) == pytest.approx(theta)
            assert phase.at(now + 0.5) == pytest.approx(theta), "it stands still"
            phase.end_exchange(now + 1.0, is_withdrawn=kind == "withdrawn")
            if kind == "exchange":
                gap_s = 0.0 if last is None else now - last
                last, counted = now, 0.0
                if gap_s > 0.0:
                    num_gaps += 1
                    share = max(0.1, 1.0 / num_gaps)
                    mean = (
                        gap_s if num_gaps == 1 else mean + share * (min(gap_s, 10.0 * mean) - mean)
                    )
            now += 1.0
            due = min((now - last) / mean, 4.0) if last is not None and num_gaps else 0.0
            theta += speed * max(0.0, due - counted)
            counted = max(due, counted)
