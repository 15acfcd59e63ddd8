"""Connections that are not links yet: accepted or dialled, then TLS if there is any, then our
handshake.

Everything here deals with strangers, so all of it is bounded: the number of accepted connections,
the time each may take, the bytes read of each, what is allocated for it (of TLS nothing before its
first byte) and what is logged of it. Nothing here waits.
"""

from __future__ import annotations

import abc
import socket
import weakref
from collections.abc import Callable, Iterator
from typing import final

from gossipdp.runtime import fork, tcp_sockets
from gossipdp.runtime.handshake import MAGIC, Handshake, HandshakeError, Stage
from gossipdp.runtime.identity import Identity, Refusal
from gossipdp.runtime.once_log import OnceLog
from gossipdp.runtime.tcp_stream import PlainStream, Stream, peek, receive_some
from gossipdp.runtime.tls import Tls, TlsStream

HANDSHAKE_TIMEOUT_S = 5.0
MAX_UNAUTHENTICATED = 64
# What is read of a stranger that is turned away, so that it hears why before the reset.
MAX_EMPTIED_BYTES = 64 << 10

# Said by the acceptor to a worker whose link it does not want because its own is on its way.
CROSSED = Refusal("crossed", "", "")


@final
class Opening:
    """A connection whose handshake is not over.

    Attributes:
        handshake: ours.
        there: host and port of the other end.
        address: the same for messages; without the port where it dialled us.
        deadline_s: when it is given up, by the transport's clock.
        wanted: whom a dial wants to reach.
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
        host, port = self.there = there
        self.handshake = handshake
        self.address = f"{host}:{port}" if handshake.dialler else host
        self.deadline_s = deadline_s
        self.wanted = handshake.wanted_rank
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
    def standing(self) -> int:
        """What it has shown so far: nothing; a TLS hello; that it knows the run's id."""
        if self.handshake.stage is not Stage.OPENING:
            return 2
        return int(self.has_spoken)


class OpeningsOwner(abc.ABC):
    """What openings need of their transport."""

    identity: Identity
    clock: Callable[[], float]
    scratch: memoryview

    @abc.abstractmethod
    def watch(self, opening: Opening) -> None:
        """Call ``advance`` whenever its socket has news; raises OSError where that cannot be."""

    @abc.abstractmethod
    def release(self, opening: Opening) -> None:
        """Watch it no more and close its socket."""

    @abc.abstractmethod
    def last_link(self, peer: int | None) -> bytes:
        """Dialler: the id of the link to ``peer`` that this worker let go; empty: none."""

    @abc.abstractmethod
    def decide(self, opening: Opening) -> None:
        """Acceptor: welcome or refuse a peer whose identity is proved and agrees."""

    @abc.abstractmethod
    def establish(self, opening: Opening) -> None:
        """The handshake is done; the opening is no more, its stream is a link's."""

    @abc.abstractmethod
    def dial_refused(self, peer: int | None, refusal: Refusal) -> None:
        """A dial met a worker that does not want the link, and said why."""

    @abc.abstractmethod
    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        """A dial came to nothing."""


