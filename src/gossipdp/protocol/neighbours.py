"""Which neighbour to ask: the policies behind ``neighbour_policy=``.

A policy is asked with the neighbours that can exchange now and their rates ``lambda_ij``; it
answers with the order in which to try them for this demand. Whoever is asked accepts whenever it
is idle: a policy decides for the initiator alone.

Pairing with whoever is free *locks in*: two workers that finish together find only each other
free and exchange again, for ever, and the network stops mixing. ``fresh`` is the remedy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from random import Random
from typing import final


class NeighbourPolicy(ABC):
    """The order in which one worker asks its neighbours."""

    def __init__(self, random: Random) -> None:
        self._random = random

    @abstractmethod
    def draw(self, available: Mapping[int, float]) -> list[int]:
        """Neighbours to try, in order; ``available`` maps those that can exchange to lambda."""

    @abstractmethod
    def exchanged(self, peer: int, *, initiated: bool) -> None:
        """An exchange with ``peer`` ended well; ``initiated``: it was this worker that asked."""


@final
class Fresh(NeighbourPolicy):
    """Not those it exchanged with last: the default.

    Of the ``deg`` neighbours that can exchange now, the ``floor(deg / 2)`` most recent partners
    are left out (at least one when ``deg > 1``); the others are tried in an order
    drawn by lambda.
    """

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._recent: dict[int, None] = {}  # most recent last

    def draw(self, available: Mapping[int, float]) -> list[int]:
        num_left_out = len(available) // 2
        recent = [peer for peer in reversed(self._recent) if peer in available]
        left_out = set(recent[:num_left_out])
        others = {peer: rate for peer, rate in available.items() if peer not in left_out}
        return _weighted_order(others, self._random)

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        self._recent.pop(peer, None)
        self._recent[peer] = None


@final
class Poisson(NeighbourPolicy):
    """The paper's edges: a partner drawn by lambda in advance, and waited for."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._partner: int | None = None

    def draw(self, available: Mapping[int, float]) -> list[int]:
        if self._partner not in available:
            self._partner = next(iter(_weighted_order(available, self._random)), None)
        return [] if self._partner is None else [self._partner]

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        if initiated:
            self._partner = None


@final
class Available(NeighbourPolicy):
    """The first that is free, as in the authors' released code. It locks in: for comparison."""

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return _weighted_order(available, self._random)

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        pass


@final
class Scheduled(NeighbourPolicy):
    """A fixed cyclic order, each neighbour waited for in its turn; the rates play no part."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._last: int | None = None

    def draw(self, available: Mapping[int, float]) -> list[int]:
        if not available:
            return []
        if self._last is None:
            self._last = self._random.choice(sorted(available))
        later = [peer for peer in available if peer > self._last]
        return [min(later, default=min(available))]

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        if initiated:
            self._last = peer


NEIGHBOUR_POLICIES: Mapping[str, type[NeighbourPolicy]] = {
    "fresh": Fresh,
    "poisson": Poisson,
    "available": Available,
    "scheduled": Scheduled,
}


def make_policy(name: str, random: Random) -> NeighbourPolicy:
    """The policy called ``name``, one of :data:`NEIGHBOUR_POLICIES`."""
    if name not in NEIGHBOUR_POLICIES:
        known = ", ".join(NEIGHBOUR_POLICIES)
        raise ValueError(f"unknown neighbour policy {name!r}; choose one of: {known}")
    return NEIGHBOUR_POLICIES[name](random)


def _weighted_order(rates: Mapping[int, float], random: Random) -> list[int]:
    """A random order in which each next peer is drawn by rate (the exponential race)."""
    arrivals = {peer: random.expovariate(1.0) / rates[peer] for peer in sorted(rates)}
    return sorted(arrivals, key=lambda peer: (arrivals[peer], peer))
