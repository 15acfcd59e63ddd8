"""The guarantees of :mod:`gossipdp.links.link`, checked on every kind of link."""

import contextlib
import functools
import select
import threading
from collections.abc import Callable
from typing import Any

import pytest
from links import EXCHANGE, key
from waiting import FOR_EVER_S, LONGEST_S

from gossipdp.links.frames import HEADER_BYTES, MAX_CONTROL_BYTES, FrameError, FrameType
from gossipdp.links.link import Link

MEGABYTE = 1 << 20


@pytest.fixture(params=["tcp", "tls", "shared", "limited"])
def make(request: pytest.FixtureRequest, world: Any) -> Callable[..., Any]:
    """Make workers on the kind of link under test."""
    if request.param == "shared":
        return functools.partial(world.shared, num_bytes=10 * MEGABYTE)
    if request.param == "limited":
        return functools.partial(world.tls, max_bytes_per_s=100e6)
    return getattr(world, request.param)


@pytest.fixture
def pair(make: Callable[..., Any], world: Any) -> tuple[Any, Any, Link, Link]:
    return world.pair(make)


def test_one_link_to_a_peer_however_often_and_by_whom_it_is_dialled(make, world):
    """The dial to another peer need not know which worker listens there. A turn serves both."""
    first, second, third = make(5), make(1), make(2)
    first.dial(second, peer=None)
    for _ in range(5):
        first.dial(third)
    world.until(lambda: second.handler.links and third.handler.links)
    world.settle()
    assert first.handler.names() == ["link_up"] * 2
    for node in (second, third):
        assert first.link(node).peer_identity == node.transport.identity
        assert first.link(node).peer_identity.port == node.port
        assert node.handler.names() == ["link_up"]
        node.link(first).send_control(b"to one")
        node.transport.flush()
    links = first.handler.links.values()
    for link in links:
        link.send_control(b"to both")
        assert select.select([link.connection], [], [], LONGEST_S)[0]
    first.transport.flush()
    assert not any(link.has_unsent for link in links)
    first.transport.poll(0.0)
    assert len(first.handler.of("control")) == 2


def test_controls_arrive_in_order(pair, world):
    _, second, there, _ = pair
    sent = [*(b"%d" % number * (number + 1) for number in range(300)), b"x" * MAX_CONTROL_BYTES]
    for data in sent:
        there.send_control(data)
    world.until(lambda: len(second.handler.of("control")) == len(sent))
    assert [data for _, data in second.handler.of("control")] == sent
    assert not there.has_unsent


def test_chunks_both_ways_at_once(pair, world):
    first, second, there, back = pair
    payloads = [bytes([number]) * (MEGABYTE + number) for number in range(8)]
    for number, payload in enumerate(payloads):
        there.send_chunk(EXCHANGE, key(number), first.payload(payload))
        back.send_chunk(FrameType.STATE_CHUNK, key(number), second.payload(payload))
    assert there.queued_chunks == 8
    world.until(lambda: all(len(node.handler.of("chunk")) == 8 for node in (first, second)))
    expected = [(key(number), payload) for number, payload in enumerate(payloads)]
    assert [event[2:] for event in second.handler.of("chunk")] == expected
    assert [event[2:] for event in first.handler.of("chunk")] == expected
    assert {event[1] for event in first.handler.of("chunk")} == {FrameType.STATE_CHUNK}
    assert there.queued_chunks == back.queued_chunks == 0
    assert there.bytes_sent == back.bytes_received
    num_bytes = sum(map(len, payloads))
    assert there.shared_bytes_sent == back.shared_bytes_received == num_bytes * there.is_shared
    assert there.bytes_sent - 8 * HEADER_BYTES >= num_bytes * (not there.is_shared)


def test_chunks_are_counted_by_type_except_words_and_what_has_no_buffer(pair, world):
    """A chunk without a buffer is dropped, and the stream goes on behind it."""
    first, second, there, back = pair
    size, unwanted, last = 9 * MEGABYTE, FrameType.EXCHANGE_REPEAT, b"\x07" * 99
    second.handler.hooks["chunk_buffer"] = lambda link, kind, name, length: (
        None if kind is unwanted else memoryview(bytearray(length))
    )
    for _ in range(50):
        there.send_control(b"x" * 10_000)
    there.send_chunk(EXCHANGE, key(0), first.payload(bytes(size)))
    there.send_chunk(unwanted, key(1), first.payload(bytes(700_001)))
    there.send_chunk(EXCHANGE, key(2), first.payload(last))
    back.send_chunk(FrameType.EXCHANGE_VERDICT, key(0), memoryview(b"1"))
    parts = set()

    def has_all() -> bool:
        parts.add(back.chunk_bytes_received[EXCHANGE])
        return len(second.handler.of("chunk")) == 3 and bool(first.handler.of("chunk"))

    world.until(has_all)
    assert [data for *_, data in second.handler.of("chunk")] == [bytes(size), None, last]
    assert there.chunk_bytes_sent == {EXCHANGE: size + 99, unwanted: 700_001}
    assert back.chunk_bytes_received == {EXCHANGE: size + 99}
    assert there.chunk_bytes_received == {FrameType.EXCHANGE_VERDICT: 1}
    assert there.is_shared or len(parts) > 2, "a chunk under way counts as far as it is here"
    world.until(lambda: there.queued_chunks == 0)  # the dropped one is confirmed too


