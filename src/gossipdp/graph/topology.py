"""Graphs of workers: the named topologies, and the graph after deaths.

A graph is undirected, connected and simple; its nodes are ranks and its edges are the pairs of
workers that may exchange. The same name and number of workers give the same graph in every
process.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from itertools import combinations, pairwise
from numbers import Integral
from typing import TYPE_CHECKING

from gossipdp.rules import whole_number

if TYPE_CHECKING:
    import networkx as nx


Edges = Iterable[tuple[int, int]]


class Graph(dict[int, set[int]]):
    """The neighbours of each worker, under its rank.

    networkx accepts it: ``networkx.Graph(graph)``. It is no class of networkx, whose import would
    take each worker longer than that of gossipdp.

    Args:
        workers: ranks.
        edges: pairs of different ranks, in any order; repeats do not matter.
        name: for messages and tables; by default the size.

    Example:
        >>> Graph(range(3), [(0, 1), (2, 1)])[1]
        {0, 2}
    """

    def __init__(self, workers: Iterable[int] = (), edges: Edges = (), name: str = "") -> None:
        super().__init__((rank, set()) for rank in workers)
        for left, right in edges:
            self.join(left, right)
        self.name = name or _sized_name("Graph", len(self), sum(map(len, self.values())) // 2)

    def join(self, left: int, right: int) -> None:
        """Add an edge between two different ranks, and the ranks where they are not there yet."""
        self.setdefault(left, set()).add(right)
        self.setdefault(right, set()).add(left)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The pairs i < j, ascending."""
        return sorted((i, j) for i, others in self.items() for j in others if i < j)


def build_graph(graph: str | Graph | nx.Graph[int], num_workers: int) -> Graph:
    """Build, or check and copy, the graph of ``num_workers`` workers.

    ==============  =============================================================================
    ring            rank i with i + 1 mod n; two workers share one edge
    path            a ring without the edge that closes it
    star            rank 0 with everyone
    complete        everyone with everyone
    exponential     rank i with i + 2^k mod n for every 2^k < n; the half hop n/2 is one edge
    torus           rows x columns, both closed to rings, as square as n allows (`torus_shape`);
                    for a prime n that is 1 x n, which is the ring
    ==============  =============================================================================

    networkx makes others, such as a hypercube or random graphs.

    Args:
        graph: One of `GRAPH_NAMES`, or a networkx graph whose nodes are the ranks 0..n-1. Only
            the nodes and edges of a networkx graph count: rates come from `Constants.of`.
        num_workers: n, at least 1. One worker has no edges.

    Returns:
        A new graph of the ranks 0..n-1, whose ``name`` says its kind.

    Raises:
        ValueError: The name is unknown, or no valid graph of this kind has so many workers, or
            the networkx graph is empty, directed, a multigraph, disconnected, has self loops, or
            nodes other than 0..n-1. The message names the graph and the fix.

    Example:
        >>> build_graph("ring", 4).edges
        [(0, 1), (0, 3), (1, 2), (2, 3)]
    """
    num_workers = whole_number("num_workers", num_workers)
    if not isinstance(graph, str):
        return _of_ranks(checked_graph(graph), num_workers)
    if graph not in _BUILDERS:
        near = difflib.get_close_matches(graph.lower(), GRAPH_NAMES, n=1, cutoff=0.5)
        hint = f"do you mean {near[0]}? There are" if near else "choose one of"
        raise ValueError(f"unknown graph {graph!r}; {hint} {', '.join(GRAPH_NAMES)}")
    if num_workers < 1:
        raise ValueError(f"graph {graph!r} of {num_workers} workers: there must be at least 1")
    shape = "{} x {}, ".format(*torus_shape(num_workers)) if graph == "torus" else ""
    name = f"{graph} ({shape}{count(num_workers, 'worker')})"
    return Graph(range(num_workers), _BUILDERS[graph](num_workers), name)


def checked_graph(graph: Graph | nx.Graph[int]) -> Graph:
    """Check that the graph is connected and return it; a networkx graph becomes one of ours.

    Raises:
        ValueError: It is no simple, undirected, connected graph of ranks.
    """
    checked = graph if isinstance(graph, Graph) else _from_networkx(graph)
    if not checked:
        raise ValueError(
            f"graph {checked.name!r} has no nodes: give it one node per worker, at least 1"
        )
    first = min(checked)
    reached, waiting = {first}, [first]
    while waiting:
        found = checked[waiting.pop()] - reached
        reached |= found
        waiting += found
    if len(reached) < len(checked):
        raise ValueError(
            f"graph {checked.name!r} is disconnected: worker {min(set(checked) - reached)} cannot "
            f"reach worker {first}, so they would never agree. Add edges until it is connected"
        )
    return checked


def _from_networkx(graph: nx.Graph[int]) -> Graph:
    import networkx as nx  # the caller has imported it, or is wrong

    if not isinstance(graph, nx.Graph):
        raise ValueError(
            f"a graph is a name or a networkx.Graph, got {graph!r}: "
            f"pass one of {', '.join(GRAPH_NAMES)}, or a networkx.Graph"
        )
    name = graph.name or _sized_name(type(graph).__name__, len(graph), graph.number_of_edges())
    if graph.is_directed():
        raise ValueError(
            f"graph {name!r} is directed, but an exchange goes both ways: "
            "pass networkx.Graph(graph.to_undirected())"
        )
    if graph.is_multigraph():
        raise ValueError(
            f"graph {name!r} is a multigraph, but a pair of workers shares one edge: "
            "pass networkx.Graph(graph)"
        )
    nodes: Iterable[object] = graph.nodes
    strange = [node for node in nodes if not isinstance(node, Integral) or node < 0]
    if strange:
        raise ValueError(
            f"graph {name!r} has a node {strange[0]!r} that is no rank: "
            "pass networkx.convert_node_labels_to_integers(graph)"
        )
    loops = sorted(node for node in graph if graph.has_edge(node, node))
    if loops:
        raise ValueError(
            f"graph {name!r} has self loops, the first at worker {loops[0]}: remove them with "
            "graph.remove_edges_from(list(networkx.selfloop_edges(graph)))"
        )
    # Ranks may be numpy integers here; ours are ints.
    return Graph(map(int, graph), ((int(left), int(right)) for left, right in graph.edges), name)


