"""The graph of workers: who may exchange with whom, how often, and how fast that mixes.

    topology   named graphs, edge lists, checks, the graph after deaths
    constants  a graph with its rates: chi1, chi2, eta, alpha_tilde, by the spectrum of its
               Laplacian; the graph over the live workers
    promise    the speed of agreement that a graph promises

Pure: no thread, socket, file descriptor kept open, or clock. Every other package may import this
one; it imports numpy, and, where a graph needs them, scipy and networkx.
"""

from gossipdp.graph.constants import Constants
from gossipdp.graph.promise import Plan, plan
from gossipdp.graph.topology import GRAPH_NAMES, Graph, build_graph, read_edge_list, without

__all__ = [
    "GRAPH_NAMES",
    "Constants",
    "Graph",
    "Plan",
    "build_graph",
    "plan",
    "read_edge_list",
    "without",
]
