"""The TCP transport: one non-blocking poll loop that owns all sockets of a worker.

Every wait has a deadline, and an error of a socket ends that link or dial and nothing else. A
connection begins as an :class:`~.opening.Opening` and, once its handshake is done, becomes a
:class:`~.tcp_link.TcpLink`. The cost of strangers is bounded: the number of accepted connections,
and for each its time, the bytes read, the memory allocated and the lines logged.

If two workers dial each other, the link dialled by the lower rank stays: the higher lets it replace
its own and gives up its dial, and the lower refuses the higher's dial while its own link to that
process is up. Another process of the peer always replaces the old.
"""

import errno
import ipaddress
import logging
import math
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Literal, final

import msgspec

from gossipdp.links import sockets
from gossipdp.links.clock import since_boot_s
from gossipdp.links.frames import run_tag
from gossipdp.links.handshake import Handshake, HandshakeError, Identity, Refusal
from gossipdp.links.link import LinkHandler, SendLimit, Transport
from gossipdp.links.opening import Opening
from gossipdp.links.shared_memory import SlotMemory
from gossipdp.links.sockets import Listener
from gossipdp.links.tcp_link import LinkOwner, TcpLink
from gossipdp.links.tls import Tls
from gossipdp.logs import OnceLog

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 64
# Bytes read from a stranger that is refused, so that it hears why before the reset.
MAX_EMPTIED_BYTES = 64 << 10
SCRATCH_BYTES = 256 << 10
# The pause in accepting connections when the process has no descriptor left.
LISTENER_REST_S = 0.2

_EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


