"""The TCP transport: one non-blocking poll loop that owns all sockets of a worker.

Used from one thread, except :meth:`TcpTransport.wake`. Everything that waits has a deadline, and
every error of a socket ends that link or dial and nothing else.

A connection begins as an :class:`~.openings.Opening` and, once its handshake is done, becomes a
:class:`~.tcp_link.TcpLink`.
"""

import ipaddress
import logging
import mmap
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal, final

import msgspec

from gossipdp.links import fork, shared_offers, sockets
from gossipdp.links.clock import since_boot_s
from gossipdp.links.frames import run_tag
from gossipdp.links.handshake import Identity
from gossipdp.links.link import LinkHandler, Transport
from gossipdp.links.openings import (
    MAX_UNAUTHENTICATED,
    DialEnded,
    Opening,
    Openings,
)
from gossipdp.links.shared_memory import SharedSegment
from gossipdp.links.sockets import Listener, listen
from gossipdp.links.strangers import OnceLog
from gossipdp.links.tcp_link import LinkOwner, TcpLink
from gossipdp.links.tls import Tls

__all__ = ["TcpTransport", "listen"]

SharedMemory = Literal["auto", "off"]

SCRATCH_BYTES = 256 << 10
# How long the listener rests when the process has no descriptor left.
LISTENER_REST_S = 0.2

_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


