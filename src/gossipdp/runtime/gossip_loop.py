"""One worker's side of everything that crosses the network: a single-threaded event loop.

It performs the protocol's actions and turns what links report into the protocol's inputs. All of
it runs in one thread (:mod:`~gossipdp.runtime.gossip_thread`), so nothing here is locked; the
parameters are reached through :class:`~gossipdp.runtime.shared_state.SharedState` alone.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from gossipdp.dynamics.state import Chunk
from gossipdp.errors import PeerLostError, PoisonedError, RefusedError, SupersededError
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
from gossipdp.protocol.consolidation_actions import Prepare
from gossipdp.protocol.messages import (
    DIALLED_MESSAGES,
    Envelope,
    OfferTraining,
    Propose,
    ProtocolError,
    RequestState,
    RequestTraining,
    StateRefused,
    decode,
    encode,
)
from gossipdp.protocol.worker import Action, WorkerProtocol
from gossipdp.runtime.averaging import Averaging, Outcome
from gossipdp.runtime.dialer import Dialer
from gossipdp.runtime.exchange import CompletedExchange, Exchange, PoisonFound
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Refusal
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.noticed import Noticed
from gossipdp.runtime.reports import Report, send_report
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.transfers import TransferMessage, Transfers
from gossipdp.runtime.transport import Transport
from gossipdp.runtime.wire_formats import wire_format

logger = logging.getLogger("gossipdp.runtime")

LONGEST_TURN_S = 0.5
RECENT_EXCHANGES = 16
REPORT_INTERVAL_S = 0.2
FAREWELL_S = 1.0
# A handshake that fails so shows that the worker dialled lives.
REFUSALS_OF_THE_LIVING = ("crossed", "incarnation", "own_rank")


@dataclass
class Traffic:
    """What was exchanged so far. Written by the loop's thread; others may read it at any time."""

    exchanges_by_neighbour: dict[int, int] = field(default_factory=dict)
    exchange_seconds: float = 0.0
    chunks_exchanged: int = 0
    chunks_repeated: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    recent_exchanges: deque[CompletedExchange] = field(
        default_factory=lambda: deque(maxlen=RECENT_EXCHANGES)
    )


