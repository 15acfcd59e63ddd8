import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipdp.graph import Constants, build_graph, without


@st.composite
def connected_graphs(draw, max_workers=12):
    """Draw a random tree, so that the graph is connected, and any further edges."""
    num_workers = draw(st.integers(2, max_workers))
    graph = nx.Graph()
    graph.add_nodes_from(range(num_workers))
    for rank in range(1, num_workers):
        graph.add_edge(draw(st.integers(0, rank - 1)), rank)
    ranks = st.integers(0, num_workers - 1)
    further = draw(st.lists(st.tuples(ranks, ranks), max_size=2 * num_workers))
    graph.add_edges_from((left, right) for left, right in further if left != right)
    return graph


@st.composite
def rated_graphs(draw, max_workers=12):
    graph = draw(connected_graphs(max_workers))
    rate = st.floats(0.01, 1.0)
    edges = sorted((min(edge), max(edge)) for edge in graph.edges)
    return Constants(tuple(sorted(graph)), tuple(edges), tuple(draw(rate) for _ in edges))


def pieces(constants):
    """Per edge its rate and (e_i - e_j); the centring projection; L^+."""
    size = len(constants.workers)
    differences = [np.eye(size)[i] - np.eye(size)[j] for i, j in constants.edges]
    edges = list(zip(constants.rates, differences, strict=True))
    laplacian = sum(rate * np.outer(difference, difference) for rate, difference in edges)
    return edges, np.eye(size) - 1.0 / size, np.linalg.pinv(laplacian, hermitian=True)


@settings(max_examples=200)
@given(data=st.data())
def test_the_graph_after_deaths_is_connected_whoever_dies(data):
    graph = data.draw(connected_graphs(max_workers=20))
    dead = data.draw(st.sets(st.sampled_from(sorted(graph)), max_size=len(graph) - 1))
    built, ordered = build_graph(graph, len(graph)), sorted(dead)
    survivors = without(built, ordered)
    assert survivors == without(built, [*reversed(ordered), *ordered]), "in whatever order they die"
    assert built == build_graph(graph, len(graph)), "the original is kept"
    assert set(survivors) == set(graph) - dead
    shown = nx.Graph(survivors)
    assert nx.is_connected(shown)
    assert nx.number_of_selfloops(shown) == 0
    kept = {frozenset(edge) for edge in graph.edges if not dead & set(edge)}
    assert kept <= {frozenset(edge) for edge in survivors.edges}
    assert Constants.of(survivors) == Constants.of(shown)


@settings(max_examples=60)
@given(graph=connected_graphs(), comm_rate=st.floats(0.01, 50.0))
def test_default_rates_respect_the_budget_and_the_degrees(graph, comm_rate):
    constants = Constants.of(graph, comm_rate)
    for worker in constants.workers:
        neighbours = constants.neighbours(worker)
        assert set(neighbours) == set(graph[worker])
        assert constants.worker_rate(worker) <= comm_rate * (1 + 1e-12)
        for peer, rate in neighbours.items():
            assert rate == constants.neighbours(peer)[worker]
            assert rate == pytest.approx(comm_rate / max(graph.degree[worker], graph.degree[peer]))


@settings(max_examples=60)
@given(constants=rated_graphs())
def test_gossip_decays_at_least_as_fast_as_its_bound(constants):
    # The generator of E|x|^2 as a quadratic form, plus bound times the form, is nowhere positive.
    edges, centre, pseudo_inverse = pieces(constants)
    assert constants.chi1 == pytest.approx(np.linalg.eigvalsh(pseudo_inverse)[-1], rel=1e-6)
    resistances = [difference @ pseudo_inverse @ difference for _, difference in edges]
    assert constants.chi2 == pytest.approx(max(resistances) / 2, rel=1e-6)
    assert constants.chi2 <= constants.chi1
    assert constants.alpha_tilde >= 0.5
    generator = np.zeros_like(centre)
    for rate, difference in edges:
        step = np.eye(len(centre)) - 0.5 * np.outer(difference, difference)
        generator += rate * (step.T @ centre @ step - centre)
    excess = generator + centre / (2 * constants.chi1)
    assert np.linalg.eigvalsh(excess)[-1] <= 1e-9 * constants.exchanges_per_unit_time


@settings(max_examples=60)
@given(constants=rated_graphs())
def test_a2cid2_decays_at_least_as_fast_as_its_bound(constants):
    # The same for the energy |x|^2 + x_tilde^T L^+ x_tilde / chi1 on the pair (x, x_tilde), under
    # the paper's flow and exchanges with the constants' eta and alpha_tilde: the bound is eta.
    edges, centre, pseudo_inverse = pieces(constants)
    size = len(centre)
    energy = np.zeros((2 * size, 2 * size))
    energy[:size, :size] = centre
    energy[size:, size:] = pseudo_inverse / constants.chi1
    flow = constants.eta * np.kron([[-1.0, 1.0], [1.0, -1.0]], np.eye(size))
    generator = flow.T @ energy + energy @ flow
    for rate, difference in edges:
        outer = np.outer(difference, difference)
        step = np.eye(2 * size)
        step[:size, :size] -= 0.5 * outer
        step[size:, :size] -= constants.alpha_tilde * outer
        generator += rate * (step.T @ energy @ step - energy)
    excess = generator + constants.eta * energy
    assert np.linalg.eigvalsh(excess)[-1] <= 1e-9 * constants.exchanges_per_unit_time
