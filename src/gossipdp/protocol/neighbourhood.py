"""With whom a worker exchanges, and how often, as workers die, leave, come back and join.

Guarantees: once two workers have the same view of who lives, they have the same graph, for it is a
function of that set alone; every live worker is in it, and it is connected. The first change is
followed at once, further ones after ``REBUILD_INTERVAL_S``: a partition brings half of the
workers' deaths in a burst, and each new set costs an eigenvalue problem.

Races: two workers whose views differ for a while have different neighbours and gains. Whoever is
asked answers, neighbour or not, and ACCEPT fixes the smaller gain; who is dead is not chosen at
once, whatever the graph still says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from gossipdp.graph.constants import Constants
from gossipdp.graph.live import LiveGraph
from gossipdp.protocol.actions import Rebuilt
from gossipdp.protocol.membership import Member, Status

REBUILD_INTERVAL_S = 0.25


class Neighbourhood:
    """One worker's place in the graph over the live workers.

    Args:
        rank: this worker.
        graph: the run's graph; those of its workers of whom nothing is known are taken to live.
        has_momentum: whether the method is a2cid2; else eta is 0 and alpha_tilde 1/2.
    """

    def __init__(self, rank: int, graph: LiveGraph, *, has_momentum: bool) -> None:
        self.rank = rank
        self.rates: Mapping[int, float] = {}
        """lambda of each neighbour, at the comm rate asked for."""
        self.alpha_tilde = 0.5
        self.worker_rate = 0.0
        """The sum of the rates."""
        self.graph = graph
        self._has_momentum = has_momentum
        self._eta = 0.0
        self._originals = frozenset(graph.original.workers)
        self._live = self._originals
        self._wanted = self._originals
        self._is_outdated = False
        self._rebuilt_at = -math.inf
        if rank in self._originals:
            self._take(graph.original)

    @property
    def num_originals(self) -> int:
        """The number of workers that the run began with."""
        return len(self._originals)

    def review(self, members: Iterable[Member]) -> None:
        """The membership view changed."""
        live, over = set(self._originals), set[int]()
        for member in members:
            (live if member.is_live else over).add(member.rank)
        self._wanted = frozenset(live - over)
        self._is_outdated = self._wanted != self._live

    def next_deadline(self) -> float:
        """When :meth:`rebuild` has something to do."""
        return self._rebuilt_at + REBUILD_INTERVAL_S if self._is_outdated else math.inf

    def rebuild(self, members: Iterable[Member], now: float, *, has_ended: bool) -> Rebuilt:
        """Take the graph over the live workers.

        ``has_ended``: no more exchanges, so that neighbours matter only for whom to watch, and
        the constants are not worth their cost.
        """
        self._live, self._rebuilt_at, self._is_outdated = self._wanted, now, False
        if self.rank not in self._live:
            self.rates, self.worker_rate, self._eta = {}, 0.0, 0.0
        elif has_ended:
            self.rates = dict.fromkeys(self.graph.graph(self._live)[self.rank], 1.0)
        else:
            self._take(self.graph.constants(self._live))
        comm_rate = self.graph.comm_rate or 1.0
        return Rebuilt(
            eta=self._eta / comm_rate,
            worker_rate=self.worker_rate / comm_rate,
            neighbours=frozenset(self.rates),
            dead=frozenset(member.rank for member in members if member.status is Status.DEAD),
        )

    def _take(self, constants: Constants) -> None:
        self.rates = constants.neighbours(self.rank)
        self.worker_rate = constants.worker_rate(self.rank)
        if self._has_momentum:
            self._eta, self.alpha_tilde = constants.eta, constants.alpha_tilde
