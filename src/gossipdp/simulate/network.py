"""Workers, links and exchanges as events: the ``links`` fidelity of the simulator.

Each worker is a real :class:`~gossipdp.protocol.worker.WorkerProtocol`. Messages take a latency
and arrive in order within a link, in any order between links. An exchange is one transfer each
way; an end has finished when the other's data are there. A cut loses what is on its way; each end
learns of it in its own time, and the link is made anew.

Parameters are not simulated: the chunks of a consolidation travel as events without content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

from gossipdp.graph.constants import Constants
from gossipdp.protocol.actions import Begin, Send, Stop
from gossipdp.protocol.consolidation_actions import (
    ConsolidationAction,
    Finished,
    MeasureDistance,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.consolidation_messages import ConsolidationMessage
from gossipdp.protocol.messages import Envelope, ExchangeId
from gossipdp.protocol.worker import Action, Method, WorkerProtocol
from gossipdp.simulate.engine import Engine, Event

Seconds = Callable[[int, int], float]
"""A duration for something that goes from one rank to another."""


@dataclass(frozen=True)
class Conditions:
    """What the network is like; every duration in seconds of virtual time.

    Args:
        latency_s: how long a message travels from one rank to another.
        transfer_s: how long one end of an exchange needs to put its data on the link.
        step_s: how long the next gradient step of a rank takes.
        detection_s: how long until an end learns that its link was cut.
        reconnect_s: how long after a cut the link is there again.
        cut_at_messages: the numbers of those messages, counted over the network, at whose
            sending their link is cut.
    """

    latency_s: Seconds
    transfer_s: Seconds
    step_s: Callable[[int], float]
    detection_s: Seconds = lambda _sender, _receiver: 0.01
    reconnect_s: float = 0.2
    cut_at_messages: Collection[int] = ()


@dataclass
class End:
    """One end of an exchange: when it began and ended here, and how."""

    began: float
    alpha_tilde: float
    ended: float | None = None
    outcome: str = "running"


@dataclass
class ExchangeRecord:
    """An exchange as its two ends saw it."""

    id: ExchangeId
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that began it."""
        return frozenset(self.ends)

    @property
    def is_complete(self) -> bool:
        """Whether both ends finished it."""
        return [end.outcome for end in self.ends.values()] == ["finished", "finished"]


@dataclass
class _Direction:
    """One way along a link: what keeps its order."""

    last_arrival: float = 0.0
    data_leaves: float = 0.0
    data_arrives: float = 0.0