def test_controls_overtake_chunks_that_were_not_started(pair, world):
    first, second, there, _ = pair
    payload = first.payload(bytes(4 * MEGABYTE))
    for number in range(8):
        there.send_chunk(EXCHANGE, key(number), payload)
    first.transport.flush()  # some of the first chunks leave
    there.can_write = True  # as an event says that comes too early
    there.write_some(acknowledge=False)
    there.send_control(b"urgent")
    world.until(lambda: len(second.handler.of("chunk")) == 8)
    names = second.handler.names()  # in shared memory all of them are started at once
    assert there.is_shared or names.index("control") < len(names) - 3


def test_landing_in_the_buffer_that_the_handler_names(pair, world):
    """Both ends may see the bytes as numbers of any format."""
    first, second, there, back = pair
    landed, before_s = bytearray(MEGABYTE), back.last_heard_s
    second.handler.hooks["chunk_buffer"] = lambda *_: memoryview(landed).cast("I")
    there.send_chunk(EXCHANGE, key(3), first.payload(b"\x05" * MEGABYTE).cast("d"))
    world.until(lambda: second.handler.of("chunk"))
    assert second.handler.of("chunk")[0][3] == b"\x05" * MEGABYTE
    assert landed == (bytes(MEGABYTE) if there.is_shared else b"\x05" * MEGABYTE)
    assert second.handler.of("chunk_buffer")[0][1:] == (EXCHANGE, key(3), MEGABYTE)
    assert back.last_heard_s > before_s


@pytest.mark.parametrize("size", [10, 12, None])
def test_a_chunk_that_cannot_be_ends_the_link(pair, world, size):
    """Its buffer has another size, or the handler says that no worker sends it."""
    first, second, there, _ = pair

    def take(*_: Any) -> memoryview:
        if size is None:
            raise FrameError("a verdict of 11 bytes")
        return memoryview(bytearray(size))

    second.handler.hooks["chunk_buffer"] = take
    there.send_chunk(EXCHANGE, key(0), first.payload(bytes(11)))
    world.until(lambda: second.handler.of("link_down") and first.handler.of("link_down"))
    fault = "a verdict of 11 bytes" if size is None else f"a chunk of 11 bytes, not {size}"
    assert second.handler.of("link_down")[0][1] == f"the peer broke the protocol: {fault}"
    assert second.handler.of("chunk") == []


def test_writable_when_the_queue_falls_under_its_bound(pair, world):
    first, second, there, _ = pair
    rest = list(range(40))
    payload = first.payload(bytes(MEGABYTE))

    def refill(link: Link) -> None:
        assert link.queued_chunks < 4
        while rest and link.queued_chunks < 4:
            link.send_chunk(EXCHANGE, key(rest.pop(0)), payload)

    first.handler.hooks["writable"] = refill
    refill(there)
    world.until(lambda: len(second.handler.of("chunk")) == 40)
    assert [event[2].index for event in second.handler.of("chunk")] == list(range(40))


def test_close_tells_both_sides_once_behind_the_last_message(pair, world):
    first, second, there, back = pair
    there.send_chunk(EXCHANGE, key(), first.payload(b"what has left"))
    world.until(lambda: not there.queued_chunks)
    there.send_control(b"abort: poisoned")
    there.close("enough")
    there.close("again")
    assert first.handler.of("link_down") == []  # only from poll()
    world.until(lambda: second.handler.of("link_down"))
    world.settle()
    assert first.handler.of("link_down") == [(there, "enough")]
    assert second.handler.names() == ["link_up", "chunk", "control", "link_down"]
    assert second.handler.of("link_down") == [(back, "closed by the peer")]


def test_nothing_is_touched_after_close(pair, world):
    _, second, there, back = pair
    landing = bytearray(8 * MEGABYTE)
    second.handler.hooks["chunk_buffer"] = lambda *_: memoryview(landing)
    payload = bytearray(b"\x01" * len(landing))
    there.send_chunk(EXCHANGE, key(0), memoryview(payload))
    world.until(lambda: back.bytes_received > 0)
    there.close("enough")
    back.close("enough")
    assert (there.queued_chunks, there.has_unsent) == (0, False)
    copy = bytes(landing)
    payload.clear()  # a BufferError if anyone still held it
    there.send_control(b"nothing")
    there.send_chunk(EXCHANGE, key(1), memoryview(b"nothing"))
    world.settle()
    assert landing == copy
    landing.clear()
    assert second.handler.of("chunk") == []


