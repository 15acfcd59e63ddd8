"""Connections that are not links yet: accepted or dialled, then TLS if there is any, then our
handshake.

Everything here deals with strangers, so all of it is bounded: the number of accepted connections,
the time each may take, the bytes read of each, what is allocated for it (of TLS nothing before its
first byte) and what is logged of it. Nothing here waits.

Where both of two workers dial, the link dialled by the lower rank stays: the lower turns the
higher's dial away while its own has got through or its link is up, and the higher gives up its own
dial once a link that the lower dialled is up. Another process of the peer always replaces the old.
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, final

from gossipdp.links import fork, sockets
from gossipdp.links.handshake import MAGIC, Handshake, HandshakeError, Identity, Refusal, Stage
from gossipdp.links.sockets import PlainStream, Stream
from gossipdp.links.strangers import OnceLog
from gossipdp.links.tcp_link import TcpLink
from gossipdp.links.tls import Tls, TlsStream

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 64
# What is read of a stranger that is turned away, so that it hears why before the reset.
MAX_EMPTIED_BYTES = 64 << 10

# Said by the acceptor to a worker whose link it does not want because its own is on its way.
CROSSED = Refusal("crossed")

_EDGE = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


@final
class Opening:
    """A connection whose handshake is not over.

    Attributes:
        handshake: ours.
        there: host and port of the other end.
        deadline_s: when it is given up, by the transport's clock.
        connected: whether the dial has got through.
        stream: what carries the handshake; None until that is known.
        has_spoken: whether the other end has said a byte that TLS may begin with.
        output: bytes of the handshake still to be sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        handshake: Handshake,
        there: tuple[str, int],
        deadline_s: float,
    ) -> None:
        self.handshake = handshake
        self.there = there
        self.deadline_s = deadline_s
        self.connected = not handshake.dialler
        self.stream: Stream | None = None
        self.has_spoken = False
        self.output = b""
        self._connection = connection

    @property
    def connection(self) -> socket.socket:
        """The socket, whose object TLS replaces by one of its own."""
        return self._connection if self.stream is None else self.stream.connection

    @property
    def wanted(self) -> int | None:
        """Whom a dial wants to reach."""
        return self.handshake.wanted_rank

    @property
    def who(self) -> str:
        """The other end for messages: without the port where it dialled us."""
        host, port = self.there
        return f"{host}:{port}" if self.handshake.dialler else host

    @property
    def standing(self) -> int:
        """What it has shown so far: nothing; a TLS hello; that it knows the run's id."""
        return 2 if self.handshake.stage is not Stage.OPENING else int(self.has_spoken)


class DialEnded(NamedTuple):
    """A dial that made no link: refused for a reason, or failed."""

    peer: int | None
    address: tuple[str, int]
    refusal: Refusal | None = None
    refused_connection: bool = False


