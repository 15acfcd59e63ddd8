"""Workers, links and exchanges as events: the ``links`` fidelity of the simulator.

Each worker is a real :class:`~gossipdp.protocol.worker.WorkerProtocol`. Messages take a latency
and arrive in order within a link, in any order between links. An exchange is one transfer each
way; an end has finished when its own data have left and the other's are there. A cut loses what is
on its way; each end learns of it in its own time, and the link is made anew.

What the workers hold is behind the seam of :mod:`gossipdp.simulate.payload`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from gossipdp.graph.constants import Constants
from gossipdp.protocol.actions import Begin, Send, Stop
from gossipdp.protocol.consolidation_messages import ConsolidationMessage
from gossipdp.protocol.messages import Envelope, ExchangeId
from gossipdp.protocol.worker import Action, Method, WorkerProtocol
from gossipdp.simulate.averaging_transfers import AveragingTransfers
from gossipdp.simulate.conditions import Conditions
from gossipdp.simulate.engine import Engine, Event
from gossipdp.simulate.exchange_record import End, ExchangeRecord
from gossipdp.simulate.payload import NoParameters, Payload
from gossipdp.simulate.wire import Wire


@dataclass(slots=True)
class _Running:
    """The exchange that a worker is in."""

    id: ExchangeId
    own_leave: float
    """When its own data have left."""


def make_workers(
    constants: Constants,
    *,
    seed: int,
    method: Method = "a2cid2",
    policy_name: str = "fresh",
    timeout_s: float = 5.0,
    num_chunks: int = 1,
) -> dict[int, WorkerProtocol]:
    """A protocol for every worker of the graph, each with its own random source.

    All know of one another from the start, as after a rendezvous.
    """
    workers = {
        rank: WorkerProtocol(
            rank=rank,
            incarnation=0,
            process_id=rank,
            host="simulated",
            port=0,
            constants=constants,
            method=method,
            policy_name=policy_name,
            timeout_s=timeout_s,
            random=Random(f"{seed} {rank} 0"),  # as a real worker of that seed
            num_chunks=num_chunks,
        )
        for rank in constants.workers
    }
    everybody = [worker.membership.own for worker in workers.values()]
    for worker in workers.values():
        worker.membership.merge_all(everybody)
    return workers


class Network:
    """Drives the protocols of ``workers`` on ``engine`` under ``conditions``.

    Links are opened along ``edges`` at once. ``records`` holds every exchange in the order in
    which they began, ``num_exchanges`` counts those that both ends finished, ``num_messages``
    the control messages by type, ``left`` says when each worker left after consolidation.

    Args:
        engine: the clock and its events.
        workers: their protocols, by rank.
        edges: who is linked.
        conditions: what the network is like.
        payload: what the workers hold; by default nothing.
        keeps_records: whether ``records`` keeps exchanges that are over, in a long run many.

    Raises:
        RuntimeError: from within ``engine.run``, when a worker begins an exchange while in
            another.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Mapping[int, WorkerProtocol],
        edges: Collection[tuple[int, int]],
        conditions: Conditions,
        payload: Payload | None = None,
        *,
        keeps_records: bool = True,
    ) -> None:
        self.engine = engine
        self.workers = workers
        self.edges = tuple(sorted(edges))
        self.conditions = conditions
        self.records: dict[ExchangeId, ExchangeRecord] = {}
        self.num_exchanges = 0
        self.num_messages: Counter[str] = Counter()
        self._payload = NoParameters() if payload is None else payload
        self._keeps_records = keeps_records
        self._num_sent = 0
        self._wires: dict[tuple[int, int], Wire] = {}
        self._running: dict[int, _Running] = {}
        self._alarms: dict[int, Event] = {}
        self._averaging = AveragingTransfers(self)
        for rank in sorted(workers):
            self._start_step(rank)
        for first, second in self.edges:
            self._connect(first, second)

    @property
    def left(self) -> Mapping[int, float]:
        """When each worker left after consolidation."""
        return self._averaging.left

    def running(self, rank: int) -> ExchangeId | None:
        """The exchange that ``rank`` is in."""
        running = self._running.get(rank)
        return None if running is None else running.id

    def wire(self, first: int, second: int) -> Wire | None:
        """The link between two workers, in either order; None where it is down."""
        return self._wires.get(_pair(first, second))

    def perform(self, rank: int, actions: list[Action]) -> None:
        """Do what the protocol of ``rank`` asks, then wait for its next deadline."""
        for action in actions:
            match action:
                case Send(peer=peer, message=envelope):
                    self._send(rank, peer, envelope)
                case Begin():
                    self._begin(rank, action)
                case Stop():
                    self._end(rank, "stopped")
                    self.cut(rank, action.peer)
                case _:
                    self._averaging.perform(rank, action)
        self._set_alarm(rank)

    def done(self, rank: int) -> None:
        """``rank`` trains no more; once all are done they consolidate and leave."""
        self.perform(rank, self.workers[rank].done(self.engine.now))

    def cut(self, first: int, second: int) -> None:
        """Cut the link between two workers; it is made anew after ``reconnect_s``."""
        wire = self._wires.pop(_pair(first, second), None)
        if wire is None:
            return
        wire.is_up = False
        latest = self.engine.now
        for end, other in ((first, second), (second, first)):
            learns = self.engine.now + self.conditions.detection_s(other, end)
            latest = max(latest, learns)
            self.engine.at(learns, partial(self._link_down, end, other))
        again = latest + self.conditions.reconnect_s
        self.engine.at(again, partial(self._connect, first, second))

    # --- steps and deadlines ---------------------------------------------------------------

    def _start_step(self, rank: int) -> None:
        now = self.engine.now
        end = now + self.conditions.step_s(rank)
        self._payload.step_started(rank, now, end)
        self.engine.at(end, partial(self._end_step, rank), priority=1)

    def _end_step(self, rank: int) -> None:
        if self.workers[rank].is_done:
            return
        now = self.engine.now
        self._payload.step_ended(rank, now)
        self.perform(rank, self.workers[rank].step(1, now))
        self._start_step(rank)

    def _set_alarm(self, rank: int) -> None:
        now = self.engine.now
        due = max(now, self.workers[rank].next_deadline(now))
        alarm = self._alarms.get(rank)
        if alarm is not None:
            if alarm.time == due and alarm.callback is not None:
                return
            alarm.cancel()
        if due < float("inf"):
            self._alarms[rank] = self.engine.at(due, partial(self._poll, rank), priority=2)

    def _poll(self, rank: int) -> None:
        self._alarms.pop(rank).cancel()
        self.perform(rank, self.workers[rank].poll(self.engine.now))

    # --- links -----------------------------------------------------------------------------

    def _connect(self, first: int, second: int) -> None:
        if self.wire(first, second) is not None:
            return
        self._wires[_pair(first, second)] = Wire(first, second)
        for end, other in ((first, second), (second, first)):
            self.perform(end, self.workers[end].link_up(other, self.engine.now))

    def _link_down(self, rank: int, peer: int) -> None:
        if self.wire(rank, peer) is not None:
            return  # made anew meanwhile, which said it already
        self.perform(rank, self.workers[rank].link_down(peer, self.engine.now))

    def _send(self, rank: int, peer: int, envelope: Envelope) -> None:
        wire = self.wire(rank, peer)
        if wire is None and isinstance(envelope.message, ConsolidationMessage):
            self._connect(rank, peer)
            wire = self.wire(rank, peer)
        if wire is None:
            return
        number = self._num_sent
        self._num_sent += 1
        self.num_messages[type(envelope.message).__name__] += 1
        if number in self.conditions.cut_at_messages:
            self.cut(rank, peer)
            return
        latency_s = self.conditions.latency_s(rank, peer)
        arrives = wire.carry_message(rank, self.engine.now, latency_s)
        self.engine.at(arrives, partial(self._deliver, wire, rank, peer, envelope))

    def _deliver(self, wire: Wire, rank: int, peer: int, envelope: Envelope) -> None:
        if wire.is_up:
            self.perform(peer, self.workers[peer].receive(rank, envelope, self.engine.now))

    # --- exchanges -------------------------------------------------------------------------

    def _begin(self, rank: int, begin: Begin) -> None:
        now, peer = self.engine.now, begin.peer
        if rank in self._running:
            raise RuntimeError(
                f"rank {rank} begins {begin.id} while in {self._running[rank].id} at {now}"
            )
        record = self.records.get(begin.id)
        if record is None:
            record = ExchangeRecord(begin.id, self.conditions.transfer_s(rank, peer))
            self.records[begin.id] = record
        record.ends[rank] = End(now, begin.alpha_tilde)
        data = self._payload.exchange_began(rank, begin, now)
        wire = self.wire(rank, peer)
        if wire is None:  # cut already; the end will learn of it
            self._running[rank] = _Running(begin.id, own_leave=now)
            return
        leave, arrive = wire.carry_data(
            rank, now, record.transfer_s, self.conditions.latency_s(rank, peer)
        )
        self._running[rank] = _Running(begin.id, own_leave=leave)
        self.engine.at(arrive, partial(self._data_arrived, wire, rank, begin, data))

    def _data_arrived(self, wire: Wire, rank: int, begin: Begin, data: object) -> None:
        # At the end that was asked these are the initiator's data, which confirm its ACCEPT.
        now, peer = self.engine.now, begin.peer
        running = self._running.get(peer)
        if not wire.is_up or running is None or running.id != begin.id:
            return
        self._payload.data_arrived(peer, begin.id, data, now)
        if running.own_leave > now:
            self.engine.at(running.own_leave, partial(self._finish, wire, peer, rank, running))
        else:
            self._finish(wire, peer, rank, running)

    def _finish(self, wire: Wire, rank: int, peer: int, running: _Running) -> None:
        if not wire.is_up or self._running.get(rank) is not running:
            return
        self._end(rank, "finished")
        worker, now = self.workers[rank], self.engine.now
        worker.heard(peer, now)
        self.perform(rank, worker.finished(running.id, now))

    def _end(self, rank: int, outcome: str) -> None:
        id = self._running.pop(rank).id
        self._payload.exchange_ended(rank, id, self.engine.now)
        record = self.records[id]
        end = record.ends[rank]
        end.ended, end.outcome = self.engine.now, outcome
        self.num_exchanges += record.is_complete
        if not self._keeps_records and all(end.ended is not None for end in record.ends.values()):
            del self.records[id]


def _pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)
