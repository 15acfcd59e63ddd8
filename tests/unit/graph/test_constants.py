"""The constants of a graph, its spectrum, and the graph over the live workers."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gossipdp.graph.constants as constants_module
from gossipdp.graph.constants import (
    Constants,
    LiveGraph,
    dense_spectrum,
    laplacian_matrix,
    sparse_spectrum,
    spectrum,
)
from gossipdp.graph.topology import GRAPH_NAMES, MOST_COMPLETE, build_graph, without


def of(name, num_workers, comm_rate=1.0):
    return Constants.of(build_graph(name, num_workers), comm_rate)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 16, 63, 64, 200])
def test_ring_closed_forms(num_workers):
    constants = of("ring", num_workers)
    assert constants.chi1 == pytest.approx(1 / (1 - math.cos(2 * math.pi / num_workers)))
    assert constants.chi2 == pytest.approx((num_workers - 1) / num_workers)


@pytest.mark.parametrize("num_workers", [2, 3, 7, 64])
def test_the_complete_graph_is_not_accelerated(num_workers):
    constants = of("complete", num_workers)
    expected = (num_workers - 1) / num_workers
    assert constants.chi1 == pytest.approx(expected)
    assert constants.chi2 == pytest.approx(expected)
    assert constants.alpha_tilde == pytest.approx(0.5)
    assert constants.eta == pytest.approx(1 / (2 * expected))


@pytest.mark.parametrize("least_bits", [0.0, 1e-15, -1e-15])
def test_no_rounding_brings_the_gain_below_one_half(monkeypatch, least_bits):
    """Processors round differently, and every worker refuses a gain below 1/2."""
    exact = constants_module._spectrum_of

    def rounded(*arguments):
        found = exact(*arguments)
        return found._replace(
            lambda_2=found.lambda_2 * (1 + least_bits),
            resistances=found.resistances * (1 + least_bits),
        )

    monkeypatch.setattr(constants_module, "_spectrum_of", rounded)
    for num_workers in range(2, 65):
        constants = of("complete", num_workers)
        assert constants.chi2 <= constants.chi1
        assert 0.5 <= constants.alpha_tilde == pytest.approx(0.5)


@pytest.mark.parametrize("num_workers", [3, 10, 64])
def test_star_closed_forms(num_workers):
    # lambda = 1/(n-1) on every edge: lambda_2 is that too, and a leaf hangs on one resistor.
    constants = of("star", num_workers)
    assert constants.chi1 == pytest.approx(num_workers - 1)
    assert constants.chi2 == pytest.approx((num_workers - 1) / 2)


@pytest.mark.parametrize("dimension", [1, 2, 3, 6])
def test_hypercube_closed_forms(dimension):
    # lambda = 1/d, lambda_2 = 2/d; by symmetry and Foster's theorem R = (n-1) / sum of rates.
    constants = of("hypercube", 2**dimension)
    assert constants.chi1 == pytest.approx(dimension / 2)
    assert constants.chi2 == pytest.approx((2**dimension - 1) / 2**dimension)


def test_formulas_of_eta_and_alpha_tilde():
    constants = of("path", 9)
    assert constants.eta == pytest.approx(1 / (2 * math.sqrt(constants.chi1 * constants.chi2)))
    assert constants.alpha_tilde == pytest.approx(math.sqrt(constants.chi1 / constants.chi2) / 2)


def test_default_rates_keep_every_worker_within_its_budget():
    constants = of("star", 5, comm_rate=2.0)
    assert constants.rates == (0.5,) * 4
    assert constants.worker_rate(0) == pytest.approx(2.0)
    assert constants.worker_rate(3) == pytest.approx(0.5)
    assert constants.neighbours(0) == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}
    assert list(of("ring", 5).neighbours(2)) == [1, 3]
    assert of("ring", 64).exchanges_per_unit_time == pytest.approx(32.0)


def test_one_worker():
    constants = of("ring", 1)
    assert constants.edges == ()
    assert (constants.chi1, constants.chi2, constants.eta) == (0.0, 0.0, 0.0)
    assert constants.alpha_tilde == 0.5
    assert constants.exchanges_per_unit_time == 0.0
    assert constants.neighbours(0) == {}
    assert constants.worker_rate(0) == 0.0


def test_after_deaths_ranks_have_gaps():
    constants = Constants.of(without(build_graph("ring", 6), [0, 3]))
    assert constants.workers == (1, 2, 4, 5)
    assert constants.edges == ((1, 2), (1, 5), (2, 4), (4, 5))
    assert constants.chi1 == pytest.approx(of("ring", 4).chi1)
    assert constants.neighbours(1) == {2: 0.5, 5: 0.5}


def test_the_same_graph_and_rates_are_worked_out_once(monkeypatch):
    asked = []
    monkeypatch.setattr(
        constants_module, "spectrum", lambda *given: asked.append(given[0]) or spectrum(*given)
    )
    constants_module._spectrum_of.cache_clear()
    first, same = of("ring", 5), of("ring", 5)
    assert (first.chi1, first.chi2) == (same.chi1, same.chi2)
    other = of("ring", 5, comm_rate=2.0)
    assert other.chi1 == pytest.approx(first.chi1 / 2)
    assert asked == [5, 5]


# The spectrum.


def edges_and_rates(name, num_workers):
    edges = np.array(build_graph(name, num_workers).edges)
    return edges, np.random.default_rng(0).uniform(0.2, 1.0, len(edges))


@pytest.mark.parametrize("name", GRAPH_NAMES)
@pytest.mark.parametrize("solve", [dense_spectrum, sparse_spectrum])
def test_both_solvers_agree_with_the_pseudo_inverse(name, solve):
    edges, rates = edges_and_rates(name, 16)
    laplacian = laplacian_matrix(16, edges, rates)
    pseudo_inverse = np.linalg.pinv(laplacian)
    difference = np.eye(16)[edges[:, 0]] - np.eye(16)[edges[:, 1]]
    expected = np.einsum("ei,ij,ej->e", difference, pseudo_inverse, difference)
    lambda_2, resistances = solve(16, edges, rates)
    assert lambda_2 == pytest.approx(np.linalg.eigvalsh(laplacian)[1], rel=1e-9)
    np.testing.assert_allclose(resistances, expected, rtol=1e-9)


def test_the_sparse_solver_works_in_blocks():
    # More workers than one block of columns holds, against the dense solver.
    edges, rates = edges_and_rates("random-regular", 600)
    expected = dense_spectrum(600, edges, rates)
    lambda_2, resistances = spectrum(600, edges, rates)
    assert lambda_2 == pytest.approx(expected.lambda_2, rel=1e-9)
    np.testing.assert_allclose(resistances, expected.resistances, rtol=1e-9)


def test_the_sparse_solver_gives_the_same_bits_twice():
    edges, rates = edges_and_rates("torus", 300)
    first, second = (spectrum(300, edges, rates) for _ in range(2))
    assert first.lambda_2 == second.lambda_2
    assert np.array_equal(first.resistances, second.resistances)


# The graph over the live workers.


def live_graph(name: str = "ring", num_workers: int = 8, comm_rate: float = 1.0) -> LiveGraph:
    return LiveGraph(Constants.of(build_graph(name, num_workers), comm_rate))


def test_all_alive_is_the_original() -> None:
    live = live_graph()
    assert live.constants(range(8)) is live.original


@pytest.mark.parametrize("name", GRAPH_NAMES)
@pytest.mark.parametrize("comm_rate", [0.5, 3.0])
def test_the_comm_rate_is_that_of_the_busiest_worker(name: str, comm_rate: float) -> None:
    assert live_graph(name, 8, comm_rate).comm_rate == pytest.approx(comm_rate)


def test_after_deaths_it_is_the_graph_without_the_dead_at_the_same_rate() -> None:
    live = live_graph("torus", 12, 2.0)
    expected = Constants.of(without(build_graph("torus", 12), [0, 7]), 2.0)
    constants = live.constants(set(range(12)) - {0, 7})
    assert constants.edges == expected.edges
    assert constants.rates == pytest.approx(expected.rates)
    assert live.constants(set(range(12)) - {7, 0}) is constants, "worked out once"


def test_one_worker_and_one_joiner() -> None:
    live = live_graph()
    assert live.constants({3}).edges == ()
    assert LiveGraph(Constants.of(build_graph("ring", 1))).constants({0, 1}).edges == ((0, 1),)


@given(live=st.sets(st.integers(0, 40), min_size=1), num_originals=st.integers(1, 24))
def test_the_automatic_graph_follows_the_live_workers(live: set[int], num_originals: int) -> None:
    original = Constants.of(build_graph("auto", num_originals))
    graph = LiveGraph(original, is_automatic=True).graph(live)
    assert set(graph) == live
    assert nx.is_connected(nx.Graph(graph))
    assert nx.number_of_selfloops(nx.Graph(graph)) == 0
    if len(live) <= MOST_COMPLETE:
        assert all(graph[rank] == live - {rank} for rank in live)
    elif live == set(range(max(num_originals, max(live) + 1))):
        assert graph == build_graph("exponential", len(live))


@pytest.mark.parametrize("rank", [0, 20, 31])
def test_a_death_moves_few_edges_of_the_automatic_graph(rank: int) -> None:
    live = LiveGraph(Constants.of(build_graph("auto", 32)), is_automatic=True)
    before, after = (set(live.graph(set(range(32)) - gone).edges) for gone in (set(), {rank}))
    assert {edge for edge in before if rank not in edge} <= after
    assert len(after - before) <= 5, "one for each hop of those that led to it"


def test_momentum_flows_on_where_the_automatic_graph_turns_complete() -> None:
    live = LiveGraph(Constants.of(build_graph("auto", 10)), is_automatic=True)
    many, few = live.constants(range(10)), live.constants(range(8))
    assert many.alpha_tilde > 0.6
    assert few.alpha_tilde == pytest.approx(0.5)
    assert few.eta > 0, "c, to which exchanges add nothing any more, goes to zero"


@given(
    name=st.sampled_from(["ring", "star", "path", "exponential"]),
    live=st.sets(st.integers(0, 15), min_size=1),
)
def test_any_set_of_survivors_and_joiners_is_connected(name: str, live: set[int]) -> None:
    """Ranks from 8 on are joiners; all of the first 8 may be dead."""
    graph = live_graph(name).graph(live)
    assert set(graph) == live
    assert nx.is_connected(nx.Graph(graph))
    joiners = [rank for rank in live if rank >= 8]
    others = sorted(live)
    for rank in joiners:
        position = others.index(rank)
        following = {others[(position + step) % len(others)] for step in (1, 2)} - {rank}
        assert following <= set(graph[rank])