def _sized_name(kind: str, num_workers: int, num_edges: int) -> str:
    return f"{kind} ({count(num_workers, 'worker')}, {count(num_edges, 'edge')})"


def count(number: int, noun: str) -> str:
    """Return ``number`` with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def torus_shape(num_workers: int) -> tuple[int, int]:
    """Return rows, the largest divisor up to sqrt(n), and columns of the most square torus."""
    rows = math.isqrt(num_workers)
    while num_workers % rows:
        rows -= 1
    return rows, num_workers // rows


def without(graph: Graph, dead: Iterable[int]) -> Graph:
    """Return the graph of the workers that live on, which is connected.

    Dead ranks are removed one by one, in ascending order, and the neighbours of each are joined in
    a ring, sorted by rank. So a path through a dead rank becomes a way round its ring. The result
    depends on the set of the dead alone, not on the order of their deaths, so workers that learn of
    them in different orders agree.

    Args:
        graph: The original graph of the run; it is not changed.
        dead: Ranks in it, in any order; repeats do not matter.

    Raises:
        ValueError: A dead rank is not in the graph, or no worker is left.

    Example:
        >>> without(build_graph("star", 5), [0]).edges
        [(1, 2), (1, 4), (2, 3), (3, 4)]
    """
    ranks = sorted(set(dead))
    name = graph.name
    unknown = [rank for rank in ranks if rank not in graph]
    if unknown:
        raise ValueError(f"graph {name!r} has no worker {unknown[0]}: pass ranks that are in it")
    if len(ranks) == len(graph):
        raise ValueError(f"graph {name!r} without all of its workers is empty: keep at least one")
    survivors = Graph(graph, graph.edges, name)
    for rank in ranks:
        neighbours = sorted(survivors.pop(rank))
        for neighbour in neighbours:
            survivors[neighbour].remove(rank)
        if len(neighbours) > 1:
            for left, right in pairwise([*neighbours, neighbours[0]]):
                survivors.join(left, right)
    if ranks:
        survivors.name = f"{name} without {', '.join(map(str, ranks))}"
    return survivors


def attach(graph: Graph, joiners: Iterable[int]) -> Graph:
    """Return the graph with workers added, each joined to the two ranks that follow it.

    These are the next two ranks of the result, other joiners included; after the highest rank comes
    the lowest. So the result depends on the set of joiners alone. A walk from rank to rank reaches
    every joiner and ``graph``, so the whole is connected if ``graph`` is.

    Args:
        graph: A connected graph or an empty one; it is not changed.
        joiners: Ranks that are not in it.

    Example:
        >>> attach(build_graph("ring", 4), [4]).edges
        [(0, 1), (0, 3), (0, 4), (1, 2), (1, 4), (2, 3)]
    """
    added = sorted(set(joiners))
    joined = Graph([*graph, *added], graph.edges, graph.name)
    ranks = sorted(joined)
    for rank in added:
        position = ranks.index(rank)
        for step in (1, 2):
            following = ranks[(position + step) % len(ranks)]
            if following != rank:
                joined.join(rank, following)
    return joined


def _of_ranks(graph: Graph, num_workers: int) -> Graph:
    """Return a copy of a graph whose nodes are the ranks 0..n-1, in this order."""
    if len(graph) != num_workers:
        raise ValueError(
            f"graph {graph.name!r} has {count(len(graph), 'node')}, but there "
            f"{'is' if num_workers == 1 else 'are'} {count(num_workers, 'worker')}: "
            f"start {count(len(graph), 'worker')} or pass a graph with one node per worker"
        )
    if max(graph) != num_workers - 1:
        missing = min(set(range(num_workers)) - set(graph))
        raise ValueError(
            f"graph {graph.name!r} has no node {missing}, but its nodes must be the ranks "
            f"0..{num_workers - 1}: pass networkx.convert_node_labels_to_integers(graph)"
        )
    return Graph(range(num_workers), graph.edges, graph.name)


def _circulant(num_workers: int, hops: Iterable[int]) -> Edges:
    hops = [hop for hop in hops if hop < num_workers]
    return ((rank, (rank + hop) % num_workers) for rank in range(num_workers) for hop in hops)


def _torus(num_workers: int) -> Edges:
    rows, columns = torus_shape(num_workers)
    for rank in range(num_workers):
        row, column = divmod(rank, columns)
        right = row * columns + (column + 1) % columns
        below = (row + 1) % rows * columns + column
        yield from ((rank, other) for other in (right, below) if other != rank)


_BUILDERS: dict[str, Callable[[int], Edges]] = {
    "ring": lambda n: _circulant(n, [1]),
    "path": lambda n: pairwise(range(n)),
    "star": lambda n: ((0, rank) for rank in range(1, n)),
    "complete": lambda n: combinations(range(n), 2),
    "exponential": lambda n: _circulant(n, (1 << power for power in range(n.bit_length()))),
    "torus": _torus,
}

GRAPH_NAMES: tuple[str, ...] = tuple(_BUILDERS)
"""The names that `build_graph` knows."""
