"""The bytes that a worker may send: at most its rate, and all of it if it wants to."""

from hypothesis import given
from hypothesis import strategies as st

from gossipdp.links.link import MOST_SAVED, SendLimit, portion_of


@given(
    rate=st.floats(1250.0, 1e10),
    waits=st.lists(st.floats(0.0, 3.0), max_size=50),
    spent=st.integers(0, 10_000),
)
def test_it_lets_pass_its_rate_and_what_was_saved(rate, waits, spent):
    limit = SendLimit(rate)
    portion = portion_of(rate)
    now, sent = 5.0, limit.take(10**12, 5.0)
    assert sent == int(MOST_SAVED * portion)
    limit.spend(spent)
    sent += spent
    for wait in waits:
        # A sender that comes when it may.
        now = limit.opens_at(now) + min(wait, 1.0) * portion / rate
        taken = limit.take(10**12, now)
        assert taken >= int(portion) - 1
        sent += taken
        assert sent <= MOST_SAVED * portion + (now - 5.0) * rate + spent + 1
    # Nothing that was earned is lost.
    assert sent >= MOST_SAVED * portion + (now - 5.0) * rate * (1 - 1e-9) - portion - 2


def test_portions_are_small_beside_a_time_out_and_large_beside_a_packet():
    assert portion_of(1e3) == 1500
    assert portion_of(20e3) == 5000
    assert portion_of(1e6) == 32 << 10
    assert portion_of(100e6) == 1e6


def test_less_than_a_portion_passes_if_no_more_is_wanted():
    limit = SendLimit(1e6)
    limit.take(10**12, 0.0)
    assert limit.take(10**12, 0.031) == 0
    assert limit.take(400, 0.031) == 400
    assert limit.take(10**12, 0.033) == 0
    assert limit.take(10**12, 0.034) > 32 << 10
