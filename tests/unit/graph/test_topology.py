import networkx as nx
import numpy as np
import pytest

from gossipdp.graph.topology import GRAPH_NAMES, attach, build_graph, torus_shape, without


def edges(graph):
    return sorted(tuple(sorted(edge)) for edge in graph.edges)


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [(name, num_workers) for name in GRAPH_NAMES for num_workers in (1, 2, 3, 4, 5, 8, 13, 16, 64)],
)
def test_every_graph_is_simple_connected_and_on_ranks(name, num_workers):
    graph = build_graph(name, num_workers)
    assert list(graph) == list(range(num_workers))
    assert all(type(rank) is int for edge in graph.edges for rank in edge)
    assert nx.is_connected(nx.Graph(graph))
    assert nx.number_of_selfloops(nx.Graph(graph)) == 0
    assert len(graph.edges) >= num_workers - 1
    assert name in graph.name
    assert str(num_workers) in graph.name


def test_shapes_of_the_regular_graphs():
    assert edges(build_graph("ring", 5)) == [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    assert edges(build_graph("path", 4)) == [(0, 1), (1, 2), (2, 3)]
    assert edges(build_graph("star", 4)) == [(0, 1), (0, 2), (0, 3)]
    assert edges(build_graph("complete", 3)) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("num_workers", range(1, 31))
def test_the_graphs_that_networkx_has_too_are_the_same_as_there(num_workers):
    grid = nx.grid_2d_graph(*torus_shape(num_workers), periodic=True)
    assert edges(build_graph("torus", num_workers)) == edges(
        nx.convert_node_labels_to_integers(grid)
    )
    hops = [hop for hop in (1, 2, 4, 8, 16) if hop < num_workers]
    exponential = nx.circulant_graph(num_workers, hops)
    assert edges(build_graph("exponential", num_workers)) == edges(exponential)


def test_the_torus_is_as_square_as_the_number_allows():
    expected = {1: (1, 1), 2: (1, 2), 12: (3, 4), 36: (6, 6), 64: (8, 8), 30: (5, 6)}
    assert {number: torus_shape(number) for number in expected} == expected
    assert "1 x 13" in build_graph("torus", 13).name


@pytest.mark.parametrize("given", [nx.petersen_graph(), build_graph("ring", 4)])
def test_a_graph_is_copied_with_its_name(given):
    built, before = build_graph(given, len(given)), edges(given)
    assert edges(built) == edges(nx.Graph(built)) == before
    assert built.name == given.name
    built.join(0, 2)
    assert edges(given) == before


def test_numpy_ranks_become_ints():
    given = nx.Graph([tuple(pair) for pair in np.array([[2, 1], [1, 0]])])
    built = build_graph(given, 3)
    assert all(type(rank) is int for rank in built)
    assert edges(built) == [(0, 1), (1, 2)]


def test_neighbours_of_the_dead_are_joined_in_a_ring():
    assert edges(without(build_graph("ring", 5), [2])) == [(0, 1), (0, 4), (1, 3), (3, 4)]
    assert edges(without(build_graph("path", 3), [0])) == [(1, 2)]
    star = without(build_graph("star", 5), [0])
    assert edges(star) == [(1, 2), (1, 4), (2, 3), (3, 4)]


def test_the_original_is_kept_and_nobody_dead_is_a_copy():
    graph = build_graph("ring", 6)
    same = without(graph, [])
    assert (same, same.name) == (graph, graph.name)
    same.join(0, 2)
    attach(graph, [7])
    assert graph == build_graph("ring", 6)
