"""Workers' transports, driven by hand from the test's own thread: on real loopback sockets."""

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from waiting import wait_until

from gossipdp.links.frames import HEADER_BYTES, ChunkKey, FrameType, check_length, pack_key, run_tag
from gossipdp.links.handshake import Handshake, Identity, Refusal
from gossipdp.links.link import Link, LinkHandler, Transport
from gossipdp.links.shared_memory import SlotMemory
from gossipdp.links.sockets import listen
from gossipdp.links.tcp import TcpTransport
from gossipdp.links.tcp_link import LinkOwner, TcpLink
from gossipdp.links.tls import Tls
from gossipdp.logs import OnceLog

EXCHANGE = FrameType.EXCHANGE_CHUNK


def key(index: int = 0) -> ChunkKey:
    """Return the key of a chunk of a test's one exchange."""
    return ChunkKey(0, 0, 1, index)


def identity(rank: int, **changes: Any) -> Identity:
    """Return the hello of a worker of the run "run"."""
    settings = "run", "model", "a2cid2", "ring of 4", "1.0", "float32"
    return msgspec.structs.replace(Identity(rank, 0, 1000 + rank, *settings), **changes)


def feed(machine: Handshake, data: bytes) -> bytes:
    """Give a machine bytes as it wants them; return those that it did not want."""
    while data and (count := machine.num_wanted):
        machine.receive(data[:count])
        data = data[count:]
    return data


@dataclass(eq=False)
class Recorder(LinkHandler):
    """Writes down its calls; ``hooks`` by method name may do more, or raise."""

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
        """Place ``data`` where peers can read it, if this worker has such memory."""
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

    def __init__(self, tls: Path | None = None) -> None:
        self.nodes: list[Node] = []
        self._tls_directory = tls

    def tcp(self, rank: int, *, at: tuple[str, int] = ("127.0.0.1", 0), **changes: Any) -> Node:
        """Make a worker that listens ``at``; ``changes`` are of its hello and its transport."""
        own = Identity.__struct_fields__
        options = {name: changes.pop(name) for name in list(changes) if name not in own}
        secret = options.pop("secret", b"secret")
        listener, handler = listen(*at), Recorder()
        transport = TcpTransport(handler, identity(rank, **changes), secret, listener, **options)
        self.nodes.append(Node(handler, transport, *listener.getsockname()[:2], rank))
        return self.nodes[-1]

    def tls(self, rank: int, **changes: Any) -> Node:
        """As ``tcp``, with the run's certificate and key; ``tls=`` gives others."""
        return self.tcp(rank, **{"tls": Tls(self._tls_directory), **changes})

    def shared(self, rank: int, num_bytes: int = 1 << 16, **changes: Any) -> Node:
        """As ``tcp``, with memory that peers read in place."""
        node = self.tcp(rank, **changes)
        node.memory = node.transport.allocate(num_bytes)
        return node

    def until(self, condition: Callable[[], object], *only: Node) -> None:
        """Turn all loops, or ``only`` some, until ``condition()`` holds."""

        def said() -> str:
            return str([node.handler.events[-5:] for node in self.nodes])

        wait_until(condition, said, lambda: self.settle(*only, turns=1))

    def settle(self, *only: Node, turns: int = 20) -> None:
        """Turn the loops a number of times, for what must not happen."""
        for _ in range(turns):
            for node in only or tuple(self.nodes):
                node.transport.poll(0.001)

    def close(self, node: Node) -> None:
        self.nodes.remove(node)
        node.transport.close()

    def join(self, first: Node, second: Node) -> tuple[Link, Link]:
        first.dial(second)
        self.until(
            lambda: second.rank in first.handler.links and first.rank in second.handler.links
        )
        there, back = first.link(second), second.link(first)
        if first.memory and second.memory:
            self.until(lambda: there.is_shared and back.is_shared)
        return there, back

    def pair(self, make: Callable[[int], Node]) -> tuple[Node, Node, Link, Link]:
        first, second = make(0), make(1)
        return first, second, *self.join(first, second)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the other end has closed; drop some of what it said before."""
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


class MemoryLink(Link):
    """A link without a network: what is queued stays there until a test takes it."""

    def __init__(self, peer: int = 0) -> None:
        super().__init__()
        self.peer_identity = Identity(peer, 0, 1, "run", "", "", "", "", "")
        self.controls: deque[bytes] = deque()
        self.queue: deque[tuple[FrameType, ChunkKey, memoryview]] = deque()
        self.most_queued = 0
        self.closed_for: str | None = None

    @property
    def queued_chunks(self) -> int:
        return len(self.queue)

    @property
    def has_unsent(self) -> bool:
        return bool(self.controls or self.queue)

    def queued_of(self, *frame_types: FrameType) -> int:
        return sum(frame_type in frame_types for frame_type, *_ in self.queue)

    def send_control(self, data: bytes) -> None:
        check_length(FrameType.CONTROL, len(data))
        if not self.closed:
            self.controls.append(data)

    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        check_length(frame_type, payload.nbytes)
        pack_key(key)
        if not self.closed:
            self.queue.append((frame_type, key, payload.cast("B")))
            self.most_queued = max(self.most_queued, len(self.queue))

    def take(self) -> tuple[FrameType, ChunkKey, memoryview]:
        """Return the oldest chunk: it has left."""
        frame_type, key, payload = self.queue.popleft()
        self.bytes_sent += HEADER_BYTES + len(payload)
        self.chunk_bytes_sent[frame_type] += len(payload)
        return frame_type, key, payload

    def close(self, reason: str) -> None:
        if not self.closed:
            self.closed, self.closed_for = True, reason
            self.controls.clear()
            self.queue.clear()


class NoNetwork(Transport):
    """A transport on which nothing happens: the test says what becomes of a dial."""

    def __init__(self, handler: LinkHandler) -> None: ...
    def dial(self, peer: int | None, host: str, port: int) -> None: ...
    def flush(self) -> None: ...
    def poll(self, timeout_s: float) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

    def allocate(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))


class LoneOwner(LinkOwner):
    """A transport of one link, whose other end the test plays; ``ended`` is why it went down."""

    def __init__(self, handler: LinkHandler, *, may_share: bool = False) -> None:
        self.handler = handler
        self.tag = run_tag("run")
        self.clock = lambda: 0.0
        self.scratch = memoryview(bytearray(4096))
        self.memory = SlotMemory(OnceLog(logging.getLogger()), may_share=may_share, handler=handler)
        self.to_read: dict[Any, None] = {}
        self.to_write: dict[TcpLink, None] = {}
        self.limit = None
        self.ended: list[str] = []

    def link_ended(self, link: TcpLink, reason: str, *, broken: bool) -> None:
        self.ended.append(reason)


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[tuple[str, int]]:
    """Accept one connection, in a thread that ends with ``answer``."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


def in_child(function: Callable[[], object]) -> str:
    """Call ``function`` in a forked child; return its result as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(function()).encode())
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