class GossipLoop(LinkHandler):
    """The event loop of one worker.

    Args:
        protocol: this worker's protocol.
        shared: its parameters.
        transport: makes links; this loop must be its handler (:meth:`turn` polls it).
        clock: seconds, monotonic; the transport's and the shared state's is the same.
        wire_format_name: in which form parameters travel in exchanges.
    """

    def __init__(
        self,
        protocol: WorkerProtocol,
        shared: SharedState,
        make_transport: Callable[[LinkHandler], Transport],
        clock: Callable[[], float],
        wire_format_name: str = "parameters",
    ) -> None:
        self.protocol = protocol
        self.transport = make_transport(self)
        self.traffic = Traffic()
        self.poisoned: PoisonedError | None = None
        self._shared = shared
        self.clock = clock
        self._actions: deque[Action] = deque()
        self._is_performing = False
        self._links: dict[int, Link] = {}
        self._outbox: dict[int, list[bytes]] = {}
        self._dialer = Dialer(protocol.rank, Random(protocol.rank))
        self._exchange: Exchange | None = None
        self._asked_s = self._exchange_started_s = 0.0
        self._wire_format = wire_format(wire_format_name, shared, self.transport.allocate)
        self.transfers = Transfers(shared, self._links, self._send, self._refusal_to_give, clock)
        self.averaging = Averaging(shared, protocol, self._links, self.perform)
        self.others_samples = 0
        self.silent: frozenset[int] = frozenset()
        self.noticed = Noticed(protocol.rank, protocol.neighbourhood.num_originals)
        self._reported: dict[int, tuple[str, int]] = {}
        self._reported_version = -1
        self._report_due_s = -math.inf
        self._refresh_end: Callable[[Exception | None], None] | None = None
        self._heard_every_s = protocol.timeout_s / 10
        # Until it has the start parameters this worker must not exchange its own.
        self.hold()

    # What the owner of the loop calls.

    def its_thread(self) -> AbstractContextManager[object]:
        """The thread that turns this loop does so within this."""
        return self._shared.gossip_thread()

    def turn(self, longest_s: float = LONGEST_TURN_S) -> None:
        """Wait for something to happen, at most ``longest_s``, and deal with it."""
        now = self.clock()
        due_s = min(
            self.protocol.next_deadline(now),
            self._dialer.next_due_s(self.protocol.membership.addresses()),
            now + longest_s,
        )
        self.transport.poll(max(0.0, due_s - now))
        now = self.clock()
        for peer, link in list(self._links.items()):
            # Chunks are life too, on a link that may be too busy with them for a heartbeat.
            if link.last_heard_s > self.protocol.last_heard(peer) + self._heard_every_s:
                self.perform(self.protocol.heard(peer, link.last_heard_s))
        self.perform(self.protocol.poll(now))
        self.others_samples = self.protocol.progress.others_samples
        membership = self.protocol.membership
        self.silent = self.protocol.suspects()
        self.noticed.look(membership.version, membership.members, self.silent, now)
        self._report_addresses(now)
        self._dial(now)
        self._pump()

    def _report_addresses(self, now: float) -> None:
        """Tell whoever restarts workers where the live ones are, when that has changed."""
        membership = self.protocol.membership
        if self._reported_version == membership.version or now < self._report_due_s:
            return
        self._reported_version = membership.version
        self._report_due_s = now + REPORT_INTERVAL_S
        live = {
            member.rank: (member.host, member.port)
            for member in membership.members()
            if member.is_live and member.port
        }
        if live != self._reported:
            self._reported = live
            send_report(Report(addresses=live))

    def serve_state(self, first: Iterable[int], on_served: Callable[[], None]) -> None:
        """Answer requests for this worker's state from now on; it has one.

        ``on_served`` is called once each worker of ``first`` has been sent it, or is gone.
        """
        first = set(first)
        # Dialled, so that one that has died is known by its refusal.
        self._dialer.want(first, self.clock())
        self.transfers.serve(first, on_served)

    def start_exchanging(self) -> None:
        """Link to the neighbours, and exchange from now on."""
        self._dialer.want(self.protocol.neighbours, self.clock())
        self.release()

    def hold(self) -> None:
        """Exchange with nobody until :meth:`release`; a running exchange is aborted.

        So is a refresh: the parameters are loaded from elsewhere, which is as good.
        """
        now = self.clock()
        self.perform(self.protocol.hold(now))
        self.perform(self.protocol.abort("the parameters are being loaded", now))
        if self._refresh_end is not None and self.transfers.cancel(self._refresh_end):
            self._refresh_end = None

    def pause(self) -> bool:
        """Begin no exchange until :meth:`release`; whether none, and no refresh, is under way."""
        self.perform(self.protocol.pause(self.clock()))
        return self._exchange is None and self._refresh_end is None

    def release(self) -> None:
        """Exchange again."""
        self.perform(self.protocol.release(self.clock()))

    def joined(self) -> None:
        """Take part from now on: this worker, which was joining, has another's parameters."""
        self.perform(self.protocol.joined(self.clock()))
        # At once: the others may be backing off from where this worker lived before.
        self._dialer.want(self.protocol.neighbours, self.clock(), at_once=True)
        self.release()

    def poison(self, error: PoisonedError) -> None:
        """Exchange no more: this worker's parameters are poisoned, as ``error`` says."""
        self.poisoned = error
        logger.error("%s", error)
        self.perform(self.protocol.poisoned(self.clock()))

    def refresh(self) -> None:
        """Take another worker's parameters in place of poisoned ones, as soon as one gives them.

        The main thread waits meanwhile: until :attr:`poisoned` is None again, or
        ``protocol.refresher.is_needed`` turns False, when nobody is left to ask.
        """
        self.perform(self.protocol.refresh(self.clock()))

    def consolidate(self, on_end: Callable[[Outcome], None]) -> None:
        """Take part in consolidation; ``on_end`` is called when this worker may leave."""
        self.averaging.on_end(on_end)
        self.perform(self.protocol.done(self.clock()))

    def links(self) -> list[Link]:
        """The links that are up, for any thread to read their counts."""
        return list(self._links.values())

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes sent and received so far, on all links."""
        links = self.links()
        return (
            self.traffic.bytes_sent + sum(link.bytes_sent for link in links),
            self.traffic.bytes_received + sum(link.bytes_received for link in links),
        )

    def bytes_shared(self) -> tuple[int, int]:
        """Bytes of own memory that neighbours read in place so far, and of theirs read here."""
        links = self.links()
        return (
            self.traffic.shared_bytes_sent + sum(link.shared_bytes_sent for link in links),
            self.traffic.shared_bytes_received + sum(link.shared_bytes_received for link in links),
        )

    def fetch_state(
        self,
        peer: int,
        sink: Callable[[Chunk, Tensor], None],
        on_end: Callable[[Exception | None], None],
        timeout_s: float,
    ) -> None:
        """Ask ``peer`` for its state; ``on_end`` is called once, with None or what went wrong.

        Args:
            peer: whom to ask; it is dialled where there is no link.
            sink: called with every chunk of this worker and the values for it.
            on_end: called in the loop's thread.
            timeout_s: the longest time without progress.
        """
        self.transfers.fetch(peer, sink, on_end, timeout_s)

    def close(self) -> None:
        """Close all links and the transport."""
        self.transfers.end(PeerLostError("this worker is closing"))
        self._stop_exchange()
        self._say_farewell()
        self.transport.close()

    def _say_farewell(self) -> None:
        """After consolidation: let RELEASE and LEFT go out, so that nobody takes us for dead."""
        deadline_s = self.clock() + FAREWELL_S
        while self.protocol.consolidation.is_finished and self.clock() < deadline_s:
            if not any(link.queued_bytes for link in self._links.values()):
                return
            self.transport.poll(FAREWELL_S / 10)

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what the protocol asks, in order."""
        self._actions.extend(actions)
        if self._is_performing:
            return  # from within an action: after those that came before
        self._is_performing = True
        try:
            while self._actions:
                self._perform_next(self._actions.popleft())
        finally:
            self._is_performing = False

    def _perform_next(self, action: Action) -> None:
        match action:
            case Send(peer=peer, message=envelope):
                if isinstance(envelope.message, Propose):
                    self._asked_s = self.clock()
                self._post(peer, envelope)
            case Begin():
                self._begin(action)
            case Stop(peer=peer, reason=reason):
                self._stop(peer, reason)
            case Unlink(peer=peer, reason=reason):
                link = self._links.get(peer)
                if link is not None:
                    link.close(reason)
            case Reach(peer=peer, host=host, port=port):
                self.transport.dial(peer, host, port)
            case Rebuilt():
                self._shared.set_speed(action.eta, action.worker_rate)
                self._dialer.want(action.neighbours | action.dead, self.clock())
            case Refresh(peer=peer):
                self._refresh(peer)
            case Superseded():
                raise SupersededError(
                    f"another process of rank {self.protocol.rank} has taken this worker's place "
                    "in the run, so this one ends; start one process a rank"
                )
            case _:
                if isinstance(action, Prepare):  # pending is about to hold sums
                    self.transfers.refuse_parameters("it consolidates")
                self.averaging.perform(action, self.clock())

    # Links.

    def link_up(self, link: Link) -> None:
        now = self.clock()
        self._links[link.peer] = link
        self._dialer.linked(link.peer)
        self.perform(self.protocol.link_up(link.peer, now))
        for data in self._outbox.pop(link.peer, ()):
            link.send_control(data)

    def link_down(self, link: Link, reason: str) -> None:
        now = self.clock()
        peer = link.peer
        self.traffic.bytes_sent += link.bytes_sent
        self.traffic.bytes_received += link.bytes_received
        self.traffic.shared_bytes_sent += link.shared_bytes_sent
        self.traffic.shared_bytes_received += link.shared_bytes_received
        self._links.pop(peer, None)
        self._dialer.unlinked(peer, now)
        self.averaging.link_lost(peer)
        logger.info("worker %d: link to worker %d down: %s", self.protocol.rank, peer, reason)
        self.perform(self.protocol.link_down(peer, now))
        # Crossing dials replace a link; a peer that died refuses the next dial.
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
            self.perform(self.protocol.peer_unreachable(peer, now))
        if refusal.field != "crossed":  # the link that it crossed with is on its way
            # Who has another of this worker's rank may yet learn which of the two stands.
            kind = PeerLostError if refusal.field in REFUSALS_OF_THE_LIVING else RefusedError
            self.transfers.gone(peer, kind(f"worker {peer} refused this worker: {refusal}"))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        if peer is None:
            return
        now = self.clock()
        self._dialer.failed(peer, now)
        if not refused_connection:
            self.perform(self.protocol.peer_unreachable(peer, now))
            return
        self._outbox.pop(peer, None)
        self.perform(self.protocol.peer_dead(peer, now, address))
        self.transfers.dead(peer)

    def _dial(self, now: float) -> None:
        addresses = self.protocol.membership.addresses()
        for peer in self._dialer.due(addresses, now):
            self.transport.dial(peer, *addresses[peer])

    # Control messages.

    def control(self, link: Link, data: bytes) -> None:
        now = self.clock()
        try:
            envelope = decode(data)
        except ProtocolError as error:
            link.close(str(error))
            return
        self.perform(self.protocol.receive(link.peer, envelope, now))
        match envelope.message:
            case RequestState() | StateRefused() | RequestTraining() | OfferTraining() as message:
                self.transfers.receive(link, message)
            case _:
                pass

    def _send(self, peer: int, message: TransferMessage) -> None:
        envelope = self.protocol.wrap(peer, message, self.clock()).message
        self._post(peer, envelope, dial=True)

    def _post(self, peer: int, envelope: Envelope, dial: bool = False) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.send_control(encode(envelope))
        elif dial or isinstance(envelope.message, DIALLED_MESSAGES):
            self._outbox.setdefault(peer, []).append(encode(envelope))
            self._dialer.want([peer], self.clock(), at_once=True)

    # Chunks.

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        match frame_type:
            case FrameType.STATE_CHUNK | FrameType.TRAINING_CHUNK:
                return self.transfers.landing(link, frame_type, key, length)
            case FrameType.PARTIAL_CHUNK | FrameType.RESULT_CHUNK:
                return self.averaging.landing(link.peer, frame_type, key, length)
            case _:
                exchange = self._exchange
                if exchange is None or exchange.link is not link:
                    return None
                return exchange.landing(frame_type, key, length)

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        if payload is None:
            return
        match frame_type:
            case FrameType.STATE_CHUNK | FrameType.TRAINING_CHUNK:
                self.transfers.landed(link, key)
            case FrameType.PARTIAL_CHUNK | FrameType.RESULT_CHUNK:
                self.averaging.landed(link.peer, frame_type, key, self.clock())
            case _:
                exchange = self._exchange
                # It may have been stopped while its chunk was arriving.
                if exchange is not None and exchange.expects(frame_type, key):
                    self._guarded(lambda: exchange.landed(frame_type, key, payload))

    def writable(self, link: Link) -> None:
        self._pump()

    def _pump(self) -> None:
        # On a lost link nothing counts as queued, but the peer may still be reading our slots; the
        # exchange is stopped by link_down, which is on its way.
        if self._exchange is not None and not self._exchange.link.closed:
            self._guarded(self._exchange.pump)
        self.transfers.pump()
        self.averaging.pump()
        exchange = self._exchange
        if exchange is not None and not exchange.link.closed and exchange.is_finished:
            self._finish(exchange)

    # Exchanges.

    def _begin(self, begin: Begin) -> None:
        link = self._links[begin.peer]
        self._exchange_started_s = self.clock()
        # The first snapshots wait for the end of the turn: the answer leaves before they are taken.
        self._exchange = self._wire_format.start(link, begin.id, begin.alpha_tilde)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step of the exchange; poison ends it before anything spreads."""
        try:
            step()
        except PoisonFound as poison:
            exchange = self._exchange
            assert exchange is not None
            if poison.ours:
                self.poison(
                    PoisonedError(
                        f"the parameters of worker {self.protocol.rank} hold NaN or infinity; it "
                        "has stopped exchanging, and nothing of it was sent. Lower the learning "
                        "rate or clip gradients"
                    )
                )
            else:
                self._stop_exchange()
                exchange.link.close("its parameters hold NaN or infinity")
                self.perform(self.protocol.failed(exchange.id, self.clock()))

    def _finish(self, exchange: Exchange) -> None:
        now = self.clock()
        traffic = self.traffic
        traffic.exchange_seconds += now - self._exchange_started_s
        traffic.chunks_exchanged += exchange.num_applied
        traffic.chunks_repeated += exchange.num_repeated
        peer = exchange.link.peer
        initiated = exchange.id.initiator == self.protocol.rank
        traffic.recent_exchanges.append(
            CompletedExchange(
                peer=peer,
                initiated=initiated,
                asked_s=self._asked_s if initiated else None,
                started_s=self._exchange_started_s,
                ended_s=now,
                half_squared_distance=0.5 * exchange.squared_distance,
            )
        )
        traffic.exchanges_by_neighbour[peer] = traffic.exchanges_by_neighbour.get(peer, 0) + 1
        self._stop_exchange()
        self.perform(self.protocol.finished(exchange.id, now))

    def _stop(self, peer: int, reason: str) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.link.peer == peer:
            logger.info(
                "worker %d: exchange with worker %d stopped after %d of %d chunks: %s",
                self.protocol.rank,
                peer,
                exchange.num_applied,
                len(self._shared.state.chunks),
                reason,
            )
            self._stop_exchange()
        link = self._links.get(peer)
        if link is not None:
            link.close(reason)

    def _stop_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.end()
            self._exchange = None

    # States.

    def _refresh(self, peer: int) -> None:
        """Take over the parameters of ``peer``; see ``SharedState.take_over`` for the races.

        A poisoned worker's x is written too: its main thread does nothing but wait.
        """
        poisoned = self.poisoned

        def on_end(error: Exception | None) -> None:
            now = self.clock()
            self._refresh_end = None
            if error is not None:
                logger.warning("worker %d: no refresh: %s", self.protocol.rank, error)
                self.perform(self.protocol.refresh_failed(peer, now))
                return
            logger.info("worker %d took over the parameters of %d", self.protocol.rank, peer)
            self.noticed.note(self.protocol.rank, "refreshed", now)
            if self.poisoned is poisoned:
                self.poisoned = None
            self.perform(self.protocol.refreshed(now))

        self._refresh_end = on_end
        sink = self._shared.take_over if poisoned is None else self._shared.replace
        self.transfers.fetch(peer, sink, on_end, self.protocol.timeout_s)

    def _refusal_to_give(self) -> str | None:
        if self.protocol.can_donate:
            return None
        return str(self.poisoned or "its parameters are not to be taken over just now")
