"""The TCP transport: dials that fail or cross, refusals, strangers, limits."""

import errno
import gc
import itertools
import os
import random
import socket
import weakref
from pathlib import Path
from typing import Any

import pytest
from calling_back import CallingLock
from clocks import Clock
from links import EXCHANGE, key
from waiting import FOR_EVER_S

from gossipdp.errors import RendezvousError
from gossipdp.links import sockets
from gossipdp.links.frames import HEADER_BYTES
from gossipdp.links.handshake import FIRST_VISITOR_RANK
from gossipdp.links.sockets import PlainStream, listen


def test_a_link_made_while_it_is_accepted_is_up_before_its_first_frame(world):
    """All of the handshake, and a message behind it, may come while one connection is taken in."""
    node, quick = world.tcp(0), world.tcp(1)
    quick.handler.hooks["link_up"] = lambda link: link.send_control(b"at once")
    advance = node.transport._advance

    def answered_meanwhile(opening: Any) -> None:
        for _ in range(20):
            if opening in node.transport._openings:
                advance(opening)
            quick.transport.poll(0.001)

    node.transport._advance = answered_meanwhile
    quick.dial(node)
    world.until(lambda: node.handler.of("control"), node)
    assert node.handler.names() == ["link_up", "control"]


def test_a_failed_dial_says_which_address_it_was(world):
    """The peer has come back elsewhere meanwhile, and is to be dialled there."""
    gone, node = world.tcp(1), world.tcp(0)
    world.close(gone)
    node.dial(gone)
    with socket.create_server(("127.0.0.1", 0)) as back:
        node.transport.dial(1, *back.getsockname())
        world.until(lambda: node.handler.events)
        world.settle()
    assert node.handler.events == [("dial_failed", 1, (gone.host, gone.port), True)]


def test_an_address_that_is_not_numeric_or_no_port_is_a_failed_dial(world, caplog):
    node = world.tcp(0)
    addresses = [("a-name.example", 4000), ("fe80::1%nowhere", 4000), ("127.0.0.1", 0)]
    addresses += [("127.0.0.1", 65536), ("127.0.0.1", 65535)]  # the last is a port, and is refused
    for peer, address in enumerate(addresses, 1):
        node.transport.dial(peer, *address)
    world.settle()
    dials = enumerate(addresses, 1)
    assert node.handler.of("dial_failed") == [(*dial, dial[0] == 5) for dial in dials]
    assert [record.name for record in caplog.records] == ["gossipdp"] * 3


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        (socket, "socket", errno.EMFILE),
        (sockets, "set_options", errno.ENOSPC),
        (socket.socket, "connect_ex", errno.ENETUNREACH),
    ],
)
def test_a_dial_that_fails_at_once_says_why(world, monkeypatch, caplog, *, module, name, code):
    """A visitor says it if no worker answers; another address of the name may do."""
    node, address = world.tcp(0), ("127.0.0.1", 4000)
    error = OSError(code, os.strerror(code))
    num_open = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        if name == "connect_ex":
            return code
        raise error

    monkeypatch.setattr(module, name, fail)
    node.transport.dial(None, *address)
    fault = f"127.0.0.1:4000: {error.strerror if name == 'connect_ex' else error}"
    assert (caplog.messages, node.transport.dial_fault) == ([], fault)
    node.transport.dial(1, *address)
    node.transport.poll(0.0)
    assert node.handler.events == [("dial_failed", peer, address, False) for peer in (None, 1)]
    assert caplog.messages in ([f"dialling rank 1 at {fault}"], [f"cannot dial {fault}"])
    assert len(os.listdir("/proc/self/fd")) <= num_open


def test_a_connection_to_oneself_counts_as_nobody():
    """A socket bound to the port that it dials meets itself; Linux allows it."""
    with socket.socket() as mirror:
        mirror.bind(("127.0.0.1", 0))
        mirror.connect(mirror.getsockname())
        with pytest.raises(ConnectionRefusedError, match="itself"):
            sockets.is_connected(mirror)


