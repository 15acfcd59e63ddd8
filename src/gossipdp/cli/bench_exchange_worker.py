"""One of the two processes of ``gossipdp bench exchange``: every way of exchanging, side by side.

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
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from gossipdp.dynamics.phase import Phase
from gossipdp.dynamics.state import DEFAULT_CHUNK_BYTES, Role, Segment, State
from gossipdp.protocol.messages import ExchangeId
from gossipdp.runtime.exchange import Exchange
from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Identity, Refusal
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.shared_state import SharedState
from gossipdp.runtime.tcp import SharedMemory, TcpTransport, listen
from gossipdp.runtime.wire_buffers import tensor_bytes
from gossipdp.runtime.wire_formats import wire_format

CHUNK_BYTES = DEFAULT_CHUNK_BYTES
WINDOW = 4
ALPHA_TILDE = 1.3
TIMEOUT_S = 60.0


def values(rank: int, round_number: int, num_values: int) -> Tensor:
    """What worker ``rank`` holds in a round: both ends can compute both, and no two are alike."""
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


class Handler(LinkHandler):
    """Of a transport that has one link and nothing to say over it."""

    link: Link | None = None

    def link_up(self, link: Link) -> None:
        self.link = link

    def link_down(self, link: Link, reason: str) -> None:
        raise RuntimeError(f"link down: {reason}")

    def control(self, link: Link, data: bytes) -> None: ...

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        raise RuntimeError(str(refusal))

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        raise RuntimeError("the dial failed")


def connect(
    rank: int, pipe: Connection, handler: Handler, shared_memory: SharedMemory
) -> TcpTransport:
    """A transport to the other process, whose link is up with all that belongs to it."""
    listener = listen("127.0.0.1", 0)
    identity = Identity(rank, 0, os.getpid(), "bench", "", "", "", "", "")
    transport = TcpTransport(handler, identity, b"secret", listener, shared_memory=shared_memory)
    pipe.send(listener.getsockname())
    return transport


def dial(rank: int, pipe: Connection, handler: Handler, transport: TcpTransport) -> None:
    """The other half of :func:`connect`, once the memory to be shared is allocated."""
    address = pipe.recv()
    if rank == 0:
        transport.dial(1, *address)
    deadline_s = time.monotonic() + TIMEOUT_S
    wants_memory = transport.segment is not None
    while handler.link is None or (wants_memory and not handler.link.is_shared):
        transport.poll(0.01)
        if time.monotonic() > deadline_s:
            raise RuntimeError("no link, or no memory shared over it")


class ChunkHandler(Handler):
    """Sends ``outgoing`` in chunks through ``slots`` and takes in as many."""

    def __init__(self, outgoing: memoryview, incoming: memoryview) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.slots: memoryview | None = None
        self.num_chunks = -(-len(outgoing) // CHUNK_BYTES)
        self.num_queued = self.num_landed = self.num_chunks
        self.views: list[tuple[int, memoryview]] = []

    @property
    def is_finished(self) -> bool:
        assert self.link is not None
        return self.num_landed == self.num_chunks and self.link.queued_chunks == 0

    def start(self) -> None:
        """Begin a round."""
        self.num_queued = self.num_landed = 0
        self.views.clear()
        assert self.link is not None
        self.writable(self.link)

    def writable(self, link: Link) -> None:
        while self.num_queued < self.num_chunks and link.queued_chunks < WINDOW:
            start = self.num_queued * CHUNK_BYTES
            payload = self.outgoing[start : start + CHUNK_BYTES]
            if self.slots is not None:
                slot = self.slots[start : start + len(payload)]
                slot[:] = payload
                payload = slot
            key = ChunkKey(0, 0, 0, self.num_queued)
            self.num_queued += 1
            link.send_chunk(FrameType.EXCHANGE_CHUNK, key, payload)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview:
        start = key.index * CHUNK_BYTES
        return self.incoming[start : start + length]

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert payload is not None
        self.num_landed += 1
        if self.slots is not None:
            self.views.append((key.index * CHUNK_BYTES, payload))


@final
class LinkTransfer(Transfer):
    """A link of ours. With shared memory the time includes writing the values there.

    The others begin with values that are ready to be sent; there is room for all chunks, so that
    what the peer can read after the run is what the run has brought.
    """

    def __init__(
        self, rank: int, num_values: int, pipe: Connection, shared_memory: SharedMemory
    ) -> None:
        super().__init__(rank, num_values)
        self._handler = ChunkHandler(tensor_bytes(self.outgoing), tensor_bytes(self.incoming))
        self._transport = connect(rank, pipe, self._handler, shared_memory)
        if shared_memory == "auto":
            self._handler.slots = self._transport.allocate(4 * num_values)
        dial(rank, pipe, self._handler, self._transport)

    def run(self) -> None:
        self._handler.start()
        while not self._handler.is_finished:
            self._transport.poll(1.0)
        self._transport.poll(0.0)  # the peer waits for word of its last chunk

    def verify(self, round_number: int) -> None:
        for start, view in self._handler.views:
            self._handler.incoming[start : start + len(view)] = view
        super().verify(round_number)


class Update(Contender):
    """Values exchanged and applied to a worker's whole state."""

    def __init__(self, rank: int, num_values: int) -> None:
        super().__init__(rank, num_values)
        self.state = State([Segment(torch.zeros(num_values), Role.TRAINED)])
        self.shared = SharedState(self.state, Phase(0.0, 1.0))

    def prepare(self, round_number: int) -> None:
        self.shared.reset()
        (segment,) = self.state.segments
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


