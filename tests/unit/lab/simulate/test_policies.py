"""The neighbour policies draw by lambda, and by their seed alone."""

from collections import Counter
from random import Random

import pytest
from policies import NEIGHBOUR_POLICIES


@pytest.mark.parametrize("name", sorted(NEIGHBOUR_POLICIES))
def test_same_seed_same_order(name):
    one, other = (NEIGHBOUR_POLICIES[name](Random(7)) for _ in range(2))
    assert one.draw({1: 0.5, 2: 0.5, 3: 0.1}) == other.draw({3: 0.1, 2: 0.5, 1: 0.5})


@pytest.mark.parametrize("name", ["poisson", "available"])
def test_first_choice_follows_lambda(name):
    policy = NEIGHBOUR_POLICIES[name](Random(0))
    counts: Counter[int] = Counter()
    for _ in range(4000):
        peer = policy.draw({1: 0.1, 2: 0.3})[0]
        policy.exchanged(peer, initiated=True)
        counts[peer] += 1
    assert counts[2] / 4000 == pytest.approx(0.75, abs=0.03)
