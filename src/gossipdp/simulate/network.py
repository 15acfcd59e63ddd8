"""Workers, links and exchanges as events: the ``links`` fidelity of the simulator.

Each worker is a real :class:`~gossipdp.protocol.worker.WorkerProtocol`. Messages take a latency
and arrive in order within a link, in any order between links. An exchange is one transfer each
way; an end has finished when its own data have left and the other's are there. A cut loses what is
on its way; each end learns of it in its own time, and the link is made anew.

Faults are inputs: ``crash``, ``start`` (a restart or a joiner), ``stall``, ``partition``, ``cut``.
What then happens to links is in :mod:`gossipdp.simulate.outages`.

What the workers hold is behind the seam of :mod:`gossipdp.simulate.payload`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from gossipdp.graph.constants import Constants
from gossipdp.graph.live import LiveGraph
from gossipdp.protocol.actions import (
    Begin,
    Reach,
    Rebuilt,
    Refresh,
    Send,
    Stop,
    Superseded,
    Unlink,
)
from gossipdp.protocol.membership import Status
from gossipdp.protocol.messages import DIALLED_MESSAGES, Envelope, ExchangeId
from gossipdp.protocol.worker import Action, Method, WorkerProtocol
from gossipdp.simulate.averaging_transfers import AveragingTransfers
from gossipdp.simulate.conditions import Conditions
from gossipdp.simulate.engine import Engine, Event
from gossipdp.simulate.exchange_record import End, ExchangeRecord
from gossipdp.simulate.outages import Outages
from gossipdp.simulate.payload import NoParameters, Payload
from gossipdp.simulate.wire import Wire

if TYPE_CHECKING:
    from gossipdp.simulate.averaged_rows import AveragedRows

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0


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
    live_graph = LiveGraph(constants)
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
            live_graph=live_graph,
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
        averaged: what consolidation averages; by default nothing.
        keeps_records: whether ``records`` keeps exchanges that are over, in a long run many.

    ``crashed`` holds the ranks whose process is gone, ``superseded`` those that gave way to
    another process, ``refreshed`` (when, who, from whom) every take-over of parameters.

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
        averaged: AveragedRows | None = None,
        keeps_records: bool = True,
    ) -> None:
        self.engine = engine
        self.workers = dict(workers)
        self.edges = tuple(sorted(edges))
        self.conditions = conditions
        self.records: dict[ExchangeId, ExchangeRecord] = {}
        self.num_exchanges = 0
        self.num_messages: Counter[str] = Counter()
        self.crashed: set[int] = set()
        self.superseded: list[int] = []
        self.refreshed: list[tuple[float, int, int]] = []
        self._payload = NoParameters() if payload is None else payload
        self._keeps_records = keeps_records
        self._num_sent = 0
        self._wires: dict[tuple[int, int], Wire] = {}
        self._running: dict[int, _Running] = {}
        self._alarms: dict[int, Event] = {}
        self._averaging = AveragingTransfers(self, averaged)
        self._outages = Outages(engine)
        self._retry_s: dict[tuple[int, int], float] = {}
        """Back-off of each dial that is to be repeated, by who dials and whom."""
        self._outbox: dict[tuple[int, int], list[Envelope]] = {}
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
                    self.cut(rank, action.peer, by=rank)
                case Unlink(peer=peer):
                    self.cut(rank, peer, by=rank)
                case Reach(peer=peer):
                    self._dial(rank, peer)
                case Rebuilt():
                    self._payload.rebuilt(rank, action, self.engine.now)
                    for peer in sorted(action.neighbours | action.dead):
                        self._want(rank, peer)
                case Refresh(peer=peer):
                    self._refresh(rank, peer)
                case Superseded():
                    self.superseded.append(rank)
                    self.crash(rank)
                    return
                case _:
                    self._averaging.perform(rank, action)
        self._set_alarm(rank)

    def done(self, rank: int) -> None:
        """``rank`` trains no more; once all are done they consolidate and leave."""
        self.perform(rank, self.workers[rank].done(self.engine.now))

    def cut(self, first: int, second: int, by: int | None = None) -> None:
        """Cut the link between two workers; it is made anew after ``reconnect_s``.

        Where the network is parted, and ``by`` closes the link, the other end learns of it late.
        """
        wire = self._wires.pop(_pair(first, second), None)
        if wire is None:
            return
        wire.is_up = False
        latest = self.engine.now
        for end, other in ((first, second), (second, first)):
            learns = self.engine.now + self.conditions.detection_s(other, end)
            latest = max(latest, learns)
            if by == other and self._outages.is_apart(end, other):
                learns += self._outages.heals_at - self.engine.now
            self.engine.at(learns, partial(self._link_down, end, other))
        again = latest + self.conditions.reconnect_s
        for end, other in ((first, second), (second, first)):
            self._retry_s[end, other] = FIRST_RETRY_S
            self.engine.at(again, partial(self._try_again, end, other))

    # --- faults ----------------------------------------------------------------------------

    def crash(self, rank: int) -> None:
        """The process of ``rank`` is gone: its links are closed, its address refuses dials."""
        self.crashed.add(rank)
        self._outages.forget(rank)
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
        """A new process starts: after a crash of its rank, or as one that joins.

        One that is joining first takes parameters from a live worker that it knows, and trains
        once it has them; with nobody to give them its process ends.
        """
        rank = worker.rank
        self.workers[rank] = worker
        self.crashed.discard(rank)
        self._averaging.started(rank)
        if worker.membership.own.status is Status.JOINING:
            self._join(worker)
        else:
            self._start_step(rank)
            for peer in sorted(worker.neighbours):
                self._want(rank, peer)
        self._set_alarm(rank)

    def stall(self, rank: int, duration_s: float) -> None:
        """The process of ``rank`` stands still: what arrives waits, its kernel answers dials."""
        until = self.engine.now + duration_s
        if rank not in self.crashed and self._outages.stall(rank, until):
            self.engine.at(until, partial(self._wake, rank))

    def _wake(self, rank: int) -> None:
        for callback in self._outages.wake(rank):
            callback()

    def partition(self, groups: Collection[Collection[int]], until: float) -> None:
        """Until then nothing passes between two groups; what was sent arrives afterwards.

        Links stay, silent, until an end closes them. Ranks in no group reach everybody.
        """
        self._outages.part(groups, until)

    # --- steps and deadlines ---------------------------------------------------------------

    def _start_step(self, rank: int) -> None:
        now = self.engine.now
        end = now + self.conditions.step_s(rank)
        self._payload.step_started(rank, now, end)
        self.engine.at(end, partial(self._end_step, rank, self.workers[rank]), priority=1)

    def _end_step(self, rank: int, worker: WorkerProtocol) -> None:
        if self._outages.wait(rank, partial(self._end_step, rank, worker)):
            return
        if worker.is_done or not self._lives(worker):
            return
        now = self.engine.now
        self._payload.step_ended(rank, now)
        self.perform(rank, self.workers[rank].step(1, now))
        self._start_step(rank)

    def _set_alarm(self, rank: int) -> None:
        now = self.engine.now
        if rank in self.crashed:
            return
        due = max(now, self.workers[rank].next_deadline(now))
        alarm = self._alarms.get(rank)
        if alarm is not None:
            if alarm.time == due and alarm.callback is not None:
                return
            alarm.cancel()
        if due < float("inf"):
            self._alarms[rank] = self.engine.at(due, partial(self._poll, rank), priority=2)

    def _poll(self, rank: int) -> None:
        if self._outages.wait(rank, partial(self._poll, rank)):
            return
        alarm = self._alarms.pop(rank, None)
        if alarm is not None:
            alarm.cancel()
        self.perform(rank, self.workers[rank].poll(self.engine.now))

    # --- links -----------------------------------------------------------------------------

    def _connect(self, first: int, second: int) -> None:
        if self.wire(first, second) is not None:
            return
        self._wires[_pair(first, second)] = Wire(first, second)
        for end, other in ((first, second), (second, first)):
            self._retry_s.pop((end, other), None)
            self.perform(end, self.workers[end].link_up(other, self.engine.now))
            for envelope in self._outbox.pop((end, other), ()):
                self._send(end, other, envelope)

    def _want(self, rank: int, peer: int) -> None:
        """Dial ``peer``, again and again until there is a link."""
        if self.wire(rank, peer) is None and (rank, peer) not in self._retry_s:
            self._retry_s[rank, peer] = FIRST_RETRY_S
            self.engine.at(self.engine.now, partial(self._try_again, rank, peer))

    def _try_again(self, rank: int, peer: int) -> None:
        if self._outages.wait(rank, partial(self._try_again, rank, peer)):
            return
        if (rank, peer) in self._retry_s:
            self._dial(rank, peer)

    def _is_reachable(self, rank: int, peer: int) -> bool:
        is_apart, is_stalled = self._outages.is_apart(rank, peer), self._outages.is_stalled(peer)
        return peer not in self.crashed and not is_apart and not is_stalled

    def _dial(self, rank: int, peer: int) -> None:
        now = self.engine.now
        if rank == peer or (peer in self.crashed and not self._outages.is_apart(rank, peer)):
            answers = now + self.conditions.latency_s(peer, rank)
            self.engine.at(answers, partial(self._dial_failed, rank, peer, is_refused=True))
        elif self._is_reachable(rank, peer):
            self.engine.at(now, partial(self._connect_if_alive, rank, peer))
        else:
            answers = now + self.conditions.dial_timeout_s
            self.engine.at(answers, partial(self._dial_failed, rank, peer, is_refused=False))

    def _connect_if_alive(self, rank: int, peer: int) -> None:
        if rank in self.crashed or self._outages.is_stalled(rank):
            return
        if self._is_reachable(rank, peer):
            self._connect(rank, peer)
        elif self.wire(rank, peer) is None:
            self._dial(rank, peer)

    def _dial_failed(self, rank: int, peer: int, *, is_refused: bool) -> None:
        failed = partial(self._dial_failed, rank, peer, is_refused=is_refused)
        if rank in self.crashed or self._outages.wait(rank, failed):
            return
        if self.wire(rank, peer) is not None:
            return
        worker, now = self.workers[rank], self.engine.now
        retry_s = self._retry_s.get((rank, peer))
        if retry_s is not None:
            self._retry_s[rank, peer] = min(2 * retry_s, LONGEST_RETRY_S)
            self.engine.at(now + retry_s, partial(self._try_again, rank, peer))
        if is_refused:
            self._outbox.pop((rank, peer), None)
            self.perform(rank, worker.peer_dead(peer, now))
        else:
            self.perform(rank, worker.peer_unreachable(peer, now))

    def _link_down(self, rank: int, peer: int) -> None:
        if self._outages.wait(rank, partial(self._link_down, rank, peer)):
            return
        if self.wire(rank, peer) is not None or rank in self.crashed:
            return  # made anew meanwhile, which said it already
        self.perform(rank, self.workers[rank].link_down(peer, self.engine.now))

    def _send(self, rank: int, peer: int, envelope: Envelope) -> None:
        wire = self.wire(rank, peer)
        if wire is None and isinstance(envelope.message, DIALLED_MESSAGES):
            if self._is_reachable(rank, peer):
                self._connect(rank, peer)
                wire = self.wire(rank, peer)
            else:
                self._outbox.setdefault((rank, peer), []).append(envelope)
                self._want(rank, peer)
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
        if self.holds_up(rank, peer, partial(self._deliver, wire, rank, peer, envelope)):
            return
        if wire.is_up:
            self.perform(peer, self.workers[peer].receive(rank, envelope, self.engine.now))

    def holds_up(self, rank: int, peer: int, arrive: Callable[[], None]) -> bool:
        """Whether what arrives at ``peer`` from ``rank`` has to wait: then it is seen to."""
        if self._outages.is_apart(rank, peer):
            self.engine.at(self._outages.heals_at, arrive)
            return True
        return self._outages.wait(peer, arrive)

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
        if self.holds_up(rank, peer, partial(self._data_arrived, wire, rank, begin, data)):
            return
        running = self._running.get(peer)
        if not wire.is_up or running is None or running.id != begin.id:
            return
        self._payload.data_arrived(peer, begin.id, data, now)
        if running.own_leave > now:
            self.engine.at(running.own_leave, partial(self._finish, wire, peer, rank, running))
        else:
            self._finish(wire, peer, rank, running)

    def _finish(self, wire: Wire, rank: int, peer: int, running: _Running) -> None:
        if self._outages.wait(rank, partial(self._finish, wire, rank, peer, running)):
            return
        if not wire.is_up or self._running.get(rank) is not running:
            return
        self._end(rank, "finished")
        worker, now = self.workers[rank], self.engine.now
        self.perform(rank, worker.finished(running.id, now))
        if self._lives(worker):
            self.perform(rank, worker.heard(peer, now))

    # --- parameters of others --------------------------------------------------------------

    def _refresh(self, rank: int, peer: int) -> None:
        worker, wire = self.workers[rank], self.wire(rank, peer)
        ends = self.engine.now + self.conditions.transfer_s(peer, rank)
        self.engine.at(ends, partial(self._refresh_ends, worker, peer, wire))

    def _refresh_ends(self, worker: WorkerProtocol, peer: int, wire: Wire | None) -> None:
        rank, now = worker.rank, self.engine.now
        if self.holds_up(peer, rank, partial(self._refresh_ends, worker, peer, wire)):
            return
        if not self._lives(worker):
            return
        if wire is not None and wire.is_up and self.workers[peer].can_donate:
            self._payload.took_over(rank, peer, now)
            self.refreshed.append((now, rank, peer))
            self.perform(rank, worker.refreshed(now))
        else:
            self.perform(rank, worker.refresh_failed(peer, now))

    def _join(self, worker: WorkerProtocol) -> None:
        """Ask the next who can give parameters; called again until somebody has."""
        rank, now = worker.rank, self.engine.now
        if not self._lives(worker) or self._outages.wait(rank, partial(self._join, worker)):
            return
        donors = [
            peer
            for peer in worker.membership.live()
            if peer != rank and self._is_reachable(rank, peer) and self.workers[peer].can_donate
        ]
        if not donors:
            self.crash(rank)
            return
        self._connect(rank, donors[0])
        ends = now + self.conditions.transfer_s(donors[0], rank)
        wire = self.wire(rank, donors[0])
        self.engine.at(ends, partial(self._join_ends, worker, donors[0], wire))

    def _join_ends(self, worker: WorkerProtocol, peer: int, wire: Wire | None) -> None:
        rank, now = worker.rank, self.engine.now
        if self.holds_up(peer, rank, partial(self._join_ends, worker, peer, wire)):
            return
        if wire is None or not wire.is_up or not self.workers[peer].can_donate:
            self._join(worker)
        elif self._lives(worker):
            self._payload.took_over(rank, peer, now)
            self.refreshed.append((now, rank, peer))
            self.perform(rank, worker.joined(now))
            self._start_step(rank)

    def _lives(self, worker: WorkerProtocol) -> bool:
        return self.workers.get(worker.rank) is worker and worker.rank not in self.crashed

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
