"""One of the two processes of exchange.py: every way of exchanging, side by side.

Each way is a :class:`Contender`: it gets everything ready once, and then, round by round, prepares,
runs (which alone is timed) and verifies what this very run has brought.
"""

from __future__ import annotations

import abc
import functools
import os
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from gossipdp.dynamics.chunks import Role
from gossipdp.dynamics.device import zeros
from gossipdp.dynamics.state import Segment, State
from gossipdp.gossip.codec import make_codec, tensor_bytes
from gossipdp.gossip.exchange import Exchange
from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.link import Link
from gossipdp.links.tcp import SharedMemory
from gossipdp.links.tls import TlsFiles
from gossipdp.protocol.messages import ExchangeId
from support.links import TIMEOUT_S, ChunkStream, LinkEnd, transport_to_the_other

CHUNK_BYTES = 1 << 20
ALPHA_TILDE = 1.3


def values(rank: int, round_number: int, num_values: int) -> Tensor:
    """Return the values of a worker in a round: no two are alike, and both ends know both."""
    return _base(rank, num_values) + round_number


@functools.cache
def _base(rank: int, num_values: int) -> Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(rank))


class Contender(abc.ABC):
    """One way of exchanging ``num_values`` float32 each way."""

    def __init__(self, rank: int, num_values: int) -> None:
        self.rank = rank
        self.num_values = num_values

    @abc.abstractmethod
    def prepare(self, round_number: int) -> None:
        """Get this round's values ready, as they are before an exchange."""

    @abc.abstractmethod
    def run(self) -> None:
        """Exchange."""

    @abc.abstractmethod
    def verify(self, round_number: int) -> None:
        """Raise AssertionError unless this round's values have come."""


class Transfer(Contender):
    """Values from memory to memory."""

    def __init__(self, rank: int, num_values: int) -> None:
        super().__init__(rank, num_values)
        self.outgoing = torch.zeros(num_values)
        self.incoming = torch.ones(num_values)

    def prepare(self, round_number: int) -> None:
        self.outgoing.copy_(values(self.rank, round_number, self.num_values))

    def verify(self, round_number: int) -> None:
        expected = values(1 - self.rank, round_number, self.num_values)
        assert torch.equal(self.incoming, expected), "what arrived is not what was sent"


@final
class BareSocket(Transfer):
    """The barest loop that sends and receives at once: no frames, no handshake, one link."""

    def __init__(self, rank: int, num_values: int, connection: socket.socket) -> None:
        super().__init__(rank, num_values)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._poll = select.poll()

    def run(self) -> None:
        outgoing, incoming = tensor_bytes(self.outgoing), tensor_bytes(self.incoming)
        connection, poll = self._connection, self._poll
        sent = received = 0
        while sent < len(outgoing) or received < len(incoming):
            wanted = (select.POLLIN if received < len(incoming) else 0) | (
                select.POLLOUT if sent < len(outgoing) else 0
            )
            poll.register(connection, wanted)
            for _, mask in poll.poll():
                if mask & select.POLLIN:
                    received += connection.recv_into(incoming[received : received + CHUNK_BYTES])
                if mask & select.POLLOUT:
                    sent += connection.send(outgoing[sent : sent + CHUNK_BYTES])


@final
class Gloo(Transfer):
    """torch.distributed: first one way, then the other, as blocking calls; or both at once."""

    def __init__(self, rank: int, num_values: int, *, at_once: bool) -> None:
        super().__init__(rank, num_values)
        self._at_once = at_once

    def run(self) -> None:
        gloo_exchange(self.rank, self.outgoing, self.incoming, self._at_once)


def gloo_exchange(rank: int, outgoing: Tensor, incoming: Tensor, at_once: bool) -> None:
    """Send one tensor to the other process and receive one of its."""
    peer = 1 - rank
    if at_once:
        for work in (dist.isend(outgoing, peer), dist.irecv(incoming, peer)):
            assert work is not None
            work.wait()
    elif rank == 0:
        dist.send(outgoing, peer)
        dist.recv(incoming, peer)
    else:
        dist.recv(incoming, peer)
        dist.send(outgoing, peer)


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
        self._transport, meet = transport_to_the_other(
            rank, pipe, self._stream, shared_memory=shared_memory, tls=tls
        )
        if shared_memory == "auto":
            self._stream.slots = self._transport.allocate(4 * num_values)
        meet()

    def run(self) -> None:
        self._stream.start()
        while not self._stream.is_finished:
            self._transport.poll(1.0)
        self._transport.poll(0.0)  # the peer waits for word of its last chunk

    def verify(self, round_number: int) -> None:
        self._stream.copy_shared()
        super().verify(round_number)


