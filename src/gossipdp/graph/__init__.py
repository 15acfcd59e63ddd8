"""The graph of workers: who may exchange with whom, how often, and how fast that mixes.

    topology   named graphs, checks, the graph after deaths
    constants  a graph with its rates: chi1, chi2, eta, alpha_tilde and the speed of agreement, by
               the spectrum of its Laplacian; the graph over the live workers

Pure: no thread, socket, file descriptor kept open, or clock. Every other package may import this
one; it imports numpy, and, where a graph needs it, networkx.
"""

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import GRAPH_NAMES, Graph, build_graph, without

__all__ = ["GRAPH_NAMES", "Constants", "Graph", "build_graph", "without"]
