"""One end of a link between two processes, driven without a gossip loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import SharedMemory, TcpTransport
from gossipdp.links.tls import Tls, TlsFiles

TIMEOUT_S = 60.0
WINDOW = 4
"""Chunks that are queued at once, as in an exchange."""


class LinkEnd(LinkHandler):
    """Listens to a transport with one link and no messages; anything else is an error."""

    link: Link | None = None

    def link_up(self, link: Link) -> None:
        self.link = link

    def link_down(self, link: Link, reason: str) -> None:
        raise RuntimeError(f"link down: {reason}")

    def control(self, link: Link, data: bytes) -> None:
        raise RuntimeError("a control message came, but nobody sends any")

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        raise RuntimeError(str(refusal))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        raise RuntimeError("the dial failed")


def transport_to_the_other(
    rank: int,
    pipe: Connection,
    end: LinkEnd,
    *,
    shared_memory: SharedMemory,
    tls: TlsFiles | None = None,
) -> tuple[TcpTransport, Callable[[], None]]:
    """Return a transport to the other of two processes, and the dialler that connects it.

    Between the two the caller allocates the memory that is to be shared. ``pipe`` leads to the
    parent, which hands each process the other's address.
    """
    listener = listen("127.0.0.1", 0)
    identity = Identity(rank, 0, os.getpid(), "bench", "", "", "", "", "")
    transport = TcpTransport(
        end,
        identity,
        b"a secret of the benchmark",
        listener,
        tls=None if tls is None else Tls(tls),
        shared_memory=shared_memory,
    )
    pipe.send(listener.getsockname())

    def meet() -> None:
        address = pipe.recv()
        if rank == 0:
            transport.dial(1, *address)
        deadline_s = time.monotonic() + TIMEOUT_S
        wants_memory = transport.memory.segment is not None
        while end.link is None or (wants_memory and not end.link.is_shared):
            transport.poll(0.01)
            if time.monotonic() > deadline_s:
                raise RuntimeError("no link, or no memory shared over it")

    return transport, meet


class ChunkStream(LinkEnd):
    """Sends ``outgoing`` in chunks and takes in as many, round by round.

    With ``slots``, memory that is shared, chunks are written there and read in place; there is room
    for all, so that what the peer can read after a round is what the round has brought.
    """

    def __init__(self, outgoing: memoryview, incoming: memoryview, chunk_bytes: int) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.slots: memoryview | None = None
        self._chunk_bytes = chunk_bytes
        self._num_chunks = -(-len(outgoing) // chunk_bytes)
        self._num_queued = self._num_landed = self._num_chunks
        self._views: list[tuple[int, memoryview]] = []

    @property
    def is_finished(self) -> bool:
        """Return whether all chunks of this round have come and gone."""
        assert self.link is not None
        return self._num_landed == self._num_chunks and self.link.queued_chunks == 0

    def start(self) -> None:
        """Begin a round."""
        self._num_queued = self._num_landed = 0
        self._views.clear()
        assert self.link is not None
        self.writable(self.link)

    def copy_shared(self) -> None:
        """Copy to ``incoming`` what the peer has written to shared memory."""
        for start, view in self._views:
            self.incoming[start : start + len(view)] = view

    def writable(self, link: Link) -> None:
        while self._num_queued < self._num_chunks and link.queued_chunks < WINDOW:
            start = self._num_queued * self._chunk_bytes
            payload = self.outgoing[start : start + self._chunk_bytes]
            if self.slots is not None:
                slot = self.slots[start : start + len(payload)]
                slot[:] = payload
                payload = slot
            key = ChunkKey(0, 0, 0, self._num_queued)
            self._num_queued += 1
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview:
        start = key.index * self._chunk_bytes
        return self.incoming[start : start + length]

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert payload is not None
        self._num_landed += 1
        if self.slots is not None:
            self._views.append((key.index * self._chunk_bytes, payload))
