"""Rows of simulated workers, where faults tear exchanges, change graphs, and bring joiners."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.protocol.actions import Rebuilt
from gossipdp.protocol.messages import ExchangeId
from gossipdp_lab.simulate.links import CarriedRows
from gossipdp_lab.simulate.network import Payload
from gossipdp_lab.simulate.population import Population, Training


class FaultyPayload(Payload):
    """Nothing, as of any network, and nothing changes by what faults bring."""

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        """``rank`` follows a new graph, with another speed of its phase."""

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        """``rank``, in no exchange, holds x + c/2 of ``peer`` now, with c = 0."""


class FaultyRows(CarriedRows, FaultyPayload):
    """The rows of a simulation, with an account of the exchanges that only one end applied.

    Attributes:
        num_torn: exchanges that one end applied and the other never will.
        torn: what those did to the sum of x + c/2 over the workers.
    """

    def __init__(self, training: Training, phases: Mapping[int, Phase]) -> None:
        super().__init__(training, phases)
        self.num_torn = 0
        self.torn = torch.zeros_like(self.population.half_applied)
        self._applied: set[int] = set()

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        super().data_arrived(rank, id, data, now_s)
        self._applied.add(rank)

    def exchange_ended(
        self, rank: int, id: ExchangeId, now_s: float, *, is_withdrawn: bool = False
    ) -> None:
        super().exchange_ended(rank, id, now_s, is_withdrawn=is_withdrawn)
        has_applied = rank in self._applied
        self._applied.discard(rank)
        if not has_applied and (half := self._halves.pop(id, None)) is not None:
            self.num_torn += 1
            self.torn += half

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        self.phases[rank].set_speed(graph.eta, graph.worker_rate, now_s)

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        population = self.population
        row = population.x[peer].clone()
        if population.c is not None:
            row[: population.num_trained] += 0.5 * population.c[peer]
        put(population, rank, row)


def put(population: Population, rank: int, row: Tensor) -> None:
    """Give one worker another row, and no momentum; its change is no drift."""
    trained = population.num_trained
    population.expected_sum -= population.x[rank, :trained].double()
    if population.c is not None:
        population.expected_sum -= 0.5 * population.c[rank].double()
        population.c[rank].zero_()
    population.x[rank].copy_(row)
    population.expected_sum += row[:trained].double()
