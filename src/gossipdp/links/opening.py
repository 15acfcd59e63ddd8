"""A connection that is no link yet: accepted or dialled, then TLS if there is any, then our
handshake. Few bytes of a stranger are read, and nothing is allocated for TLS before its first byte.
"""

from __future__ import annotations

import socket
from typing import final

from gossipdp.links import sockets
from gossipdp.links.handshake import MAGIC, Handshake, Refusal
from gossipdp.links.sockets import PlainStream, Stream
from gossipdp.links.tls import Tls, TlsStream


@final
class Opening:
    """A connection to ``address`` whose handshake is not over, given up at ``deadline_s``.

    ``stream`` carries the handshake; it is None until its kind is known.
    """

    def __init__(
        self,
        connection: socket.socket,
        handshake: Handshake,
        address: tuple[str, int],
        deadline_s: float,
        tls: Tls | None,
    ) -> None:
        self.handshake, self.address, self.deadline_s = handshake, address, deadline_s
        self.stream: Stream | None = None
        self.descriptor = connection.fileno()
        self._connection, self._tls = connection, tls
        self._is_connected = not handshake.dialler
        self._has_spoken = False  # a byte that TLS may begin with
        self._output = b""

    @property
    def connection(self) -> socket.socket:
        """The socket; TLS replaces its object by one of its own."""
        return self._connection if self.stream is None else self.stream.connection

    @property
    def who(self) -> str:
        """The other end, for messages; without its port if it dialled us."""
        host, port = self.address
        return f"{host}:{port}" if self.handshake.dialler else host

    @property
    def trust_level(self) -> int:
        """0: it has shown nothing so far; 1: a TLS hello; 2: that it knows the run's id."""
        return 2 if self.handshake.knows_run else int(self._has_spoken)

    def advance(self) -> None:
        """Go on without waiting, until the handshake is over.

        Raises:
            BlockingIOError: the other end is to speak first.
            EOFError: the other end has ended.
            HandshakeError, OSError: it has failed.
        """
        handshake = self.handshake
        if not self._is_connected:
            if not sockets.is_connected(self.connection):
                raise BlockingIOError
            self._is_connected = True
        if not self._has_spoken:
            self._begin_stream()
            self._has_spoken = True
        stream = self.stream
        assert stream is not None
        if isinstance(stream, TlsStream):
            stream.do_handshake()
        while True:
            self._output += handshake.take_output()
            if self._output:
                self._output = self._output[stream.send([self._output]) :]
            if self._output:
                raise BlockingIOError
            if handshake.num_wanted == 0:
                return
            room = bytearray(handshake.num_wanted)
            count = stream.receive_into([memoryview(room)])
            if count == 0:
                raise EOFError
            handshake.receive(bytes(room[:count]))

    def _begin_stream(self) -> None:
        dialler = self.handshake.dialler
        if self._tls is None:
            self.stream = PlainStream(self.connection)
            return
        if dialler and self.stream is None:
            self._wrap(self._tls).do_handshake()  # says hello
            # do_handshake did not wait: the answer was there, so no event will follow.
            return
        # The start of our own handshake shows a worker without TLS. Use the plain method, since an
        # ssl.SSLSocket refuses flags.
        start = socket.socket.recv(self.connection, len(MAGIC), socket.MSG_PEEK)
        if not start:
            raise EOFError
        if start != MAGIC and MAGIC.startswith(start):
            raise BlockingIOError  # the rest is an event of its own
        if start == MAGIC:  # both hear why
            self.stream = PlainStream(self.connection)
            self.handshake.refuse(Refusal("tls", *(("off", "on") if dialler else ("on", "off"))))
        elif not dialler:
            self._wrap(self._tls)

    def _wrap(self, tls: Tls) -> TlsStream:
        # A child forked between these two lines must find the socket under its new object.
        with sockets.descriptors_guard:
            stream = tls.wrap(self.connection, server_side=not self.handshake.dialler)
            self.stream = stream
        return stream
