"""Simulated exchanges whose differences travel in the library's 8-bit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from gossipdp.dynamics import lattice
from gossipdp.protocol.actions import Begin
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate import links


class _Coded(NamedTuple):
    """An exchange of coded rows: its ends, and the exponents of its steps."""

    ends: tuple[int, int]
    exponents: Tensor


class CodedRows(links.CarriedRows):
    """Rows as real workers exchange them over TCP, but for the code of Adam's second moment.

    Both ends round to points of one lattice, with the larger of their steps, and apply the
    difference of the two; where a code does not reach, both take their snapshots in bfloat16.
    """

    _steps: dict[int, lattice.LatticeSteps]
    _coded: dict[ExchangeId, _Coded]
    _asked: dict[ExchangeId, int]

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        count, size = self.population.x.shape
        self._blocks = lattice.num_blocks(size)
        self._steps = {rank: lattice.LatticeSteps(self._blocks) for rank in range(count)}
        self._coded, self._asked = {}, {}

    def exchange_began(
        self, rank: int, begin: Begin, now_s: float
    ) -> tuple[Tensor, list[Tensor | None]]:
        other = self._asked.setdefault(begin.id, rank)
        if other != rank:
            needed = [self._steps[each].exponents() for each in (rank, other)]
            self._coded[begin.id] = _Coded((rank, other), torch.maximum(*needed))
            del self._asked[begin.id]
        return super().exchange_began(rank, begin, now_s)

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        assert isinstance(data, tuple)
        peers, moments = data
        exchange = self._open[rank]
        mine, sizes = exchange.snapshot, lattice.largest(exchange.snapshot)
        exponents = self._coded[id].exponents
        step = lattice.difference(torch.ones_like(mine, dtype=torch.int8), exponents)
        points = torch.round(mine / step) - torch.round(peers / step)
        is_rounded = bool((points.abs() > 127).any())
        if is_rounded:
            mine, peers = mine.bfloat16().float(), peers.bfloat16().float()
        else:
            mine, peers = points * step, torch.zeros_like(points)
        exchange.snapshot = mine
        super().data_arrived(rank, id, (peers, moments), now_s)
        blocks, distances = slice(0, self._blocks), lattice.largest(mine - peers)
        self._steps[rank].learn(blocks, distances, sizes, is_rounded=is_rounded)


@contextmanager
def coded_exchanges() -> Iterator[None]:
    """Let simulations within exchange coded rows."""
    plain, links.CarriedRows = links.CarriedRows, CodedRows  # type: ignore[misc]
    try:
        yield
    finally:
        links.CarriedRows = plain  # type: ignore[misc]