def limited_star(world: Any, make: Any) -> tuple[Clock, Any, list[Any]]:
    """Link a worker that may send 1 MB/s to two others; its clock is the test's."""
    clock = Clock()
    first, others = make(0, max_bytes_per_s=1e6, clock=clock), [make(1), make(2)]
    for other in others:
        world.join(first, other)
    return clock, first, others


def tick(world: Any, clock: Clock, num_ticks: int) -> None:
    for _ in range(num_ticks):
        clock.now_s += 0.005
        world.settle(turns=3)


@pytest.mark.parametrize("stream", ["tcp", "tls"])
def test_all_links_of_a_worker_share_its_limit_evenly(world, stream):
    """One that ends while it waits leaves the limit to the other."""
    clock, first, others = limited_star(world, getattr(world, stream))
    tick(world, clock, 10)
    links = [first.link(other) for other in others]
    for link in links:
        link.send_chunk(EXCHANGE, key(), memoryview(bytes(400_000)))
    before = sum(link.bytes_sent for link in links)
    tick(world, clock, 100)
    sent = [link.chunk_bytes_sent[EXCHANGE] for link in links]
    assert 480_000 < sum(link.bytes_sent for link in links) - before < 570_000
    assert sent[0] == pytest.approx(sent[1], abs=70_000)
    tick(world, clock, 80)
    assert all(len(other.handler.of("chunk")) == 1 for other in others)
    for link in links:
        link.send_chunk(EXCHANGE, key(1), memoryview(bytes(100_000)))
    tick(world, clock, 5)
    links[0].close("the test ends it")
    tick(world, clock, 60)
    assert len(others[1].handler.of("chunk")) == 2
    assert not first.transport.limit.held


def test_a_message_does_not_wait_for_the_chunk_of_another_link(world):
    clock, first, (one, other) = limited_star(world, world.tcp)
    there = first.link(one)
    there.send_chunk(EXCHANGE, key(), memoryview(bytes(10**6)))
    tick(world, clock, 2)
    before = there.bytes_sent
    data = b"x" * 60_000
    first.link(other).send_control(data)
    world.until(lambda: [each for _, each in other.handler.of("control")] == [data])
    tick(world, clock, 8)  # 40,000 bytes' time, which the message has used up
    assert there.bytes_sent == before
    tick(world, clock, 30)
    assert there.bytes_sent > before


def test_a_worker_that_waits_for_its_limit_sleeps(world):
    first, second = world.tcp(0, max_bytes_per_s=20_000), world.tcp(1)
    there, _ = world.join(first, second)
    there.send_chunk(EXCHANGE, key(), memoryview(bytes(10_000)))
    for _ in itertools.takewhile(lambda _: there.has_unsent, range(14)):
        first.transport.poll(FOR_EVER_S)
    assert not there.has_unsent


def test_where_a_worker_may_listen_what_it_tells_of_that_and_that_a_port_is_soon_free(world):
    first, second, *_ = world.pair(world.tcp)
    with pytest.raises(RendezvousError, match=f"port {second.port} on 127.0.0.1 is in use"):
        listen("127.0.0.1", second.port)
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)
    everywhere = world.tcp(2, at=("0.0.0.0", 0), host="127.0.0.1")
    assert everywhere.transport.identity.host == "127.0.0.1"
    world.close(second)
    world.until(lambda: not first.handler.links)
    world.join(first, world.tcp(1, at=(second.host, second.port), incarnation=1))


def test_ipv6_loopback(world):
    try:
        node = world.tcp(0, at=("::1", 0))
    except RendezvousError as error:
        pytest.skip(f"no IPv6 here: {error}")
    world.join(world.tcp(1), node)


