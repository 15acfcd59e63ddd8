"""The chunks of a consolidation, which travel through a simulated network without content."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gossipdp.protocol.consolidation_actions import (
    ConsolidationAction,
    Finished,
    MeasureDistance,
    SendPartial,
    SendResult,
)
from gossipdp.simulate.wire import Wire

if TYPE_CHECKING:
    from gossipdp.simulate.network import Network


class AveragingTransfers:
    """Performs what the consolidation of each worker asks for.

    ``left`` says when each worker left.
    """

    def __init__(self, network: Network) -> None:
        self.left: dict[int, float] = {}
        self._network = network

    def perform(self, rank: int, action: ConsolidationAction) -> None:
        """Do what the consolidation of ``rank`` asks."""
        network = self._network
        now = network.engine.now
        match action:
            case MeasureDistance(origin=origin):
                worker = network.workers[rank]
                network.perform(rank, worker.distance_measured(origin, 0.0, now))
            case Finished():
                self.left[rank] = now
            case SendPartial() | SendResult():
                wire = network.wire(rank, action.peer)
                if wire is not None:
                    latency_s = network.conditions.latency_s(rank, action.peer)
                    arrives = wire.carry_message(rank, now, latency_s)
                    network.engine.at(arrives, partial(self._chunk_arrived, wire, rank, action))
            case _:
                pass  # arithmetic on parameters, which are not here

    def _chunk_arrived(self, wire: Wire, rank: int, sent: SendPartial | SendResult) -> None:
        network = self._network
        if network.holds_up(rank, sent.peer, partial(self._chunk_arrived, wire, rank, sent)):
            return
        if not wire.is_up:
            return
        worker, now = network.workers[sent.peer], network.engine.now
        match sent:
            case SendPartial(epoch=epoch, chunk=chunk):
                if worker.consolidation.accepts_partial(rank, epoch, chunk):
                    network.perform(sent.peer, worker.partial_landed(rank, epoch, chunk, now))
            case SendResult(origin=origin, chunk=chunk):
                if worker.consolidation.accepts_result(rank, origin, chunk):
                    network.perform(sent.peer, worker.result_landed(rank, origin, chunk, now))
