"""One of the two processes of exchange.py: every way of exchanging, side by side.

Each way is a :class:`Transfer`: it gets everything ready once, and then, round by round, prepares,
runs (which alone is timed) and verifies what this very run has brought.
"""

from __future__ import annotations

import abc
import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from gossipdp.gossip.codec import tensor_bytes
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import SharedMemory, TcpTransport
from gossipdp.links.tls import Tls, TlsFiles

TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 20
WINDOW = 4
"""Chunks that are queued at once, as in an exchange."""


def values(rank: int, round_number: int, num_values: int) -> Tensor:
    """Return the values of a worker in a round: no two are alike, and both ends know both."""
    return _base(rank, num_values) + round_number


@functools.cache
def _base(rank: int, num_values: int) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))


class Transfer(abc.ABC):
    """One way of exchanging ``num_values`` float32 each way, from memory to memory."""

    def __init__(self, rank: int, num_values: int) -> None:
        self.rank = rank
        self.num_values = num_values
        self.outgoing = torch.zeros(num_values)
        self.incoming = torch.ones(num_values)

    def prepare(self, round_number: int) -> None:
        """Get this round's values ready, as they are before an exchange."""
        self.outgoing.copy_(values(self.rank, round_number, self.num_values))

    @abc.abstractmethod
    def run(self) -> None:
        """Exchange."""

    def verify(self, round_number: int) -> None:
        """Raise AssertionError unless this round's values have come."""
        expected = values(1 - self.rank, round_number, self.num_values)
        assert torch.equal(self.incoming, expected), "what arrived is not what was sent"


@final
class Gloo(Transfer):
    """torch.distributed: first one way, then the other, as blocking calls; or both at once."""

    def __init__(self, rank: int, num_values: int, *, at_once: bool) -> None:
        super().__init__(rank, num_values)
        self._at_once = at_once

    def run(self) -> None:
        peer = 1 - self.rank
        if self._at_once:
            for work in (dist.isend(self.outgoing, peer), dist.irecv(self.incoming, peer)):
                assert work is not None
                work.wait()
        elif self.rank == 0:
            dist.send(self.outgoing, peer)
            dist.recv(self.incoming, peer)
        else:
            dist.recv(self.incoming, peer)
            dist.send(self.outgoing, peer)


class ChunkStream(LinkHandler):
    """Sends ``outgoing`` in chunks over its one link and takes in as many, round by round.

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
        self.link: Link | None = None

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


@final
class LinkTransfer(Transfer):
    """A link of ours. With shared memory the time includes writing the values there.

    The others begin with values that are ready to be sent; there is room for all chunks, so that
    what the peer can read after the run is what the run has brought.
    """

    def __init__(
        self,
        rank: int,
        num_values: int,
        pipe: Connection,
        shared_memory: SharedMemory,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(rank, num_values)
        self._stream = ChunkStream(
            tensor_bytes(self.outgoing), tensor_bytes(self.incoming), CHUNK_BYTES
        )
        listener = listen("127.0.0.1", 0)
        self._transport = TcpTransport(
            self._stream,
            Identity(rank, 0, os.getpid(), "bench", "", "", "", "", ""),
            b"a secret of the benchmark",
            listener,
            tls=None if tls is None else Tls(tls),
            shared_memory=shared_memory,
        )
        if shared_memory == "auto":
            self._stream.slots = self._transport.allocate(4 * num_values)
        pipe.send(listener.getsockname())  # to the parent, which hands each the other's address
        self._meet(pipe.recv())

    def _meet(self, address: tuple[str, int]) -> None:
        if self.rank == 0:
            self._transport.dial(1, *address)
        deadline_s = time.monotonic() + TIMEOUT_S
        wants_memory = self._transport.memory.segment is not None
        stream = self._stream
        while stream.link is None or (wants_memory and not stream.link.is_shared):
            self._transport.poll(0.01)
            if time.monotonic() > deadline_s:
                raise RuntimeError("no link, or no memory shared over it")

    def run(self) -> None:
        self._stream.start()
        while not self._stream.is_finished:
            self._transport.poll(1.0)
        self._transport.poll(0.0)  # the peer waits for word of its last chunk

    def verify(self, round_number: int) -> None:
        self._stream.copy_shared()
        super().verify(round_number)


def contenders(
    rank: int, pipe: Connection, num_values: int, tls: TlsFiles
) -> dict[str, Callable[[], Transfer]]:
    """Return the maker of each. Those with addresses swap them in this order, through ``pipe``."""
    return {
        "tcp": lambda: LinkTransfer(rank, num_values, pipe, "off"),
        "tls": lambda: LinkTransfer(rank, num_values, pipe, "off", tls),
        "shared_memory": lambda: LinkTransfer(rank, num_values, pipe, "auto"),
        "gloo": lambda: Gloo(rank, num_values, at_once=False),
        "gloo_at_once": lambda: Gloo(rank, num_values, at_once=True),
    }


NUM_ADDRESSES = 3


def work(rank: int, pipe: Connection, num_values: int, directory: Path) -> None:
    """Serve rounds until asked to stop: (name, number) in, (wall seconds, CPU seconds) out.

    ``directory`` holds a certificate and its key, and takes the store of gloo.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    certificate, key = directory / "cert.pem", directory / "key.pem"
    tls = TlsFiles(certificate, key, certificate)
    made = {name: make() for name, make in contenders(rank, pipe, num_values, tls).items()}
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        name, round_number = order
        contender = made[name]
        contender.prepare(round_number)
        pipe.send("prepared")
        pipe.recv()
        cpu_s, started_s = time.process_time(), time.perf_counter()
        contender.run()
        pipe.send((time.perf_counter() - started_s, time.process_time() - cpu_s))
        contender.verify(round_number)
    os._exit(0)  # the two ends part in no order
