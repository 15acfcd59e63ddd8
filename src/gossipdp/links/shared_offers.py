"""How workers of one host pass their memory to each other, over abstract Unix sockets.

Every worker that has a segment listens on one such socket, of a random name. It tells a peer the
name and a random token of their link over that link itself. To offer its segment, a worker connects
to the peer's socket, sends one packet, the segment's descriptor with it, and closes. That is all:
the answer comes over the link. A connection that is refused says that the peer is not in the same
network namespace, so "the same host" is proved and never guessed from names. No socket has a path,
so nothing is left after a kill.

Each end looks at the other's user id, for which the kernel vouches: a process of another user gets
nothing and is not read. One of the same user could read a worker's memory anyway.

Nothing here waits: a peer whose queue is full is not offered anything, and the link stays as it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Collection
from typing import NamedTuple, final

from gossipdp.links import fork
from gossipdp.links.frames import MAX_SEGMENT, NAME_BYTES, TOKEN_BYTES
from gossipdp.links.shared_memory import SharedSegment, map_peers_segment
from gossipdp.links.strangers import OnceLog

# All workers of a host may offer at once.
BACKLOG = 1024
# Connections of this user's processes that have not said anything yet; the oldest goes first.
MAX_STRANGERS = 64

_EVENTS = select.EPOLLIN | select.EPOLLET
_OFFER = struct.Struct(f"<8s{TOKEN_BYTES}sIQ")
_MAGIC = b"GDPMEM2\0"
_CREDENTIALS = struct.Struct("3i")


class Offer(NamedTuple):
    """A segment, mapped, from whoever knows the ``token`` of a link."""

    token: bytes
    number: int
    memory: memoryview


def offer(segment: SharedSegment, memory_socket: bytes) -> bool:
    """Offer ``segment`` to the peer that told its ``memory_socket``, a name and a token.

    Returns:
        Whether it is on this host.

    Raises:
        OSError: It is, and its socket did not take it, or it runs as another user.
    """
    name, token = memory_socket[:NAME_BYTES], memory_socket[NAME_BYTES:]
    packet = _OFFER.pack(_MAGIC, token, segment.number, len(segment.memory))
    with fork.descriptors_guard, _socket() as connection:
        try:
            connection.connect(_address(name))
        except OSError as error:
            # No such socket, or a system without any.
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return False
            raise
        if _user_of(connection) != os.geteuid():
            raise PermissionError(errno.EPERM, "it runs as another user")
        socket.send_fds(connection, [packet], [segment.descriptor])
    return True


@final
class Offers:
    """One worker's Unix socket. Not thread-safe; its owner is a :class:`.fork.DescriptorOwner`.

    Args:
        log: for what a stranger does.
        epoll: watches every socket for :meth:`take`, edge-triggered.

    Attributes:
        name: random; the peers are told it.

    Raises:
        OSError: The system has no such sockets.
    """

    def __init__(self, log: OnceLog, epoll: select.epoll) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._log = log
        self._epoll = epoll
        self._strangers: list[socket.socket] = []  # the oldest first
        with fork.descriptors_guard:
            self._listener = _socket()
            try:
                self._listener.bind(_address(self.name))
                self._listener.listen(BACKLOG)
                epoll.register(self._listener, _EVENTS)
            except OSError:
                self._listener.close()
                raise

    def owns(self, descriptor: int) -> bool:
        """Whether an event of ``descriptor`` is a reason to call :meth:`take`."""
        return any(connection.fileno() == descriptor for connection in self._sockets)

    def take(self, tokens: Collection[bytes]) -> list[Offer]:
        """The offers that have come for links with these tokens."""
        offers = [self._hear(connection, tokens) for connection in list(self._strangers)]
        for _ in range(BACKLOG):
            connection = self._accept()
            if connection is None:
                break
            offers.append(self._hear(connection, tokens))
            if len(self._strangers) > MAX_STRANGERS:
                self._drop(self._strangers[0])
        return [offer for offer in offers if offer is not None]

    def close(self) -> None:
        """Close all sockets; under the guard of :mod:`.fork`."""
        for connection in self._sockets:
            connection.close()
        self._strangers.clear()

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.links.fork.DescriptorOwner`."""
        for connection in self._sockets:
            fork.close_descriptor(connection.detach())

    @property
    def _sockets(self) -> list[socket.socket]:
        return [self._listener, *self._strangers]

    def _accept(self) -> socket.socket | None:
        """A connection of a process of this user; None: there is no more."""
        while True:
            with fork.descriptors_guard:
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    return None
                except ConnectionError:
                    continue
                except OSError as error:  # no descriptor left: look again at the next event
                    self._warn("cannot take what is offered", error)
                    return None
                if _user_of(connection) != os.geteuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                self._strangers.append(connection)
                self._epoll.register(connection, _EVENTS)
                return connection

    def _hear(self, connection: socket.socket, tokens: Collection[bytes]) -> Offer | None:
        """What ``connection`` brings; it is kept only while it has said nothing."""
        try:
            offer = self._receive(connection, tokens)
        except BlockingIOError:
            return None
        except (OSError, ValueError) as error:
            self._warn("dropped a connection to the memory socket", error)
            offer = None
        self._drop(connection)
        return offer

    def _drop(self, connection: socket.socket) -> None:
        with fork.descriptors_guard:
            self._strangers.remove(connection)
            self._epoll.unregister(connection)
            connection.close()

    def _receive(self, connection: socket.socket, tokens: Collection[bytes]) -> Offer | None:
        """The offer that ``connection`` brings; None: for a link that is no more.

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
                magic, token, number, num_bytes = _OFFER.unpack(packet)
                if magic != _MAGIC or len(descriptors) != 1:
                    raise ValueError("a packet that is no offer")
                if not 0 < number <= MAX_SEGMENT:
                    raise ValueError(f"an offer of segment {number}")
                if token not in tokens:
                    return None
                return Offer(token, number, map_peers_segment(descriptors[0], num_bytes))
            finally:
                for descriptor in descriptors:
                    fork.close_descriptor(descriptor)

    def _warn(self, what: str, why: object) -> None:
        self._log.warn_once("memory", f"{what}: {why}", "%s: %s", what, why)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _address(name: bytes) -> bytes:
    """The abstract address of the socket called ``name``."""
    return b"\0gossipdp-" + name.hex().encode()


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel saw it connect or listen."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user_id: int = _CREDENTIALS.unpack(data)[1]
    return user_id
