"""Listening and connected sockets, and the bytes of one connection, in the clear or through TLS.

Everything is non-blocking and made for edge-triggered events.

**A forked child keeps none of our descriptors.** A DataLoader worker is a fork of the training
process and holds its sockets. When the parent is then killed, the kernel sends no end of stream
until the child dies too. So every forked child closes the descriptors at once. It never shuts them
down, since a shutdown would end the parent's connections as well.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import ipaddress
import math
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import final

from gossipdp.errors import RendezvousError

# The most unsent bytes that the kernel takes: a control message on a slow link waits for these and
# one chunk, and not for megabytes.
NOTSENT_LOWAT_BYTES = 256 << 10
# <linux/tcp.h>: a CPython that was built beside an old C library has no name for it.
TCP_NOTSENT_LOWAT = 25
BACKLOG = 128
# Within a payload, packets that follow one another sooner than this gather, up to so many bytes:
# each time the thread wakes it takes the interpreter's lock, and a core, from training. On a slow
# link none do, so that the peer is heard as often as it sends.
QUICK_S = 1e-3
MAX_BATCH_BYTES = 64 << 10

# The race: a fork between accept() (or socket()) and the moment its owner lists the descriptor, or
# between the moment an owner drops one and close(), would leave the child with a descriptor that
# no owner names. So owners open and close descriptors under this guard, and a fork waits for it.
# The calls made under it never block. It is re-entrant, so that a signal handler that forks does
# not wait for its own thread. The child only releases what its parent took for it.
descriptors_guard = threading.RLock()


class DescriptorOwner(abc.ABC):
    """An object with descriptors that a forked child must not keep."""

    @abc.abstractmethod
    def close_in_child(self) -> None:
        """Close every descriptor by number, ignoring errors, and become inert. Takes no lock."""


_owners: weakref.WeakSet[DescriptorOwner] = weakref.WeakSet()


def register(owner: DescriptorOwner) -> None:
    """Close ``owner``'s descriptors in every child forked from now on, while it lives."""
    _owners.add(owner)


def close_descriptor(number: int) -> None:
    """Close a descriptor by number; one that is not open is no error."""
    with contextlib.suppress(OSError):
        os.close(number)


def _after_fork_in_child() -> None:
    try:
        for owner in list(_owners):
            owner.close_in_child()
    finally:
        descriptors_guard.release()


os.register_at_fork(
    before=descriptors_guard.acquire,
    after_in_parent=descriptors_guard.release,
    after_in_child=_after_fork_in_child,
)


class Stream(abc.ABC):
    """A connected socket and the layer between it and its user.

    A call that moves fewer bytes than it was asked to has reached the end of the kernel's bytes (or
    of its room), so the next event says when another call is worth it.

    Attributes:
        connection: the socket itself; closing it closes the stream.
        has_more: True if ``receive_into`` has more to return although it returned fewer bytes.
        gathers: True if the next event comes only when more than one byte is there.
        is_aging: True if a key has protected half as much as it may: a new connection is due when
            nothing is under way.
        is_worn: True if its key has protected as much as it may: a new connection is due at once.
    """

    connection: socket.socket
    has_more = False
    gathers = False
    is_aging = is_worn = False

    @abc.abstractmethod
    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        """Fill ``rooms`` in turn; return the number of bytes that came, 0 if the peer has ended.

        Raises BlockingIOError if nothing has come yet, OSError if the connection is lost.
        """

    def gather(self, rest: int, count: int = 0, gap_s: float = math.nan) -> bool:
        """Let the next event come when a batch of the ``rest`` of a payload is there, or the end.

        The last read brought ``count`` bytes, ``gap_s`` after the one before. Return True if the
        caller is to read once more, since lowering the mark makes no event. TLS gathers nothing:
        the plain bytes in a part of a record cannot be counted.
        """
        return False

    @abc.abstractmethod
    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Hand ``parts`` to the kernel in turn; return the number of bytes that it took.

        The rest must come first, unchanged, in the next call. Raises as above.
        """


@final
class PlainStream(Stream):
    """The socket as it is; methods as of :class:`Stream`."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._batch_bytes = self._mark = 1

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        return self.connection.recvmsg_into(rooms)[0]

    def gather(self, rest: int, count: int = 0, gap_s: float = math.nan) -> bool:
        if gap_s < QUICK_S:
            self._batch_bytes = min(2 * max(self._batch_bytes, count), MAX_BATCH_BYTES)
        elif gap_s > 10 * QUICK_S:
            self._batch_bytes = 1
        before, self._mark = self._mark, max(1, min(rest, self._batch_bytes))
        self.gathers = self._mark > 1
        if self._mark != before:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._mark)
        return self._mark < before

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        return self.connection.sendmsg(parts)


@final
class Listener(socket.socket, DescriptorOwner):
    """A listening socket that no forked child keeps.

    A child that held it would accept connections after its parent's death, and the others would
    wait for an answer, while a refusal shows them that the worker is dead.
    """

    def close_in_child(self) -> None:
        close_descriptor(self.detach())


def listen(host: str, port: int) -> Listener:
    """Return a non-blocking listening socket; port 0 takes a free one.

    Raises:
        RendezvousError: the port is in use, or the address is not of this machine.
    """
    listener = None
    stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=stream, flags=passive)[0]
        with descriptors_guard:
            listener = Listener(family, stream | socket.SOCK_NONBLOCK)
            register(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        text = f"cannot listen on {host}:{port}: {error.strerror}; name an address of this machine"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} on {host} is in use; choose another, or port 0 for any free one"
        raise RendezvousError(text) from None
    return listener


def set_options(connection: socket.socket, peer_host: str) -> None:
    """Make a data connection non-blocking and undelayed, and bound its unsent bytes.

    Loopback has no such bound: only bytes that the peer has not read queue there, and
    the bound costs a quarter more CPU time.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(peer_host).is_loopback:
        connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)


def is_connected(connection: socket.socket) -> bool:
    """Return True once a non-blocking ``connect`` is through; raise OSError if it failed."""
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, str(code)))
    try:
        peer_name = connection.getpeername()
    except OSError:
        return False
    if connection.getsockname() == peer_name:
        # A dial to a free port of this host may be given that very port as its own and connect to
        # itself: no process listens there.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    return True


def empty(connection: socket.socket, scratch: memoryview, max_bytes: int = 16 << 20) -> None:
    """Drop the bytes that have arrived on a socket about to be closed.

    Closing with unread data resets the connection, and the reset overtakes the last bytes sent.
    """
    with contextlib.suppress(OSError):
        # Use the plain method, since nobody needs the bytes decrypted.
        while max_bytes > 0 and (count := socket.socket.recv_into(connection, scratch)):
            max_bytes -= count
