import math

import pytest
from calling_back import CallingLock
from hypothesis import given
from hypothesis import strategies as st

from gossipdp.dynamics.phase import Phase


def test_an_exchange_that_starts_under_a_look_freezes_what_the_look_sees():
    phase = Phase(eta=0.5, worker_rate=1.0)
    for now_s in (0.0, 1.0):
        phase.start_exchange(now_s)
        phase.end_exchange(now_s)
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


kinds = ["exchange", "exchange", "withdrawn", "look", "look", "early", "graph"]
seconds = st.floats(0.0, 30.0, allow_subnormal=False)
phase_event = st.tuples(st.sampled_from(kinds), seconds, st.sampled_from([0.0, 1.0]))
phase_events = st.lists(phase_event, min_size=20, max_size=60)


@given(phase_events)
def test_the_phase_is_that_of_a_model_after_every_event(events):
    """Each passes once the time since the last start, in mean gaps, up to 4; never backwards.

    A start is that of an exchange that was not withdrawn. The first one only starts the clock, and
    a gap counts after the flow over it, as at most ten mean gaps. During an exchange, and with no
    neighbours, the phase stands still. Nothing changes without its lock.
    """
    phase, speed = Guarded(eta=0.5, worker_rate=2.0), 0.25
    now = theta = counted = 0.0
    last, num_gaps, mean = None, 0, math.nan

    def flow(passed: float) -> None:
        nonlocal now, theta, counted
        now += passed
        due = min((now - last) / mean, 4.0) if last is not None and num_gaps else 0.0
        theta += speed * max(0.0, due - counted)
        counted = max(due, counted)

    for kind, amount, duration in events:
        if kind == "early":
            assert phase.at(now - amount) == pytest.approx(theta)
            continue
        flow(amount)
        if kind == "look":
            assert phase.at(now) == pytest.approx(theta)
        elif kind == "graph":
            worker_rate = int(amount) % 4  # 0: a worker without neighbours
            speed = 0.2 / worker_rate if worker_rate else 0.0
            phase.set_speed(0.2, worker_rate, now)
        else:
            assert phase.start_exchange(now) == pytest.approx(theta)
            assert phase.at(now + 0.5) == pytest.approx(theta), "it stands still"
            phase.end_exchange(now + duration, is_withdrawn=kind == "withdrawn")
            if kind == "exchange":
                gap_s = 0.0 if last is None else now - last
                last, counted = now, 0.0
                if gap_s > 0.0:  # a mean of 0 would stay
                    num_gaps += 1
                    share = max(0.1, 1.0 / num_gaps)
                    mean = gap_s if num_gaps == 1 else mean + share * (min(gap_s, 10 * mean) - mean)
            flow(duration)
