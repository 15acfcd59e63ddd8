"""A simulated network in which workers stand still, are cut off, crash, join and consolidate."""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, Literal, TypeAlias

from gossipdp.gossip.sums import Outcome, Sums
from gossipdp.protocol import actions as do
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.members import Member, Status, first_incarnation
from gossipdp.protocol.messages import DIALLED_MESSAGES, Envelope, ExchangeId, decode, encode
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp_lab.simulate.network import Conditions, Exchange, VirtualNetwork, Wire
from simulated_faults.averaged_rows import AveragedRows, Frame, Links, SimulatedLink, no_parameters
from simulated_faults.invariants import ProtocolChecks
from simulated_faults.ledger import FaultyPayload

FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 10.0
RECONNECT_S = 0.2
"""The wait of both ends, once they know of a cut, until they dial again."""
DIAL_TIMEOUT_S = 1.0
"""The wait for the answer to a dial."""
PIECE_S = 0.1
"""The time in which some bytes of a chunk move on slow links."""

Answer: TypeAlias = Literal["accepted", "refused", "silence"]
Loss: TypeAlias = Literal["message lost", "link lost"]
Data: TypeAlias = Literal["all", "nothing", "refused"]


class FaultyNetwork(VirtualNetwork):
    """A network with faults as inputs: ``crash``, ``start``, ``join``, ``stall``, ``partition``.

    A stall or a partition loses nothing: what it holds up goes on when it ends, in order. Ranks
    that are rejected from one another have a firewall between them that refuses dials. A cut loses
    what is on its way; each end learns of it in its own time, and then dials again.

    Args:
        averaged: what consolidation averages; None: nothing.
        lost_at_messages: the numbers of those messages, counted over the network, at whose
            sending their link is cut.
        detection_s: how long until the second rank learns that its link to the first was cut.
        chunk_s: how long a chunk of a sum takes to leave or to reach a rank, for each that does so
            at a time; None: no time. A link carries one chunk after another.
    """

    def __init__(
        self,
        workers: Mapping[int, WorkerProtocol],
        edges: Collection[tuple[int, int]],
        conditions: Conditions,
        payload: FaultyPayload | None = None,
        *,
        averaged: AveragedRows | None = None,
        lost_at_messages: Collection[int] = (),
        detection_s: Callable[[int, int], float] = lambda sender, receiver: 0.01,
        chunk_s: Callable[[int], float] | None = None,
        keeps_exchanges: bool = False,
    ) -> None:
        self.crashed: set[int] = set()
        self.left: dict[int, float] = {}  # when each worker left after consolidation
        self.superseded: list[int] = []
        self.took_over: list[tuple[float, int, int]] = []  # when, who, and from whom
        self._averaged = averaged
        self._lost_at_messages = lost_at_messages
        self._num_sent = 0
        self._stalled_until: dict[int, float] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._sides: dict[int, int] = {}
        self._heals_at = 0.0
        self._rejected: set[frozenset[int]] = set()
        self._detection_s = detection_s
        self._retry_s: dict[tuple[int, int], float] = {}  # back-off, by who dials and whom
        self._outbox: dict[tuple[int, int], list[Envelope]] = {}
        self._faulty_payload = payload or FaultyPayload()
        self.sums: dict[WorkerProtocol, Sums] = {}
        self._checks = ProtocolChecks()
        self._ends_of: dict[Wire, dict[int, SimulatedLink]] = {}
        self._pumping: set[int] = set()
        self._chunk_s = chunk_s
        self._queues: dict[tuple[Wire, int], deque[Frame]] = {}
        self._moving: Counter[tuple[str, int]] = Counter()  # chunks from and to a rank just now
        super().__init__(
            workers, edges, conditions, self._faulty_payload, keeps_exchanges=keeps_exchanges
        )

    def running(self, rank: int) -> ExchangeId | None:
        running = self._running.get(rank)
        return None if running is None else running.id

    def lives(self, worker: WorkerProtocol) -> bool:
        return self.workers.get(worker.rank) is worker and worker.rank not in self.crashed

    def done(self, rank: int, wait_s: float = math.inf) -> None:
        """End the training of ``rank``, which waits so long for the others to be done too."""
        self.perform(rank, self.workers[rank].done(self.engine.now, wait_s))

    # --- faults ----------------------------------------------------------------------------

    def crash(self, rank: int) -> None:
        """Kill the process of ``rank``: its links are closed, its address refuses dials."""
        self.crashed.add(rank)
        self._stalled_until.pop(rank, None)
        self._waiting.pop(rank, None)
        if (alarm := self._alarms.pop(rank, None)) is not None:
            alarm.cancel()
        if rank in self._running:
            self._end(rank, "crashed")
        for first, second in list(self._wires):
            if rank in (first, second):
                self.cut(first, second)
        self._retry_s = {dial: wait for dial, wait in self._retry_s.items() if dial[0] != rank}
        self._outbox = {dial: box for dial, box in self._outbox.items() if dial[0] != rank}

    def start(self, worker: WorkerProtocol) -> None:
        """Let a process train from now on, with its own parameters: after a crash of its rank."""
        rank = worker.rank
        self._add(worker)
        self._start_step(rank)
        for peer in sorted(worker.neighbours):
            self._want(rank, peer)
        self._set_alarm(rank)

    def new_process(
        self, rank: int | None, process_id: int, asked: int, *, is_joining: bool = True
    ) -> WorkerProtocol:
        """Return a worker that knows what ``asked`` tells it, for :meth:`join` or :meth:`start`.

        Without a ``rank`` it gets the one after all that are known.
        """
        informant = self.workers[asked]
        answer, chunks = informant.answer_joiner(), informant.consolidation.num_chunks
        rank, incarnation = first_incarnation(answer.members, rank)
        status = Status.JOINING if is_joining else Status.ALIVE
        worker = WorkerProtocol(
            own=Member(rank, incarnation, process_id, status, "simulated"),
            graph=informant.neighbourhood.graph,
            method="a2cid2",
            timeout_s=informant.timeout_s,
            random=Random(process_id),
            num_chunks=chunks,
            exchange_rate=None if informant.exchange_rate is None else ExchangeRate(),
        )
        worker.membership.merge_all(answer.members)
        worker.progress.merge_all(answer.progress, self.engine.now)
        return worker

    def stall(self, rank: int, duration_s: float) -> None:
        """Stop the process of ``rank``: what arrives waits, its kernel answers no dial."""
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

    def join(self, worker: WorkerProtocol) -> None:
        """Start a process that takes parameters from a live worker before it trains.

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
        reached = [
            peer
            for peer in worker.membership.live()
            if peer != rank and self.answer(rank, peer) == "accepted"
        ]
        donor = next((peer for peer in reached if self.workers[peer].can_donate), None)
        if donor is None:
            self.crash(rank)
            return
        self.connect(rank, donor)
        ends = self.engine.now + self.conditions.transfer_s(donor, rank)
        self.engine.at(ends, partial(self._take_over, worker, donor, self.wire(rank, donor)))

    def _take_over(self, worker: WorkerProtocol, peer: int, wire: Any) -> None:
        rank, now = worker.rank, self.engine.now
        if self.holds_up(peer, rank, partial(self._take_over, worker, peer, wire)):
            return
        if wire is None or not wire.is_up or not self.workers[peer].can_donate:
            self._ask_for_parameters(worker)
        elif self.lives(worker):
            self._faulty_payload.took_over(rank, peer, now)
            self.took_over.append((now, rank, peer))
            self.perform(rank, worker.release(now))
            self._start_step(rank)

    # --- what they do to the network -------------------------------------------------------

    def answer(self, rank: int, peer: int) -> Answer:
        """Return what a dial from ``rank`` to ``peer`` meets."""
        if self._is_apart(rank, peer):
            return "silence"
        if frozenset((rank, peer)) in self._rejected:
            return "refused"
        if peer in self._stalled_until:
            return "silence"
        return "refused" if peer in self.crashed or peer == rank else "accepted"

    def carries(self, rank: int, peer: int, envelope: Envelope) -> Envelope | Loss:
        """Return what the link carries as a message is sent: it, another one, or what is lost."""
        number = self._num_sent
        self._num_sent += 1
        return "link lost" if number in self._lost_at_messages else envelope

    def sends(self, rank: int, begin: do.Begin) -> Data:
        """Which data ``rank`` sends in an exchange; the peer closes the link to refuse."""
        return "all"

    def stands_still(self, rank: int, callback: Callable[[], None]) -> bool:
        """Return whether ``rank`` stands still; ``callback`` is then called when it goes on."""
        if rank not in self._stalled_until:
            return False
        self._waiting.setdefault(rank, []).append(callback)
        return True

    def holds_up(self, rank: int, peer: int, callback: Callable[[], None]) -> bool:
        """Return whether ``peer`` is out of reach of ``rank``; then call back once it is not."""
        if self._is_apart(rank, peer):
            self.engine.at(self._heals_at, callback)
            return True
        return self.stands_still(peer, callback)

    def _can_hold_up(self) -> bool:
        """Return whether anything stands still or is parted: mostly not, and events are many."""
        return bool(self._stalled_until) or self.engine.now < self._heals_at

    # Around the actions with which a rank answers one input.
    def before(self, rank: int, actions: Sequence[Action]) -> None: ...
    def after(self, rank: int, actions: Sequence[Action]) -> None: ...

    def perform(self, rank: int, actions: Sequence[Action]) -> None:
        if rank in self.crashed:
            return
        self.before(rank, actions)
        for action in actions:
            self.act(rank, action)
            if rank in self.crashed:
                break
        if rank not in self.crashed and rank not in self._pumping:
            self._pumping.add(rank)
            sums = self._sums(rank)
            while rank not in self.crashed and sums.pump():
                pass
            self._pumping.discard(rank)
        if rank not in self.crashed:
            self._set_alarm(rank)
        self._checks.check(self.workers[rank])
        self.after(rank, actions)

    def end_step(self, rank: int, worker: WorkerProtocol) -> None:
        is_over = worker.is_done or not self.lives(worker)
        if not self.stands_still(rank, partial(self.end_step, rank, worker)) and not is_over:
            super().end_step(rank, worker)

    def poll(self, rank: int) -> None:
        if not self._can_hold_up() or not self.stands_still(rank, partial(self.poll, rank)):
            self._sums(rank).note_progress()
            super().poll(rank)

    def send(self, rank: int, peer: int, envelope: Envelope) -> None:
        if self.wire(rank, peer) is None and isinstance(envelope.message, DIALLED_MESSAGES):
            if self.answer(rank, peer) == "accepted":
                self.connect(rank, peer)
            else:
                self._outbox.setdefault((rank, peer), []).append(envelope)
                self._want(rank, peer)
        if self.wire(rank, peer) is None:
            return
        assert decode(encode(envelope)) == envelope  # within the bounds that real workers check
        carried = self.carries(rank, peer, envelope)
        if isinstance(carried, Envelope):
            super().send(rank, peer, carried)
        else:
            self.num_messages[type(envelope.message).__name__] += 1
            if carried == "link lost":
                self.cut(rank, peer)

    def deliver(self, wire: Wire, rank: int, peer: int, envelope: Envelope) -> None:
        if not self._can_hold_up() or not self.holds_up(
            rank, peer, partial(self.deliver, wire, rank, peer, envelope)
        ):
            super().deliver(wire, rank, peer, envelope)

    def send_data(self, wire: Wire, rank: int, begin: do.Begin, data: object) -> None:
        sent, peer = self.sends(rank, begin), begin.peer
        if sent == "all":
            super().send_data(wire, rank, begin, data)
        elif sent == "refused":
            exchange, latency_s = self._running[rank], self.conditions.latency_s(rank, peer)
            now = self.engine.now
            leave, arrive = wire.carry_data(rank, now, exchange.transfer_s, latency_s)
            exchange.ends[rank].own_leave = leave
            self.engine.at(arrive, partial(self.cut, rank, peer, by=peer))

    def deliver_data(
        self, wire: Wire, rank: int, peer: int, exchange: Exchange, data: object
    ) -> None:
        again = partial(self.deliver_data, wire, rank, peer, exchange, data)
        if not self.holds_up(rank, peer, again):
            super().deliver_data(wire, rank, peer, exchange, data)

    def confirm(self, wire: Wire, rank: int, peer: int, exchange: Exchange) -> None:
        if not self.holds_up(rank, peer, partial(self.confirm, wire, rank, peer, exchange)):
            super().confirm(wire, rank, peer, exchange)

    def finish(self, wire: Wire, rank: int, peer: int, exchange: Exchange) -> None:
        if not self.stands_still(rank, partial(self.finish, wire, rank, peer, exchange)):
            super().finish(wire, rank, peer, exchange)

    # --- links that are lost ---------------------------------------------------------------

    def connect(self, first: int, second: int) -> None:
        """Link two workers, unless they are."""
        if self.wire(first, second) is None:
            super().connect(first, second)

    def linked(self, rank: int, peer: int) -> None:
        self._retry_s.pop((rank, peer), None)
        super().linked(rank, peer)
        for envelope in self._outbox.pop((rank, peer), ()):
            self.send(rank, peer, envelope)

    def cut(self, first: int, second: int, by: int | None = None) -> None:
        """Cut the link between two workers; both dial again once they know.

        ``by`` is the end that closes it: the other can learn of that only through the network.
        """
        wire = self._wires.pop((min(first, second), max(first, second)), None)
        if wire is None:
            return
        wire.is_up = False
        again = self.engine.now
        for end, other in ((first, second), (second, first)):
            learns = self.engine.now + self._detection_s(other, end)
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
        self._sums(rank).link_lost(peer)
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
        is_refused = answer == "refused"
        if is_refused:
            self._outbox.pop((rank, peer), None)
        self.perform(rank, worker.dial_failed(peer, now, is_refused=is_refused))

    def _is_apart(self, first: int, second: int) -> bool:
        if self.engine.now >= self._heals_at:
            return False
        sides = self._sides
        return first in sides and second in sides and sides[first] != sides[second]

    # --- what only faults and consolidation bring ------------------------------------------

    def act(self, rank: int, action: Action) -> None:
        now = self.engine.now
        match action:
            case do.Send() | do.Begin() | do.Withdrawn():
                super().act(rank, action)
            case do.Stop():
                self._end(rank, "stopped")
                self.cut(rank, action.peer, by=rank)
            case do.Unlink(peer=peer):
                self.cut(rank, peer, by=rank)
            case do.Reach(peer=peer):
                self._dial(rank, peer)
            case do.Rebuilt():
                self._faulty_payload.rebuilt(rank, action, now)
                for peer in sorted(action.neighbours | action.dead):
                    self._want(rank, peer)
            case do.Superseded():
                self.superseded.append(rank)
                self.crash(rank)
            case do.Finished():
                self._sums(rank).on_end = partial(self._ended, rank)
                self._sums(rank).perform(action)
                self.left[rank] = now
            case _:
                self._sums(rank).perform(action)

    # --- sums over a tree, by the code of real workers -------------------------------------

    def average(self, rank: int) -> Any:
        """Have ``rank`` ask for the average of the live workers; return the future."""
        return self._sums(rank).ask()

    def _sums(self, rank: int) -> Sums:
        worker, averaged = self.workers[rank], self._averaged
        if worker not in self.sums:
            num_chunks = worker.consolidation.num_chunks
            self.sums[worker] = Sums(
                no_parameters(num_chunks) if averaged is None else averaged.state(rank),
                worker,
                Links(partial(self._peers, rank), partial(self._link, rank)),
                partial(self.perform, rank),
                lambda: self.engine.now,
                poisoned=partial(self.crash, rank),
            )
        return self.sums[worker]

    def _ended(self, rank: int, outcome: Outcome) -> None:
        if self._averaged is not None:
            self._averaged.end(rank, outcome)

    def _peers(self, rank: int) -> list[int]:
        return [b if a == rank else a for a, b in self._wires if rank in (a, b)]

    def _link(self, rank: int, peer: int) -> SimulatedLink | None:
        wire = self.wire(rank, peer)
        if wire is None:
            return None
        ends = self._ends_of.setdefault(wire, {})
        if rank not in ends:
            send = partial(self.send_chunk, wire, rank, peer)
            ends[rank] = SimulatedLink(peer, send, partial(self.cut, rank, peer, by=rank))
        return ends[rank]

    def send_chunk(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        if self._chunk_s is not None:
            queue = self._queues.setdefault((wire, rank), deque())
            queue.append(frame)
            if len(queue) == 1:
                self._begin_chunk(wire, rank, peer)
            return
        latency_s = self.conditions.latency_s(rank, peer)
        arrives = wire.carry_message(rank, self.engine.now, latency_s)
        self.engine.at(arrives, partial(self._chunk_arrived, wire, rank, peer, frame))

    def _begin_chunk(self, wire: Wire, rank: int, peer: int) -> None:
        self._moving.update([("from", rank), ("to", peer)])
        link, (frame_type, key, _) = self._link(peer, rank), self._queues[wire, rank][0]
        if link is not None:
            self._sums(peer).landing(link, frame_type, key)  # its header comes first
        leaves_s = self._moving["from", rank] * self._chunk_s(rank)
        arrives_s = self._moving["to", peer] * self._chunk_s(peer)
        self._move_chunk(wire, rank, peer, max(leaves_s, arrives_s))

    def _move_chunk(self, wire: Wire, rank: int, peer: int, left_s: float) -> None:
        """Move some bytes of a chunk, or let it arrive and begin the next."""
        queue = self._queues[wire, rank]
        sender, receiver = self._link(rank, peer), self._link(peer, rank)
        if left_s > 0.0 and wire.is_up and sender is not None and receiver is not None:
            sender.chunk_bytes_sent[queue[0][0]] += 1
            receiver.chunk_bytes_received[queue[0][0]] += 1
            piece_s = min(left_s, PIECE_S)
            again = partial(self._move_chunk, wire, rank, peer, left_s - piece_s)
            self.engine.at(self.engine.now + piece_s, again)
            return
        self._moving.subtract([("from", rank), ("to", peer)])
        self._chunk_arrived(wire, rank, peer, queue.popleft())
        if queue:
            self._begin_chunk(wire, rank, peer)

    def _chunk_arrived(self, wire: Wire, rank: int, peer: int, frame: Frame) -> None:
        again = partial(self._chunk_arrived, wire, rank, peer, frame)
        if self.holds_up(rank, peer, again) or not wire.is_up:
            return
        link, (frame_type, key, data) = self._link(peer, rank), frame
        if link is None or self.wire(rank, peer) is not wire:
            return
        sums = self._sums(peer)
        room = sums.landing(link, frame_type, key)
        if room is not None:
            link.chunk_bytes_received[frame_type] += len(data)
            room[:] = data
            sums.landed(link, frame_type, key)