@final
class TcpTransport(Transport, LinkOwner, sockets.DescriptorOwner):
    """A transport that listens, dials, and moves frames between links and one handler.

    Args:
        handler: receives all events; see :mod:`.link` for the guarantees.
        identity: this worker's hello; the transport fills in ``host`` and ``port`` of its listener
            (a ``host`` that is given stays: the address that others are to dial).
        secret: shared by all workers of the run; not used with ``tls``.
        listener: from :func:`~.sockets.listen`; the transport closes it.
        clock: seconds, monotonic; the handler's own, which looks at ``last_heard_s``.
        max_bytes_per_s: the limit on the bytes that all links together send, handshakes aside;
            None for none.
        shared_memory: "auto": workers of one host read each other's exchange chunks in place, if
            the system has sealed memory and sending is not limited; "off": all chunks are sent.

    Attributes:
        links: the link to each peer that has one. ``link_up`` may still be on its way.
        dial_fault: why a dial failed at once, of the last that did; a refused connection is none.
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
        max_bytes_per_s: float | None = None,
        shared_memory: Literal["auto", "off"] = "auto",
    ) -> None:
        self._closed = True  # until there is something to close
        bound_host, bound_port = listener.getsockname()[:2]
        self.identity = msgspec.structs.replace(
            identity, host=identity.host or bound_host, port=bound_port
        )
        self.handler, self.clock = handler, clock
        self.tag = run_tag(identity.run_id)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._secret = secret if tls is None else None
        self._tls = tls
        self.limit = None if max_bytes_per_s is None else SendLimit(max_bytes_per_s)
        self.links: dict[int, TcpLink] = {}
        self.dial_fault = ""
        self._openings: dict[Opening, None] = {}  # the oldest first
        self._by_descriptor: dict[int, TcpLink | Opening] = {}  # all that is open
        self._notices: deque[Callable[[], None]] = deque()
        self.to_read: dict[Any, None] = {}  # links and openings
        self.to_write: dict[TcpLink, None] = {}
        self._accept_due = False
        self._listener_rests_until_s = -math.inf
        self._log = OnceLog(logging.getLogger("gossipdp"))
        # Race: between wake()'s test and its write another thread's close() could close the
        # descriptor, and the system reuse its number. Re-entrant, so that a signal handler does not
        # wait for its own thread.
        self._wake_guard = threading.RLock()
        self._listener = listener
        may_share = shared_memory == "auto" and max_bytes_per_s is None
        with sockets.descriptors_guard:
            self._epoll = select.epoll()
            self.memory = SlotMemory(self._log, may_share=may_share, handler=handler)
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            sockets.register(self)
            self._closed = False
        # Edge-triggered too, so that the counter need not be read back, and a listener that cannot
        # accept does not end every wait at once.
        for source in (self._listener, self._wake_descriptor):
            self._epoll.register(source, select.EPOLLIN | select.EPOLLET)

    def flush(self) -> None:
        self._write(acknowledge=True)
        self._tell()

    def poll(self, timeout_s: float) -> None:
        assert not self._closed
        if self._write(acknowledge=True) | self._tell():
            timeout_s = 0.0  # the caller may have waited for just that
        if not self._closed:
            self._collect_events(timeout_s)
            if self._accept_due and self.clock() >= self._listener_rests_until_s:
                self._accept()
            # If the other end was quick, the link and its first frame may be here already.
            self._tell()
        if not self._closed:
            self._read()
        if not self._closed:
            now = self.clock()
            for opening in list(self._openings):  # all have as much time: the oldest first
                if opening.deadline_s > now:
                    break
                self._end(opening, f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s")
            # Acknowledgements that are owed may yet ride on the caller's next frames.
            self._write(acknowledge=False)
            self._tell()

    def wake(self) -> None:
        # A forked child, in which the guard may be taken for ever, finds the transport closed.
        if self._closed:
            return
        with self._wake_guard:
            if not self._closed:
                with suppress(BlockingIOError):  # the counter is full, so a wake-up is pending
                    os.eventfd_write(self._wake_descriptor, 1)

    def close(self) -> None:
        if self._closed:
            return
        for link in list(self.links.values()):
            link.flush_controls()
            sockets.empty(link.connection, self.scratch)
        with sockets.descriptors_guard, self._wake_guard:
            self._closed = True
            for each in self._by_descriptor.values():
                each.connection.close()
            self._listener.close()
            self._epoll.close()
            os.close(self._wake_descriptor)
        for link in list(self.links.values()):
            link.end("this worker closed its transport")
        self.memory.abandon()
        self.links.clear()
        self._notices.clear()

    def close_in_child(self) -> None:
        """Close every descriptor but the listener's, which sees to itself in a child.

        Sockets are detached first: a socket object closed later, by the collector, must not close
        a number that the child has meanwhile given to a file of its own.
        """
        if self._closed:
            return
        self._closed = True
        for each in self._by_descriptor.values():
            sockets.close_descriptor(each.connection.detach())
        self._epoll.close()
        sockets.close_descriptor(self._wake_descriptor)

    def __del__(self) -> None:
        """Close a transport that its owner forgot."""
        self.close()

    def allocate(self, num_bytes: int) -> memoryview:
        assert not self._closed
        before = self.memory.segment
        memory = self.memory.allocate(num_bytes)
        if self.memory.segment is not before:
            # A link whose peer reads nothing may end here, and the memory be abandoned at once.
            for link in list(self.links.values()):
                link.offer_memory()
        return memory

    # Links.

    def link_ended(self, link: TcpLink, reason: str, *, broken: bool) -> None:
        if self._closed:
            return
        if broken:
            who = f"rank {link.peer} at {link.peer_identity.host}"
            self._log.warn_once("broken", who, "ended the link to %s: %s", who, reason)
        self.to_read.pop(link, None)
        self.to_write.pop(link, None)
        if self.limit is not None:
            self.limit.held.pop(link, None)
        with sockets.descriptors_guard:
            if self.links.get(link.peer) is link:
                del self.links[link.peer]
            self._close_connection(link.connection, link.connection.fileno())
        self._notices.append(partial(self.handler.link_down, link, reason))

    def _establish(self, opening: Opening) -> None:
        """Make a link of an opening whose handshake is done; it replaces an older one."""
        handshake = opening.handshake
        peer, mine = handshake.peer, self.identity.rank
        assert peer is not None
        assert opening.stream is not None
        old = self.links.get(peer.rank)
        if old is not None:
            if peer.incarnation < old.peer_identity.incarnation:
                self._release(opening)
                return
            old.end("replaced by a newer link")
        if not handshake.dialler and peer.rank < mine:
            for dial in self._dials_to(peer.rank):
                self._release(dial)
        link = TcpLink(self, opening.stream, peer, mine if handshake.dialler else peer.rank)
        self.links[peer.rank] = self._by_descriptor[opening.descriptor] = link
        del self._openings[opening]
        self.to_read[link] = None
        self._notices.append(partial(self.handler.link_up, link))
        link.offer_memory()

    # Openings.

    def dial(self, peer: int | None, host: str, port: int) -> None:
        assert not self._closed
        if peer is not None and self._dials_to(peer):
            return
        opening = None
        try:
            # Only numeric hosts, as in every hello: to look a name up may block for seconds.
            version = ipaddress.ip_address(host).version
            if not 0 < port < 65536:
                raise ValueError(f"port {port} is not in 1..65535")
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            with sockets.descriptors_guard:
                connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                opening = self._begin(connection, (host, port), True, peer)
            code = connection.connect_ex((host, port))
        except (ValueError, OSError) as error:  # such as an IPv6 address with a foreign zone
            self.dial_fault = f"{host}:{port}: {error}"
            if peer is not None:  # a visitor, which may know other addresses, says it at its end
                self._log.warn_once("dial", host, "cannot dial %s", self.dial_fault)
            if opening is not None:
                self._release(opening)
            self._note_failure(peer, (host, port), False)
            return
        if code not in (0, errno.EINPROGRESS):
            refused = code == errno.ECONNREFUSED
            fault = "" if refused else os.strerror(code)
            if fault:
                self.dial_fault = f"{host}:{port}: {fault}"
            self._end(opening, fault if peer is not None else "", is_nobody_there=refused)

    def _note_failure(self, peer: int | None, address: tuple[str, int], refused: bool) -> None:
        if peer not in self.links:
            self._notices.append(partial(self.handler.dial_failed, peer, address, refused))

    def _dials_to(self, peer: int) -> list[Opening]:
        return [each for each in self._openings if each.handshake.wanted_rank == peer]

    def _begin(
        self, connection: socket.socket, address: tuple[str, int], dialler: bool, wanted: int | None
    ) -> Opening:
        handshake = Handshake(
            self.identity, self._secret, dialler=dialler, wanted_rank=wanted, admit=self._admit
        )
        deadline_s = self.clock() + HANDSHAKE_TIMEOUT_S
        opening = Opening(connection, handshake, address, deadline_s, self._tls)
        try:
            sockets.set_options(connection, address[0])
            self._epoll.register(connection, _EDGE)
        except OSError:
            connection.close()
            raise
        self._by_descriptor[opening.descriptor] = opening
        self._openings[opening] = None
        return opening

    def _accept(self) -> None:
        try:
            for _ in range(sockets.BACKLOG):
                with sockets.descriptors_guard:
                    try:
                        connection, address = self._listener.accept()
                    except BlockingIOError:
                        self._accept_due = False
                        return
                    except ConnectionError:
                        continue  # it was gone before we looked
                    opening = self._begin(connection, address[:2], False, None)
                # Read what it has sent by now: that counts when one must go.
                self._advance(opening)
                if len(self._accepted()) > MAX_UNAUTHENTICATED:
                    self._drop_one("too many unauthenticated connections")
        except OSError as error:
            # Out of descriptors or memory: free one, and look again a little later.
            text = "cannot accept connections: %s"
            self._log.warn_once("accept", str(error.errno), text, error.strerror)
            self._listener_rests_until_s = self.clock() + LISTENER_REST_S
            self._drop_one("no descriptor left")

    def _accepted(self) -> list[Opening]:
        return [opening for opening in self._openings if not opening.handshake.dialler]

    def _drop_one(self, reason: str) -> None:
        """Close the oldest accepted opening of those that have shown least: strangers go first."""
        accepted = self._accepted()
        if accepted:
            self._end(min(accepted, key=lambda opening: opening.trust_level), reason)

    def _advance(self, opening: Opening) -> None:
        """Carry an opening as far as it goes without waiting."""
        try:
            opening.advance()
        except BlockingIOError:
            pass
        except (ConnectionError, EOFError) as error:  # as happens in a healthy run
            self._end(opening, is_nobody_there=isinstance(error, ConnectionRefusedError))
        except HandshakeError as error:
            self._end(opening, str(error))
        except OSError as error:
            self._end(opening, error.strerror or str(error))
        else:
            if opening.handshake.refusal is None:
                self._establish(opening)
            else:
                self._end(opening)

    def _admit(self, peer: Identity) -> Refusal | None:
        """Refuse a member that is outdated; abort if our own link to it takes precedence."""
        old = self.links.get(peer.rank)
        if old is not None:
            held = old.peer_identity
            if peer.incarnation < held.incarnation:
                return Refusal("incarnation", str(held.incarnation), str(peer.incarnation))
            same_life = (held.incarnation, held.process_id) == (peer.incarnation, peer.process_id)
            if same_life and old.dialler == self.identity.rank < peer.rank:
                raise ConnectionAbortedError  # its dial comes to nothing, and it may try again
        return None

    def _end(self, opening: Opening, fault: str = "", *, is_nobody_there: bool = False) -> None:
        """End an opening that made no link.

        ``fault`` is logged. ``is_nobody_there``: no process listens at the address dialled.
        """
        handshake, who, refusal = opening.handshake, opening.who, opening.handshake.refusal
        if handshake.dialler:
            self._release(opening)
            peer = handshake.wanted_rank
            at = who if peer is None else f"rank {peer} at {who}"
            if fault:
                self._log.warn_once("dial", who, "dialling %s: %s", at, fault)
            if refusal is None:
                self._note_failure(peer, opening.address, is_nobody_there)
                return
            if peer is not None:  # a visitor raises it
                self._log.warn_once(refusal.field, who, "%s refuses: %s", at, refusal)
            self._notices.append(partial(self.handler.refused, peer, refusal))
            return
        sockets.empty(opening.connection, self.scratch, MAX_EMPTIED_BYTES)
        self._release(opening)
        if fault:
            self._log.warn_once("drop", who, "dropped %s: %s", who, fault)
        # An empty run id is the question of a launcher that joins workers (`ask_join_infos`).
        if refusal is not None and (refusal.field, refusal.theirs) != ("run_id", ""):
            if handshake.peer is not None and not handshake.peer.is_visitor:
                who = f"rank {handshake.peer.rank} at {who}"
            name = "TLS" if refusal.field == "tls" else refusal.field
            reason = f"{name} differs (ours {refusal.ours!r}, theirs {refusal.theirs!r})"
            if refusal.field == "secret":
                reason = "it does not know this run's secret"
            self._log.warn_once(refusal.field, who, "refused %s: %s", who, reason)

    def _release(self, opening: Opening) -> None:
        """Forget an opening and close its socket, in one step for a fork."""
        with sockets.descriptors_guard:
            del self._openings[opening]
            self._close_connection(opening.connection, opening.descriptor)

    def _close_connection(self, connection: socket.socket, descriptor: int) -> None:
        del self._by_descriptor[descriptor]
        if connection.fileno() >= 0:  # else lost on its way into TLS, and closed there
            # Unregister explicitly: a forked child that has not closed its copy yet keeps the
            # connection, and with it the registration, alive.
            self._epoll.unregister(connection)
            connection.close()

    # A turn of the loop.

    def _tell(self) -> bool:
        """Deliver the queued notices to the handler, oldest first; return True if there was one.

        Links go up and down only here, so no handler method is entered twice however it uses
        ``close()``. Frames are read only after this, so ``link_up`` comes before the first.
        """
        had_notices = bool(self._notices)
        while self._notices:
            self._notices.popleft()()
        return had_notices

    def _write(self, acknowledge: bool) -> bool:
        """Write on every link that has output and room; return True if there was one."""
        if self.limit is not None and (link := self.limit.next_held(self.clock())) is not None:
            self.to_write[link] = None
        had_output = any(link.has_output for link in self.to_write)
        for link in list(self.to_write):
            # Remove it only afterwards: if the handler raises, the rest is written next time.
            link.write_some(acknowledge)
            if not (link.has_output or link.owes):
                self.to_write.pop(link, None)
        return had_output

    def _collect_events(self, timeout_s: float) -> None:
        """Sleep, then turn all events into flags before any callback runs.

        So an exception loses no edge, and no event reaches a new owner of a descriptor's number.
        """
        due_s = [opening.deadline_s for opening in islice(self._openings, 1)]  # the oldest
        if self._accept_due:
            due_s.append(self._listener_rests_until_s)
        if self.limit is not None and self.limit.held:
            due_s.append(self.limit.opens_at(self.clock()))
        if due_s:
            timeout_s = min(timeout_s, min(due_s) - self.clock())
        if self.to_read or self.to_write:
            timeout_s = 0.0
        events = self._epoll.poll(max(0.0, timeout_s))
        if timeout_s > 0.0 and not events:  # what has come may be too little for an event
            for link in self.links.values():
                if link.stream.gathers:
                    link.can_read = True
                    self.to_read[link] = None
        for descriptor, mask in events:
            source = self._by_descriptor.get(descriptor)
            if isinstance(source, TcpLink):
                source.hung_up = source.hung_up or bool(mask & select.EPOLLRDHUP)
                if mask & select.EPOLLIN:  # comes with an end of stream and an error too
                    source.can_read = True
                    self.to_read[source] = None
                if mask & select.EPOLLOUT:
                    source.can_write = True
                    if source.has_output or source.owes:
                        self.to_write[source] = None
            elif source is not None:
                self.to_read[source] = None
            elif descriptor == self._listener.fileno():
                self._accept_due = True

    def _read(self) -> None:
        for source in list(self.to_read):
            if self._closed:
                return
            if isinstance(source, Opening):
                self.to_read.pop(source, None)
                if source in self._openings:  # else closed since its event
                    self._advance(source)
            else:
                source.read_some()
                if not source.has_input:
                    self.to_read.pop(source, None)
            self._tell()
