"""The rows of a population as the payload of a simulated network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Begin, Rebuilt
from gossipdp.protocol.messages import ExchangeId
from gossipdp.simulate.payload import Payload
from gossipdp.simulate.population import Population
from gossipdp.simulate.trace import Interval
from gossipdp.simulate.training import Training


@dataclass(slots=True)
class _Open:
    """An exchange that a worker is in."""

    id: ExchangeId
    alpha_tilde: float
    began_s: float
    snapshot: Tensor
    has_applied: bool = False


@dataclass(slots=True)
class _Half:
    """An exchange that one end has applied and the other has not."""

    mine: Tensor
    peers: Tensor
    alpha_tilde: float


@final
class CarriedRows(Payload):
    """Each worker holds a row of ``population``, trains it and exchanges it.

    As on a real worker: an exchange freezes the phase at its start, the row flows to it, and its
    snapshot is both what travels and what delta is computed from. A step boundary applies the
    gradient step, then flows the row to the phase. Between boundaries the row is x + pending of a
    real worker; the gradient that is under way was begun at the row's value then.

    The released exchange, for comparison only: what travels is the row before it flowed; delta is
    the live row when the data arrive, flowed and with the steps taken meanwhile, minus that.

    Args:
        population: the rows.
        training: their gradient steps.
        phases: the phase of each rank.
        is_released: exchange as the authors' released code does.
        progress: the share of the run that is over, for the learning rate; None: a constant rate.
        interval: told what each worker did when.
    """

    def __init__(
        self,
        population: Population,
        training: Training,
        phases: Mapping[int, Phase],
        *,
        is_released: bool = False,
        progress: Callable[[float], float] | None = None,
        interval: Callable[[Interval], None] = lambda interval: None,
    ) -> None:
        self.num_torn = 0
        """Exchanges that one end applied and the other never will."""
        self.torn = torch.zeros(population.num_trained, dtype=torch.float64)
        """What those did to the sum of x + c/2 over the workers."""
        self._population: Final = population
        self._training: Final = training
        self._phases: Final = phases
        self._is_released: Final = is_released
        self._progress: Final = progress
        self._interval: Final = interval
        self._open: dict[int, _Open] = {}
        self._halves: dict[ExchangeId, _Half] = {}

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        progress = None if self._progress is None else self._progress(now_s)
        self._training.start_step(rank, progress)
        self._interval(Interval(rank, "computing", now_s, end_s))

    def step_ended(self, rank: int, now_s: float) -> None:
        self._training.end_step(rank)
        self._population.flow(rank, self._phases[rank].at(now_s))

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> Tensor:
        row = self._population.x[rank]
        theta = self._phases[rank].start_exchange(now_s)
        unflowed = row.clone() if self._is_released else None
        self._population.flow(rank, theta)
        snapshot = row.clone() if unflowed is None else unflowed
        self._open[rank] = _Open(begin.id, begin.alpha_tilde, now_s, snapshot)
        return snapshot

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        assert isinstance(data, Tensor)
        exchange = self._open[rank]
        mine = self._population.x[rank].clone() if self._is_released else exchange.snapshot
        self._population.apply(rank, mine, data, exchange.alpha_tilde)
        exchange.has_applied = True
        if self._halves.pop(id, None) is None:
            self._halves[id] = _Half(mine, data, exchange.alpha_tilde)

    def exchange_ended(self, rank: int, id: ExchangeId, now_s: float) -> None:
        exchange = self._open.pop(rank)
        self._phases[rank].end_exchange(now_s)
        self._interval(Interval(rank, "exchanging", exchange.began_s, now_s))
        if not exchange.has_applied and (half := self._halves.pop(id, None)) is not None:
            self.num_torn += 1
            self.torn += self._change(half)

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        self._phases[rank].set_speed(graph.eta, graph.worker_rate, now_s)

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        self._population.take_over(rank, peer)

    def settle_drift(self) -> None:
        """Tell the population what exchanges under way did to its mean at one end so far."""
        total = torch.zeros_like(self.torn)
        for half in self._halves.values():
            total += self._change(half)
        self._population.half_applied = total

    def _change(self, half: _Half) -> Tensor:
        """What one end's part of an exchange did to the sum of x + c/2."""
        gain = 0.5
        if self._population.c is not None:
            gain += 0.5 * (half.alpha_tilde - 0.5)
        delta = (half.mine - half.peers)[: self._population.num_trained]
        return delta.double() * -gain
