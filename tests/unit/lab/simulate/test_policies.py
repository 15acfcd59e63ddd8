"""The neighbour policies: one suite for all, then what sets each apart."""

from collections import Counter
from random import Random

import pytest
from policies import NEIGHBOUR_POLICIES

from gossipdp.protocol.neighbours import NeighbourPolicy

EVERY_POLICY = sorted(NEIGHBOUR_POLICIES)


def make(name: str, seed: int = 0) -> NeighbourPolicy:
    return NEIGHBOUR_POLICIES[name](Random(seed))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_draws_distinct_available_neighbours(name):
    random = Random(0)
    policy = NEIGHBOUR_POLICIES[name](random)
    assert policy.draw({}) == []
    for _ in range(200):
        available = dict.fromkeys(random.sample(range(10), random.randint(1, 6)), 0.3)
        order = policy.draw(available)
        assert order
        assert len(set(order)) == len(order)
        assert set(order) <= set(available)
        policy.exchanged(random.choice(list(available)), initiated=random.random() < 0.5)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_same_seed_same_order(name):
    draws = []
    for available in ({1: 0.5, 2: 0.5, 3: 0.1}, {3: 0.1, 2: 0.5, 1: 0.5}):
        policy = make(name, 7)
        draws.append(policy.draw(available))
    assert draws[0] == draws[1]


@pytest.mark.parametrize("name", ["poisson", "available"])
def test_first_choice_follows_lambda(name):
    policy = make(name)
    counts: Counter[int] = Counter()
    for _ in range(4000):
        peer = policy.draw({1: 0.1, 2: 0.3})[0]
        policy.exchanged(peer, initiated=True)
        counts[peer] += 1
    assert counts[2] / 4000 == pytest.approx(0.75, abs=0.03)
