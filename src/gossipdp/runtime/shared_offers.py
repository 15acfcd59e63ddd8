"""How workers of one host pass their memory to each other, over abstract Unix sockets.

Every worker that has a segment listens on one such socket, whose name only those can work out who
have the run's secret. To offer its segment on an established link, a worker connects to the peer's
socket, sends one packet, the segment's descriptor with it, and closes. That is all: the answer
comes over the link. A connection that is refused says that the peer is not in the same network
namespace, so "the same host" is proved and never guessed from names. No socket has a path, so
nothing is left after a kill.

The dialler of a link offers first, since the acceptor has had the link before it; the acceptor
offers its own on taking that offer. Either may offer another segment later.

Whoever offers proves by HMAC that it knows the secret, for that very link, and each end looks at
the other's user id, which the kernel vouches for. A process of another user gets nothing and is not
read. One of the same user could read a worker's memory anyway.

Nothing here waits: a peer whose queue is full is not offered anything, and the link stays as it is.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import msgspec

from gossipdp.runtime import fork
from gossipdp.runtime.frames import MAX_SEGMENT
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.once_log import OnceLog
from gossipdp.runtime.shared_memory import SharedSegment, map_peers_segment

# All workers of a host may offer at once.
BACKLOG = 1024
# Connections that have not said anything yet; the oldest goes first. As many are accepted a turn,
# so that none is dropped before it was looked at, though all neighbours offer at once.
MAX_STRANGERS = 64

_EVENTS = select.EPOLLIN | select.EPOLLET
_OFFER = struct.Struct("<8s16sIIQ32s")
_MAGIC = b"GDPMEM1\0"
_CREDENTIALS = struct.Struct("3i")
# No such socket, or a system without any.
_ELSEWHERE = (errno.ECONNREFUSED, errno.ENOENT)


@dataclass(frozen=True)
class Offer:
    """A segment of a peer, proved and mapped: of link ``link_id``, whose other end has ``rank``."""

    link_id: bytes
    rank: int
    number: int
    memory: memoryview


@final
class Offers:
    """One worker's Unix socket. Not thread-safe; its owner is a :class:`.fork.DescriptorOwner`.

    Args:
        identity: this worker's, with the address at which others know it.
        secret: shared by all workers of the run.
        clock: seconds, monotonic.
        timeout_s: a connection that has said nothing for so long is closed.
        log: for what a stranger does.
        epoll: watches every socket for :meth:`take`, edge-triggered.

    Attributes:
        is_due: whether :meth:`take` has more to do than it did in its last call.

    Raises:
        OSError: The system has no such sockets, or the name is taken.
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        *,
        clock: Callable[[], float],
        timeout_s: float,
        log: OnceLog,
        epoll: select.epoll,
    ) -> None:
        self.is_due = False
        self._identity = identity
        self._secret = secret
        self._clock = clock
        self._timeout_s = timeout_s
        self._log = log
        self._epoll = epoll
        # By age: the descriptor is the key, the value when it is given up.
        self._strangers: dict[socket.socket, float] = {}
        with fork.descriptors_guard:
            self._listener = _socket()
            try:
                self._listener.bind(_name(secret, identity))
                self._listener.listen(BACKLOG)
                epoll.register(self._listener, _EVENTS)
            except OSError:
                self._listener.close()
                raise

    def owns(self, descriptor: int) -> bool:
        """Whether an event of ``descriptor`` is a reason to call :meth:`take`."""
        return any(connection.fileno() == descriptor for connection in self._sockets)

    @property
    def next_deadline_s(self) -> float | None:
        """When :meth:`take` has something to do without an event; None: never."""
        return next(iter(self._strangers.values()), None)

    def send(self, segment: SharedSegment, peer: Identity, link_id: bytes) -> bool:
        """Offer ``segment`` to ``peer``; whether it is on this host and its socket took it."""
        offered = (segment.number, len(segment.memory))
        proof = self._prove(link_id, self._identity.rank, *offered)
        packet = _OFFER.pack(_MAGIC, link_id, self._identity.rank, *offered, proof)
        try:
            with fork.descriptors_guard, _socket() as connection:
                connection.connect(_name(self._secret, peer))
                if _user_of(connection) != os.geteuid():
                    raise PermissionError(errno.EPERM, "it runs as another user")
                socket.send_fds(connection, [packet], [segment.descriptor])
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                self._warn(f"cannot share memory with rank {peer.rank}", error)
            return False
        return True

    def take(self) -> list[Offer]:
        """The offers that have come, and close what has waited too long."""
        self._accept()
        offers = []
        now = self._clock()
        for connection, deadline_s in list(self._strangers.items()):
            try:
                offers.append(self._receive(connection))
            except BlockingIOError:
                if deadline_s > now:
                    continue
                self._warn("dropped a connection to the memory socket", "it said nothing")
            except (OSError, ValueError) as error:
                self._warn("dropped a connection to the memory socket", error)
            self._drop(connection)
        return offers

    def close(self) -> None:
        """Close all sockets; under the guard of :mod:`.fork`."""
        for connection in self._sockets:
            connection.close()
        self._strangers.clear()

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.runtime.fork.DescriptorOwner`."""
        for connection in self._sockets:
            fork.close_descriptor(connection.detach())

    @property
    def _sockets(self) -> list[socket.socket]:
        return [self._listener, *self._strangers]

    def _accept(self) -> None:
        self.is_due = False
        for _ in range(MAX_STRANGERS):
            with fork.descriptors_guard:
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    return
                except ConnectionError:
                    continue
                except OSError as error:  # no descriptor left: look again at the next event
                    self._warn("cannot take what is offered", error)
                    return
                connection.setblocking(False)
                self._strangers[connection] = self._clock() + self._timeout_s
                try:
                    is_foreign = _user_of(connection) != os.geteuid()
                except OSError:
                    is_foreign = True
                self._epoll.register(connection, _EVENTS)
            if is_foreign:
                self._drop(connection)
            elif len(self._strangers) > MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))
        self.is_due = True

    def _drop(self, connection: socket.socket) -> None:
        with fork.descriptors_guard:
            del self._strangers[connection]
            self._epoll.unregister(connection)
            connection.close()

    def _receive(self, connection: socket.socket) -> Offer:
        """The offer that ``connection`` brings.

        Raises:
            BlockingIOError: It has not come yet.
            ValueError: It is none.
            OSError: The connection is lost, or the memory cannot be mapped.
        """
        with fork.descriptors_guard:
            packet, descriptors, flags, _ = socket.recv_fds(
                connection, _OFFER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            try:
                if len(packet) != _OFFER.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise ValueError(f"a packet of {len(packet)} bytes is no offer")
                magic, link_id, rank, number, num_bytes, proof = _OFFER.unpack(packet)
                if magic != _MAGIC or len(descriptors) != 1:
                    raise ValueError("a packet that is no offer")
                due = self._prove(link_id, rank, number, num_bytes)
                if not hmac.compare_digest(proof, due):
                    raise ValueError("an offer without proof of the secret")
                if not 0 < number <= MAX_SEGMENT:
                    raise ValueError(f"an offer of segment {number}")
                return Offer(link_id, rank, number, map_peers_segment(descriptors[0], num_bytes))
            finally:
                for descriptor in descriptors:
                    fork.close_descriptor(descriptor)

    def _prove(self, link_id: bytes, *said: int) -> bytes:
        """The HMAC over the run, the link, who offers, and what."""
        statement = ("gossipdp memory", self._identity.run_id, link_id, *said)
        return hmac.digest(self._secret, msgspec.msgpack.encode(statement), "sha256")

    def _warn(self, what: str, why: object) -> None:
        self._log.warn_once("memory", f"{what}: {why}", "%s: %s", what, why)


def _socket() -> socket.socket:
    kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
    return socket.socket(socket.AF_UNIX, kind)


def _name(secret: bytes, identity: Identity) -> bytes:
    """The abstract name of a worker's socket: one for each process, from its hello.

    Without the incarnation, which a process that joins is given only later; the address is there
    because no two workers of one network namespace can have the same.
    """
    who = (identity.run_id, identity.rank, identity.process_id, identity.host, identity.port)
    statement = msgspec.msgpack.encode(("gossipdp memory socket", *who))
    return b"\0gossipdp-" + hmac.digest(secret, statement, "sha256").hex().encode()


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel saw it connect or listen."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user_id: int = _CREDENTIALS.unpack(data)[1]
    return user_id
