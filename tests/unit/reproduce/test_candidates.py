from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gossipdp.reproduce.candidates import CANDIDATES, ByAge, LeastRecent, LeftOut

NEIGHBOURS = dict.fromkeys(range(8), 1.0)


def met(policy, *peers):
    for peer in peers:
        policy.exchanged(peer, initiated=True)
    return policy


@given(
    name=st.sampled_from(sorted(CANDIDATES)),
    peers=st.lists(st.integers(0, 7), max_size=20),
    available=st.sets(st.integers(0, 7), min_size=1),
    seed=st.integers(0, 5),
)
def test_a_policy_asks_somebody_available_and_nobody_twice(name, peers, available, seed):
    policy = met(CANDIDATES[name](Random(seed)), *peers)
    order = policy.draw(dict.fromkeys(available, 0.5))
    assert order
    assert len(set(order)) == len(order)
    assert set(order) <= available


def test_shares_left_out():
    for share, num_asked in ((0.25, 6), (0.5, 4), (0.75, 2), (1.0, 1)):
        policy = met(LeftOut(Random(0), share), *range(8))
        assert set(policy.draw(NEIGHBOURS)) == set(range(num_asked))
    kept = met(LeftOut(Random(0), 0.5, falls_back=True), *range(8)).draw(NEIGHBOURS)
    assert set(kept[:4]) == {0, 1, 2, 3}
    assert kept[4:] == [4, 5, 6, 7]


def test_least_recent_goes_by_age():
    policy = met(LeastRecent(Random(0)), 3, 1, 2, 0, 7, 6, 5)
    assert policy.draw(NEIGHBOURS) == [4, 3, 1, 2, 0, 7, 6, 5]


def test_by_age_prefers_the_old_and_leaves_nobody_out():
    policy = met(ByAge(Random(0), 2.0), *range(8))
    orders = [policy.draw(NEIGHBOURS) for _ in range(400)]
    assert all(set(order) == set(range(8)) for order in orders)
    first = [order[0] for order in orders]
    # Ages 8 to 1, so that the oldest is drawn first 64 times as often as the youngest.
    assert 0.2 < first.count(0) / 400 < 0.45
    assert first.count(7) < 10
