"""Neighbour policies that tests run the protocol with, beside the runtime's :class:`Fresh`."""

from collections.abc import Mapping
from random import Random
from typing import final

from gossipdp.protocol.neighbours import Fresh, NeighbourPolicy, weighted_order


@final
class Poisson(NeighbourPolicy):
    """The paper's edges: a worker draws its partner by lambda in advance, and waits for it."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._partner: int | None = None

    def draw(self, available: Mapping[int, float]) -> list[int]:
        if self._partner not in available:
            self._partner = next(iter(weighted_order(available, self._random)), None)
        return [] if self._partner is None else [self._partner]

    def exchanged(self, peer: int, *, initiated: bool) -> None:
        if initiated:
            self._partner = None


@final
class Available(NeighbourPolicy):
    """The first neighbour that is free, as in the authors' released code. It locks in."""

    def draw(self, available: Mapping[int, float]) -> list[int]:
        return weighted_order(available, self._random)

    def exchanged(self, peer: int, *, initiated: bool) -> None: ...


NEIGHBOUR_POLICIES = {"fresh": Fresh, "poisson": Poisson, "available": Available}