@pytest.mark.parametrize("method", ["link_up", "control", "chunk_buffer", "chunk"])
def test_closing_the_link_that_called(make, world, method):
    first, second = make(0), make(1)

    def close(link: Link, *_: Any) -> memoryview:
        link.close(f"during {method}")
        return memoryview(bytearray(8))

    second.handler.hooks[method] = close
    first.dial(second)
    world.until(lambda: first.handler.of("link_up"))
    for link in first.handler.links.values():
        for number in range(2):
            link.send_control(b"%d" % number)
            link.send_chunk(EXCHANGE, key(number), first.payload(bytes(8)))
    world.until(lambda: second.handler.of("link_down"))
    world.settle()
    assert second.handler.of("link_down")[0][1] == f"during {method}"
    assert second.handler.names()[-1] == "link_down"
    assert len(second.handler.of(method)) == 1


@pytest.mark.parametrize("method", ["link_up", "control", "chunk_buffer", "chunk", "link_down"])
def test_an_exception_leaves_poll_and_loses_only_its_call(make, world, method):
    first, second = make(0), make(1)
    raised: list[str] = []

    def fail(*_: Any) -> None:
        del second.handler.hooks[method]
        raised.append(method)
        raise RuntimeError(method)

    second.handler.hooks[method] = fail
    first.dial(second)

    def turn(condition: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):
            world.until(condition)
        world.until(condition)

    turn(lambda: 1 in first.handler.links and 0 in second.handler.links)
    there = first.link(second)
    for number in range(3):
        there.send_control(b"%d" % number)
        there.send_chunk(EXCHANGE, key(number), first.payload(bytes(MEGABYTE)))
    turn(lambda: len(second.handler.of("chunk")) == 3)
    assert [data for _, data in second.handler.of("control")] == [b"0", b"1", b"2"]
    there.close("end")
    turn(lambda: second.handler.of("link_down"))
    assert raised == [method]


def test_sending_too_much_is_the_senders_error(pair):
    _, _, there, _ = pair
    for data in (b"", bytes(MAX_CONTROL_BYTES + 1)):
        with pytest.raises(FrameError):
            there.send_control(data)
    for index, data in ((0, b""), (2**32, b"x")):
        with pytest.raises(FrameError):
            there.send_chunk(EXCHANGE, key(index), memoryview(data))


def test_last_words_before_the_transport_closes_which_is_final(make, world):
    first, second, third = (make(rank) for rank in range(3))
    ends = [(other, *world.join(other, second)) for other in (first, third)]
    for other, there, back in ends:
        there.send_control(b"unread by the time it closes")
        other.transport.poll(0.0)
        back.send_control(b"left")
    world.close(second)
    second.transport.close()
    second.transport.wake()
    for other, there, _ in ends:
        world.until(lambda other=other: other.handler.of("link_down"))
        assert other.handler.names() == ["link_up", "control", "link_down"]
        # An end of stream: a reset could overtake the last words on a slower network.
        assert other.handler.of("link_down") == [(there, "closed by the peer")]


def test_a_new_link_replaces_the_old_one(pair, world):
    first, second, there, _ = pair
    first.dial(second)
    world.until(lambda: len(second.handler.of("link_up")) == len(first.handler.of("link_up")) == 2)
    for node in (first, second):
        assert node.handler.names() == ["link_up", "link_down", "link_up"]
    assert first.handler.of("link_down") == [(there, "replaced by a newer link")]


def test_poll_returns_when_another_thread_wakes_it_or_what_was_queued_has_left(pair, world):
    first, _, there, _ = pair
    world.settle()
    thread = threading.Thread(target=first.transport.wake)
    for begin in (
        thread.start,
        lambda: there.send_control(b"x"),
        lambda: there.send_chunk(EXCHANGE, key(0), memoryview(b"x")),
        lambda: there.close("enough"),
    ):
        begin()
        first.transport.poll(FOR_EVER_S)
        assert not there.has_unsent
    thread.join()


def test_closing_the_transport_from_a_handler(make, world):
    first, second = make(0), make(1)
    second.handler.hooks["control"] = lambda *_: world.close(second)
    there, _ = world.join(first, second)
    there.send_control(b"go")
    there.send_control(b"away")
    world.until(lambda: first.handler.of("link_down"))
    assert second.handler.names() == ["link_up", "control"]