@dataclass
class _Link:
    """A link in one of its lives; both ends drop what an earlier life carries."""

    directions: dict[int, _Direction]
    is_up: bool = True


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
            random=Random(f"{seed}/{rank}"),
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
    which they began, ``num_messages`` counts control messages by type, ``left`` says when each
    worker left after consolidation.

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
    ) -> None:
        self.engine = engine
        self.workers = workers
        self.edges = tuple(sorted(edges))
        self.records: dict[ExchangeId, ExchangeRecord] = {}
        self.num_messages: Counter[str] = Counter()
        self.left: dict[int, float] = {}
        self._conditions = conditions
        self._links: dict[frozenset[int], _Link] = {}
        self._running: dict[int, ExchangeId] = {}
        self._alarms: dict[int, Event] = {}
        for rank in sorted(workers):
            self._next_step(rank)
        for first, second in self.edges:
            self._connect(first, second)

    @property
    def num_exchanges(self) -> int:
        """Exchanges that both ends finished."""
        return sum(record.is_complete for record in self.records.values())

    def running(self, rank: int) -> ExchangeId | None:
        """The exchange that ``rank`` is in."""
        return self._running.get(rank)

    def perform(self, rank: int, actions: list[Action]) -> None:
        """Do what the protocol of ``rank`` asks, then wait for its next deadline."""
        for action in actions:
            match action:
                case Send(peer=peer, message=envelope):
                    self._send(rank, peer, envelope)
                case Begin():
                    self._begin(rank, action)
                case Stop():
                    self._end(rank, action.id, "stopped")
                    self.cut(rank, action.peer)
                case _:
                    self._consolidate(rank, action)
        self._set_alarm(rank)

    def done(self, rank: int) -> None:
        """``rank`` trains no more; once all are done they consolidate and leave."""
        self.perform(rank, self.workers[rank].done(self.engine.now))

    def cut(self, first: int, second: int) -> None:
        """Cut the link between two workers; it is made anew after ``reconnect_s``."""
        link = self._links.pop(frozenset((first, second)), None)
        if link is None:
            return
        link.is_up = False
        latest = self.engine.now
        for end, other in ((first, second), (second, first)):
            learns = self.engine.now + self._conditions.detection_s(other, end)
            latest = max(latest, learns)
            self.engine.at(learns, partial(self._link_down, end, other))
        again = latest + self._conditions.reconnect_s
        self.engine.at(again, partial(self._connect, first, second))

    # --- steps and deadlines ---------------------------------------------------------------

    def _next_step(self, rank: int) -> None:
        duration = self._conditions.step_s(rank)
        self.engine.at(self.engine.now + duration, partial(self._step, rank), priority=1)

    def _step(self, rank: int) -> None:
        if self.workers[rank].is_done:
            return
        self.perform(rank, self.workers[rank].step(1, self.engine.now))
        self._next_step(rank)

    def _set_alarm(self, rank: int) -> None:
        due = max(self.engine.now, self.workers[rank].next_deadline(self.engine.now))
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
        pair = frozenset((first, second))
        if pair in self._links:
            return
        self._links[pair] = _Link({first: _Direction(), second: _Direction()})
        for end, other in ((first, second), (second, first)):
            self.perform(end, self.workers[end].link_up(other, self.engine.now))

    def _link_down(self, rank: int, peer: int) -> None:
        if frozenset((rank, peer)) in self._links:
            return  # made anew meanwhile, which said it already
        self.perform(rank, self.workers[rank].link_down(peer, self.engine.now))

    def _send(self, rank: int, peer: int, envelope: Envelope) -> None:
        pair = frozenset((rank, peer))
        if pair not in self._links and isinstance(envelope.message, ConsolidationMessage):
            self._connect(rank, peer)
        link = self._links.get(pair)
        if link is None:
            return
        number = self.num_messages.total()
        self.num_messages[type(envelope.message).__name__] += 1
        if number in self._conditions.cut_at_messages:
            self.cut(rank, peer)
            return
        way = link.directions[rank]
        arrives = self.engine.now + self._conditions.latency_s(rank, peer)
        arrives = max(arrives, way.last_arrival)
        if self.engine.now >= way.data_leaves:  # behind the data; otherwise between two chunks
            arrives = max(arrives, way.data_arrives)
        way.last_arrival = arrives
        self.engine.at(arrives, partial(self._deliver, link, rank, peer, envelope))

    def _deliver(self, link: _Link, rank: int, peer: int, envelope: Envelope) -> None:
        if link.is_up:
            self.perform(peer, self.workers[peer].receive(rank, envelope, self.engine.now))

    # --- exchanges -------------------------------------------------------------------------

    def _begin(self, rank: int, begin: Begin) -> None:
        if rank in self._running:
            raise RuntimeError(
                f"rank {rank} begins {begin.id} while in {self._running[rank]} at {self.engine.now}"
            )
        self._running[rank] = begin.id
        record = self.records.setdefault(begin.id, ExchangeRecord(begin.id))
        record.ends[rank] = End(self.engine.now, begin.alpha_tilde)
        link = self._links.get(frozenset((rank, begin.peer)))
        if link is None:
            return  # cut already; the end will learn of it
        way = link.directions[rank]
        way.data_leaves = self.engine.now + self._conditions.transfer_s(rank, begin.peer)
        arrives = way.data_leaves + self._conditions.latency_s(rank, begin.peer)
        way.data_arrives = max(arrives, way.last_arrival)
        self.engine.at(
            way.data_arrives, partial(self._data_arrived, link, rank, begin.peer, begin.id)
        )

    def _data_arrived(self, link: _Link, rank: int, peer: int, id: ExchangeId) -> None:
        if link.is_up and self._running.get(peer) == id:
            self._end(peer, id, "finished")
            self.workers[peer].heard(rank, self.engine.now)
            self.perform(peer, self.workers[peer].finished(id, self.engine.now))

    # --- consolidation ---------------------------------------------------------------------

    def _consolidate(self, rank: int, action: ConsolidationAction) -> None:
        now = self.engine.now
        match action:
            case MeasureDistance(origin=origin):
                self.perform(rank, self.workers[rank].distance_measured(origin, 0.0, now))
            case Finished():
                self.left[rank] = now
            case SendPartial() | SendResult():
                link = self._links.get(frozenset((rank, action.peer)))
                if link is not None:
                    way = link.directions[rank]
                    arrives = now + self._conditions.latency_s(rank, action.peer)
                    way.last_arrival = max(arrives, way.last_arrival)
                    self.engine.at(
                        way.last_arrival, partial(self._chunk_arrived, link, rank, action)
                    )
            case _:
                pass  # arithmetic on parameters, which are not here

    def _chunk_arrived(self, link: _Link, rank: int, sent: SendPartial | SendResult) -> None:
        if not link.is_up:
            return
        worker, now = self.workers[sent.peer], self.engine.now
        match sent:
            case SendPartial(epoch=epoch, chunk=chunk):
                if worker.consolidation.accepts_partial(rank, epoch, chunk):
                    self.perform(sent.peer, worker.partial_landed(rank, epoch, chunk, now))
            case SendResult(origin=origin, chunk=chunk):
                if worker.consolidation.accepts_result(rank, origin, chunk):
                    self.perform(sent.peer, worker.result_landed(rank, origin, chunk, now))

    def _end(self, rank: int, id: ExchangeId, outcome: str) -> None:
        del self._running[rank]
        end = self.records[id].ends[rank]
        end.ended, end.outcome = self.engine.now, outcome
