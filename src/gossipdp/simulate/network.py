"""Workers, links and exchanges as events: the ``links`` fidelity of the simulator.

Each worker is a real :class:`~gossipdp.protocol.worker.WorkerProtocol`. Messages take a latency.
They arrive in order within a link, and in any order between links. An exchange is one transfer
each way. An end has finished when its own data have left and the other's have arrived. A cut loses
what is on its way; each end learns of it in its own time, and then dials again.

Nothing goes wrong in this network. Tests of faults derive from it and replace its hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import Literal, TypeAlias

from gossipdp.graph.constants import Constants, LiveGraph
from gossipdp.protocol.actions import Begin, Reach, Rebuilt, Send, Stop, Unlink
from gossipdp.protocol.messages import DIALLED_MESSAGES, Envelope, ExchangeId
from gossipdp.protocol.worker import Action, Method, WorkerProtocol
from gossipdp.simulate.engine import Engine, Event
from gossipdp.simulate.traffic import Conditions, End, Exchange, Payload, Wire

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 10.0
RECONNECT_S = 0.2
"""How long after both ends know of a cut they dial again."""
DIAL_TIMEOUT_S = 1.0
"""How long until a dial that nobody answers is given up."""

Answer: TypeAlias = Literal["accepted", "refused", "silence"]
Loss: TypeAlias = Literal["message lost", "link lost"]
Data: TypeAlias = Literal["all", "nothing", "refused"]


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

    Args:
        engine: the clock and its events.
        workers: their protocols, by rank.
        edges: who is linked, from the start.
        conditions: how long everything takes.
        payload: what the workers hold; None: nothing.
        keeps_exchanges: whether ``exchanges`` keeps those that are over, in a long run many.

    Attributes:
        exchanges: by id, in the order in which they began.
        num_exchanges: how many both ends have finished.
        num_messages: the control messages sent, by type.
        crashed: ranks whose process is gone; only faults fill it.

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
        keeps_exchanges: bool = False,
    ) -> None:
        self.engine = engine
        self.workers = dict(workers)
        self.conditions = conditions
        self.exchanges: dict[ExchangeId, Exchange] = {}
        self.num_exchanges = 0
        self.num_messages: Counter[str] = Counter()
        self.crashed: set[int] = set()
        self._payload = Payload() if payload is None else payload
        self._keeps_exchanges = keeps_exchanges
        self._wires: dict[tuple[int, int], Wire] = {}
        self._running: dict[int, Exchange] = {}
        self._alarms: dict[int, Event] = {}
        self._retry_s: dict[tuple[int, int], float] = {}
        """Back-off of each dial that is to be repeated, by who dials and whom."""
        self._outbox: dict[tuple[int, int], list[Envelope]] = {}
        for rank in sorted(workers):
            self._start_step(rank)
        for first, second in sorted(edges):
            self.connect(first, second)

    # --- hooks -----------------------------------------------------------------------------

    def stands_still(self, rank: int, callback: Callable[[], None]) -> bool:
        """Hook: whether ``rank`` stands still; ``callback`` is then called when it goes on."""
        return False

    def holds_up(self, rank: int, peer: int, callback: Callable[[], None]) -> bool:
        """Hook: whether what ``rank`` sent cannot reach ``peer`` yet; then call back when it can.

        A peer that stands still holds things up as well.
        """
        return False

    def answer(self, rank: int, peer: int) -> Answer:
        """Hook: what a dial from ``rank`` to ``peer`` meets."""
        return "refused" if peer in self.crashed or peer == rank else "accepted"

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        """Hook: what the link carries as a message is sent: it, another one, or what is lost."""
        return envelope

    def sends(self, rank: int, begin: Begin) -> Data:
        """Hook: which data ``rank`` sends in an exchange; the peer closes the link to refuse."""
        return "all"

    def before(self, rank: int, actions: Sequence[Action]) -> None:
        """Hook: ``rank`` is about to perform ``actions``, its answer to one input."""

    def after(self, rank: int, actions: Sequence[Action]) -> None:
        """Hook: ``rank`` has performed them."""

    def perform_other(self, rank: int, action: Action) -> None:
        """Hook: an action that only comes with faults or with consolidation."""

    # --- what can be asked and done --------------------------------------------------------

    def running(self, rank: int) -> ExchangeId | None:
        """The exchange that ``rank`` is in."""
        running = self._running.get(rank)
        return None if running is None else running.id

    def wire(self, first: int, second: int) -> Wire | None:
        """The link between two workers, in either order; None where it is down."""
        return self._wires.get(_pair(first, second))

    def lives(self, worker: WorkerProtocol) -> bool:
        """Whether the process of ``worker`` is still there."""
        return self.workers.get(worker.rank) is worker and worker.rank not in self.crashed

    def perform(self, rank: int, actions: Sequence[Action]) -> None:
        """Do what the protocol of ``rank`` asks, then wait for its next deadline."""
        self.before(rank, actions)
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
                case _:
                    self.perform_other(rank, action)
                    if rank in self.crashed:
                        break
        self._set_alarm(rank)
        self.after(rank, actions)

    def done(self, rank: int) -> None:
        """``rank`` trains no more; once all are done they consolidate."""
        self.perform(rank, self.workers[rank].done(self.engine.now))

    # --- steps and deadlines ---------------------------------------------------------------

    def _start_step(self, rank: int) -> None:
        now = self.engine.now
        end = now + self.conditions.step_s(rank)
        self._payload.step_started(rank, now, end)
        self.engine.at(end, partial(self._end_step, rank, self.workers[rank]), priority=1)

    def _end_step(self, rank: int, worker: WorkerProtocol) -> None:
        if self.stands_still(rank, partial(self._end_step, rank, worker)):
            return
        if worker.is_done or not self.lives(worker):
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
        if self.stands_still(rank, partial(self._poll, rank)):
            return
        alarm = self._alarms.pop(rank, None)
        if alarm is not None:
            alarm.cancel()
        worker, now, exchange = self.workers[rank], self.engine.now, self._running.get(rank)
        if exchange is not None and any(now < end.own_leave for end in exchange.ends.values()):
            worker.progressed(now)  # its data flow all the time
        self.perform(rank, worker.poll(now))

    # --- links -----------------------------------------------------------------------------

    def connect(self, first: int, second: int) -> None:
        """Link two workers, unless they are."""
        if self.wire(first, second) is not None:
            return
        self._wires[_pair(first, second)] = Wire(first, second)
        for end, other in ((first, second), (second, first)):
            self._retry_s.pop((end, other), None)
            self.perform(end, self.workers[end].link_up(other, self.engine.now))
            for envelope in self._outbox.pop((end, other), ()):
                self._send(end, other, envelope)

    def cut(self, first: int, second: int, by: int | None = None) -> None:
        """Cut the link between two workers; both dial again once they know.

        ``by`` is the end that closes it: the other can learn of that only through the network.
        """
        wire = self._wires.pop(_pair(first, second), None)
        if wire is None:
            return
        wire.is_up = False
        again = self.engine.now
        for end, other in ((first, second), (second, first)):
            learns = self.engine.now + self.conditions.detection_s(other, end)
            again = max(again, learns + RECONNECT_S)
            self.engine.at(learns, partial(self._link_down, end, other, is_told=by == other))
        for end, other in ((first, second), (second, first)):
            self._retry_s[end, other] = FIRST_RETRY_S
            self.engine.at(again, partial(self._try_again, end, other))

    def _link_down(self, rank: int, peer: int, *, is_told: bool) -> None:
        again = partial(self._link_down, rank, peer, is_told=is_told)
        if self.holds_up(peer, rank, again) if is_told else self.stands_still(rank, again):
            return
        if self.wire(rank, peer) is not None or rank in self.crashed:
            return  # made anew meanwhile, which said it already
        self.perform(rank, self.workers[rank].link_down(peer, self.engine.now))

    def _want(self, rank: int, peer: int) -> None:
        """Dial ``peer``, again and again until there is a link."""
        if self.wire(rank, peer) is None and (rank, peer) not in self._retry_s:
            self._retry_s[rank, peer] = FIRST_RETRY_S
            self.engine.at(self.engine.now, partial(self._try_again, rank, peer))

    def _try_again(self, rank: int, peer: int) -> None:
        if self.stands_still(rank, partial(self._try_again, rank, peer)):
            return
        if (rank, peer) in self._retry_s:
            self._dial(rank, peer)

    def _dial(self, rank: int, peer: int) -> None:
        answer, after_s = self.answer(rank, peer), 0.0
        if answer == "refused":
            after_s = self.conditions.latency_s(peer, rank)
        elif answer == "silence":
            after_s = DIAL_TIMEOUT_S
        self.engine.at(self.engine.now + after_s, partial(self._dialled, rank, peer, answer))

    def _dialled(self, rank: int, peer: int, answer: Answer) -> None:
        if rank in self.crashed or self.stands_still(
            rank, partial(self._dialled, rank, peer, answer)
        ):
            return
        if self.wire(rank, peer) is not None:
            return
        if answer == "accepted":
            if self.answer(rank, peer) == "accepted":  # still
                self.connect(rank, peer)
            else:
                self._dial(rank, peer)
            return
        worker, now = self.workers[rank], self.engine.now
        retry_s = self._retry_s.get((rank, peer))
        if retry_s is not None:
            self._retry_s[rank, peer] = min(2 * retry_s, LONGEST_RETRY_S)
            self.engine.at(now + retry_s, partial(self._try_again, rank, peer))
        if answer == "refused":
            self._outbox.pop((rank, peer), None)
            self.perform(rank, worker.dial_refused(peer, now))
        else:
            self.perform(rank, worker.peer_unreachable(peer, now))

    def _send(self, rank: int, peer: int, envelope: Envelope) -> None:
        wire = self.wire(rank, peer)
        if wire is None and isinstance(envelope.message, DIALLED_MESSAGES):
            if self.answer(rank, peer) == "accepted":
                self.connect(rank, peer)
                wire = self.wire(rank, peer)
            else:
                self._outbox.setdefault((rank, peer), []).append(envelope)
                self._want(rank, peer)
        if wire is None:
            return
        self.num_messages[type(envelope.message).__name__] += 1
        carried = self.carries(rank, peer, envelope)
        if carried == "link lost":
            self.cut(rank, peer)
        elif isinstance(carried, Envelope):
            latency_s = self.conditions.latency_s(rank, peer)
            arrives = wire.carry_message(rank, self.engine.now, latency_s)
            self.engine.at(arrives, partial(self._deliver, wire, rank, peer, carried))

    def _deliver(self, wire: Wire, rank: int, peer: int, envelope: Envelope) -> None:
        if self.holds_up(rank, peer, partial(self._deliver, wire, rank, peer, envelope)):
            return
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
            exchange = Exchange(begin.id, self.conditions.transfer_s(rank, peer))
            self.exchanges[begin.id] = exchange
        exchange.ends[rank] = end = End(now, begin.alpha_tilde, own_leave=now)
        self._running[rank] = exchange
        data = self._payload.exchange_began(rank, begin, now)
        wire, sent = self.wire(rank, peer), self.sends(rank, begin)
        if wire is None or sent == "nothing":  # cut already; the end will learn of it
            return
        latency_s = self.conditions.latency_s(rank, peer)
        end.own_leave, arrive = wire.carry_data(rank, now, exchange.transfer_s, latency_s)
        if sent == "refused":
            self.engine.at(arrive, partial(self.cut, rank, peer, by=peer))
        else:
            self.engine.at(arrive, partial(self._data_arrived, wire, rank, peer, exchange, data))

    def _data_arrived(
        self, wire: Wire, rank: int, peer: int, exchange: Exchange, data: object
    ) -> None:
        # At the end that was asked these are the initiator's data, which confirm its ACCEPT.
        now = self.engine.now
        if self.holds_up(rank, peer, partial(self._data_arrived, wire, rank, peer, exchange, data)):
            return
        if not wire.is_up or self._running.get(peer) is not exchange:
            return
        self._payload.data_arrived(peer, exchange.id, data, now)
        finish = partial(self._finish, wire, peer, rank, exchange)
        own_leave = exchange.ends[peer].own_leave
        if own_leave > now:
            self.engine.at(own_leave, finish)
        else:
            finish()

    def _finish(self, wire: Wire, rank: int, peer: int, exchange: Exchange) -> None:
        if self.stands_still(rank, partial(self._finish, wire, rank, peer, exchange)):
            return
        if not wire.is_up or self._running.get(rank) is not exchange:
            return
        self._end(rank, "finished")
        worker, now = self.workers[rank], self.engine.now
        self.perform(rank, worker.finished(exchange.id, now))
        if self.lives(worker):
            self.perform(rank, worker.heard(peer, now))

    def _end(self, rank: int, outcome: Literal["finished", "stopped", "crashed"]) -> None:
        exchange = self._running.pop(rank)
        self._payload.exchange_ended(rank, exchange.id, self.engine.now)
        end = exchange.ends[rank]
        end.ended, end.outcome = self.engine.now, outcome
        self.num_exchanges += exchange.is_complete
        if not self._keeps_exchanges and all(e.ended is not None for e in exchange.ends.values()):
            del self.exchanges[exchange.id]


def _pair(first: int, second: int) -> tuple[int, int]:
    return (first, second) if first < second else (second, first)
