"""A simulated network in which workers stand still, are cut off, crash, join and consolidate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from gossipdp.protocol.actions import (
    Commit,
    FinishChunk,
    Finished,
    MeasureDistance,
    Prepare,
    SendPartial,
    SendResult,
    Superseded,
)
from gossipdp.protocol.messages import Envelope
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp.simulate.engine import Engine
from gossipdp.simulate.network import Answer, Loss, Network
from gossipdp.simulate.traffic import Conditions, Payload
from simulated_faults.averaged_rows import AveragedRows


class FaultyNetwork(Network):
    """A network with faults as inputs: ``crash``, ``start``, ``join``, ``stall``, ``partition``.

    A stall or a partition loses nothing: what it holds up goes on when it ends, in order. Ranks
    that are rejected from one another have a firewall between them that refuses dials.

    Args:
        workers, edges, conditions, payload, keeps_exchanges: as of any network.
        averaged: what consolidation averages; None: nothing.
        lost_at_messages: the numbers of those messages, counted over the network, at whose
            sending their link is cut.

    Attributes:
        left: when each worker left after consolidation.
        superseded: the ranks that gave way to another process.
        took_over: (when, who, from whom) of every take-over of parameters.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerProtocol],
        edges: Collection[tuple[int, int]],
        conditions: Conditions,
        payload: Payload | None = None,
        *,
        averaged: AveragedRows | None = None,
        lost_at_messages: Collection[int] = (),
        keeps_exchanges: bool = False,
    ) -> None:
        self.left: dict[int, float] = {}
        self.superseded: list[int] = []
        self.took_over: list[tuple[float, int, int]] = []
        self._averaged = averaged
        self._lost_at_messages = lost_at_messages
        self._num_sent = 0
        self._stalled_until: dict[int, float] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._sides: dict[int, int] = {}
        self._heals_at = 0.0
        self._rejected: set[frozenset[int]] = set()
        super().__init__(
            Engine(), workers, edges, conditions, payload, keeps_exchanges=keeps_exchanges
        )

    # --- faults ----------------------------------------------------------------------------

    def crash(self, rank: int) -> None:
        """The process of ``rank`` is gone: its links are closed, its address refuses dials."""
        self.crashed.add(rank)
        self._stalled_until.pop(rank, None)
        self._waiting.pop(rank, None)
        alarm = self._alarms.pop(rank, None)
        if alarm is not None:
            alarm.cancel()
        if rank in self._running:
            self._end(rank, "crashed")
        for first, second in list(self._wires):
            if rank in (first, second):
                self.cut(first, second)
        self._retry_s = {dial: wait for dial, wait in self._retry_s.items() if dial[0] != rank}
        self._outbox = {dial: box for dial, box in self._outbox.items() if dial[0] != rank}

    def start(self, worker: WorkerProtocol) -> None:
        """A process trains from now on: after a crash of its rank, with parameters of its own."""
        rank = worker.rank
        self._add(worker)
        self._start_step(rank)
        for peer in sorted(worker.neighbours):
            self._want(rank, peer)
        self._set_alarm(rank)

    def stall(self, rank: int, duration_s: float) -> None:
        """The process of ``rank`` stands still: what arrives waits, its kernel answers no dial."""
        until = self.engine.now + duration_s
        if rank in self.crashed or until <= self._stalled_until.get(rank, self.engine.now):
            return
        self._stalled_until[rank] = until
        self.engine.at(until, partial(self._wake, rank))

    def _wake(self, rank: int) -> None:
        if self._stalled_until.get(rank, 0.0) > self.engine.now:
            return
        self._stalled_until.pop(rank, None)
        for callback in self._waiting.pop(rank, []):
            callback()

    def partition(self, groups: Collection[Collection[int]], until: float) -> None:
        """Until then nothing passes between two groups; what was sent arrives afterwards.

        Links stay, silent, until an end closes them. Ranks in no group reach everybody. It
        replaces an older partition.
        """
        self._sides = {rank: side for side, group in enumerate(groups) for rank in group}
        self._heals_at = until

    def reject(self, first: int, second: int, until: float) -> None:
        """Until then a firewall between two ranks refuses their dials, and their link is cut."""
        pair = frozenset((first, second))
        self._rejected.add(pair)
        self.cut(first, second)
        self.engine.at(until, partial(self._rejected.discard, pair), priority=-1)

    def done_within(self, rank: int, wait_s: float) -> None:
        """``rank`` trains no more, and waits so long for those that still do."""
        self.perform(rank, self.workers[rank].done(self.engine.now, wait_s))

    def join(self, worker: WorkerProtocol) -> None:
        """A process starts that is to take parameters from a live worker before it trains.

        With nobody to give them its process ends.
        """
        self._add(worker)
        self._ask_for_parameters(worker)
        self._set_alarm(worker.rank)

    def _add(self, worker: WorkerProtocol) -> None:
        self.workers[worker.rank] = worker
        self.crashed.discard(worker.rank)
        self.left.pop(worker.rank, None)
        if self._averaged is not None:
            self._averaged.forget(worker.rank)

    def _ask_for_parameters(self, worker: WorkerProtocol) -> None:
        """Ask the next who can give them; called again until somebody has."""
        rank = worker.rank
        again = partial(self._ask_for_parameters, worker)
        if not self.lives(worker) or self.stands_still(rank, again):
            return
        donors = [
            peer
            for peer in worker.membership.live()
            if peer != rank
            and self.answer(rank, peer) == "accepted"
            and self.workers[peer].can_donate
        ]
        if not donors:
            self.crash(rank)
            return
        self.connect(rank, donors[0])
        ends = self.engine.now + self.conditions.transfer_s(donors[0], rank)
        wire = self.wire(rank, donors[0])
        self.engine.at(ends, partial(self._take_over, worker, donors[0], wire))

    def _take_over(self, worker: WorkerProtocol, peer: int, wire: Any) -> None:
        rank, now = worker.rank, self.engine.now
        if self.holds_up(peer, rank, partial(self._take_over, worker, peer, wire)):
            return
        if wire is None or not wire.is_up or not self.workers[peer].can_donate:
            self._ask_for_parameters(worker)
        elif self.lives(worker):
            self._payload.took_over(rank, peer, now)
            self.took_over.append((now, rank, peer))
            self.perform(rank, worker.joined(now))
            self._start_step(rank)

    # --- what they do to the network -------------------------------------------------------

    def stands_still(self, rank: int, callback: Callable[[], None]) -> bool:
        if rank not in self._stalled_until:
            return False
        self._waiting.setdefault(rank, []).append(callback)
        return True

    def holds_up(self, rank: int, peer: int, callback: Callable[[], None]) -> bool:
        if self._is_apart(rank, peer):
            self.engine.at(self._heals_at, callback)
            return True
        return self.stands_still(peer, callback)

    def answer(self, rank: int, peer: int) -> Answer:
        if self._is_apart(rank, peer):
            return "silence"
        if frozenset((rank, peer)) in self._rejected:
            return "refused"
        return "silence" if peer in self._stalled_until else super().answer(rank, peer)

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        number = self._num_sent
        self._num_sent += 1
        return "link lost" if number in self._lost_at_messages else envelope

    def _is_apart(self, first: int, second: int) -> bool:
        """Whether nothing passes between two ranks."""
        if self.engine.now >= self._heals_at:
            return False
        sides = self._sides
        return first in sides and second in sides and sides[first] != sides[second]

    # --- consolidation ---------------------------------------------------------------------

    def perform_other(self, rank: int, action: Action) -> None:
        averaged, worker, now = self._averaged, self.workers[rank], self.engine.now
        match action:
            case Superseded():
                self.superseded.append(rank)
                self.crash(rank)
            case MeasureDistance(origin=origin):
                distance = 0.0 if averaged is None else averaged.squared_distance(rank)
                self.perform(rank, worker.distance_measured(origin, distance, now))
            case Finished():
                self.left[rank] = now
            case SendPartial() | SendResult():
                wire = self.wire(rank, action.peer)
                if wire is not None:
                    data = None if averaged is None else averaged.chunk(rank, action.chunk)
                    latency_s = self.conditions.latency_s(rank, action.peer)
                    arrives = wire.carry_message(rank, now, latency_s)
                    self.engine.at(arrives, partial(self._chunk_arrived, wire, rank, action, data))
            case Prepare() if averaged is not None:
                averaged.prepare(rank)
            case FinishChunk() if averaged is not None:
                averaged.finish(rank, action.chunk, action.num_members)
            case Commit() if averaged is not None:
                averaged.commit(rank, action)
            case _:
                pass  # arithmetic on parameters, which are not here

    def _chunk_arrived(
        self, wire: Any, rank: int, sent: SendPartial | SendResult, data: Any
    ) -> None:
        again = partial(self._chunk_arrived, wire, rank, sent, data)
        if self.holds_up(rank, sent.peer, again) or not wire.is_up:
            return
        averaged, peer, now = self._averaged, sent.peer, self.engine.now
        worker = self.workers[peer]
        match sent:
            case SendPartial(epoch=epoch, chunk=chunk):
                if worker.consolidation.accepts_partial(rank, epoch, chunk):
                    if averaged is not None:
                        averaged.add(peer, chunk, data)
                    self.perform(peer, worker.partial_landed(rank, epoch, chunk, now))
            case SendResult(origin=origin, chunk=chunk):
                if worker.consolidation.accepts_result(rank, origin, chunk):
                    if averaged is not None:
                        averaged.take(peer, chunk, data)
                    self.perform(peer, worker.result_landed(rank, origin, chunk, now))
