"""Who may exchange with whom, how often, and how fast that mixes.

    topology   named graphs, edge lists, checks, the graph after deaths   (networkx graphs)
    constants  a graph with its rates: chi1, chi2, eta, alpha_tilde       (one frozen object)
    live       the graph over the live workers, with joiners
    spectrum   the linear algebra behind it: lambda_2, effective resistances
    planning   what a graph promises before anything is run

and, on top of scipy's solvers and therefore imported by name only where they are needed,

    gradient_noise   what gradient steps add
    second_moments   exact consensus distance and decay, for any eta and alpha_tilde
    tuning           factors of eta and alpha_tilde for a noise
    edge_rates       rates of the edges that mix fastest    (rate_program solves them)
    network_plan     what a network of given speed makes of it, beside all-reduce

Pure: no thread, socket, file descriptor kept open, or clock. Everything above may import this
package; it imports numpy, scipy and networkx alone.
"""

from gossipdp.graph.constants import Constants
from gossipdp.graph.planning import Plan, plan
from gossipdp.graph.topology import GRAPH_NAMES, build_graph, read_edge_list, without

__all__ = [
    "GRAPH_NAMES",
    "Constants",
    "Plan",
    "build_graph",
    "plan",
    "read_edge_list",
    "without",
]
