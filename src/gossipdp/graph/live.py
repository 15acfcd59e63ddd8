"""The graph over the live workers: what is left of the original one after deaths, and joiners."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from gossipdp.graph.constants import Constants
from gossipdp.graph.topology import attach, without

if TYPE_CHECKING:
    import networkx as nx

MAX_CACHED = 64


class LiveGraph:
    """The graph of a run as a function of the set of its live workers.

    From the original graph the dead are removed (`without`), then joiners beyond it are attached
    (`attach`). The result depends on the set alone, so workers with the same view of who lives
    have the same graph, whatever they learned in which order. Rates are the default ones,
    lambda_ij = r min(1/deg_i, 1/deg_j), except for the original set, which keeps its own.

    Cost of one set that is not cached, with one BLAS thread on a busy machine of two cores: 1 to
    3 ms for 64 workers (10 if complete), 9 to 19 for 256 (190 if complete, whose 32,640 edges are
    walked in Python). Where BLAS starts threads of its own and they find no idle core, up to 40 ms
    for 64 workers and 0.8 s for 256. The last ``MAX_CACHED`` sets are cached.

    Args:
        constants: The original graph with its rates; ``comm_rate`` is its busiest worker's rate.

    Example:
        >>> from gossipdp.graph import build_graph
        >>> live = LiveGraph(Constants.of(build_graph("ring", 4)))
        >>> live.constants({0, 1, 3}).edges
        ((0, 1), (0, 3), (1, 3))
    """

    def __init__(self, constants: Constants) -> None:
        import networkx as nx

        self.original = constants
        self.comm_rate = max(map(constants.worker_rate, constants.workers))
        self._graph: nx.Graph[int] = nx.Graph(constants.edges)
        self._graph.add_nodes_from(constants.workers)
        self._cache: OrderedDict[frozenset[int], Constants] = OrderedDict()

    def constants(self, live: Collection[int]) -> Constants:
        """Rates and constants over the workers ``live``.

        Raises:
            ValueError: nobody lives.
        """
        key = frozenset(live)
        if key == frozenset(self.original.workers):
            return self.original
        constants = self._cache.get(key)
        if constants is None:
            # One worker has no edges, so that any rate will do.
            constants = Constants.of(self.graph(key), self.comm_rate or 1.0)
            self._cache[key] = constants
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return constants

    def graph(self, live: Collection[int]) -> nx.Graph[int]:
        """The edges alone, without the cost of the constants.

        Raises:
            ValueError: nobody lives.
        """
        import networkx as nx

        ranks = set(live)
        originals = ranks & set(self.original.workers)
        joiners = ranks - originals
        if not ranks:
            raise ValueError("a graph of no live workers: keep at least one")
        graph: nx.Graph[int] = nx.Graph()
        if originals:
            graph = without(self._graph, set(self.original.workers) - originals)
        return attach(graph, joiners)
