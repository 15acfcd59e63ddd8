"""The chunks of a consolidation, which travel through a simulated network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gossipdp.protocol.consolidation_actions import (
    Commit,
    ConsolidationAction,
    FinishChunk,
    Finished,
    MeasureDistance,
    Prepare,
    SendPartial,
    SendResult,
)
from gossipdp.simulate.wire import Wire

if TYPE_CHECKING:  # `gossipdp plan` drives the protocol over links without torch
    from torch import Tensor

    from gossipdp.simulate.averaged_rows import AveragedRows
    from gossipdp.simulate.network import Network


class AveragingTransfers:
    """Performs what the consolidation of each worker asks for.

    ``left`` says when each worker left.

    Args:
        network: carries the chunks.
        rows: what they hold; None: nothing.
    """

    def __init__(self, network: Network, rows: AveragedRows | None) -> None:
        self.left: dict[int, float] = {}
        self._network = network
        self._rows = rows

    def started(self, rank: int) -> None:
        """A new process of ``rank`` begins."""
        self.left.pop(rank, None)
        if self._rows is not None:
            self._rows.forget(rank)

    def perform(self, rank: int, action: ConsolidationAction) -> None:
        """Do what the consolidation of ``rank`` asks."""
        network, rows = self._network, self._rows
        now = network.engine.now
        match action:
            case MeasureDistance(origin=origin):
                distance = 0.0 if rows is None else rows.squared_distance(rank)
                worker = network.workers[rank]
                network.perform(rank, worker.distance_measured(origin, distance, now))
            case Finished():
                self.left[rank] = now
            case SendPartial() | SendResult():
                wire = network.wire(rank, action.peer)
                if wire is not None:
                    data = None if rows is None else rows.chunk(rank, action.chunk)
                    latency_s = network.conditions.latency_s(rank, action.peer)
                    arrives = wire.carry_message(rank, now, latency_s)
                    arrive = partial(self._chunk_arrived, wire, rank, action, data)
                    network.engine.at(arrives, arrive)
            case Prepare() if rows is not None:
                rows.prepare(rank)
            case FinishChunk() if rows is not None:
                rows.finish(rank, action.chunk, action.num_members)
            case Commit() if rows is not None:
                rows.commit(rank, action)
            case _:
                pass  # arithmetic on parameters, which are not here

    def _chunk_arrived(
        self, wire: Wire, rank: int, sent: SendPartial | SendResult, data: Tensor | None
    ) -> None:
        network, rows = self._network, self._rows
        again = partial(self._chunk_arrived, wire, rank, sent, data)
        if network.holds_up(rank, sent.peer, again) or not wire.is_up:
            return
        peer, now = sent.peer, network.engine.now
        worker = network.workers[peer]
        match sent:
            case SendPartial(epoch=epoch, chunk=chunk):
                if worker.consolidation.accepts_partial(rank, epoch, chunk):
                    if rows is not None and data is not None:
                        rows.add(peer, chunk, data)
                    network.perform(peer, worker.partial_landed(rank, epoch, chunk, now))
            case SendResult(origin=origin, chunk=chunk):
                if worker.consolidation.accepts_result(rank, origin, chunk):
                    if rows is not None and data is not None:
                        rows.take(peer, chunk, data)
                    network.perform(peer, worker.result_landed(rank, origin, chunk, now))