def test_crossing_dials_end_in_one_link_dialled_by_the_lower_rank(world, caplog):
    """Their loops turn in a random order; an acceptor that takes any new link fails in 1 of 20."""
    for seed in range(100):
        order, low, high = random.Random(seed), world.tcp(0), world.tcp(1)
        dials = [(low, high), (high, low)]
        order.shuffle(dials)
        dials[0][0].dial(dials[0][1])
        for _ in range(order.randrange(8)):
            order.choice((low, high)).transport.poll(0.0)
        dials[1][0].dial(dials[1][1])
        for _ in range(30):
            order.choice((low, high)).transport.poll(0.0)
        for node in 20 * (low, high):
            node.transport.poll(0.0)
        there, back = low.transport.links[1], high.transport.links[0]
        assert there.connection.getsockname() == back.connection.getpeername()
        for end in (there.connection, back.connection):
            unsent = end.getsockopt(socket.IPPROTO_TCP, sockets.TCP_NOTSENT_LOWAT)
            assert unsent != 256 << 10, "loopback has no bound"
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert there.dialler == back.dialler == 0
        for node in (low, high):
            assert not node.handler.of("refused")
            assert all(not refused for *_, refused in node.handler.of("dial_failed"))
            world.close(node)
    assert not caplog.records


@pytest.mark.parametrize(
    ("dialled_by_lower", "redialled_by_lower"), [(True, True), (False, True), (False, False)]
)
def test_a_link_that_one_end_lost_is_replaced_at_once(world, dialled_by_lower, redialled_by_lower):
    """The end that lost it dials; the other still believes in the old one."""
    low, high = world.tcp(0), world.tcp(1)
    world.join(*((low, high) if dialled_by_lower else (high, low)))
    loser, other = (low, high) if redialled_by_lower else (high, low)
    lost = loser.transport.links[other.rank]
    # A reset that the other end has not heard of: a copy keeps the connection open.
    with lost.connection.dup():
        lost.close("lost on this side")
        watched = Path(f"/proc/self/fdinfo/{loser.transport._epoll.fileno()}").read_text()
        assert watched.count("tfd:") == 2, "its listener, and what wakes it"
        loser.dial(other)
        world.until(lambda: len(other.handler.of("link_up")) == 2)
        world.settle()
    assert loser.handler.names() == other.handler.names() == ["link_up", "link_down", "link_up"]


def test_the_higher_rank_s_dial_waits_until_the_lower_knows_that_its_link_is_lost(world):
    low, high = world.tcp(0), world.tcp(1)
    world.join(low, high)
    lost = high.transport.links[0]
    with lost.connection.dup():  # no end of stream tells the lower one
        lost.close("lost on this side")
        high.dial(low)
        world.until(lambda: high.handler.of("dial_failed"))
        assert not high.handler.of("dial_failed")[0][-1]  # no refused connection: it lives
        assert low.handler.names() == ["link_up"]
        low.link(high).close("silent")
        high.dial(low)
        world.until(lambda: high.handler.links and low.handler.links)


def test_a_newer_process_replaces_and_a_lower_incarnation_is_refused(world):
    node, old = world.tcp(0), world.tcp(1, incarnation=2)
    world.join(old, node)
    same, new = world.tcp(1, incarnation=2, process_id=7), world.tcp(1, incarnation=3)
    for newer, before in ((same, old), (new, same)):
        newer.dial(node)
        world.until(lambda n=newer, b=before: n.handler.links and b.handler.of("link_down"))
        assert node.link(newer).peer_identity.process_id == newer.transport.identity.process_id
    old.dial(node)
    world.until(lambda: old.handler.of("refused"))
    assert "newer incarnation (3)" in str(old.handler.of("refused")[0][1])
    assert node.handler.names() == ["link_up"] + 2 * ["link_down", "link_up"]


