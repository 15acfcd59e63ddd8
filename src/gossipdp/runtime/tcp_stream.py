"""The bytes of one connection, in the clear or through TLS: what openings and links read and write.

Both are non-blocking and made for edge-triggered events. A call that moves fewer bytes than it was
asked to has come to the end of what the kernel had (or had room for), so the next event says when
it is worth another; a call that could move none at all raises :class:`BlockingIOError`.
"""

from __future__ import annotations

import abc
import socket
from collections.abc import Sequence
from typing import final


class Stream(abc.ABC):
    """A connected socket and what lies between it and its user.

    Attributes:
        connection: the socket itself; whoever closes it closes the stream.
        mixes_directions: whether reading may have to wait for room to write, or the other way
            round, so that any event is a reason to try both.
        certificates: what names this end's and the peer's certificate; empty without TLS.
    """

    connection: socket.socket
    mixes_directions: bool
    certificates: tuple[bytes, bytes] = (b"", b"")

    @property
    @abc.abstractmethod
    def has_more(self) -> bool:
        """Whether ``receive_into`` has something to say although it returned fewer bytes."""

    @abc.abstractmethod
    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        """Fill ``rooms``, one after the other; how many bytes came. 0: the peer has ended.

        Raises:
            BlockingIOError: Nothing has come yet.
            OSError: The connection is lost.
        """

    @abc.abstractmethod
    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """Hand ``parts`` to the kernel, one after the other; how many bytes it took.

        What was not taken must come first, unchanged, in the next call.

        Raises:
            BlockingIOError: No room.
            OSError: The connection is lost.
        """


@final
class PlainStream(Stream):
    """The socket as it is."""

    mixes_directions = False

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @property
    def has_more(self) -> bool:
        """See :class:`Stream`."""
        return False

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        """See :class:`Stream`."""
        return self.connection.recvmsg_into(rooms)[0]

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        """See :class:`Stream`."""
        return self.connection.sendmsg(parts)


def receive_some(stream: Stream, size: int) -> bytes:
    """Up to ``size`` bytes from ``stream``; raises as :meth:`Stream.receive_into`."""
    room = bytearray(size)
    count = stream.receive_into([memoryview(room)])
    return bytes(room[:count])


def peek(connection: socket.socket, size: int) -> bytes:
    """Up to ``size`` bytes that have arrived, left where they are; empty: the peer has ended.

    Raises:
        BlockingIOError: Nothing has come yet.
    """
    # The plain method: an ssl.SSLSocket refuses flags.
    return socket.socket.recv(connection, size, socket.MSG_PEEK)
