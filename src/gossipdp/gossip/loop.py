"""One worker's side of everything that crosses the network: a single-threaded event loop.

It performs the protocol's actions and turns reports of links into the protocol's inputs. All of it
runs in one thread (:mod:`~gossipdp.gossip.thread`), so nothing here is locked; it reaches the
parameters only through their chunks (:mod:`~gossipdp.dynamics.chunks`).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import State
from gossipdp.errors import PeerLostError, PoisonedError, RefusedError, SupersededError
from gossipdp.gossip.codec import Codec, PoisonFound
from gossipdp.gossip.exchange import CompletedExchange, Exchange
from gossipdp.gossip.processor import IdleWatch
from gossipdp.gossip.snapshot import PUBLISH_EVERY_S, LoopSnapshot, Publisher
from gossipdp.gossip.sums import Outcome, Sums
from gossipdp.gossip.transfer import TransferMessage, Transfers
from gossipdp.launcher.reports import Report, say_instead_of_traceback, send_report
from gossipdp.links.frames import SUM_TYPES, ChunkKey, FrameType
from gossipdp.links.handshake import Refusal
from gossipdp.links.link import Dialer, Link, LinkHandler, Transport
from gossipdp.logs import OnceLog, printable
from gossipdp.protocol.actions import (
    Begin,
    LeftBehind,
    Notice,
    Reach,
    Rebuilt,
    Send,
    Stop,
    Superseded,
    Unlink,
    Withdrawn,
)
from gossipdp.protocol.messages import (
    DIALLED_MESSAGES,
    Envelope,
    Propose,
    ProtocolError,
    decode,
    encode,
)
from gossipdp.protocol.worker import Action, WorkerProtocol

logger = logging.getLogger("gossipdp")

LONGEST_TURN_S = 0.5
# Messages that wait for one peer's link. If there are more, the oldest are dropped without harm:
# consolidation and the failure detector repeat messages without an answer, and an average that does
# not come is requested again after its time-out.
MAX_WAITING = 16
REPORT_INTERVAL_S = 0.2
FAREWELL_S = 1.0
# A handshake that fails with one of these shows that the dialled worker lives.
REFUSALS_OF_THE_LIVING = ("incarnation", "own_rank")


class GossipLoop(LinkHandler):
    """The event loop of one worker.

    ``make_transport`` gets this loop as the handler of links; transport and phase use the same
    ``clock``.

    Attributes:
        its_thread: makes the context in which its thread must turn this loop.
        snapshot: the state for other threads to read, replaced whole, at most 50 ms after a turn.
        poisoned: the error that stopped this worker's exchanges, if any; any thread may read it.
    """

    def __init__(
        self,
        protocol: WorkerProtocol,
        state: State,
        phase: Phase,
        make_transport: Callable[[LinkHandler], Transport],
        clock: Callable[[], float],
        *,
        wire_format: str,
    ) -> None:
        self.protocol = protocol
        self._state, self._phase = state, phase
        self.its_thread = state.device.gossip_thread
        self.transport = make_transport(self)
        self.poisoned: PoisonedError | None = None
        self.clock = clock
        self._actions: deque[Action] = deque()
        self._is_performing = False
        self._links: dict[int, Link] = {}
        self._outbox: dict[int, deque[bytes]] = {}
        self._dialer = Dialer(protocol.rank, Random(protocol.rank), self._links)
        self._exchange: Exchange | None = None
        self._progress = 0  # bytes of chunks at the exchange's latest progress
        self._exchange_started_s = 0.0
        self._processor_before = 0.0, 0.0  # as the exchange began: of this thread, of the codec
        self.codec = Codec(wire_format, state, self.transport.allocate)
        # A device's arrays take none of this thread's time, and are launched by Python.
        self.codec.is_timed = protocol.exchange_rate is not None and not state.device.is_queued
        self.transfers = Transfers(
            state.all_chunks,
            links=self._links,
            send=self._send,
            dial=self._dial_at_once,
            refusal=lambda: (
                None if protocol.can_donate else str(self.poisoned or "it has none to give now")
            ),
            clock=clock,
        )
        at_end = (
            ", or their sum with those of the others, hold NaN or infinity: they are not averaged"
        )
        poisoned = partial(self._found_poison, at_end)
        self.sums = Sums(state, protocol, self._links, self.perform, clock, poisoned=poisoned)
        self._idle_watch: IdleWatch | None = None
        self._is_busy = False  # sums have work left for the next turn
        self._owners: dict[FrameType, Transfers | Sums] = {
            FrameType.STATE_CHUNK: self.transfers,
            **dict.fromkeys(SUM_TYPES, self.sums),
        }
        self._publisher = Publisher(protocol, self._links)
        self.snapshot = self._publisher.snapshot(clock())
        self._publish_due_s, self._is_snapshot_old = -math.inf, False
        self.report: Callable[[Report], object] = send_report
        self._reported: dict[int, tuple[str, int]] = {}
        self._reported_version = -1
        self._report_due_s = -math.inf
        self._dials_neighbours_at_once = False
        self._heard_every_s = protocol.timeout_s / 10
        self._log = OnceLog(logger)
        # Until it has its parameters this worker must neither exchange nor give any.
        self.hold()

    # Calls of the loop's owner.

    def watch_this_thread(self) -> None:
        """Watch the idle time of the training thread, which calls this once."""
        self._idle_watch = IdleWatch(has_helpers=self._state.device.is_queued)

    def turn(self, longest_s: float = LONGEST_TURN_S) -> None:
        """Wait for something to happen, at most ``longest_s``, and deal with it."""
        self.transport.flush()  # a chunk that leaves may bring the next deadline nearer
        now = self.clock()
        due_s = min(
            self.protocol.next_deadline(),
            self._dialer.next_due_s(self.protocol.membership.addresses()),
            now + (0.0 if self._is_busy else longest_s),
            self._publish_due_s if self._is_snapshot_old else math.inf,
        )
        self.transport.poll(max(0.0, due_s - now))
        now = self.clock()
        for peer, link in list(self._links.items()):
            # Chunks are signs of life too: a link may be too busy with them for a heartbeat.
            if link.last_heard_s > self.protocol.peers.last_heard(peer) + self._heard_every_s:
                self.perform(self.protocol.heard(peer, link.last_heard_s))
        self.sums.note_progress()
        # Heartbeats alone are no progress. Bytes count, not chunks: on a slow link one chunk may
        # take longer than the time-out.
        exchange = self._exchange
        if exchange is not None and exchange.bytes_moved > self._progress:
            self._progress = exchange.bytes_moved
            self.protocol.progressed(now)
        self.perform(self.protocol.poll(now))
        rate, watch = self.protocol.exchange_rate, self._idle_watch
        if rate is not None and watch is not None and (idle := watch.look(now)) is not None:
            rate.saw_idle(*idle)
        self._report_addresses(now)
        addresses = self.protocol.membership.addresses()
        for peer in self._dialer.due(addresses, now):
            self.transport.dial(peer, *addresses[peer])
        self._pump()
        self._is_snapshot_old = now < self._publish_due_s
        if not self._is_snapshot_old:
            self.publish()

    def publish(self) -> LoopSnapshot:
        """Replace the snapshot by one as of now, and return it."""
        now = self.clock()
        self._publish_due_s = now + PUBLISH_EVERY_S
        self.snapshot = self._publisher.snapshot(now)
        return self.snapshot

    def _report_addresses(self, now: float) -> None:
        """Report the live workers' addresses to the supervisor, if they have changed."""
        membership = self.protocol.membership
        if self._reported_version == membership.version or now < self._report_due_s:
            return
        self._reported_version = membership.version
        self._report_due_s = now + REPORT_INTERVAL_S
        members = [each for each in membership.members() if each.is_live and each.port]
        live = {each.rank: (each.host, each.port) for each in members}
        if live != self._reported:
            self._reported = live
            self.report(Report(addresses=live))

    def hold(self) -> None:
        """Neither exchange nor give a state until :meth:`release`; abort a running exchange."""
        self.transfers.has_state = False
        now = self.clock()
        self.perform(self.protocol.hold(now))
        self.perform(self.protocol.abort("the parameters are being loaded", now))

    def release(self) -> None:
        """Take part from now on: this worker has its parameters. It links to its neighbours."""
        self.transfers.has_state = True
        self.perform(self.protocol.release(self.clock()))
        # At once: others may be backing off from the address of this worker's earlier life.
        self._dialer.want(self.protocol.neighbours, self.clock(), at_once=True)
        self._dials_neighbours_at_once = True  # a joiner's graph is still to come

    def _found_poison(self, where_and_outcome: str) -> None:
        """Stop exchanging for good."""
        error = f"the parameters of worker {self.protocol.rank}{where_and_outcome}"
        self.poisoned = PoisonedError(f"{error}. Lower the learning rate or clip gradients")
        logger.error("%s", self.poisoned)
        self.perform(self.protocol.poisoned(self.clock()))

    def consolidate(self, on_end: Callable[[Outcome], None], timeout_s: float = math.inf) -> None:
        """Take part in consolidation; ``on_end`` is called when this worker may leave.

        ``timeout_s``: the longest wait for workers that still train.
        """
        if self.protocol.consolidation.is_finished and self.sums.outcome is not None:
            on_end(self.sums.outcome)  # asked again after an interrupt
            return
        self.sums.on_end = on_end
        self.perform(self.protocol.done(self.clock(), timeout_s))

    def close(self) -> None:
        self.transfers.end(PeerLostError("this worker is closing"))
        self.sums.end("this worker is closing")
        self._stop_exchange()
        # Let RELEASE and LEFT go out after consolidation, or others would take us for dead.
        deadline_s = self.clock() + FAREWELL_S
        while self.protocol.consolidation.is_finished and self.clock() < deadline_s:
            if not any(link.has_unsent for link in self._links.values()):
                break
            self.transport.poll(FAREWELL_S / 10)
        self.publish()
        self.transport.close()

    def perform(self, actions: Iterable[Action]) -> None:
        """Do the protocol's actions, in order."""
        self._actions.extend(actions)
        if self._is_performing:
            return  # this call came from an action; the loop below gets to them
        self._is_performing = True
        try:
            while self._actions:
                self._perform_next(self._actions.popleft())
        finally:
            self._is_performing = False

    def _perform_next(self, action: Action) -> None:
        match action:
            case Send(peer=peer, message=envelope):
                self._post(peer, envelope)
            case Begin():
                self._begin(action)
            case Stop(peer=peer, reason=reason):
                self._stop(peer, reason)
            case Withdrawn():
                self._stop_exchange(is_withdrawn=True)
            case Unlink(peer=peer, reason=reason):
                self._unlink(peer, reason)
            case Reach(peer=peer, host=host, port=port):
                self.transport.dial(peer, host, port)
            case Notice():
                self._publisher.noticed(action)
            case Rebuilt():
                self._phase.set_speed(action.eta, action.worker_rate, self.clock())
                at_once, self._dials_neighbours_at_once = self._dials_neighbours_at_once, False
                self._dialer.want(action.neighbours | action.dead, self.clock(), at_once=at_once)
            case Superseded(reason=reason):
                raise SupersededError(reason)
            case LeftBehind(stood_still_s=seconds):
                say_instead_of_traceback()
                raise PeerLostError(
                    f"worker {self.protocol.rank} stood still for {seconds:.3g} s, and no other "
                    "worker is in the run now: they have ended it, or died. This one's parameters "
                    "are not the run's: take the model that the others saved, or start the run "
                    "again from its checkpoints"
                )
            case _:
                self.sums.perform(action)

    # Links.

    def link_up(self, link: Link) -> None:
        self._links[link.peer] = link
        self._dialer.linked(link.peer, self.clock())
        self.perform(self.protocol.link_up(link.peer, self.clock()))
        for data in self._outbox.pop(link.peer, ()):
            link.send_control(data)
        self.transfers.link_up(link)

    def link_down(self, link: Link, reason: str) -> None:
        now = self.clock()
        peer = link.peer
        self._publisher.link_down(link)
        self._links.pop(peer, None)
        self._dialer.unlinked(peer, now)
        self.sums.link_lost(peer)
        logger.info("worker %d: link to worker %d down: %s", self.protocol.rank, peer, reason)
        self.perform(self.protocol.link_down(peer, now))
        # The peer may live: crossing dials replace a link. If it died, it refuses the next dial.
        self.transfers.link_down(link)

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        if peer is None:
            return
        now = self.clock()
        self._dialer.failed(peer, now)
        if refusal.field == "incarnation":
            self.perform(self.protocol.outdated(peer, now))
        elif refusal.field in REFUSALS_OF_THE_LIVING:
            self.perform(self.protocol.reached(peer, now))
        else:
            self.perform(self.protocol.dial_failed(peer, now, is_refused=False))
        # A peer linked to another process of this rank may yet learn which of the two stays.
        kind = PeerLostError if refusal.field in REFUSALS_OF_THE_LIVING else RefusedError
        self.transfers.gone(peer, kind(f"worker {peer} refused this worker: {refusal}"))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        if peer is None:
            return
        now = self.clock()
        self._dialer.failed(peer, now)
        if refused_connection:
            self._outbox.pop(peer, None)
        self.perform(self.protocol.dial_failed(peer, now, address, is_refused=refused_connection))
        if refused_connection:
            gone = PeerLostError(f"worker {peer} is gone: its address refuses us")
            self.transfers.gone(peer, gone)

    # Control messages.

    def control(self, link: Link, data: bytes) -> None:
        try:
            envelope = decode(data)
        except ProtocolError as error:
            self._log.warn_once(
                "message",
                str(link.peer),
                "worker %d closes its link to worker %d, which sent a message it cannot accept: "
                "%s. They exchange nothing while that goes on. If both run the same version of "
                "gossipdp, please report it",
                self.protocol.rank,
                link.peer,
                printable(str(error)),
            )
            link.close(str(error))
            return
        if isinstance(envelope.message, Propose) and self._renews(link):
            return
        self.perform(self.protocol.receive(link.peer, envelope, self.clock()))
        if isinstance(envelope.message, TransferMessage):
            self.transfers.receive(link, envelope.message)

    def _renews(self, link: Link) -> bool:
        """Close a link whose keys have served long, now that its peer asks for an exchange.

        Return whether the link is closed. A peer that asks has finished its previous exchange, so
        closing loses no chunk.
        """
        is_idle = self._exchange is None or self._exchange.link is not link
        if link.is_aging and is_idle and not link.queued_chunks:
            link.close("its TLS key has protected half of what one may; a new link takes its place")
        return link.closed

    def _send(self, peer: int, message: TransferMessage) -> None:
        self._post(peer, self.protocol.peers.wrap(peer, message, self.clock()).message)

    def _post(self, peer: int, envelope: Envelope) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.send_control(encode(envelope))
        elif isinstance(envelope.message, DIALLED_MESSAGES):
            self._outbox.setdefault(peer, deque(maxlen=MAX_WAITING)).append(encode(envelope))
            self._dial_at_once(peer)

    def _dial_at_once(self, peer: int) -> None:
        self._dialer.want([peer], self.clock(), at_once=True)

    # Chunks. If a chunk and its landing place differ in length, its link ends.

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        owner = self._owners.get(frame_type)
        if owner is not None:
            return owner.landing(link, frame_type, key)
        exchange = self._exchange
        if exchange is None or exchange.link is not link:
            return None
        return exchange.landing(frame_type, key)

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        if payload is None:
            return
        owner, exchange = self._owners.get(frame_type), self._exchange
        if owner is not None:
            owner.landed(link, frame_type, key)
        # The exchange may have been stopped while its chunk was arriving.
        elif exchange is not None and exchange.expects(frame_type, key):
            self._guarded(lambda: exchange.landed(frame_type, key, payload))

    def writable(self, link: Link) -> None:
        self._pump()

    def pin(self, memory: memoryview, *, is_peers: bool) -> object:
        return self._state.device.pin(memory, is_peers=is_peers)

    def _pump(self) -> None:
        # On a lost link nothing counts as queued, but the peer may still be reading our slots. So
        # this waits for link_down, which comes soon and stops the exchange.
        if self._exchange is not None and not self._exchange.link.closed:
            self._guarded(self._exchange.pump)
        self.transfers.pump()
        self._is_busy = self.sums.pump()
        exchange = self._exchange
        if exchange is not None and not exchange.link.closed and exchange.is_finished:
            self._finish(exchange)

    # Exchanges.

    def _begin(self, begin: Begin) -> None:
        link = self._links[begin.peer]
        now = self._exchange_started_s = self.clock()
        # The first snapshots wait for the end of the turn, so that the answer leaves before them.
        theta = self._phase.start_exchange(now)
        self._exchange = Exchange(
            self._state,
            self.codec,
            link,
            begin.id,
            alpha_tilde=begin.alpha_tilde,
            theta=theta,
            moments=begin.moments,
        )
        self._progress = self._exchange.bytes_moved
        if self.protocol.exchange_rate is not None:
            self._processor_before = time.thread_time(), self.codec.busy_s

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step of the exchange; if it finds poison, end the exchange before that spreads."""
        try:
            step()
        except PoisonFound as poison:
            exchange = self._exchange
            assert exchange is not None
            if poison.ours:
                self._found_poison(
                    " hold NaN or infinity; it has stopped exchanging, and nothing of it was sent"
                )
            else:
                reason = f"what worker {exchange.link.peer} sent holds NaN or infinity"
                self.perform(self.protocol.abort(reason, self.clock()))

    def _finish(self, exchange: Exchange) -> None:
        now = self.clock()
        completed = CompletedExchange(
            exchange.link.peer,
            exchange.id.initiator == self.protocol.rank,
            self._exchange_started_s,
            now,
            half_squared_distance=0.5 * exchange.squared_distance,
            wire_format=self.codec.form.name,
        )
        self._publisher.exchanged(completed, exchange.num_applied, exchange.num_repeated)
        self._stop_exchange()
        if self.protocol.exchange_rate is not None:
            before_s, arrays_before_s = self._processor_before
            self.protocol.exchange_rate.took_processor(
                time.thread_time() - before_s, self.codec.busy_s - arrays_before_s
            )
        self.perform(self.protocol.finished(exchange.id, now))

    def _stop(self, peer: int, reason: str) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.link.peer == peer:
            text = "worker %d: exchange with worker %d stopped after %s chunks: %s"
            done = f"{exchange.num_applied} of {exchange.num_chunks}"
            logger.info(text, self.protocol.rank, peer, done, reason)
            self._stop_exchange()
        self._unlink(peer, reason)

    def _unlink(self, peer: int, reason: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.close(reason)

    def _stop_exchange(self, *, is_withdrawn: bool = False) -> None:
        if self._exchange is not None:
            self._exchange = None
            self._phase.end_exchange(self.clock(), is_withdrawn=is_withdrawn)
