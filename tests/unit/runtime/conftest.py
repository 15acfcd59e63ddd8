"""Workers' transports on real loopback sockets, driven by hand from the test's own thread."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Identity, Refusal
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.tcp import TcpTransport, listen
from gossipdp.runtime.tls import Tls
from gossipdp.runtime.transport import Transport


@dataclass(eq=False)
class Recorder(LinkHandler):
    """Writes down what it is told; ``hooks`` by method name may do more, or raise."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    depth: int = 0

    def names(self) -> list[str]:
        return [event[0] for event in self.events]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]

    def _record(self, name: str, *values: Any) -> Any:
        assert self.depth == 0, "a handler method was entered twice"
        self.events.append((name, *values))
        if name not in self.hooks:
            return None
        self.depth += 1
        try:
            return self.hooks[name](*values)
        finally:
            self.depth -= 1

    def link_up(self, link: Link) -> None:
        assert link.peer not in self.links, "two links to one peer are up"
        self.links[link.peer] = link
        self._record("link_up", link)

    def link_down(self, link: Link, reason: str) -> None:
        assert self.links.pop(link.peer) is link
        assert link.closed
        self._record("link_down", link, reason)

    def control(self, link: Link, data: bytes) -> None:
        assert self.links[link.peer] is link
        self._record("control", link, data)

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        assert self.links[link.peer] is link
        if "chunk_buffer" in self.hooks:
            return self._record("chunk_buffer", link, frame_type, key, length)
        return memoryview(bytearray(length))

    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        assert self.links[link.peer] is link
        data = None if payload is None else bytes(payload)
        self._record("chunk", link, frame_type, key, data)

    def writable(self, link: Link) -> None:
        self._record("writable", link)

    def refused(self, peer: int | None, refusal: Refusal) -> None:
        self._record("refused", peer, refusal)

    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        self._record("dial_failed", peer, address, refused_connection)


@dataclass(eq=False)
class Node:
    """One worker: its handler, its transport, its address."""

    handler: Recorder
    transport: Transport
    host: str
    port: int
    rank: int
    memory: memoryview | None = None
    num_used: int = 0

    def payload(self, data: bytes) -> memoryview:
        """``data`` to be sent: where peers can read it in place, if this worker has such memory."""
        if self.memory is None:
            return memoryview(data)
        start = self.num_used
        self.num_used += -(-len(data) // 64) * 64
        room = self.memory[start : start + len(data)]
        room[:] = data
        return room

    def dial(self, other: "Node", peer: int | None = -1) -> None:
        self.transport.dial(other.rank if peer == -1 else peer, other.host, other.port)

    def link(self, other: "Node") -> Link:
        return self.handler.links[other.rank]


class World:
    """Makes workers and turns their loops until something is so."""

    def __init__(self, authority: Any) -> None:
        self.nodes: list[Node] = []
        self._authority = authority
        self._tls: dict[int, Tls] = {}

    def identity(self, rank: int, **changes: Any) -> Identity:
        plain = Identity(
            rank, 0, 1000 + rank, "run", "model", "a2cid2", "ring of 4", "1.0", "float32"
        )
        return msgspec.structs.replace(plain, **changes)

    def tcp(self, rank: int, *, secret: bytes = b"secret", port: int = 0, **changes: Any) -> Node:
        options = {
            name: changes.pop(name)
            for name in (
                "tls",
                "clock",
                "handshake_timeout_s",
                "max_unauthenticated",
                "max_bytes_per_s",
                "shared_memory",
            )
            if name in changes
        }
        listener = listen("127.0.0.1", port)
        address = listener.getsockname()
        handler = Recorder()
        transport = TcpTransport(
            handler, self.identity(rank, **changes), secret, listener, **options
        )
        node = Node(handler, transport, *address, rank)
        self.nodes.append(node)
        return node

    def tls(self, rank: int, **changes: Any) -> Node:
        """As ``tcp``, with a certificate of its own; ``tls=`` gives another."""
        if rank not in self._tls:
            self._tls[rank] = Tls(self._authority.issue())
        return self.tcp(rank, **{"tls": self._tls[rank], **changes})

    def shared(self, rank: int, num_bytes: int = 1 << 16, **changes: Any) -> Node:
        """As ``tcp``, with memory that peers read in place."""
        node = self.tcp(rank, **changes)
        node.memory = node.transport.allocate(num_bytes)
        return node

    def until(self, condition: Callable[[], object], *only: Node, timeout_s: float = 10.0) -> None:
        """Turn all loops, or ``only`` some, until ``condition()`` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, [n.handler.events[-5:] for n in self.nodes]
            for node in only or tuple(self.nodes):
                node.transport.poll(0.001)

    def settle(self, *only: Node, turns: int = 20) -> None:
        """Turn the loops a number of times, for what must not happen."""
        for _ in range(turns):
            for node in only or tuple(self.nodes):
                node.transport.poll(0.001)

    def close(self, node: Node) -> None:
        self.nodes.remove(node)
        node.transport.close()

    def join(self, first: Node, second: Node) -> tuple[Link, Link]:
        """A link between two workers, ``first`` dialling."""
        first.dial(second)
        self.until(
            lambda: second.rank in first.handler.links and first.rank in second.handler.links
        )
        there, back = first.link(second), second.link(first)
        if first.memory and second.memory:
            self.until(lambda: there.is_shared and back.is_shared)
        return there, back


@pytest.fixture
def world(authority: Any) -> Iterator[World]:
    world = World(authority)
    yield world
    for node in list(world.nodes):
        world.close(node)


@pytest.fixture
def open_descriptors() -> Callable[[], set[tuple[str, str]]]:
    """The process's open sockets and event descriptors, as (number, what)."""

    def look() -> set[tuple[str, str]]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue
            if target.startswith(("socket:", "anon_inode:")):
                found.add((name, target))
        return found

    return look