@final
class Openings:
    """All openings of one transport.

    Args:
        identity: this worker's hello.
        secret: shared by all workers of the run; not looked at with ``tls``.
        tls: None: in the clear.
        links: the links there are, by peer.
        epoll: watches every socket.
        clock: seconds, monotonic.
        log: for what a stranger does.
        max_accepted: beyond this many accepted ones, the oldest of those that have shown least
            is closed.
        max_bytes_per_s: see :class:`~gossipdp.links.tcp.TcpTransport`.

    Attributes:
        accepted, dials: in order of age.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        tls: Tls | None,
        *,
        links: Mapping[int, TcpLink],
        epoll: select.epoll,
        clock: Callable[[], float],
        log: OnceLog,
        max_accepted: int,
        max_bytes_per_s: float | None,
    ) -> None:
        self.accepted: dict[Opening, None] = {}
        self.dials: dict[Opening, None] = {}
        self._identity = identity
        self._secret = secret if tls is None else None
        self._tls = tls
        self._links = links
        self._epoll = epoll
        self._clock = clock
        self._log = log
        self._max_accepted = max_accepted
        self._max_bytes_per_s = max_bytes_per_s
        self._scratch = memoryview(bytearray(MAX_EMPTIED_BYTES))
        self._by_descriptor: dict[int, Opening] = {}

    def __iter__(self) -> Iterator[Opening]:
        """All of them, at this moment."""
        return iter((*self.accepted, *self.dials))

    def find(self, descriptor: int) -> Opening | None:
        """The opening with that socket."""
        return self._by_descriptor.get(descriptor)

    def clear(self) -> None:
        """Forget all; their sockets are the caller's."""
        self.accepted.clear()
        self.dials.clear()
        self._by_descriptor.clear()

    def accept(self, listener: socket.socket) -> Opening | None:
        """Take in a connection that waits; call :meth:`advance` next. None: there is no more.

        Raises:
            OSError: No descriptor or no memory is left for one.
        """
        while True:
            with fork.descriptors_guard:
                try:
                    connection, address = listener.accept()
                except BlockingIOError:
                    return None
                except ConnectionError:
                    continue  # it was gone before we looked
                return self._begin(connection, address[:2], dialler=False)

    def limit(self) -> None:
        """Close one accepted opening if there are too many."""
        if len(self.accepted) > self._max_accepted:
            self.drop_one("too many unauthenticated connections")

    def drop_one(self, reason: str) -> None:
        """Close one accepted opening, if there is any: of those that have shown least the oldest.

        So a flood of connections that say nothing, or not the run's id, drives out none that do.
        """
        if self.accepted:
            self._abandon(min(self.accepted, key=lambda opening: opening.standing), reason)

    def dial(self, peer: int | None, host: str, port: int) -> DialEnded | None:
        """Begin to connect; None also where a dial to ``peer`` is under way."""
        if peer is not None and any(dial.wanted == peer for dial in self.dials):
            return None
        try:
            # Numeric, as in every hello: looking a name up may block for seconds.
            version = ipaddress.ip_address(host).version
            if not 0 < port < 65536:
                raise ValueError(f"port {port} is not in 1..65535")
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            with fork.descriptors_guard:
                connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                opening = self._begin(connection, (host, port), dialler=True, wanted=peer)
            try:
                code = connection.connect_ex((host, port))
            except OSError:  # an IPv6 address with a zone that is none of this host's
                self.release(opening)
                raise
        except (ValueError, OSError) as error:
            self._log.warn_once("dial", f"{host}:{port}", "cannot dial rank %s: %s", peer, error)
            return DialEnded(peer, (host, port))
        if code not in (0, errno.EINPROGRESS):
            return self._fail(opening, code == errno.ECONNREFUSED)
        return None

    def end_dials(self, peer: int) -> None:
        """Give up every dial to ``peer`` without a word: there is a link."""
        for dial in [dial for dial in self.dials if dial.wanted == peer]:
            self.release(dial)

    def next_deadline_s(self) -> float | None:
        """When :meth:`expire` will next have something to do; None: never."""
        # The oldest come first, and all have the same time limit.
        oldest = [next(iter(kind)) for kind in (self.accepted, self.dials) if kind]
        return min((opening.deadline_s for opening in oldest), default=None)

    def expire(self) -> list[DialEnded]:
        """Close those whose time is over."""
        now = self._clock()
        late = [opening for opening in self if opening.deadline_s <= now]
        reason = f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s"
        ended = [self._abandon(opening, reason) for opening in late]
        return [dial for dial in ended if dial is not None]

    def advance(self, opening: Opening) -> Opening | DialEnded | None:
        """Carry an opening as far as it goes without waiting.

        Returns:
            The opening itself when its handshake is DONE: make a link of it and :meth:`forget` it.
        """
        if opening not in self.accepted and opening not in self.dials:
            return None  # closed since its event
        try:
            if not opening.connected:
                if not sockets.is_connected(opening.connection):
                    return None
                opening.connected = True
            if not opening.has_spoken and not self._begin_stream(opening):
                return self._end(opening)
            return self._shake_hands(opening)
        except BlockingIOError:
            return None
        except ConnectionRefusedError:
            return self._fail(opening, True)
        except ConnectionError:
            return self._end(opening)  # as at an end of stream
        except HandshakeError as error:
            return self._abandon(opening, str(error))
        except OSError as error:
            return self._abandon(opening, error.strerror or str(error))

    def forget(self, opening: Opening) -> None:
        """Its socket is a link's from now on."""
        self.accepted.pop(opening, None)
        self.dials.pop(opening, None)
        self._by_descriptor = {
            number: other for number, other in self._by_descriptor.items() if other is not opening
        }

    def _begin(
        self,
        connection: socket.socket,
        there: tuple[str, int],
        *,
        dialler: bool,
        wanted: int | None = None,
    ) -> Opening:
        """List a new socket, under the guard of :mod:`.fork`."""
        handshake = Handshake(self._identity, self._secret, dialler=dialler, wanted_rank=wanted)
        opening = Opening(connection, handshake, there, self._clock() + HANDSHAKE_TIMEOUT_S)
        try:
            sockets.set_options(connection, there[0], self._max_bytes_per_s)
            self._epoll.register(connection, _EDGE)
        except OSError:
            connection.close()
            raise
        self._by_descriptor[connection.fileno()] = opening
        (self.dials if dialler else self.accepted)[opening] = None
        return opening

    def release(self, opening: Opening) -> None:
        """Forget an opening and close its socket."""
        with fork.descriptors_guard:
            self.forget(opening)
            if opening.connection.fileno() >= 0:  # else lost on its way into TLS, and closed there
                # Unregistered by hand: a forked child that has not closed its copy yet keeps the
                # connection, and with it the registration, alive.
                self._epoll.unregister(opening.connection)
                opening.connection.close()

    def _fail(self, opening: Opening, refused_connection: bool) -> DialEnded:
        """End a dial; ``refused_connection``: nobody listens there."""
        self.release(opening)
        return DialEnded(opening.wanted, opening.there, None, refused_connection)

    def _end(self, opening: Opening) -> DialEnded | None:
        """End an opening that was refused, or for a reason that happens in a healthy run."""
        if opening.handshake.refusal is not None:
            return self._end_refused(opening, opening.handshake.refusal)
        if opening.handshake.dialler:
            return self._fail(opening, False)
        self.release(opening)
        return None

    def _abandon(self, opening: Opening, reason: str) -> DialEnded | None:
        """End an opening for a reason that somebody may want to look into."""
        who = opening.who
        if opening.handshake.dialler:
            text = "dialling rank %s at %s: %s"
            self._log.warn_once("dial", who, text, opening.wanted, who, reason)
        else:
            self._log.warn_once("drop", who, "dropped %s: %s", who, reason)
            sockets.empty(opening.connection, self._scratch, MAX_EMPTIED_BYTES)
        return self._end(opening)

    def _begin_stream(self, opening: Opening) -> bool:
        """Choose what carries the handshake, and with TLS go through TLS's own; False: it ended.

        Raises as :meth:`TlsStream.do_handshake`.
        """
        handshake = opening.handshake
        if self._tls is None:
            opening.stream = PlainStream(opening.connection)
        elif handshake.dialler and opening.stream is None:
            self._wrap(opening, self._tls).do_handshake()  # says hello
            # It did not wait: the answer was there at once, and no event will tell of it.
        else:
            # A worker without TLS is known by how its own handshake begins. The plain method: an
            # ssl.SSLSocket refuses flags.
            start = socket.socket.recv(opening.connection, len(MAGIC), socket.MSG_PEEK)
            if not start:
                return False
            if start != MAGIC and MAGIC.startswith(start):
                raise BlockingIOError  # the rest is an event of its own
            if start == MAGIC:
                self._refuse_plain(opening)
                return False
            if not handshake.dialler:
                self._wrap(opening, self._tls)
        opening.has_spoken = True
        return True

    def _wrap(self, opening: Opening, tls: Tls) -> TlsStream:
        # Under the guard: a forked child must find the socket under its new object.
        with fork.descriptors_guard:
            stream = tls.wrap(opening.connection, server_side=not opening.handshake.dialler)
            opening.stream = stream
        return stream

    def _refuse_plain(self, opening: Opening) -> None:
        """The other worker has no TLS where this one has; let each know."""
        handshake = opening.handshake
        if handshake.dialler:
            handshake.refuse(Refusal("tls", "off", "on"))
        else:
            opening.stream = PlainStream(opening.connection)
            handshake.refuse(Refusal("tls", "on", "off"))
            opening.stream.send([handshake.take_output()])  # fits an empty socket

    def _shake_hands(self, opening: Opening) -> Opening | DialEnded | None:
        handshake, stream = opening.handshake, opening.stream
        assert stream is not None
        if isinstance(stream, TlsStream) and not stream.is_secured:
            stream.do_handshake()
        while True:
            opening.output += handshake.take_output()
            if opening.output:
                opening.output = opening.output[stream.send([opening.output]) :]
            match handshake.stage:
                case Stage.DECIDING:
                    self._decide(handshake)
                case Stage.DONE:
                    return opening
                case Stage.REFUSED:
                    return self._end(opening)
                case _:
                    room = memoryview(bytearray(handshake.num_wanted))
                    count = stream.receive_into([room])
                    if count == 0:
                        # Nothing to warn of: the peer gave up its dial, or has just ended.
                        return self._end(opening)
                    handshake.receive(bytes(room[:count]))

    def _decide(self, handshake: Handshake) -> None:
        """Acceptor: welcome a member, unless it is outdated or our own link takes precedence."""
        peer, mine = handshake.peer, self._identity.rank
        assert peer is not None
        old = self._links.get(peer.rank)
        if old is None:
            crosses = any(
                dial.wanted == peer.rank and dial.connected and dial.there == (peer.host, peer.port)
                for dial in self.dials
            )
        else:
            held = old.peer_identity
            if peer.incarnation < held.incarnation:
                incarnations = str(held.incarnation), str(peer.incarnation)
                handshake.refuse(Refusal("incarnation", *incarnations))
                return
            same_life = (held.incarnation, held.process_id) == (peer.incarnation, peer.process_id)
            crosses = same_life and old.dialler == mine
        if mine < peer.rank and crosses:
            handshake.refuse(CROSSED)
        else:
            handshake.welcome()

    def _end_refused(self, opening: Opening, refusal: Refusal) -> DialEnded | None:
        handshake, who = opening.handshake, opening.who
        if not handshake.dialler:
            sockets.empty(opening.connection, self._scratch, MAX_EMPTIED_BYTES)
        self.release(opening)
        if refusal == CROSSED:
            # The link that the lower rank dialled is on its way; should it fail after all, the
            # higher has been told that its dial came to nothing and tries again.
            return DialEnded(opening.wanted, opening.there) if handshake.dialler else None
        if handshake.dialler:
            text = "rank %s at %s refuses: %s"
            self._log.warn_once(refusal.field, who, text, opening.wanted, who, refusal)
            return DialEnded(opening.wanted, opening.there, refusal)
        if handshake.peer is not None:
            who = f"rank {handshake.peer.rank} at {who}"
        name = "TLS" if refusal.field == "tls" else refusal.field
        text = "refused %s: %s differs (ours %r, theirs %r)"
        self._log.warn_once(refusal.field, who, text, who, name, refusal.ours, refusal.theirs)
        return None
