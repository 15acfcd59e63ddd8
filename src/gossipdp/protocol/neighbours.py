"""The neighbours of a worker: who they are, how often to ask, and which one first.

:class:`Neighbourhood` is a worker's place in the graph over the live workers. The graph is a
function of the set of live workers alone, so workers with the same view have the same graph; every
live worker is in it, and it is connected. The worker follows the first change at once, and further
ones after ``REBUILD_INTERVAL_S``: a partition brings the deaths of half the workers in a burst, and
each new set costs an eigenvalue problem, which among hundreds of workers takes longer than a worker
may be silent. So the driver may work it out elsewhere; until then the old graph is used. While the
views of two workers differ, so do their neighbours and gains: a worker answers any worker that
asks, neighbour or not, and ACCEPT fixes the smaller gain.

A policy is given the neighbours that can exchange now, with their rates ``lambda_ij``. It returns
the order in which to try them for this demand. A worker that is asked accepts if it is idle, so a
policy decides for the initiator alone. Workers use ``Fresh``; the simulator compares it with
others.

Taking the first neighbour that is free *locks in*: two workers that finish together find only each
other free and exchange again, for ever, and the network stops mixing. ``Fresh`` is the remedy.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from random import Random
from typing import NamedTuple, TypeAlias, final

from gossipdp.graph.constants import LiveGraph
from gossipdp.protocol.actions import Rebuilt
from gossipdp.protocol.members import Member, Status

REBUILD_INTERVAL_S = 0.25
LOOK_INTERVAL_S = 0.05
"""Seconds between looks for a graph that is being worked out elsewhere."""


class NeighbourPolicy(ABC):
    """The order in which one worker asks its neighbours."""

    def __init__(self, random: Random) -> None:
        self._random = random

    @abstractmethod
    def draw(self, available: Mapping[int, float]) -> list[int]:
        """Return the neighbours to try, in order, of those ``available``, with their lambda."""

    @abstractmethod
    def exchanged(self, peer: int, *, initiated: bool) -> None:
        """Note an exchange that ended well; ``initiated``: this worker asked for it."""


@final
class Fresh(NeighbourPolicy):
    """The neighbours without the latest partners.

    If ``deg`` neighbours can exchange now, leave out the ``floor(deg / 2)`` most recent partners
    (at least one if ``deg > 1``), and try the others in an order drawn by lambda.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._recent: dict[int, None] = {}  # most recent last

    def draw(self, available: Mapping[int, float]) -> list[int]:
        num_left_out = len(available) // 2
        recent = [peer for peer in reversed(self._recent) if peer in available]
        left_out = set(recent[:num_left_out])
        others = {peer: rate for peer, rate in available.items() if peer not in left_out}
        return weighted_order(others, self._random)

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        self._recent.pop(peer, None)
        self._recent[peer] = None


def weighted_order(rates: Mapping[int, float], random: Random) -> list[int]:
    """Return a random order in which each next peer is drawn by rate (the exponential race)."""
    arrivals = {peer: random.expovariate(1.0) / rates[peer] for peer in sorted(rates)}
    return sorted(arrivals, key=lambda peer: (arrivals[peer], peer))


class Place(NamedTuple):
    """One worker's place in a graph: lambda of each neighbour, their sum, and the constants."""

    rates: Mapping[int, float]
    worker_rate: float
    eta: float
    alpha_tilde: float


WorkOut: TypeAlias = Callable[[Hashable, Callable[[], Place]], Place | None]
"""Calls a function and returns its result, which the key names; None: not yet, ask again later."""


def at_once(key: Hashable, function: Callable[[], Place]) -> Place:
    """Call ``function`` at once, however long it takes."""
    return function()


class Neighbourhood:
    """One worker's place in the graph over the live workers.

    Args:
        graph: the run's graph; its workers without a record count as live.
        has_momentum: whether the method is a2cid2; else eta is 0 and alpha_tilde 1/2.
    """

    def __init__(
        self, rank: int, graph: LiveGraph, *, has_momentum: bool, work_out: WorkOut = at_once
    ) -> None:
        self.rank = rank
        self.graph = graph
        self._has_momentum = has_momentum
        self._work_out = work_out
        self._originals = frozenset(graph.original.workers)
        self._live = self._originals
        self._wanted = self._originals
        self._is_outdated = False
        self._look_at = -math.inf
        self.place = self._place(self._live)
        """At the comm rate asked for."""

    def review(self, members: Iterable[Member]) -> None:
        live, over = set(self._originals), set[int]()
        for member in members:
            (live if member.is_live else over).add(member.rank)
        self._wanted = frozenset(live - over)
        self._is_outdated = self._wanted != self._live

    def next_deadline(self) -> float:
        return self._look_at if self._is_outdated else math.inf

    def rebuild(self, members: Iterable[Member], now: float) -> Rebuilt | None:
        """Take the graph over the live workers; return None if it is not worked out yet."""
        wanted = self._wanted
        place = self._work_out(wanted, lambda: self._place(wanted))
        if place is None:
            self._look_at = now + LOOK_INTERVAL_S
            return None
        self.place, self._live, self._is_outdated = place, wanted, False
        self._look_at = now + REBUILD_INTERVAL_S
        comm_rate = self.graph.comm_rate or 1.0
        return Rebuilt(
            eta=place.eta / comm_rate,
            worker_rate=place.worker_rate / comm_rate,
            neighbours=frozenset(place.rates),
            dead=frozenset(member.rank for member in members if member.status is Status.DEAD),
        )

    def _place(self, live: frozenset[int]) -> Place:
        if self.rank not in live:
            return Place({}, 0.0, 0.0, 0.5)
        constants = self.graph.constants(live)
        gains = (constants.eta, constants.alpha_tilde) if self._has_momentum else (0.0, 0.5)
        return Place(constants.neighbours(self.rank), constants.worker_rate(self.rank), *gains)
