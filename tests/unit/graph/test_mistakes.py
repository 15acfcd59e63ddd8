"""Refusals: a ValueError that names the graph, the value and the way out."""

import math

import networkx as nx
import pytest

from gossipdp.graph import Constants
from gossipdp.graph.constants import LiveGraph
from gossipdp.graph.topology import Graph, build_graph, without

RING = build_graph("ring", 3)
LOOP = nx.Graph([(0, 1), (1, 1), (1, 2)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_graph("rings", 4), r"'rings'; do you mean ring\?"),
        (lambda: build_graph("zzz", 4), "choose one of ring, path, star, .*, torus"),
        (lambda: build_graph("ring", 0), "'ring' of 0 workers"),
        (lambda: build_graph("ring", 4.5), r"4\.5; it must be a whole number"),
        (lambda: build_graph([(0, 1)], 2), r"networkx\.Graph, got \[\(0, 1\)\]"),
        (lambda: build_graph(nx.Graph(), 0), r"Graph \(0 workers, 0 edges\)' has no nodes"),
        (lambda: build_graph(nx.DiGraph([(0, 1)]), 2), "DiGraph.* is directed.*to_undirected"),
        (lambda: build_graph(nx.MultiGraph([(0, 1)] * 2), 2), r"multigraph.*Graph\(graph\)"),
        (lambda: build_graph(LOOP, 3), "self loops, the first at worker 1"),
        (lambda: build_graph(nx.Graph([(0, 1), (2, 3)]), 4), "worker 2 cannot reach worker 0"),
        (lambda: build_graph(nx.Graph([("a", "b")]), 2), "node 'a' that is no rank"),
        (lambda: build_graph(nx.Graph([(-1, 0)]), 2), "node -1 that is no rank"),
        (lambda: build_graph(nx.Graph([(0.0, 1.0)]), 2), r"node 0\.0 that is no rank"),
        (lambda: build_graph(nx.path_graph([1, 2, 3]), 3), r"no node 0, .*0\.\.2.*convert_node"),
        (lambda: build_graph(nx.path_graph(5), 4), "5 nodes, but there are 4 workers"),
        (lambda: without(RING, range(3)), r"ring \(3 workers\)' without all of its workers"),
        (lambda: without(RING, [7]), "has no worker 7"),
        (lambda: LiveGraph(Constants.of(RING)).constants(()), "no live workers"),
        (lambda: Constants.of(RING).neighbours(3), "worker 3 is not in the graph"),
        (lambda: Constants.of(RING, 0.0), r"comm rate 0\.0 is not a positive number"),
        (lambda: Constants.of(RING, math.nan), "comm rate nan is not a positive number"),
        (lambda: Constants.of(build_graph("ring", 1), math.inf), "comm rate inf is not a"),
        (lambda: Constants.of(nx.DiGraph([(0, 1)])), "is directed"),
        (lambda: Constants.of({0: [1], 1: [0]}), r"networkx\.Graph, got \{0: \[1\], 1: \[0\]\}"),
        (lambda: Constants.of(Graph()), r"Graph \(0 workers, 0 edges\)' has no nodes"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