class Update(Contender):
    """Values exchanged and applied to a worker's whole state."""

    def __init__(self, rank: int, num_values: int) -> None:
        super().__init__(rank, num_values)
        x = zeros(num_values, torch.float32, torch.device("cpu"))
        self.state = State([Segment(x, Role.TRAINED)])
        self.state.compile()

    def prepare(self, round_number: int) -> None:
        (segment,) = self.state.segments
        segment.forget(0, self.num_values)
        segment.x.copy_(values(self.rank, round_number, self.num_values))

    def verify(self, round_number: int) -> None:
        (segment,) = self.state.segments
        mine, peers = (
            values(rank, round_number, self.num_values) for rank in (self.rank, 1 - self.rank)
        )
        delta = mine - peers
        assert segment.c is not None
        assert torch.allclose(segment.pending, -0.5 * delta), "not the mean of the two"
        assert torch.allclose(segment.c, (0.5 - ALPHA_TILDE) * delta), "not the momentum"


class ExchangeHandler(LinkEnd):
    """The gossip loop's work on the chunks of an exchange."""

    exchange: Exchange | None = None

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        assert self.exchange is not None
        return self.exchange.landing(frame_type, key)

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert self.exchange is not None
        assert payload is not None
        self.exchange.landed(frame_type, key, payload)

    def writable(self, link: Link) -> None:
        assert self.exchange is not None
        self.exchange.pump()


@final
class LinkUpdate(Update):
    """The library's exchange over a link."""

    def __init__(
        self, rank: int, num_values: int, pipe: Connection, shared_memory: SharedMemory
    ) -> None:
        super().__init__(rank, num_values)
        self._handler = ExchangeHandler()
        self._transport, meet = transport_to_the_other(
            rank, pipe, self._handler, shared_memory=shared_memory
        )
        self._codec = make_codec("full", self.state, self._transport.allocate)
        self._counter = 0
        meet()

    def prepare(self, round_number: int) -> None:
        super().prepare(round_number)
        assert self._handler.link is not None
        self._counter += 1
        # Before the start of the clock, as the peer's first chunk may come before ours is run.
        self._handler.exchange = Exchange(
            self.state,
            self._codec,
            self._handler.link,
            ExchangeId(0, 0, self._counter),
            alpha_tilde=ALPHA_TILDE,
            theta=0.0,
        )

    def run(self) -> None:
        exchange = self._handler.exchange
        assert exchange is not None
        exchange.pump()
        while not exchange.is_finished:
            self._transport.poll(1.0)
            exchange.pump()
        self._transport.poll(0.0)  # the peer waits for word of its last chunk


@final
class GlooUpdate(Update):
    """Snapshots of everything, sent and received by gloo, then the same arithmetic."""

    def __init__(self, rank: int, num_values: int) -> None:
        super().__init__(rank, num_values)
        self._mine = torch.zeros(num_values)
        self._peers = torch.zeros(num_values)

    def run(self) -> None:
        places = []
        start = 0
        for chunk in self.state.chunks:
            places.append((chunk, slice(start, start := start + chunk.num_elements)))
        for chunk, place in places:
            chunk.snapshot(0.0, self._mine[place])
        gloo_exchange(self.rank, self._mine, self._peers, at_once=False)
        for chunk, place in places:
            chunk.exchange(0.0, self._mine[place], self._peers[place], ALPHA_TILDE)


def bare_connection(rank: int, pipe: Connection) -> socket.socket:
    """Open a plain TCP connection to the other process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        address = pipe.recv()
        if rank == 0:
            return socket.create_connection(address)
        return server.accept()[0]


def contenders(
    rank: int, pipe: Connection, num_values: int, tls: TlsFiles
) -> dict[str, Callable[[], Contender]]:
    """Return the maker of each. Those with addresses swap them in this order, through ``pipe``."""
    return {
        "bare_socket": lambda: BareSocket(rank, num_values, bare_connection(rank, pipe)),
        "tcp": lambda: LinkTransfer(rank, num_values, pipe, "off"),
        "tls": lambda: LinkTransfer(rank, num_values, pipe, "off", tls),
        "shared_memory": lambda: LinkTransfer(rank, num_values, pipe, "auto"),
        "tcp_with_update": lambda: LinkUpdate(rank, num_values, pipe, "off"),
        "shared_memory_with_update": lambda: LinkUpdate(rank, num_values, pipe, "auto"),
        "gloo": lambda: Gloo(rank, num_values, at_once=False),
        "gloo_at_once": lambda: Gloo(rank, num_values, at_once=True),
        "gloo_with_update": lambda: GlooUpdate(rank, num_values),
    }


NUM_ADDRESSES = 6


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
