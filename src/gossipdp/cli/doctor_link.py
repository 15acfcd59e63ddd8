"""A link measured by both of its ends: latency and speed, over the library's own transport.

One end serves (:class:`Server`), the other asks (:func:`measure`): for echoes of short messages,
and for megabytes, this way, that way, and both ways at once as in an exchange. Both ends prove
that they know the secret, as workers do, and TLS is used where it is configured. No ``torch``.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import final

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.sockets import Listener, listen
from gossipdp.links.tcp import SharedMemory, TcpTransport
from gossipdp.links.tls import Tls

RUN_ID = "gossipdp doctor"
CHUNK_BYTES = 1 << 20
WINDOW = 4
MAX_CHUNKS = 4096
NUM_ECHOES = 200
CONNECT_TIMEOUT_S = 8.0
SILENCE_TIMEOUT_S = 10.0
SERVER, CLIENT = 0, 1


class Wish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client asks of the server: an echo of this message, or chunks, or both."""

    give: int = 0
    """Chunks that the server is to send."""

    take: int = 0
    """Chunks that the client sends, of whose last the server is to say that it has come."""


@dataclass(frozen=True)
class LinkSpeed:
    """What was measured; bytes per second, medians of the rounds."""

    round_trip_s: float
    there: float
    back: float
    both: float
    """In each direction while both are busy."""


class _End(LinkHandler):
    """What both ends do: send and take chunks through a few buffers."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.error: Exception | None = None
        self.ended = ""
        self.num_to_send = self.num_landed = 0
        self.slots: memoryview | None = None
        self._index = 0
        self._outgoing = memoryview(bytearray(os.urandom(CHUNK_BYTES)))
        self._incoming = memoryview(bytearray(CHUNK_BYTES))

    def link_up(self, link: Link) -> None:
        """See :class:`LinkHandler`."""
        self.link, self.ended = link, ""
        self.num_to_send = self.num_landed = 0

    def link_down(self, link: Link, reason: str) -> None:
        """See :class:`LinkHandler`."""
        if link is self.link:
            self.link, self.ended = None, reason

    def writable(self, link: Link) -> None:
        """See :class:`LinkHandler`."""
        while self.num_to_send and link.queued_chunks < WINDOW:
            self.num_to_send -= 1
            self._index += 1
            payload = self._outgoing
            if self.slots is not None:
                start = self._index % (2 * WINDOW) * CHUNK_BYTES
                payload = self.slots[start : start + CHUNK_BYTES]
                payload[:] = self._outgoing
            key = ChunkKey(SERVER, 0, 0, self._index)
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        """See :class:`LinkHandler`."""
        return self._incoming[:length]

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """See :class:`LinkHandler`."""
        self.num_landed += 1
        if payload is not None and payload.obj is not self._incoming.obj:
            self._incoming[: len(payload)] = payload  # as an exchange reads it, where it lies

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        """See :class:`LinkHandler`."""
        self.error = RefusedError(str(refusal))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        """See :class:`LinkHandler`."""
        why = (
            "nobody listens there; run gossipdp doctor --listen on that machine first"
            if refused_connection
            else "no answer; check the address, the firewalls between, and that it listens on "
            "that address"
        )
        self.error = RendezvousError(why)


@final
class Server(_End):
    """The end that serves.

    Args:
        tell: called with a sentence when a client comes and when it goes.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self._tell = tell
        self._to_take = 0

    def link_up(self, link: Link) -> None:
        """See :class:`LinkHandler`."""
        super().link_up(link)
        self._to_take = 0
        self._tell(f"{link.peer_identity.host} measures")

    def link_down(self, link: Link, reason: str) -> None:
        """See :class:`LinkHandler`."""
        super().link_down(link, reason)
        self._tell(f"{link.peer_identity.host} has finished")

    def control(self, link: Link, data: bytes) -> None:
        """See :class:`LinkHandler`."""
        try:
            wish = msgspec.json.decode(data, type=Wish)
        except msgspec.DecodeError as error:
            link.close(f"what it asks cannot be read: {error}")
            return
        if not (0 <= wish.give <= MAX_CHUNKS and 0 <= wish.take <= MAX_CHUNKS):
            link.close(f"it asks for more than {MAX_CHUNKS} chunks")
            return
        self.num_to_send, self._to_take = wish.give, wish.take
        self.num_landed = 0
        if not wish.take:
            link.send_control(data)
        self.writable(link)

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """See :class:`LinkHandler`."""
        super().chunk(link, frame_type, key, payload)
        if self._to_take and self.num_landed == self._to_take:
            self._to_take = 0
            link.send_control(b"taken")


@final
class _Client(_End):
    def __init__(self) -> None:
        super().__init__()
        self.is_answered = False

    def control(self, link: Link, data: bytes) -> None:
        self.is_answered = True