@final
class TcpTransport(Transport, LinkOwner, fork.DescriptorOwner):
    """Listens, dials, and moves frames between links and one handler.

    Args:
        handler: is told of everything; see :mod:`~gossipdp.links.link` for the guarantees.
        identity: this worker's hello; its ``host`` and ``port`` are filled in with where it
            listens (an own ``host`` is kept: the address that others are to dial).
        secret: shared by all workers of the run; with ``tls`` it is not looked at.
        listener: from :func:`listen`; the transport closes it.
        tls: what all links go through; None: in the clear.
        clock: seconds, monotonic; the handler's own, which looks at ``last_heard_s``.
        max_unauthenticated: of accepted connections beyond this many, one is closed: the oldest
            of those that have shown least.
        max_bytes_per_s: what each link sends at most; None for no cap.
        shared_memory: "auto": workers of one host read each other's exchange chunks in place,
            where the system has what it takes; "off": all chunks are sent. With a cap on what a
            link sends there is none either.

    Attributes:
        segment: what peers of this host may read; None: nothing.
    """

    def __init__(
        self,
        handler: LinkHandler,
        identity: Identity,
        secret: bytes,
        listener: Listener,
        *,
        tls: Tls | None = None,
        clock: Callable[[], float] = since_boot_s,
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
        max_bytes_per_s: float | None = None,
        shared_memory: SharedMemory = "auto",
    ) -> None:
        self._closed = True  # until there is something to close
        bound_host, bound_port = listener.getsockname()[:2]
        if not identity.host and ipaddress.ip_address(bound_host).is_unspecified:
            raise ValueError(f"listening on {bound_host}: say in identity.host where to dial us")
        self.identity = msgspec.structs.replace(
            identity, host=identity.host or bound_host, port=bound_port
        )
        self.handler = handler
        self.tag = run_tag(identity.run_id)
        self.clock = clock
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.segment: SharedSegment | None = None
        self._memory: memoryview | None = None
        self._num_segments = 0
        self._may_share = shared_memory == "auto" and max_bytes_per_s is None
        self._offers: shared_offers.Offers | None = None
        self._offers_due = False
        self._polling = False
        self._links: dict[int, TcpLink] = {}
        self._by_descriptor: dict[int, TcpLink] = {}
        self._notices: deque[Callable[[], None]] = deque()
        self._to_read: dict[TcpLink | Opening, None] = {}
        self._to_write: dict[TcpLink, None] = {}
        self._accept_due = False
        self._listener_rests_until_s: float | None = None
        self._log = OnceLog(logging.getLogger("gossipdp"))
        # Keeps close() in another thread from closing the descriptor, and the system from giving
        # its number away, between wake()'s test and its write. Re-entrant, so that a signal handler
        # does not wait for its own thread.
        self._wake_guard = threading.RLock()
        self._listener = listener
        with fork.descriptors_guard:
            self._epoll = select.epoll()
            self._openings = Openings(
                self.identity,
                secret,
                tls,
                links=self._links,
                epoll=self._epoll,
                clock=clock,
                log=self._log,
                max_accepted=max_unauthenticated,
                max_bytes_per_s=max_bytes_per_s,
            )
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            fork.register(self)
            self._closed = False
        self._epoll.register(self._listener, select.EPOLLIN)
        # Edge-triggered, so that the counter need not be read back.
        self._epoll.register(self._wake_descriptor, select.EPOLLIN | select.EPOLLET)

    @property
    def links(self) -> Mapping[int, TcpLink]:
        """The link to each peer that has one. ``link_up`` may still be on its way."""
        return MappingProxyType(self._links)

    def allocate(self, num_bytes: int) -> memoryview:
        """See :class:`Transport`."""
        assert self._is_open()
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        self._memory = self._allocate_shared(num_bytes)
        if self._memory is None:
            private = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory = memoryview(private)
        return self._memory

    def dial(self, peer: int | None, host: str, port: int) -> None:
        """See :class:`Transport`."""
        assert self._is_open()
        self._take(self._openings.dial(peer, host, port))

    def poll(self, timeout_s: float) -> None:
        """See :class:`Transport`."""
        assert self._is_open()
        assert not self._polling, "poll() called from a handler"
        self._polling = True
        try:
            if self._write(acknowledge=True) | self._tell():
                timeout_s = 0.0  # the caller may have waited for just that
            if not self._is_open():
                return
            self._collect_events(timeout_s)
            if self._accept_due:
                self._accept_due = False
                self._accept()
            if self._offers_due:
                self._take_offers()
            # A link may be there already, and its first frame: the other end was quick, or we slow.
            self._tell()
            if not self._is_open():
                return
            self._read()
            if not self._is_open():
                return
            for ended in self._openings.expire():
                self._take(ended)
            # What is owed may yet ride on what the caller sends next.
            self._write(acknowledge=False)
            self._tell()
        finally:
            self._polling = False

    def wake(self) -> None:
        """See :class:`Transport`.

        A forked child, where another thread may have left the guard taken for ever, finds the
        transport closed before it gets there.
        """
        if self._closed:
            return
        with self._wake_guard:
            if not self._closed:
                try:
                    os.eventfd_write(self._wake_descriptor, 1)
                except BlockingIOError:
                    pass  # the counter is full, so a wake-up is pending

    def close(self) -> None:
        """See :class:`Transport`."""
        if self._closed:
            return
        for link in list(self._links.values()):
            link.flush_controls()
            sockets.empty(link.connection, self.scratch)
        with fork.descriptors_guard, self._wake_guard:
            self._closed = True
            for connection in self._connections():
                connection.close()
            self._listener.close()
            if self._offers is not None:
                self._offers.close()
            self._epoll.close()
            os.close(self._wake_descriptor)
        for link in list(self._links.values()):
            link.end("this worker closed its transport")
        self._links.clear()
        self.segment = self._memory = None
        self._openings.clear()
        self._by_descriptor.clear()
        self._to_read.clear()
        self._to_write.clear()
        self._notices.clear()

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.links.fork.DescriptorOwner`.

        Sockets are detached first: a socket object closed later, by the collector, must not close
        a number that the child has meanwhile given to a file of its own.
        """
        if self._closed:
            return
        self._closed = True
        for connection in self._connections():
            fork.close_descriptor(connection.detach())
        if self._offers is not None:
            self._offers.close_in_child()
        self._epoll.close()
        fork.close_descriptor(self._wake_descriptor)

    def __del__(self) -> None:
        """Close what the owner forgot."""
        self.close()

    def _is_open(self) -> bool:
        return not self._closed

    def _connections(self) -> list[socket.socket]:
        return [
            *(link.connection for link in self._links.values()),
            *(opening.connection for opening in self._openings),
        ]

    # What links ask for.

    def link_has_output(self, link: TcpLink) -> None:
        """See :class:`LinkOwner`."""
        self._to_write[link] = None

    def link_has_input(self, link: TcpLink) -> None:
        """See :class:`LinkOwner`."""
        self._to_read[link] = None

    def link_ended(self, link: TcpLink, reason: str, *, broken: bool, unread: bool) -> None:
        """See :class:`LinkOwner`."""
        if unread:
            # The peer may be in the middle of a read, stopped there perhaps, and apply what it
            # reads when it goes on. So nothing is written there any more: the next exchange gets
            # another segment, and this one ends when the peer has let go of it too.
            self.segment = self._memory = None
        if self._closed:
            return
        if broken:
            who = f"rank {link.peer} at {link.peer_identity.host}"
            self._log.warn_once("broken", who, "ended the link to %s: %s", who, reason)
        self._to_read.pop(link, None)
        self._to_write.pop(link, None)
        self._by_descriptor.pop(link.connection.fileno(), None)
        with fork.descriptors_guard:
            # Unregistered by hand: a forked child that has not closed its copy yet keeps the
            # connection, and with it the registration, alive.
            self._epoll.unregister(link.connection)
            link.connection.close()
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._notices.append(partial(self.handler.link_down, link, reason))

    # Memory that peers of this host read.

    def _allocate_shared(self, num_bytes: int) -> memoryview | None:
        """A fresh segment, offered to the peers of this host; None: none can be had."""
        self.segment = None
        if not self._may_share:
            return None
        try:
            if self._offers is None:
                self._offers = shared_offers.Offers(self._log, self._epoll)
                for link in self._links.values():
                    link.invite(self._offers.name)
            self.segment = SharedSegment(num_bytes, self._num_segments + 1)
        except (OSError, AttributeError) as error:  # AttributeError: not on this system
            self._may_share = False
            text = "no memory is shared with workers of this host: %s"
            self._log.warn_once("memory", "none", text, error)
            return None
        self._num_segments += 1
        for link in self._links.values():
            self.link_found_memory_socket(link)
        return self.segment.memory

    def link_found_memory_socket(self, link: TcpLink) -> None:
        """See :class:`LinkOwner`: offer our segment to the peer, unless it has been."""
        segment = self.segment
        if segment is None or not link.memory_socket or link.shared.offered == segment.number:
            return
        try:
            if shared_offers.offer(segment, link.memory_socket):
                link.shared.offered = segment.number
            else:
                link.memory_socket = b""  # on another host
        except OSError as error:
            text = "cannot share memory with rank %s: %s"
            self._log.warn_once("memory", f"{link.peer}: {error}", text, link.peer, error)

    def _take_offers(self) -> None:
        assert self._offers is not None
        by_token = {link.memory_token: link for link in self._links.values()}
        for offer in self._offers.take(by_token):
            by_token[offer.token].map(offer.number, offer.memory)
        self._offers_due = False

    # A turn of the loop.

    def _tell(self) -> bool:
        """Deliver what has queued up for the handler, oldest first. Whether there was anything.

        Links go up and down only here, between callbacks, so no handler method is entered twice
        however it uses ``close()``; and a new link's ``link_up`` comes before its first frame,
        since frames are read only after this.
        """
        told = bool(self._notices)
        while self._notices:
            self._notices.popleft()()
        return told

    def _write(self, acknowledge: bool) -> bool:
        """Write on every link that has output and room. Whether there was one."""
        had_output = any(link.has_output for link in self._to_write)
        for link in list(self._to_write):
            # Removed only afterwards: should the handler raise, the rest is written next time.
            link.write_some(acknowledge)
            if not (link.has_output or link.owes):
                self._to_write.pop(link, None)
        return had_output

    def _collect_events(self, timeout_s: float) -> None:
        """Sleep, then turn events into flags before any callback runs.

        So an exception loses no edge, and a descriptor that is closed and given out again by a
        callback cannot receive an event of its former owner.
        """
        now = self.clock()
        if self._listener_rests_until_s is not None and now >= self._listener_rests_until_s:
            self._listener_rests_until_s = None
            self._epoll.register(self._listener, select.EPOLLIN)
        for due_s in (self._listener_rests_until_s, self._openings.next_deadline_s()):
            if due_s is not None:
                timeout_s = min(timeout_s, due_s - now)
        if self._to_read or self._to_write or self._accept_due or self._offers_due:
            timeout_s = 0.0
        for descriptor, mask in self._epoll.poll(max(0.0, timeout_s)):
            if descriptor == self._listener.fileno():
                self._accept_due = True
            elif (link := self._by_descriptor.get(descriptor)) is not None:
                link.hung_up = link.hung_up or bool(mask & _HUNG_UP)
                either = link.stream.mixes_directions
                if either or mask & (select.EPOLLIN | _HUNG_UP):
                    link.can_read = True
                    self._to_read[link] = None
                if either or mask & select.EPOLLOUT:
                    link.can_write = True
                    if link.has_output or link.owes:
                        self._to_write[link] = None
            elif (opening := self._openings.find(descriptor)) is not None:
                self._to_read[opening] = None
            elif self._offers is not None and self._offers.owns(descriptor):
                self._offers_due = True

    def _read(self) -> None:
        for source in list(self._to_read):
            if not self._is_open():
                return
            if isinstance(source, Opening):
                self._to_read.pop(source, None)
                self._take(self._openings.advance(source))
            else:
                source.read_some()
                if not source.has_input:
                    self._to_read.pop(source, None)
            self._tell()

    def _accept(self) -> None:
        try:
            for _ in range(sockets.BACKLOG):
                opening = self._openings.accept(self._listener)
                if opening is None:
                    return
                # What it has said by now counts when one must go.
                self._take(self._openings.advance(opening))
                self._openings.limit()
        except OSError as error:
            # Out of descriptors or memory: free one, and look again a little later.
            text = "cannot accept connections: %s"
            self._log.warn_once("accept", str(error.errno), text, error.strerror)
            self._epoll.unregister(self._listener)
            self._listener_rests_until_s = self.clock() + LISTENER_REST_S
            self._openings.drop_one("no descriptor left")

    def _take(self, outcome: Opening | DialEnded | None) -> None:
        """Go on with what became of an opening."""
        if isinstance(outcome, Opening):
            self._establish(outcome)
        elif outcome is not None:
            peer, address, refusal, refused_connection = outcome
            if refusal is not None:
                self._notices.append(partial(self.handler.refused, peer, refusal))
            elif peer not in self._links:
                failed = partial(self.handler.dial_failed, peer, address, refused_connection)
                self._notices.append(failed)

    def _establish(self, opening: Opening) -> None:
        """Make a link of an opening whose handshake is done; it replaces an older one."""
        handshake = opening.handshake
        peer, mine = handshake.peer, self.identity.rank
        assert peer is not None
        old = self._links.get(peer.rank)
        if old is not None:
            if peer.incarnation < old.peer_identity.incarnation:
                self._openings.release(opening)
                return
            old.end("replaced by a newer link")
        if not handshake.dialler and peer.rank < mine:
            self._openings.end_dials(peer.rank)
        assert opening.stream is not None
        link = TcpLink(self, opening.stream, peer, mine if handshake.dialler else peer.rank)
        # Listed as a link before it ceases to be listed as an opening, for a fork in between.
        self._links[peer.rank] = link
        self._openings.forget(opening)
        self._by_descriptor[link.connection.fileno()] = link
        self._to_read[link] = None
        self._notices.append(partial(self.handler.link_up, link))
        if self._offers is not None:
            link.invite(self._offers.name)