class ExchangeHandler(Handler):
    """What the gossip loop does with the chunks of an exchange."""

    exchange: Exchange | None = None

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        assert self.exchange is not None
        return self.exchange.landing(frame_type, key, length)

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
        self._transport = connect(rank, pipe, self._handler, shared_memory)
        self._format = wire_format("parameters", self.shared, self._transport.allocate)
        self._counter = 0
        dial(rank, pipe, self._handler, self._transport)

    def prepare(self, round_number: int) -> None:
        super().prepare(round_number)
        assert self._handler.link is not None
        self._counter += 1
        # Before the start of the clock, as the peer's first chunk may come before ours is run.
        self._handler.exchange = self._format.start(
            self._handler.link, ExchangeId(0, 0, self._counter), ALPHA_TILDE
        )

    def run(self) -> None:
        exchange = self._handler.exchange
        assert exchange is not None
        exchange.pump()
        while not exchange.is_finished:
            self._transport.poll(1.0)
            exchange.pump()
        self._transport.poll(0.0)  # the peer waits for word of its last chunk
        exchange.end()


@final
class GlooUpdate(Update):
    """Snapshots of everything, sent and received by gloo, then the same arithmetic."""

    def __init__(self, rank: int, num_values: int) -> None:
        super().__init__(rank, num_values)
        self._mine = torch.zeros(num_values)
        self._peers = torch.zeros(num_values)

    def run(self) -> None:
        theta = self.shared.start_exchange()
        places = []
        start = 0
        for chunk in self.state.chunks:
            places.append((chunk, slice(start, start := start + chunk.num_elements)))
        for chunk, place in places:
            self.shared.snapshot(chunk, theta, self._mine[place])
        gloo_exchange(self.rank, self._mine, self._peers, at_once=False)
        for chunk, place in places:
            self.shared.exchange(chunk, self._mine[place], self._peers[place], ALPHA_TILDE)
        self.shared.end_exchange()


def bare_connection(rank: int, pipe: Connection) -> socket.socket:
    """A plain TCP connection to the other process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        address = pipe.recv()
        if rank == 0:
            return socket.create_connection(address)
        return server.accept()[0]


def contenders(rank: int, pipe: Connection, num_values: int) -> dict[str, Callable[[], Contender]]:
    """How each is made. Those with addresses to swap do so in this order, through ``pipe``."""
    return {
        "bare_socket": lambda: BareSocket(rank, num_values, bare_connection(rank, pipe)),
        "tcp": lambda: LinkTransfer(rank, num_values, pipe, "off"),
        "shared_memory": lambda: LinkTransfer(rank, num_values, pipe, "auto"),
        "tcp_with_update": lambda: LinkUpdate(rank, num_values, pipe, "off"),
        "shared_memory_with_update": lambda: LinkUpdate(rank, num_values, pipe, "auto"),
        "gloo": lambda: Gloo(rank, num_values, at_once=False),
        "gloo_at_once": lambda: Gloo(rank, num_values, at_once=True),
        "gloo_with_update": lambda: GlooUpdate(rank, num_values),
    }


NUM_ADDRESSES = 5


def work(rank: int, pipe: Connection, num_values: int, store: str) -> None:
    """Serve rounds until told to stop: (name, number) in, (wall seconds, CPU seconds) out."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    made = {name: make() for name, make in contenders(rank, pipe, num_values).items()}
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
