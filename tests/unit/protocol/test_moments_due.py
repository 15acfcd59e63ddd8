"""When moments travel: with one exchange in so many, or after so many steps."""

import itertools
import math

import pytest

from gossipdp.protocol.moments_due import MomentsDue


@pytest.mark.parametrize(
    ("num_steps", "comm_rate", "between"),
    [
        (250, 4.0, 4),
        (250, 1.0, 4),
        (250, 1 / 8, 4),
        # Sooner, where so many steps have passed.
        (2.5, 4.0, 4),
        (2.5, 1.0, 3),
        (16, 1 / 8, 2),
        (5, 1 / 8, 1),
    ],
)
def test_one_exchange_in_four_carries_moments_and_more_where_these_are_rare(
    num_steps, comm_rate, between
):
    moments = MomentsDue([4], num_steps)
    number, carrying, due = 0, [], 0.0
    for _ in range(240):
        moments.step()
        due += comm_rate
        while due >= 1.0:
            due -= 1.0
            number += 1
            if moments.now():
                carrying.append(number)
            moments.began(moments.now())
    assert {after - before for before, after in itertools.pairwise(carrying)} == {between}


def test_exchanges_that_peers_asked_for_count_and_each_period_has_its_own_count():
    moments = MomentsDue([4, 2], math.inf)
    moments.began(())
    assert moments.now() == (2,)
    moments.began((2,))
    moments.began(())
    assert moments.now() == (2, 4)
    moments.began((4,))
    assert moments.now() == (2,)
