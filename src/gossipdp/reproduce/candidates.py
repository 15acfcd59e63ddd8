"""Neighbour policies that might be better than ``fresh``: the candidates of a search.

All differ in whom an initiator asks alone; whoever is asked accepts whenever it is idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import final

from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES, NeighbourPolicy


class _Remembering(NeighbourPolicy):
    """Knows how many exchanges ago it met each neighbour; infinitely many before the first."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._met_at: dict[int, int] = {}
        self._num_exchanges = 0

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        self._num_exchanges += 1
        self._met_at[peer] = self._num_exchanges

    def age(self, peer: int) -> float:
        """Exchanges since it met ``peer``, that one included."""
        if peer not in self._met_at:
            return math.inf
        return self._num_exchanges - self._met_at[peer] + 1

    def race(self, weights: Mapping[int, float]) -> list[int]:
        """A random order in which each next peer is drawn by weight; infinite weights first."""
        arrivals = {peer: self._random.expovariate(1.0) for peer in sorted(weights)}
        return sorted(
            weights,
            key=lambda peer: (
                arrivals[peer] / weights[peer],
                arrivals[peer],
            ),
        )


@final
class LeftOut(_Remembering):
    """As ``fresh`` with another share of the neighbours left out, all but one at most.

    Args:
        share: of the neighbours that can exchange now.
        falls_back: ask those left out last, rather than not at all.
    """

    def __init__(self, random: Random, share: float, *, falls_back: bool = False) -> None:
        super().__init__(random)
        self._share = share
        self._falls_back = falls_back

    def draw(self, available: Mapping[int, float]) -> list[int]:
        num_left_out = min(len(available) - 1, max(1, int(len(available) * self._share)))
        met = sorted((p for p in available if p in self._met_at), key=self.age)
        left_out = met[: max(0, num_left_out)]
        order = self.race({p: rate for p, rate in available.items() if p not in left_out})
        return order + left_out[::-1] if self._falls_back else order


@final
class LeastRecent(_Remembering):
    """Strictly by age: the one met longest ago first, ties drawn by lambda."""

    def draw(self, available: Mapping[int, float]) -> list[int]:
        drawn = self.race(available)
        return sorted(drawn, key=lambda peer: -self.age(peer))


@final
class ByAge(_Remembering):
    """Drawn by lambda times a power of the age; nobody is left out."""

    def __init__(self, random: Random, power: float) -> None:
        super().__init__(random)
        self._power = power

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return self.race(
            {peer: rate * self.age(peer) ** self._power for peer, rate in available.items()}
        )


CANDIDATES: Mapping[str, Callable[[Random], NeighbourPolicy]] = {
    "fresh": NEIGHBOUR_POLICIES["fresh"],
    "a quarter left out": lambda random: LeftOut(random, 0.25),
    "three quarters left out": lambda random: LeftOut(random, 0.75),
    "all but one left out": lambda random: LeftOut(random, 1.0),
    "half left out, asked last": lambda random: LeftOut(random, 0.5, falls_back=True),
    "least recently met first": LeastRecent,
    "drawn by age": lambda random: ByAge(random, 1.0),
    "drawn by age squared": lambda random: ByAge(random, 2.0),
}
"""Each as a maker of one worker's policy, the default first."""