@final
class Openings:
    """All openings of one transport.

    Args:
        owner: the transport.
        secret: shared by all workers of the run.
        tls: None: in the clear.
        log: for what a stranger does.
        timeout_s: an opening that takes longer is closed.
        max_accepted: beyond this many accepted ones, the oldest of those that have shown least
            is closed.
        max_bytes_per_s: see :class:`~gossipdp.runtime.tcp.TcpTransport`.
    """

    def __init__(
        self,
        owner: OpeningsOwner,
        secret: bytes,
        tls: Tls | None,
        log: OnceLog,
        *,
        timeout_s: float,
        max_accepted: int,
        max_bytes_per_s: float | None,
    ) -> None:
        # Insertion order is order of age.
        self.accepted: dict[Opening, None] = {}
        self.dials: dict[Opening, None] = {}
        # Weak: in a cycle the sockets of a forgotten transport would be collected before it.
        self._owner: OpeningsOwner = weakref.proxy(owner)
        self._secret = secret
        self._tls = tls
        self._log = log
        self._timeout_s = timeout_s
        self._max_accepted = max_accepted
        self._max_bytes_per_s = max_bytes_per_s

    def __iter__(self) -> Iterator[Opening]:
        """All of them, at this moment."""
        return iter((*self.accepted, *self.dials))

    def clear(self) -> None:
        """Forget all; their sockets are the caller's."""
        self.accepted.clear()
        self.dials.clear()

    def accept(self, listener: socket.socket, most: int) -> None:
        """Take in up to ``most`` connections that wait, and hear each at once.

        Raises:
            OSError: No descriptor or no memory is left for one.
        """
        for _ in range(most):
            with fork.descriptors_guard:
                try:
                    connection, address = listener.accept()
                except BlockingIOError:
                    return
                except ConnectionError:
                    continue  # it was gone before we looked
                handshake = Handshake(self._owner.identity, self._secret, dialler=False)
                opening = self._begin(connection, handshake, address[:2])
                self.accepted[opening] = None
            # What it has said by now counts when one must go.
            self.advance(opening)
            if len(self.accepted) > self._max_accepted:
                self.drop_one("too many unauthenticated connections")

    def drop_one(self, reason: str) -> None:
        """Close one accepted opening, if there is any: of those that have shown least the oldest.

        So a flood of connections that say nothing, or not the run's id, drives out none that do.
        """
        if self.accepted:
            self._abandon(min(self.accepted, key=lambda opening: opening.standing), reason)

    def dial(self, connection: socket.socket, peer: int | None, host: str, port: int) -> Opening:
        """Begin with a socket that is about to connect, under the guard of :mod:`.fork`."""
        handshake = Handshake(self._owner.identity, self._secret, dialler=True, wanted_rank=peer)
        opening = self._begin(connection, handshake, (host, port))
        self.dials[opening] = None
        return opening

    def end_dials(self, peer: int) -> None:
        """Give up every dial to ``peer`` without a word: there is a link."""
        for dial in [dial for dial in self.dials if dial.wanted == peer]:
            self._release(dial)

    def next_deadline_s(self) -> float | None:
        """When :meth:`expire` will next have something to do; None: never."""
        # The oldest come first, and all have the same time limit.
        oldest = [next(iter(kind)) for kind in (self.accepted, self.dials) if kind]
        return min((opening.deadline_s for opening in oldest), default=None)

    def expire(self) -> None:
        """Close those whose time is over."""
        now = self._owner.clock()
        for kind in (self.accepted, self.dials):
            for opening in list(kind):
                if opening.deadline_s > now:
                    break
                self._abandon(opening, f"no handshake within {self._timeout_s:g} s")

    def advance(self, opening: Opening) -> None:
        """Carry an opening as far as it goes without waiting."""
        try:
            if not opening.connected:
                if not tcp_sockets.is_connected(opening.connection):
                    return
                opening.connected = True
            if not opening.has_spoken and not self._begin_stream(opening):
                return
            self._shake_hands(opening)
        except BlockingIOError:
            pass
        except ConnectionRefusedError:
            self.fail_dial(opening, True)
        except ConnectionError:
            self._end_quietly(opening)  # as at an end of stream
        except HandshakeError as error:
            self._abandon(opening, str(error))
        except OSError as error:
            self._abandon(opening, error.strerror or str(error))

    def fail_dial(self, opening: Opening, refused_connection: bool) -> None:
        """End a dial; ``refused_connection``: nobody listens there."""
        self._release(opening)
        self._owner.dial_failed(opening.wanted, opening.there, refused_connection)

    def forget(self, opening: Opening) -> None:
        """It is a link from now on."""
        self.accepted.pop(opening, None)
        self.dials.pop(opening, None)

    def _begin(
        self, connection: socket.socket, handshake: Handshake, there: tuple[str, int]
    ) -> Opening:
        deadline_s = self._owner.clock() + self._timeout_s
        opening = Opening(connection, handshake, there, deadline_s)
        try:
            tcp_sockets.set_options(connection, there[0], self._max_bytes_per_s)
            self._owner.watch(opening)
        except OSError:
            connection.close()
            raise
        return opening

    def _release(self, opening: Opening) -> None:
        self.forget(opening)
        self._owner.release(opening)

    def _end_quietly(self, opening: Opening) -> None:
        """End an opening for a reason that happens in a healthy run."""
        if opening.handshake.dialler:
            self.fail_dial(opening, False)
        else:
            self._release(opening)

    def _abandon(self, opening: Opening, reason: str) -> None:
        """End an opening for a reason that somebody may want to look into."""
        who = opening.address
        if opening.handshake.dialler:
            peer = opening.wanted
            self._log.warn_once("dial", who, "dialling rank %s at %s: %s", peer, who, reason)
        else:
            self._log.warn_once("drop", who, "dropped %s: %s", who, reason)
            tcp_sockets.empty(opening.connection, self._owner.scratch, MAX_EMPTIED_BYTES)
        self._end_quietly(opening)

    def _begin_stream(self, opening: Opening) -> bool:
        """Choose what carries the handshake, and with TLS go through TLS's own; False: it ended.

        Raises as :meth:`TlsStream.do_handshake`.
        """
        handshake = opening.handshake
        if self._tls is None:
            opening.stream = PlainStream(opening.connection)
        else:
            if handshake.dialler and opening.stream is None:
                self._wrap(opening, self._tls).do_handshake()  # says hello
                # It did not wait: the answer was there at once, and no event will tell of it.
                opening.has_spoken = True
                return True
            # A worker without TLS is known by how its own handshake begins.
            start = peek(opening.connection, len(MAGIC))
            if not start:
                self._end_quietly(opening)
                return False
            if start != MAGIC and MAGIC.startswith(start):
                raise BlockingIOError  # the rest is an event of its own
            if start == MAGIC:
                self._meet_plain(opening)
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

    def _meet_plain(self, opening: Opening) -> None:
        """End an opening with a worker that has no TLS where this one has, and let each know."""
        handshake = opening.handshake
        if handshake.dialler:
            handshake.turn_away(Refusal("tls", "off", "on"))
            self._tell_refused(opening)
        else:
            opening.stream = PlainStream(opening.connection)
            handshake.refuse(Refusal("tls", "on", "off"))
            opening.stream.send([handshake.take_output()])  # fits an empty socket
            self._tell_refused(opening)

    def _shake_hands(self, opening: Opening) -> None:
        handshake, stream = opening.handshake, opening.stream
        assert stream is not None
        if isinstance(stream, TlsStream):
            if not stream.is_secured:
                stream.do_handshake()
            handshake.bind(*stream.certificates)
        while True:
            opening.output += handshake.take_output()
            if opening.output:
                opening.output = opening.output[stream.send([opening.output]) :]
            match handshake.stage:
                case Stage.CHALLENGED:
                    handshake.answer(self._owner.last_link(opening.wanted))
                case Stage.DECIDING:
                    self._owner.decide(opening)
                case Stage.DONE:
                    self._owner.establish(opening)
                    return
                case Stage.REFUSED:
                    self._tell_refused(opening)
                    return
                case _:
                    data = receive_some(stream, handshake.num_wanted)
                    if not data:
                        # Nothing to warn of: the peer gave up its dial, or has just ended.
                        self._end_quietly(opening)
                        return
                    handshake.receive(data)

    def _tell_refused(self, opening: Opening) -> None:
        refusal = opening.handshake.refusal
        assert refusal is not None
        if not opening.handshake.dialler:
            tcp_sockets.empty(opening.connection, self._owner.scratch, MAX_EMPTIED_BYTES)
        if refusal == CROSSED:
            # The link that the lower rank dialled is on its way; should it fail after all, the
            # higher has been told that its dial came to nothing and tries again.
            self._end_quietly(opening)
            return
        self._release(opening)
        who = opening.address
        if opening.handshake.dialler:
            self._log.warn_once(
                refusal.field, who, "rank %s at %s refuses: %s", opening.wanted, who, refusal
            )
            self._owner.dial_refused(opening.wanted, refusal)
            return
        peer = opening.handshake.peer
        who = who if peer is None else f"rank {peer.rank} at {who}"
        name = "TLS" if refusal.field == "tls" else refusal.field
        text = "refused %s: %s differs (ours %r, theirs %r)"
        self._log.warn_once(refusal.field, who, text, who, name, refusal.ours, refusal.theirs)
