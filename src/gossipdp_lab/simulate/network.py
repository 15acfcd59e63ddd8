"""Workers, links and exchanges as events: the ``links`` fidelity of the simulator.

Each worker is a real :class:`~gossipdp.protocol.worker.WorkerProtocol`. Messages take a latency.
They arrive in order within a link, and in any order between links. An exchange is one transfer
each way; the end that was asked sends nothing before the initiator's first byte arrives. An end has
finished when its own data have left and the other's have arrived.

This network has no faults. Tests of faults extend its methods: each callback of an event is a
method, so that a subclass can hold it up.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal, TypeAlias

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.protocol.actions import Begin, Send, Withdrawn
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.members import Member
from gossipdp.protocol.messages import Envelope, ExchangeId
from gossipdp.protocol.neighbours import Fresh, NeighbourPolicy
from gossipdp.protocol.pairing import MomentsDue
from gossipdp.protocol.worker import Action, Method, WorkerProtocol

Outcome: TypeAlias = Literal["running", "finished", "withdrawn", "stopped", "crashed"]


def make_workers(
    constants: Constants,
    *,
    seed: int,
    method: Method = "a2cid2",
    policy_type: type[NeighbourPolicy] = Fresh,
    timeout_s: float = 5.0,
    num_chunks: int = 1,
    sets_own_rate: bool = False,
    moments_due: Callable[[], MomentsDue | None] = lambda: None,
) -> dict[int, WorkerProtocol]:
    """Make a protocol for every worker of the graph, each with its own random source.

    They know one another from the start, as after a rendezvous. ``sets_own_rate``: each exchanges
    as often as its links allow, and ``constants`` are those of comm rate 1. ``moments_due`` makes
    what says when a worker's moments travel.
    """
    graph = LiveGraph(constants)
    workers = {
        rank: WorkerProtocol(
            own=Member(rank, 0, rank, host="simulated"),
            graph=graph,
            method=method,
            policy_type=policy_type,
            timeout_s=timeout_s,
            random=Random(f"{seed} {rank} 0"),  # as a real worker of that seed
            num_chunks=num_chunks,
            exchange_rate=ExchangeRate() if sets_own_rate else None,
            moments_due=moments_due(),
        )
        for rank in constants.workers
    }
    everybody = [worker.membership.own for worker in workers.values()]
    for worker in workers.values():
        worker.membership.merge_all(everybody)
    return workers


@dataclass(frozen=True)
class Conditions:
    """The durations in a network, in seconds of virtual time.

    Args:
        latency_s: how long a message travels from one rank to another.
        transfer_s: how long one model needs to get onto the link, in an exchange. Called once for
            each exchange: chunk by chunk each end waits for the other (the runtime's window), so
            the two directions take equally long.
        step_s: how long the next gradient step of a rank takes.
    """

    latency_s: Callable[[int, int], float]
    transfer_s: Callable[[int, int], float]
    step_s: Callable[[int], float]


class Payload:
    """The data of the workers; here there is none, but exchanges still take time.

    For each rank the calls alternate: a step starts, ends, and the next starts at once; an
    exchange begins, the peer's data may arrive, and it ends before the next one begins.
    """

    def step_started(self, rank: int, now_s: float, end_s: float) -> None:
        """Begin a gradient step of ``rank``, which ends at ``end_s``."""

    def step_ended(self, rank: int, now_s: float) -> None:
        """End the gradient step of ``rank``: its step boundary."""

    def exchange_began(self, rank: int, begin: Begin, now_s: float) -> object:
        """Begin an exchange at ``rank``, and return the data that travel to its peer."""
        return None

    def models(self, begin: Begin) -> float:
        """Return how many models' worth of data each end sends in this exchange."""
        return 1.0

    def data_arrived(self, rank: int, id: ExchangeId, data: object, now_s: float) -> None:
        """Take the peer's data, which have arrived at ``rank`` whole, in its running exchange."""

    def exchange_ended(
        self, rank: int, id: ExchangeId, now_s: float, *, is_withdrawn: bool = False
    ) -> None:
        """End the exchange at ``rank``: finished, withdrawn, or stopped; data may have arrived."""


@dataclass(slots=True)
class End:
    """One end of an exchange: its times and its outcome."""

    began: float
    alpha_tilde: float
    own_leave: float = -math.inf
    """The time at which its own data have left, once they are on their way."""
    ended: float | None = None
    outcome: Outcome = "running"


@dataclass(slots=True)
class Exchange:
    """An exchange, with the ends that have begun it."""

    id: ExchangeId
    transfer_s: float
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Say if both ends finished it."""
        return [end.outcome for end in self.ends.values()] == ["finished", "finished"]


@dataclass(slots=True)
class _Direction:
    """The times that keep the order of one direction of a link."""

    last_arrival: float = 0.0
    data_leave: float = 0.0
    data_arrive: float = 0.0


class Wire:
    """A link in one of its lives; both ends drop messages of an earlier life.

    Messages arrive in the order in which they were sent. The data of an exchange travel in chunks,
    so a message can overtake those that have not left yet.
    """

    def __init__(self, first: int, second: int) -> None:
        self.is_up = True
        self._directions = {first: _Direction(), second: _Direction()}

    def carry_message(self, sender: int, now: float, latency_s: float) -> float:
        """Send a message; return when it arrives."""
        way = self._directions[sender]
        arrives = max(now + latency_s, way.last_arrival)
        if now >= way.data_leave:
            arrives = max(arrives, way.data_arrive)
        way.last_arrival = arrives
        return arrives

    def carry_data(
        self, sender: int, now: float, transfer_s: float, latency_s: float
    ) -> tuple[float, float]:
        """Send one end's data of an exchange; return when all have left and when all arrive."""
        way = self._directions[sender]
        way.data_leave = now + transfer_s
        way.data_arrive = max(way.data_leave + latency_s, way.last_arrival)
        return way.data_leave, way.data_arrive


class Event:
    """A callback that will run at ``time``, unless cancelled."""

    __slots__ = ("callback", "time")

    def __init__(self, time: float, callback: Callable[[], None]) -> None:
        self.time = time
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Let the time pass without the callback."""
        self.callback = None


class Engine:
    """A virtual clock, and a heap of the events that move it.

    Events run in the order of (time, priority, order of scheduling), so that ties are never random
    and the same seed gives the same trace.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, int, Event]] = []  # the counter ends every comparison
        self._counter = 0

    def at(self, time: float, callback: Callable[[], None], *, priority: int = 0) -> Event:
        """Run ``callback`` at ``time``; among events of one time the lowest priority is first."""
        if not (math.isfinite(time) and time >= self.now):
            raise ValueError(f"an event at {time} cannot be scheduled at {self.now}")
        event = Event(time, callback)
        heapq.heappush(self._heap, (time, priority, self._counter, event))
        self._counter += 1
        return event

    def run(self, until: float) -> None:
        """Run every event up to and including time ``until``, and set the clock there."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, _, event = heapq.heappop(heap)
            if event.callback is None:
                continue
            self.now = time
            self.num_events += 1
            event.callback()
        self.now = max(self.now, until)


class VirtualNetwork:
    """The driver of the protocols of ``workers``, with a link for each of ``edges``.

    ``keeps_exchanges``: ``exchanges`` also keeps those that are over, which are many in a long run.

    Attributes:
        engine: the clock and its events; ``engine.run`` raises a RuntimeError when a worker begins
            an exchange while in another, or asks for an action that only faults bring.
        exchanges: by id, in the order in which they began.
        num_exchanges: how many both ends have finished.
        num_messages: the control messages sent, by type.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerProtocol],
        edges: Collection[tuple[int, int]],
        conditions: Conditions,
        payload: Payload | None = None,
        *,
        keeps_exchanges: bool = False,
    ) -> None:
        self.engine = Engine()
        self.workers = dict(workers)
        self.conditions = conditions
        self.exchanges: dict[ExchangeId, Exchange] = {}
        self.num_exchanges = 0
        self.num_messages: Counter[str] = Counter()
        self._payload = Payload() if payload is None else payload
        self._keeps_exchanges = keeps_exchanges
        self._wires: dict[tuple[int, int], Wire] = {}
        self._running: dict[int, Exchange] = {}
        self._held: dict[int, tuple[Begin, object]] = {}
        """Return what the ends that were asked send once their exchange is confirmed."""
        self._alarms: dict[int, Event] = {}
        for rank in sorted(workers):
            self._start_step(rank)
        for first, second in sorted(edges):
            self.connect(first, second)

    def wire(self, first: int, second: int) -> Wire | None:
        """Return the link between two workers, in either order; None if it is down."""
        return self._wires.get((first, second) if first < second else (second, first))

    def connect(self, first: int, second: int) -> None:
        """Link two workers that have no link."""
        self._wires[min(first, second), max(first, second)] = Wire(first, second)
        self.linked(first, second)
        self.linked(second, first)

    def linked(self, rank: int, peer: int) -> None:
        """Report to ``rank`` that it has a link to ``peer`` now."""
        self.perform(rank, self.workers[rank].link_up(peer, self.engine.now))

    def perform(self, rank: int, actions: Sequence[Action]) -> None:
        """Take the actions with which ``rank`` answers an input, then wait for its deadline."""
        for action in actions:
            self.act(rank, action)
        self._set_alarm(rank)

    def act(self, rank: int, action: Action) -> None:
        """Take one action that the protocol of ``rank`` asks for."""
        if isinstance(action, Send):
            self.send(rank, action.peer, action.message)
        elif isinstance(action, Begin):
            self._begin(rank, action)
        elif isinstance(action, Withdrawn):
            self._end(rank, "withdrawn")
        else:
            raise RuntimeError(f"rank {rank} asks for {action}, though nothing went wrong")

    # --- steps and deadlines ---------------------------------------------------------------

    def _start_step(self, rank: int) -> None:
        now = self.engine.now
        end = now + self.conditions.step_s(rank)
        self._payload.step_started(rank, now, end)
        self.engine.at(end, partial(self.end_step, rank, self.workers[rank]), priority=1)

    def end_step(self, rank: int, worker: WorkerProtocol) -> None:
        """End the gradient step of a worker's process, and begin the next one."""
        now = self.engine.now
        self._payload.step_ended(rank, now)
        self.perform(rank, worker.step(1, now))
        self._start_step(rank)

    def _set_alarm(self, rank: int) -> None:
        now = self.engine.now
        due = max(now, self.workers[rank].next_deadline())
        alarm = self._alarms.get(rank)
        if alarm is not None:
            if alarm.time == due and alarm.callback is not None:
                return
            alarm.cancel()
        if due < float("inf"):
            self._alarms[rank] = self.engine.at(due, partial(self.poll, rank), priority=2)

    def poll(self, rank: int) -> None:
        """Act on a deadline of ``rank`` that has come."""
        alarm = self._alarms.pop(rank, None)
        if alarm is not None:
            alarm.cancel()
        worker, now, exchange = self.workers[rank], self.engine.now, self._running.get(rank)
        if exchange is not None and any(now < end.own_leave for end in exchange.ends.values()):
            worker.progressed(now)  # its data flow all the time
        self.perform(rank, worker.poll(now))

    # --- messages --------------------------------------------------------------------------

    def send(self, rank: int, peer: int, envelope: Envelope) -> None:
        """Put a message on the link, if there is one."""
        wire = self.wire(rank, peer)
        if wire is not None:
            self.num_messages[type(envelope.message).__name__] += 1
            latency_s = self.conditions.latency_s(rank, peer)
            arrives = wire.carry_message(rank, self.engine.now, latency_s)
            self.engine.at(arrives, partial(self.deliver, wire, rank, peer, envelope))

    def deliver(self, wire: Wire, rank: int, peer: int, envelope: Envelope) -> None:
        """Let a message from ``rank`` arrive at ``peer``."""
        if wire.is_up:
            self.perform(peer, self.workers[peer].receive(rank, envelope, self.engine.now))

    # --- exchanges -------------------------------------------------------------------------

    def _begin(self, rank: int, begin: Begin) -> None:
        now, peer = self.engine.now, begin.peer
        if rank in self._running:
            raise RuntimeError(
                f"rank {rank} begins {begin.id} while in {self._running[rank].id} at {now}"
            )
        exchange = self.exchanges.get(begin.id)
        if exchange is None:
            transfer_s = self.conditions.transfer_s(rank, peer) * self._payload.models(begin)
            exchange = Exchange(begin.id, transfer_s)
            self.exchanges[begin.id] = exchange
        exchange.ends[rank] = End(now, begin.alpha_tilde)
        self._running[rank] = exchange
        data = self._payload.exchange_began(rank, begin, now)
        wire = self.wire(rank, peer)
        if wire is None:
            return  # the end will learn that it was cut
        if begin.id.initiator != rank:
            self._held[rank] = begin, data
            return
        self.send_data(wire, rank, begin, data)
        confirmed = now + self.conditions.latency_s(rank, peer)
        self.engine.at(confirmed, partial(self.confirm, wire, rank, peer, exchange))

    def confirm(self, wire: Wire, rank: int, peer: int, exchange: Exchange) -> None:
        """Let the first byte of ``rank`` arrive at ``peer``, which now sends its own data."""
        if wire.is_up and self._running.get(peer) is exchange and peer in self._held:
            self.workers[peer].progressed(self.engine.now)
            self.send_data(wire, peer, *self._held.pop(peer))

    def send_data(self, wire: Wire, rank: int, begin: Begin, data: object) -> None:
        """Put the data of one end of an exchange on its link."""
        exchange, peer = self._running[rank], begin.peer
        latency_s = self.conditions.latency_s(rank, peer)
        leave, arrive = wire.carry_data(rank, self.engine.now, exchange.transfer_s, latency_s)
        exchange.ends[rank].own_leave = leave
        self.engine.at(arrive, partial(self.deliver_data, wire, rank, peer, exchange, data))

    def deliver_data(
        self, wire: Wire, rank: int, peer: int, exchange: Exchange, data: object
    ) -> None:
        """Let the data that ``rank`` sent arrive at ``peer``.

        At the end that was asked these are the initiator's data, which confirm its ACCEPT.
        """
        now = self.engine.now
        self.confirm(wire, rank, peer, exchange)
        if not wire.is_up or self._running.get(peer) is not exchange:
            return
        self._payload.data_arrived(peer, exchange.id, data, now)
        own_leave = exchange.ends[peer].own_leave
        if own_leave > now:
            self.engine.at(own_leave, partial(self.finish, wire, peer, rank, exchange))
        else:
            self.finish(wire, peer, rank, exchange)

    def finish(self, wire: Wire, rank: int, peer: int, exchange: Exchange) -> None:
        """Finish at ``rank``: the peer's data have arrived and its own have left."""
        if not wire.is_up or self._running.get(rank) is not exchange:
            return
        self._end(rank, "finished")
        worker, now = self.workers[rank], self.engine.now
        self.perform(rank, worker.finished(exchange.id, now))
        self.perform(rank, worker.heard(peer, now))

    def _end(self, rank: int, outcome: Outcome) -> None:
        exchange = self._running.pop(rank)
        self._held.pop(rank, None)
        is_withdrawn = outcome == "withdrawn"
        self._payload.exchange_ended(rank, exchange.id, self.engine.now, is_withdrawn=is_withdrawn)
        end = exchange.ends[rank]
        end.ended, end.outcome = self.engine.now, outcome
        self.num_exchanges += exchange.is_complete
        if not self._keeps_exchanges and all(e.ended is not None for e in exchange.ends.values()):
            del self.exchanges[exchange.id]