def serve(
    listener: Listener,
    host: str,
    secret: bytes,
    *,
    tls: Tls | None = None,
    shared_memory: SharedMemory = "off",
    tell: Callable[[str], None] = lambda text: None,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Serve whoever comes, one after the other, while ``goes_on()``."""
    handler = Server(tell)
    transport = TcpTransport(
        handler, _identity(SERVER, host), secret, listener, tls=tls, shared_memory=shared_memory
    )
    try:
        if shared_memory == "auto":
            handler.slots = transport.allocate(2 * WINDOW * CHUNK_BYTES)
        while goes_on():
            transport.poll(0.2)
    finally:
        transport.close()


def measure(
    address: tuple[str, int],
    own_host: str,
    secret: bytes,
    *,
    tls: Tls | None = None,
    shared_memory: SharedMemory = "off",
    lasts_s: float = 1.0,
    num_rounds: int = 3,
) -> LinkSpeed:
    """Measure the link to the server at ``address``, a numeric host and a port.

    Args:
        address: where it listens.
        own_host: numeric address of this machine from which it is reached.
        secret: the server's.
        tls: what the link goes through; both ends or neither.
        shared_memory: "auto" reads in place what is on the same host.
        lasts_s: about how long each round of each direction takes.
        num_rounds: of each direction.

    Raises:
        RefusedError: the server knows another secret, or one end has TLS and the other has not.
        RendezvousError: nobody answers, or the link broke.
    """
    client = _Client()
    transport = TcpTransport(
        client,
        _identity(CLIENT, own_host),
        secret,
        listen(own_host, 0),
        tls=tls,
        shared_memory=shared_memory,
    )
    try:
        if shared_memory == "auto":
            client.slots = transport.allocate(2 * WINDOW * CHUNK_BYTES)
        transport.dial(SERVER, *address)
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while client.link is None or (shared_memory == "auto" and not client.link.is_shared):
            if client.error is not None:
                raise client.error
            if time.monotonic() > deadline_s:
                raise RendezvousError(f"no answer within {CONNECT_TIMEOUT_S:g} s")
            transport.poll(0.05)
        echoes = [_round(transport, client, Wish()) for _ in range(NUM_ECHOES)]
        # One megabyte says how many fill the time; a slow start counts less in more.
        num_chunks, once_s = 1, _round(transport, client, Wish(1, 1))
        while num_chunks < 64 and once_s < lasts_s / 4:
            num_chunks *= 4
            once_s = _round(transport, client, Wish(num_chunks, num_chunks))
        kinds = (Wish(0, num_chunks), Wish(num_chunks, 0), Wish(num_chunks, num_chunks))
        rounds = [[_round(transport, client, kind) for kind in kinds] for _ in range(num_rounds)]
        num_bytes = num_chunks * CHUNK_BYTES
        speeds = [num_bytes / statistics.median(each) for each in zip(*rounds, strict=True)]
        return LinkSpeed(statistics.median(echoes), *speeds)
    finally:
        transport.close()


def measure_here(secret: bytes, shared_memory: SharedMemory, lasts_s: float) -> LinkSpeed:
    """Measure a link between this process and a new one, over loopback.

    Raises:
        RuntimeError: the other process did not start.
        RendezvousError: it does not answer.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_here, args=(theirs, secret, shared_memory), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(20.0):
            raise RuntimeError("a second process did not start within 20 s")
        return measure(
            ours.recv(), "127.0.0.1", secret, shared_memory=shared_memory, lasts_s=lasts_s
        )
    finally:
        ours.close()  # which ends it
        process.join(2.0)
        process.kill()
        process.join()


def _serve_here(pipe: Connection, secret: bytes, shared_memory: SharedMemory) -> None:
    listener = listen("127.0.0.1", 0)
    pipe.send(listener.getsockname())
    serve(
        listener,
        "127.0.0.1",
        secret,
        shared_memory=shared_memory,
        goes_on=lambda: not pipe.poll(),  # its end is news too
    )


def _round(transport: TcpTransport, client: _Client, wish: Wish) -> float:
    """Seconds until everything wished for was done."""
    client.is_answered, client.num_landed = False, 0
    started_s = time.perf_counter()
    link = client.link
    if link is not None:
        link.send_control(msgspec.json.encode(wish))
        client.num_to_send = wish.take
        client.writable(link)
    while client.num_landed < wish.give or not client.is_answered:
        if client.link is None:
            raise RendezvousError(f"the link ended while it was measured: {client.ended}")
        before = client.link.bytes_received + client.link.bytes_sent
        transport.poll(SILENCE_TIMEOUT_S)
        if client.link is not None and not client.is_answered:
            after = client.link.bytes_received + client.link.bytes_sent
            silent_s = transport.clock() - client.link.last_heard_s
            if after == before and silent_s > SILENCE_TIMEOUT_S:
                raise RendezvousError(f"the other end has been silent for {silent_s:.0f} s")
    return time.perf_counter() - started_s


def _identity(rank: int, host: str) -> Identity:
    return Identity(rank, 0, os.getpid(), RUN_ID, "", "", "", "", "", host)
