"""Neighbours are drawn by lambda, and by the seed alone."""

from random import Random

import pytest

from gossipdp.protocol.neighbours import weighted_order


def test_the_seed_alone_decides_on_the_order():
    one, other = {1: 0.5, 2: 0.5, 3: 0.1}, {3: 0.1, 2: 0.5, 1: 0.5}
    assert weighted_order(one, Random(7)) == weighted_order(other, Random(7))


def test_first_choice_follows_lambda():
    random = Random(0)
    first = [weighted_order({1: 0.1, 2: 0.3}, random)[0] for _ in range(4000)]
    assert first.count(2) / 4000 == pytest.approx(0.75, abs=0.03)
