import doctest
import importlib

import pytest

from gossipdp.graph import build_graph, plan

SIMULATED_DECAY = {
    # Consensus distance, per exchange per worker, ideal network; gossip, then a2cid2.
    ("ring", 16): (0.078, 0.234),
    ("ring", 64): (0.0048, 0.059),
    ("path", 64): (0.0013, 0.032),
    ("torus", 64): (0.148, 0.282),
    ("exponential", 64): (0.39, 0.44),
    ("complete", 64): (0.515, 0.515),
}


@pytest.mark.parametrize(("name", "num_workers"), SIMULATED_DECAY)
def test_the_bounds_lie_below_the_simulated_decay_by_at_most_about_two(name, num_workers):
    planned = plan(build_graph(name, num_workers))
    gossip, a2cid2 = SIMULATED_DECAY[name, num_workers]
    assert 1.0 <= gossip / planned.gossip_decay_bound < 2.2
    assert 1.0 <= a2cid2 / planned.a2cid2_decay_bound < 2.2


def test_the_bounds_do_not_depend_on_the_comm_rate():
    one, three = (plan(build_graph("star", 9), rate) for rate in (1.0, 3.0))
    assert three.gossip_decay_bound == pytest.approx(one.gossip_decay_bound)
    assert three.a2cid2_decay_bound == pytest.approx(one.a2cid2_decay_bound)
    assert three.comm_rate == 3.0
    assert three.exchanges_per_unit_time == pytest.approx(3 * one.exchanges_per_unit_time)


def test_where_a2cid2_helps():
    ring = plan(build_graph("ring", 64))
    assert ring.a2cid2_helps
    assert ring.expected_speedup == pytest.approx((ring.chi1 / ring.chi2) ** 0.5)
    assert ring.a2cid2_decay_bound == pytest.approx(ring.expected_speedup * ring.gossip_decay_bound)
    complete = plan(build_graph("complete", 64))
    assert not complete.a2cid2_helps
    assert complete.expected_speedup == pytest.approx(1.0)


def test_one_worker():
    planned = plan(build_graph("ring", 1))
    assert (planned.gossip_decay_bound, planned.a2cid2_decay_bound) == (0.0, 0.0)
    assert not planned.a2cid2_helps


@pytest.mark.parametrize("module", ["topology", "constants", "promise"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"gossipdp.graph.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
