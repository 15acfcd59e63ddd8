"""Strangers and traitors at the transport, while two good links of it go on exchanging."""

import contextlib
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clocks import Clock
from links import EXCHANGE, has_ended, identity, key

from gossipdp.links import sockets, tcp
from gossipdp.links.frames import HEADER_BYTES, FrameType, pack_header, run_tag
from gossipdp.links.handshake import MAGIC, VERSION, Handshake

PREFIX = MAGIC + bytes(VERSION)
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03"


@pytest.fixture(params=["tcp", "tls"])
def make(request: pytest.FixtureRequest, world: Any) -> Callable[..., Any]:
    return getattr(world, request.param)


class Guests(list[socket.socket]):
    """Connections of a stranger, closed at the end."""

    def knock(self, node: Any, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection((node.host, node.port), timeout=5)
        connection.setblocking(False)
        self.append(connection)
        if data:
            connection.send(data)
        return connection

    def close(self) -> None:
        while self:
            self.pop().close()


@pytest.fixture
def guests() -> Iterator[Guests]:
    with contextlib.closing(Guests()) as guests:
        yield guests


class Exchanging:
    """A worker with two good neighbours, between which chunks go both ways all the time."""

    def __init__(self, world: Any, make: Callable[..., Any], **options: Any) -> None:
        self.world = world
        self.hub = make(0, **options)
        self.neighbours = [make(rank) for rank in (1, 2)]
        self.links = [world.join(neighbour, self.hub) for neighbour in self.neighbours]
        self.sent = 0

    def exchange(self) -> None:
        """One chunk each way on both links arrives."""
        self.sent += 1
        payload = memoryview(bytes([self.sent % 251]) * 100_000)
        for there, back in self.links:
            for link in (there, back):
                link.send_chunk(EXCHANGE, key(self.sent), payload)
        nodes = [self.hub, *self.neighbours]
        expected = [2 * self.sent, self.sent, self.sent]
        self.world.until(lambda: [len(node.handler.of("chunk")) for node in nodes] == expected)
        assert all(node.handler.of("chunk")[-1][3] == payload.tobytes() for node in nodes)

    def assert_undisturbed(self) -> None:
        self.exchange()
        assert self.hub.handler.names().count("link_up") == 2
        assert "link_down" not in self.hub.handler.names()


HUGE = [
    PREFIX + b"\xff\xff" + bytes(4096),  # our own handshake: 65,535 bytes announced
    struct.pack(">BHH", 22, 0x0301, 0xFFFF) + bytes(4096),  # a TLS record of 65,535 bytes
    PREFIX + b"\x40\x00\xc6\xff\xff\xff\xff",  # msgpack: a binary of 4 GiB
    PREFIX + b"\x40\x00\xdd\xff\xff\xff\xff",  # msgpack: an array of 2**32 - 1 items
    PREFIX + b"\x06\x00\x93\x01\xdb\xff\xff\xff",  # msgpack: a text of 4 GiB
    b"\x00" * 4096,
    b"GET / HTTP/1.1\r\n\r\n" * 200,
    bytes(range(256)) * 16,
]


def test_garbage_and_huge_lengths_allocate_nothing_and_are_logged_once(make, world, guests, caplog):
    good = Exchanging(world, make)
    good.exchange()
    caplog.clear()
    for data in HUGE:
        tracemalloc.start()
        try:
            for _ in range(10):
                guests.knock(good.hub, data[:HEADER_BYTES])
                world.settle(turns=1)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # A connection is some Python objects; what was announced would be at least 64 KiB each.
        assert peak < 10 * 20_000
        for guest in guests:
            with contextlib.suppress(OSError):  # was shown out before
                guest.send(data[HEADER_BYTES:])
        good.assert_undisturbed()
        guests.close()
    assert len(caplog.records) <= 2  # once for no handshake, once for the other kind of one


def test_a_chunk_that_nobody_asked_for_takes_no_memory(world):
    hub = world.tcp(0)
    there, _ = world.join(world.tcp(9), hub)
    hub.handler.hooks["chunk_buffer"] = lambda *_: None
    payload = memoryview(bytes(16 << 20))
    tracemalloc.start()
    there.send_chunk(FrameType.STATE_CHUNK, key(), payload)
    world.until(lambda: hub.handler.of("chunk"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000
    assert hub.handler.of("chunk")[0][3] is None


def test_a_peer_that_authenticates_and_then_sends_garbage(make, world, caplog):
    good = Exchanging(world, make)
    traitor = make(9)
    frame = pack_header(run_tag("run"), FrameType.CONTROL, 0, 5) + b"again"
    for data in (b"\x01" * 5000, b"\x02" * 5000, 2 * frame):
        world.join(traitor, good.hub)
        traitor.transport.links[0].stream.send([data])
        world.until(lambda: 9 not in good.hub.handler.links and not traitor.handler.links)
    ended = good.hub.handler.of("link_down")
    assert [link.peer for link, _ in ended] == [9] * 3
    assert all(reason.startswith("the peer broke the protocol") for _, reason in ended)
    assert ended[-1][1].endswith("frame 0 came where 1 was due")
    assert [data for _, data in good.hub.handler.of("control")] == [b"again"]
    good.exchange()
    assert len(caplog.records) == 1
    assert "ended the link to rank 9 at 127.0.0.1: the peer broke" in caplog.text


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tcp", b""),
        ("tcp", PREFIX + b"\x40\x00\x93"),
        ("tls", b""),
        ("tls", b"GDP"),
        ("tls", TLS_HELLO),
    ],
)
def test_a_slow_loris_is_shown_out_after_the_time_limit(world, guests, kind, said):
    """A byte now and then buys no time: the limit is on both handshakes together."""
    clock = Clock()
    good = Exchanging(world, getattr(world, kind), clock=clock)
    for _ in range(10):
        guests.knock(good.hub)
    world.settle(turns=5)
    for number, byte in enumerate(said):
        clock.now_s = 4.9 * number / len(said)
        for guest in guests:
            guest.send(bytes([byte]))
        world.settle(turns=3)
    clock.now_s = 4.9
    world.settle(turns=5)
    assert len(good.hub.transport._openings) == 10
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nor does a dial wait for longer
        good.hub.transport.dial(9, *silent.getsockname())
        world.settle()
        clock.now_s = 5.0
        good.hub.transport.poll(0.0)
        assert len(good.hub.transport._openings) == 1, "all end in one turn, but for the dial"
        world.until(lambda: all(map(has_ended, guests)))
        assert good.hub.handler.of("dial_failed") == []
        clock.now_s = 9.9
        world.until(lambda: good.hub.handler.of("dial_failed"))
    assert not good.hub.transport._openings
    good.assert_undisturbed()


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_a_flood_drives_out_none_that_know_the_run(world, guests, monkeypatch, caplog, kind):
    """If there are too many, those that have said nothing go first, also if all come at once."""
    monkeypatch.setattr(tcp, "MAX_UNAUTHENTICATED", 8)
    node = getattr(world, kind)(0)
    monkeypatch.setattr(sockets, "BACKLOG", 20)  # so many come in one turn
    hello = Handshake(identity(5), b"?", dialler=True).take_output()
    early = [guests.knock(node, hello if kind == "tcp" else TLS_HELLO) for _ in range(6)]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        guests.knock(node)
    world.settle(turns=2)
    assert len(os.listdir("/proc/self/fd")) - before == 40 + 8
    for guest in early:
        assert kind == "tls" or len(guest.recv(4096)) > 30  # the challenge
        assert not has_ended(guest)
    assert sum(map(has_ended, guests)) == 2 * 20 - 8
    assert caplog.messages == ["dropped 127.0.0.1: too many unauthenticated connections"]
