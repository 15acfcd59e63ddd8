"""The constants of a graph, its spectrum, and the graph over the live workers."""

import doctest
import importlib
import math

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gossipdp.graph.constants as constants_module
from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.graph.topology import GRAPH_NAMES, build_graph, without


def of(name, num_workers, comm_rate=1.0):
    return Constants.of(build_graph(name, num_workers), comm_rate)


@pytest.mark.parametrize("least_bits", [0.0, 1e-15, -1e-15])
def test_no_rounding_brings_the_gain_below_one_half(monkeypatch, least_bits):
    """Processors round differently, and every worker refuses a gain below 1/2."""
    exact = constants_module._spectrum_of

    def rounded(*arguments):
        return tuple(each * (1 + least_bits) for each in exact(*arguments))

    monkeypatch.setattr(constants_module, "_spectrum_of", rounded)
    for num_workers in range(2, 65):
        constants = of("complete", num_workers)
        assert constants.chi2 <= constants.chi1
        assert 0.5 <= constants.alpha_tilde == pytest.approx(0.5)


def test_formulas_of_eta_and_alpha_tilde():
    constants = of("path", 9)
    assert constants.eta == pytest.approx(1 / (2 * math.sqrt(constants.chi1 * constants.chi2)))
    assert constants.alpha_tilde == pytest.approx(math.sqrt(constants.chi1 / constants.chi2) / 2)
    assert constants.expected_speedup == pytest.approx(
        constants.a2cid2_decay_bound / constants.gossip_decay_bound
    )


def test_one_worker():
    constants = of("ring", 1)
    assert constants.edges == ()
    assert (constants.chi1, constants.chi2, constants.eta) == (0.0, 0.0, 0.0)
    assert constants.alpha_tilde == 0.5
    assert constants.exchanges_per_unit_time == 0.0
    assert (constants.gossip_decay_bound, constants.a2cid2_decay_bound) == (0.0, 0.0)
    assert not constants.a2cid2_helps
    assert constants.neighbours(0) == {}
    assert constants.worker_rate(0) == 0.0
    assert LiveGraph(constants).constants({0, 1}).edges == ((0, 1),), "with a joiner"
    assert LiveGraph(of("ring", 8)).constants({3}).edges == ()


def test_after_deaths_ranks_have_gaps():
    constants = Constants.of(without(build_graph("ring", 6), [0, 3]))
    assert constants.workers == (1, 2, 4, 5)
    assert constants.edges == ((1, 2), (1, 5), (2, 4), (4, 5))
    assert constants.chi1 == pytest.approx(of("ring", 4).chi1)
    assert constants.neighbours(1) == {2: 0.5, 5: 0.5}


@pytest.mark.parametrize(
    ("name", "gossip", "a2cid2"),
    [("ring", 0.0048, 0.059), ("torus", 0.148, 0.282), ("complete", 0.515, 0.515)],
)
def test_the_bounds_lie_below_the_simulated_decay_by_at_most_about_two(name, gossip, a2cid2):
    """The decay is that of the consensus distance an exchange and worker, of 64 ideal workers."""
    for comm_rate in (1.0, 3.0):
        constants = of(name, 64, comm_rate)
        assert 1.0 <= gossip / constants.gossip_decay_bound < 2.2
        assert 1.0 <= a2cid2 / constants.a2cid2_decay_bound < 2.2


@pytest.mark.parametrize("name", GRAPH_NAMES)
@pytest.mark.parametrize("comm_rate", [0.5, 3.0])
def test_the_comm_rate_is_that_of_the_busiest_worker(name, comm_rate):
    assert LiveGraph(of(name, 8, comm_rate)).comm_rate == pytest.approx(comm_rate)


def test_after_deaths_it_is_the_graph_without_the_dead_at_the_same_rate():
    live = LiveGraph(of("torus", 12, 2.0))
    assert live.constants(range(12)) is live.original
    expected = Constants.of(without(build_graph("torus", 12), [0, 7]), 2.0)
    constants = live.constants(set(range(12)) - {0, 7})
    assert constants.edges == expected.edges
    assert constants.rates == pytest.approx(expected.rates)
    assert live.constants(set(range(12)) - {7, 0}) is constants, "worked out once"


@given(
    name=st.sampled_from(["ring", "star", "path", "exponential"]),
    live=st.sets(st.integers(0, 15), min_size=1),
)
def test_any_set_of_survivors_and_joiners_is_connected(name, live):
    """Ranks from 8 on are joiners; all of the first 8 may be dead."""
    constants = LiveGraph(of(name, 8)).constants(live)
    assert set(constants.workers) == live
    graph = nx.Graph(constants.edges)
    graph.add_nodes_from(constants.workers)
    assert nx.is_connected(graph)
    joiners = [rank for rank in live if rank >= 8]
    others = sorted(live)
    for rank in joiners:
        position = others.index(rank)
        following = {others[(position + step) % len(others)] for step in (1, 2)} - {rank}
        assert following <= set(graph[rank])


@pytest.mark.parametrize("module", ["topology", "constants"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"gossipdp.graph.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
