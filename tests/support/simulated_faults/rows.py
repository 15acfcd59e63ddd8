"""What faults do to the data of simulated workers: they change graphs, and bring joiners."""

from torch import Tensor

from gossipdp.protocol.actions import Rebuilt
from gossipdp_lab.simulate.network import Payload
from gossipdp_lab.simulate.population import Population


class FaultyPayload(Payload):
    """Nothing, as of any network, and nothing changes by what faults bring."""

    def rebuilt(self, rank: int, graph: Rebuilt, now_s: float) -> None:
        """``rank`` follows a new graph, with another speed of its phase."""

    def took_over(self, rank: int, peer: int, now_s: float) -> None:
        """``rank``, in no exchange, holds x + c/2 of ``peer`` now, with c = 0."""


def put(population: Population, rank: int, row: Tensor) -> None:
    """Give one worker another row, and no momentum; its change is no drift."""
    trained = population.num_trained
    population.expected_sum -= population.x[rank, :trained].double()
    if population.c is not None:
        population.expected_sum -= 0.5 * population.c[rank].double()
        population.c[rank].zero_()
    population.x[rank].copy_(row)
    population.expected_sum += row[:trained].double()