def test_a_question_for_the_run_is_no_alarm_and_a_wrong_secret_is_said(world, caplog):
    node = world.tcp(0)
    for changes in ({"run_id": ""}, {"secret": b"b"}):
        guest = world.tcp(FIRST_VISITOR_RANK, **changes)
        guest.transport.dial(None, node.host, node.port)
        world.until(lambda guest=guest: guest.handler.of("refused"))
    assert caplog.messages == ["refused 127.0.0.1: it does not know this run's secret"]


def test_warnings_are_bounded(world, caplog):
    log = world.tcp(0).transport._log
    for number in range(3000):
        log.warn_once("drop", f"10.0.0.{number}", "dropped %d", number)
    assert len(caplog.records) == 1025


def test_no_descriptor_for_a_guest(world, monkeypatch):
    """The listener rests, and lets the guest in later; one that is gone by then costs no rest."""
    clock = Clock()
    node, other, late = world.tcp(0, clock=clock), world.tcp(1), world.tcp(2)
    errors = [ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")]

    def fail(_: socket.socket) -> None:
        monkeypatch.undo()
        raise errors.pop()

    monkeypatch.setattr(type(node.transport._listener), "accept", fail)
    other.dial(node)
    world.settle()
    assert node.handler.events == []
    clock.now_s = 0.19
    world.settle()
    assert not node.handler.links
    clock.now_s = 0.2
    world.until(lambda: node.handler.links)
    monkeypatch.setattr(type(node.transport._listener), "accept", fail)
    late.dial(node)
    world.until(lambda: late.handler.links)


@pytest.mark.parametrize(("size", "most"), [(1 << 20, 1000), (1, 80_000)])
def test_a_peer_that_never_reads(world, size, most):
    """A frame of one byte takes hundreds here; ``most`` are far more than the bound."""
    first, _, there, _ = world.pair(world.tcp)
    for number in itertools.takewhile(lambda _: not there.closed, range(most)):
        there.send_control(bytes(size))
        if number < 100:
            first.transport.poll(0.0)
    first.transport.poll(0.0)
    unread = int(first.handler.of("link_down")[0][1].split()[3])
    assert (4 << 20) - size - HEADER_BYTES < unread <= 4 << 20


def test_a_peer_that_never_stops_sending_does_not_hold_up_a_close(world, monkeypatch):
    *_, there, _ = world.pair(world.tcp)
    read: list[int] = []
    monkeypatch.setattr(socket.socket, "recv_into", lambda *_: read.append(1) or 1 << 20)
    there.close("enough")
    assert sum(read) == 16, "more than the kernel keeps"


def test_what_a_peer_said_is_heard_although_writing_failed_which_ends_the_link(world):
    first, second, there, back = world.pair(world.tcp)
    back.send_control(b"last words")
    second.transport.poll(0.0)

    def fail(_: Any) -> int:
        raise OSError(errno.ENOBUFS, "no memory")

    there.stream.send = fail
    there.send_control(b"not sent")
    world.until(lambda: first.handler.of("link_down"))
    assert first.handler.of("control") == [(there, b"last words")]
    assert first.handler.of("link_down") == [(there, "connection lost: no memory")]


class Tape(PlainStream):
    """Keeps what is to be sent, counts reads, and knows the largest batch that was waited for."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.taken = bytearray()
        self.num_reads = self.largest = 0

    def send(self, parts: Any) -> int:
        self.taken += b"".join(parts)
        return sum(map(len, parts))

    def receive_into(self, rooms: Any) -> int:
        self.num_reads += 1
        return super().receive_into(rooms)

    def gather(self, *given: Any) -> bool:
        is_less = super().gather(*given)
        self.largest = max(self.largest, self._mark)
        return is_less


@pytest.mark.parametrize(("gap_s", "least", "most"), [(1e-5, 5, 25), (0.1, 200, 410)])
def test_quick_packets_are_read_several_at_once(world, gap_s, least, most):
    """At full speed about one wake-up in ten of 207 reads; on a slow link each is heard."""
    clock = Clock(100.0)
    first, second = world.tcp(0, clock=clock), world.tcp(1)
    here, there = world.join(first, second)
    world.settle()
    here.stream, there.stream = tapes = Tape(here.connection), Tape(there.connection)
    payload = random.Random(0).randbytes(300_000)
    for number in range(2):
        there.send_chunk(EXCHANGE, key(number), memoryview(payload))
        there.send_control(b"behind it")
    world.settle(second)
    taken, tapes[0].num_reads = bytes(tapes[1].taken), 0
    for start in range(0, len(taken), 1448):
        there.connection.send(taken[start : start + 1448])
        clock.now_s += gap_s
        first.transport.poll(0.0)
    assert [event[3] for event in first.handler.of("chunk")] == [payload] * 2
    assert [event[1] for event in first.handler.of("control")] == [b"behind it"] * 2
    assert 2 * least <= tapes[0].num_reads <= 2 * most
    assert (tapes[0].largest == 64 << 10) == (gap_s < 1e-3)


def test_a_connection_that_gets_slow_or_ends_within_a_batch_is_noticed(world):
    clock = Clock()
    first, second = world.tcp(0, clock=clock), world.tcp(1)
    world.join(first, world.tcp(2))  # whose link, the older one, has no batch
    here, there = world.join(first, second)
    world.settle()
    there.stream = tape = Tape(there.connection)
    there.send_chunk(EXCHANGE, key(), memoryview(bytes(300_000)))
    world.settle(second)
    before, sent = here.bytes_received, 0
    for start in range(0, 20 * 1448, 1448):  # a batch grows from the first read on
        sent += there.connection.send(tape.taken[start : start + 1448])
        first.transport.poll(0.0)
    assert 10_000 < here.connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) < 60_000
    sent += there.connection.send(tape.taken[sent : sent + 10])
    first.transport.poll(0.0)
    assert here.bytes_received < before + sent
    clock.now_s += 0.1
    first.transport.poll(0.001)  # a sleep ends without an event: what is there is heard
    assert here.bytes_received == before + sent
    assert here.connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "it is slow"
    clock.now_s, heard_s = 1.0, here.last_heard_s
    there.connection.shutdown(socket.SHUT_RDWR)
    world.until(lambda: first.handler.of("link_down"), first)
    assert here.last_heard_s == heard_s, "an end is no byte"


def test_a_transport_that_is_closed_or_forgotten_leaves_no_descriptor(world, open_descriptors):
    before = open_descriptors()
    nodes = [world.tcp(rank) for rank in range(3)]
    ends = [*world.join(nodes[0], nodes[1]), *world.join(nodes[2], nodes[1])]
    with socket.create_connection((nodes[0].host, nodes[0].port)):
        world.settle()
        for node in nodes:
            world.close(node)
    assert open_descriptors() == before
    assert all(link.closed for link in ends)
    world.tcp(0)
    world.nodes.clear()
    gc.collect()
    assert open_descriptors() == before


def test_a_wake_that_the_close_overtakes_writes_to_no_descriptor(world):
    node = world.tcp(0)
    node.transport._wake_guard = CallingLock(before=lambda: world.close(node))
    node.transport.wake()  # an OSError if it wrote to its descriptor, which may be another's now
    assert not world.nodes


def test_no_link_that_has_ended_is_kept(world):
    """A worker that comes and goes for hours leaves nothing behind at the others."""
    hub, guest = world.tcp(0), world.tcp(1)
    links = []
    for _ in range(5):
        there, back = world.join(hub, guest)
        links += [weakref.ref(there), weakref.ref(back)]
        there.close("enough")
        world.until(lambda: not hub.handler.links and not guest.handler.links)
        del there, back
        for node in (hub, guest):
            node.handler.events.clear()
    gc.collect()
    assert [link() for link in links] == [None] * len(links)
