"""The rate that a worker can afford: its bounds, its hysteresis, and what it allows."""

import math
from collections.abc import Sequence

import pytest
from driven_worker import ask, make_worker, said
from hypothesis import example, given
from hypothesis import strategies as st

from gossipdp.protocol.exchange_rate import BURST, CEILING, SPARE, ExchangeRate
from gossipdp.protocol.messages import Accept, Busy, Cancel, Envelope, ExchangeId, Free, Propose
from gossipdp.protocol.worker import Action

STEP_S = 0.1


def rate_after(duration_s: float, step_s: float | None = STEP_S) -> ExchangeRate:
    """Return a rate that has seen some equal exchanges."""
    rate = ExchangeRate()
    for _ in range(4):
        rate.exchanged(duration_s)
    rate.stepped(step_s)
    return rate


def median_of_last(values: Sequence[float]) -> float:
    last = sorted(values[-9:])
    return (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2


def rate_of_the_text(
    t: float, exchanges: Sequence[tuple[float, ...]], looks: Sequence[tuple[float, ...]], m: float
) -> tuple[float, set[str]]:
    """Return r by the equation of the module's text, and its bound: several if they are equal.

    ``exchanges``: d, p, q. ``looks``: c, i, l.
    """
    d, p, q = (median_of_last(each) for each in zip(*exchanges, strict=True))
    most = {"ceiling": 4.0, "link": t / (2 * d)}
    if looks:
        c, i, ran = (median_of_last(each) for each in zip(*looks, strict=True))
        taken = max((1 - c) * p, (1 - i) * q) / max(ran, 1e-3) / t
        most["processor"] = max(0.02 / taken, min(1.0, m / taken)) if taken > 0 else math.inf
    least = min(most.values())
    return least, {name for name, value in most.items() if value <= least * (1 + 1e-9)}


shares = st.floats(0.0, 1.0, allow_subnormal=False)
idle = st.floats(-1.0, 1.0, allow_subnormal=False)  # below 0: several threads are busy
costs_s = st.floats(1e-3, 10.0)
measured = st.one_of(
    st.tuples(st.just("exchange"), st.tuples(costs_s, costs_s, shares)),
    st.tuples(st.just("look"), st.tuples(idle, idle, shares)),
    st.tuples(st.just("step"), st.one_of(costs_s, costs_s, st.none())),
)


# It is near the first rate when it is known, trembles, nearly reaches the ceiling, and reaches it.
NEAR_STEPS = [("step", step_s) for step_s in (0.36, 0.446, 0.29, 1.44, 3.2)]
# Cores are idle, and the training thread runs Python all the time.
PYTHON_ALONE = [("exchange", (0.1, 0.1, 1.0))] * 4 + [("look", (1.0, 0.0, 1.0)), ("step", 1.0)]


@example(events=[("exchange", (0.2, 0.01, 0.0))] * 4 + NEAR_STEPS, most_taken=0.05)
@example(events=PYTHON_ALONE, most_taken=0.05)
@given(
    events=st.lists(measured, min_size=30, max_size=120),
    most_taken=st.just(0.05) | st.floats(0.02, 0.2),  # 5% unless another share is given
)
def test_the_rate_is_that_of_the_text_for_the_medians_of_what_was_measured_last(events, most_taken):
    """It follows them at each step, if they differ by more than a quarter or reach the ceiling."""
    rate = ExchangeRate() if most_taken == 0.05 else ExchangeRate(most_taken)
    assert (rate.rate, rate.bound) == (1.0, "start")
    exchanges, looks = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for kind, value in events:
        before = rate.rate, rate.bound
        if kind == "exchange":
            duration_s, processor_s, arrays = value
            exchanges.append((duration_s, processor_s, processor_s * arrays))
            rate.exchanged(duration_s)
            rate.took_processor(processor_s, processor_s - exchanges[-1][2])
        elif kind == "look":
            looks.append((max(0.0, value[0]), max(0.0, value[1]), value[2]))
            rate.saw_idle(*value)
        else:
            has_changed = rate.stepped(value)
            assert has_changed == (rate.rate != before[0])
            if value is None or len(exchanges) < 4:
                assert (rate.rate, rate.bound) == before
                continue
            allowed, bounds = rate_of_the_text(value, exchanges, looks, most_taken)
            ratio = max(allowed / before[0], before[0] / allowed)
            if before[1] == "start" or ratio > 1.25 + 1e-9 or allowed == CEILING:
                assert rate.rate == pytest.approx(allowed)
                assert rate.bound in bounds or before[0] == allowed == CEILING
            elif ratio < 1.25 - 1e-9:
                assert (rate.rate, rate.bound) == before
            continue
        assert (rate.rate, rate.bound) == before


def test_what_it_answers_before_its_first_known_step_leaves_no_debt():
    """A first step of a minute, such as torch.compile's, during which all others ask it."""
    rate = rate_after(0.001, step_s=None)
    for number in range(1000):
        assert rate.opens_at(0.06 * number) == 0.06 * number
        rate.began(0.06 * number)
    rate.stepped(STEP_S)
    assert rate.opens_at(60.0) <= 60.0 + STEP_S / (SPARE * rate.rate)


@given(
    waits_s=st.lists(st.floats(0.0, 5.0, allow_subnormal=False), max_size=60),
    duration_s=st.floats(0.001, 10.0),
)
def test_in_all_it_takes_part_in_no_more_than_it_saves_up(waits_s, duration_s):
    rate = rate_after(duration_s)
    now, started, num_begun = 3.0, 3.0, 0
    for wait_s in waits_s:
        now += wait_s
        if rate.opens_at(now) > now:
            # Then it is open: a poll at that time is never in vain.
            now = rate.opens_at(now)
            assert rate.opens_at(now) <= now + 1e-9 * now
        rate.began(now)
        num_begun += 1
    afforded = BURST + (now - started) * SPARE * rate.rate / STEP_S
    assert num_begun <= afforded + 1e-6


def test_a_worker_that_cannot_afford_more_says_busy_and_then_free():
    rate = rate_after(0.2)  # one exchange in 4 steps, 1.5 in all
    worker = make_worker(0, 2, exchange_rate=rate)
    now = 100.0
    worker.poll(now)
    for number in range(4):
        peer = 2 * (number % 2)
        assert isinstance(said(worker.receive(peer, ask(peer, number), now), peer)[0], Accept)
        worker.finished(ExchangeId(peer, 0, number), now)
    assert isinstance(said(worker.receive(0, ask(0, 99), now), 0)[0], Busy)
    opens_at = worker.next_deadline()
    assert opens_at == pytest.approx(now + STEP_S / (1.5 * rate.rate))
    worker.hold(now)
    assert worker.clock.is_paused
    worker.release(now)
    assert not worker.pairing.answers, "released while it cannot afford more"
    assert not worker.clock.is_paused, "its own demands go on"
    assert said(worker.poll(opens_at - 1e-3)) == []
    assert said(worker.poll(opens_at), 0) == [Free()]
    worker.receive(0, ask(0, 100), opens_at)
    worker.finished(ExchangeId(0, 0, 100), opens_at)
    worker.hold(opens_at)
    worker.poll(opens_at + 1.0)
    assert not worker.pairing.answers, "held while it can afford more"
    worker.release(opens_at + 1.0)
    assert worker.pairing.answers


def test_an_exchange_that_is_withdrawn_before_its_first_chunk_costs_nothing():
    rate = rate_after(0.2)
    worker = make_worker(0, 2, exchange_rate=rate)
    worker.poll(100.0)
    for _ in range(int(BURST) - 1):
        rate.began(100.0)
    for number in range(3):  # each is the last one that it can afford
        (answer,) = said(worker.receive(0, ask(0, number), 100.0), 0)
        assert isinstance(answer, Accept)
        worker.receive(0, Envelope(Cancel(answer.id)), 100.0)
        worker.poll(worker.next_deadline())
    assert rate.opens_at(99.0) == 99.0, "one that it can afford is enough at any time"


def test_while_it_cannot_afford_more_its_own_demands_wait_too():
    rate = rate_after(0.01, step_s=None)
    worker = make_worker(0, exchange_rate=rate)
    now, actions = 0.0, list[Action]()
    while not said(actions, 0):
        worker.heard(0, now)
        actions = worker.step(8, now)
        now += 1.0
    (proposal,) = said(actions, 0)
    assert isinstance(proposal, Propose)
    for _ in range(int(BURST) - 1):
        rate.began(now)
    worker.receive(0, Envelope(Accept(proposal.id, 0.5)), now)
    assert said(worker.finished(proposal.id, now), 0) == []
    worker.step(8, now)  # four demands more
    worker.step(8, now + 1e-6)
    opens_at = rate.opens_at(now)
    assert opens_at == pytest.approx(now + 1.0 / (SPARE * CEILING), abs=1e-5)
    for at_s, is_asked in ((opens_at - 1e-3, False), (opens_at, True)):
        asked = any(isinstance(each, Propose) for each in said(worker.poll(at_s), 0))
        assert asked is is_asked
