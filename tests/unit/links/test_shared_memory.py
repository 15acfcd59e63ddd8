"""Memory that peers of the same host read in place: what it is, how it is passed, when it ends."""

import contextlib
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from links import Recorder, has_ended, in_child

from gossipdp.links import shared_memory, sockets, tcp_link
from gossipdp.links.frames import MAX_SEGMENT, ChunkKey, FrameType, pack_header, run_tag
from gossipdp.links.shared_memory import MAX_SEGMENT_BYTES, SharedSegment, map_peers_segment

EXCHANGE = FrameType.EXCHANGE_CHUNK
PAGE = mmap.PAGESIZE


def key(index: int = 0) -> ChunkKey:
    return ChunkKey(0, 0, 1, index)


def num_mapped() -> int:
    """Return the number of this process's mappings; none has a name that a kill would leave."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    assert "/dev/shm/gossipdp" not in maps
    num_nameless = maps.count("/memfd:gossipdp (deleted)")
    assert num_nameless == maps.count("/memfd:gossipdp")
    return num_nameless


# The memory itself.


def test_only_the_owner_can_write_it_and_its_size_is_fixed():
    segment = SharedSegment(3 * PAGE, 1)
    peers = map_peers_segment(segment.descriptor, 3 * PAGE)
    segment.memory[PAGE : PAGE + 5] = b"hello"
    assert peers[PAGE : PAGE + 5] == b"hello"
    assert segment.offset_of(segment.memory[PAGE:][64:]) == PAGE + 64
    with pytest.raises(PermissionError):
        mmap.mmap(segment.descriptor, PAGE)
    for size in (0, 4 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize(
    ("num_bytes", "number"), [(0, 1), (MAX_SEGMENT_BYTES + 1, 1), (PAGE, MAX_SEGMENT + 1)]
)
def test_a_segment_that_no_frame_can_name_is_not_made(num_bytes, number):
    with pytest.raises(OSError, match="segment"):
        SharedSegment(num_bytes, number)


def test_a_mapping_lives_as_long_as_a_tensor_looks_at_it(recwarn):
    before = num_mapped()
    segment = SharedSegment(PAGE, 1)
    segment.memory[64:68] = b"\x00\x00\x80\x3f"
    peers = map_peers_segment(segment.descriptor, PAGE)
    assert num_mapped() == before + 2
    tensor = torch.frombuffer(peers[64:72], dtype=torch.float32)[:1]
    del segment, peers
    assert num_mapped() == before + 1
    assert tensor.item() == 1.0
    del tensor
    assert num_mapped() == before
    assert not recwarn.list


def test_memory_that_its_owner_could_take_away_is_not_mapped():
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(ValueError, match="not sealed"):
        map_peers_segment(descriptor, PAGE)
    os.close(descriptor)
    segment = SharedSegment(PAGE, 1)
    with pytest.raises(ValueError, match=f"{PAGE} bytes and not {2 * PAGE}"):
        map_peers_segment(segment.descriptor, 2 * PAGE)


def socket_files() -> set[str]:
    """Return the memory sockets of all workers of this machine, as a process's files name them."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {f"socket:[{line.split()[6]}]" for line in lines if "@gossipdp-" in line}


def test_a_forked_child_has_neither_the_memory_nor_its_descriptors(world):
    def look() -> tuple[int, int, int]:
        files = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        num_memories = sum("memfd:gossipdp" in file for file in files)
        return num_mapped(), num_memories, len(socket_files() & set(files))

    # Another test's failure or thread may still hold some.
    of_others = look()
    first, *_ = world.pair(world.shared)

    with contextlib.closing(stranger(first)):
        first.transport.poll(0.0)
        before = look()
        assert before[:2] == (of_others[0] + 4, of_others[1] + 2)
        # Two that listen, and at least the stranger's end in ours.
        assert before[2] >= of_others[2] + 3
        assert in_child(look) == "(0, 0, 0)"
        assert look() == before


# How it is passed.


def name_of(node: Any) -> bytes:
    return shared_memory._address(node.transport.memory._socket.name)


def stranger(node: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(name_of(node))
    return connection


def test_only_chunks_of_an_exchange_that_lie_there_are_read_there(world):
    first, second, there, back = world.pair(world.shared)
    sent = [
        (EXCHANGE, first.payload(b"a" * 100), True),
        (FrameType.STATE_CHUNK, first.payload(b"b" * 100), False),
        (EXCHANGE, first.payload(b"c" * 100)[1:], False),  # not aligned
        (EXCHANGE, memoryview(b"d" * 100), False),
        (FrameType.EXCHANGE_REPEAT, first.payload(b"e" * 100), True),
    ]
    for index, (frame_type, payload, shared) in enumerate(sent):
        before = there.shared_bytes_sent
        there.send_chunk(frame_type, key(index), payload)
        world.until(lambda index=index: len(second.handler.of("chunk")) == index + 1)
        assert second.handler.of("chunk")[index][3] == payload
        assert (there.shared_bytes_sent - before == len(payload)) == shared
    assert back.shared_bytes_received == 200
    world.until(lambda: there.queued_chunks == 0)


def test_a_chunk_counts_until_the_peer_has_read_it(world):
    first, second, there, back = world.pair(world.shared)
    there.send_chunk(EXCHANGE, key(), first.payload(b"x"))
    world.settle(first)
    assert there.queued_bytes == 0
    assert there.queued_chunks == 1
    assert first.handler.of("writable") == []
    # Word of it rides on what goes the other way in the same turn.
    second.handler.hooks["chunk"] = lambda *_: back.send_control(b"thanks")
    world.until(lambda: second.handler.of("chunk"), second)
    received = there.bytes_received
    world.until(lambda: first.handler.of("control"), first)
    assert there.queued_chunks == 0
    assert first.handler.of("writable") == [(there,)]
    world.settle()
    assert there.bytes_received == received + 56 + len(b"thanks")


def test_a_turn_that_ends_between_frames_read_at_once(world, monkeypatch):
    """No event tells of what was read ahead."""
    monkeypatch.setattr(tcp_link, "TURN_BYTES", 150)
    first, second, there, back = world.pair(world.shared)
    payload = first.payload(bytes(100))
    for index in range(8):
        there.send_chunk(EXCHANGE, key(index), payload)
        there.send_control(b"%d" % index)
    world.settle(first)
    world.until(lambda: len(second.handler.of("chunk")) == 8, second)
    assert [data for _, data in second.handler.of("control")] == [b"%d" % n for n in range(8)]
    world.until(lambda: there.queued_chunks == 0)
    assert back.bytes_received == there.bytes_sent


def test_memory_that_a_lost_peer_may_still_read_is_written_no_more(world):
    """The peer is stopped between the header and its read, as by SIGSTOP; the link ends."""
    first, second, third = (world.shared(rank) for rank in range(3))
    there, _ = world.join(first, second)
    other, _ = world.join(first, third)
    old = first.memory
    there.send_chunk(EXCHANGE, key(), first.payload(b"what it was"))
    first.transport.poll(0.0)
    there.close("it is silent")
    assert not other.is_shared
    fresh = first.transport.allocate(len(old))
    assert fresh.obj is not old.obj
    fresh[:11] = b"what it is!"
    # It goes on, and applies the chunk that was announced.
    world.until(lambda: second.handler.of("chunk"), second)
    assert second.handler.of("chunk")[0][3] == b"what it was"
    # The other peers are given the fresh memory.
    world.until(lambda: other.is_shared)
    other.send_chunk(EXCHANGE, key(), fresh[:11])
    world.until(lambda: third.handler.of("chunk"))
    assert third.handler.of("chunk")[0][3] == b"what it is!"
    assert other.shared_bytes_sent == 11


class Pinned:
    """The result of pinning."""


def test_memory_is_mapped_and_pinned_as_long_as_it_is_held(world, monkeypatch):
    held: weakref.WeakKeyDictionary[Pinned, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def pin(_: Recorder, memory: memoryview, *, is_peers: bool) -> Pinned:
        held[made := Pinned()] = len(memory), is_peers
        return made

    monkeypatch.setattr(Recorder, "pin", pin)
    before = num_mapped()
    first, second, there, back = world.pair(world.shared)
    assert num_mapped() == before + 4
    size = len(first.memory)
    assert sorted(held.values()) == [(size, False), (size, False)]
    for one, other, link in ((first, second, there), (second, first, back)):
        link.send_chunk(EXCHANGE, key(), one.payload(b"x"))
        world.until(lambda other=other: other.handler.of("chunk"))
    assert sorted(held.values()) == [(size, False), (size, False), (size, True), (size, True)]
    world.until(lambda: there.queued_chunks == 0)
    there.send_chunk(EXCHANGE, key(1), first.payload(b"x"))
    first.transport.poll(0.0)
    there.close("it is silent")
    world.settle(first)
    gc.collect()
    # The second's, which has not seen the end: its own and the first's.
    assert sorted(held.values()) == [(size, False), (size, True)]
    first.memory = first.transport.allocate(size)
    # Its own: the second's is unmapped, the given up is the second's alone; and the fresh one.
    assert num_mapped() == before + 3
    assert sorted(held.values()) == [(size, False), (size, False), (size, True)]
    world.until(lambda: second.handler.of("link_down"), second)
    assert num_mapped() == before + 2


def test_who_has_memory_later_shares_it_later(world):
    first, second, there, back = world.pair(world.tcp)
    world.settle()
    second.memory = second.transport.allocate(PAGE)
    world.settle()
    assert not back.is_shared
    first.memory = first.transport.allocate(PAGE)
    world.until(lambda: there.is_shared and back.is_shared)


@pytest.mark.parametrize("changes", [{"shared_memory": "off"}, {"max_bytes_per_s": 1e9}])
def test_none_is_shared_where_it_is_not_wanted(world, changes):
    first, second = world.shared(0), world.tcp(1, **changes)
    second.memory = second.transport.allocate(PAGE)
    assert second.transport.memory.segment is None
    second.memory[:3] = b"abc"
    first.dial(second)
    world.until(lambda: first.handler.links and second.handler.links)
    world.settle()
    assert not first.link(second).is_shared
    assert not second.link(first).is_shared


def test_a_system_without_sealed_memory_sends_bytes_and_says_so(world, monkeypatch, caplog):
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(shared_memory.os, "memfd_create", refuse)
    first = world.shared(0)
    assert first.transport.memory.segment is None
    first.memory[:3] = b"abc"
    assert first.transport.allocate(len(first.memory)) is first.memory
    assert [record.message for record in caplog.records] == [
        "no memory is shared with workers of this host: [Errno 1] not here"
    ]


def test_no_fork_comes_between_the_opening_of_the_socket_and_its_listing(world, monkeypatch):
    made_by, may_fork = shared_memory.MemorySocket, []

    def make(*arguments: Any) -> shared_memory.MemorySocket:
        made = made_by(*arguments)
        with ThreadPoolExecutor(1) as other:
            may_fork.append(other.submit(guard_is_free).result())
        return made

    def guard_is_free() -> bool:
        is_free = sockets.descriptors_guard.acquire(blocking=False)
        if is_free:
            sockets.descriptors_guard.release()
        return is_free

    monkeypatch.setattr(shared_memory, "MemorySocket", make)
    world.shared(0)
    assert may_fork == [False]


def test_the_socket_has_another_name_each_time_and_each_link_its_own_token(world):
    first, second, third = (world.shared(rank) for rank in range(3))
    assert name_of(first) != name_of(second)
    links = [world.join(first, other)[0] for other in (second, third)]
    assert len({link.peer_memory.token for link in links}) == 2
    assert {link.peer_memory.socket[:16] for link in links} == {
        node.transport.memory._socket.name for node in (second, third)
    }


def test_a_peer_of_another_host_is_offered_memory_once(world, monkeypatch):
    """No process here listens at the name that it gave."""
    first, second = world.tcp(0), world.tcp(1)
    for node in (first, second):
        node.memory = node.transport.allocate(PAGE)
    asked: list[bytes] = []
    monkeypatch.setattr(shared_memory, "_address", lambda name: asked.append(name) or b"\0no-such")
    first.dial(second)
    world.until(lambda: len(asked) == 2)
    world.settle()
    first.transport.memory._memory = None  # and the next segment is not offered to it
    first.transport.allocate(2 * PAGE)
    world.settle()
    assert len(asked) == 2
    assert not first.link(second).is_shared


# Strangers.


@pytest.fixture
def guests() -> Iterator[list[socket.socket]]:
    guests: list[socket.socket] = []
    yield guests
    for guest in guests:
        guest.close()


def test_packets_that_are_no_memory_socket(world, guests):
    first, second, there, _ = world.pair(world.shared)
    segment = SharedSegment(PAGE, 7)
    size = shared_memory._OFFER.size
    token = first.transport.links[1].peer_memory.token
    good = shared_memory._OFFER.pack(shared_memory._MAGIC, token, 7, PAGE)
    guessed = shared_memory._OFFER.pack(shared_memory._MAGIC, bytes(16), 7, PAGE)
    unnamed = shared_memory._OFFER.pack(shared_memory._MAGIC, token, MAX_SEGMENT + 1, PAGE)
    before = num_mapped(), len(os.listdir("/proc/self/fd"))
    for packet, descriptors in [
        (b"", [segment.descriptor]),
        (b"x", []),
        (b"x" * size, [segment.descriptor]),
        (b"x" * 4000, [segment.descriptor] * 5),
        (guessed, [segment.descriptor]),
        (unnamed, [segment.descriptor]),
        (good, []),
        (b"x" + good[1:], [segment.descriptor]),
        (good[:-1] + b"x", [segment.descriptor]),
    ]:
        guest = stranger(first)
        guests.append(guest)
        if packet or descriptors:
            socket.send_fds(guest, [packet], descriptors)
        else:
            guest.shutdown(socket.SHUT_WR)
        world.until(lambda guest=guest: has_ended(guest), first)
        guest.close()
    assert (num_mapped(), len(os.listdir("/proc/self/fd"))) == before
    assert there.is_shared
    there.send_chunk(EXCHANGE, key(), first.payload(b"undisturbed"))
    world.until(lambda: second.handler.of("chunk"))


def test_an_offer_for_a_link_that_is_no_more_is_dropped(world, caplog):
    first, second, *_ = world.pair(world.shared)
    memory_socket = second.transport.links[0].peer_memory.socket
    segment = SharedSegment(PAGE, 9)
    before = num_mapped()
    assert shared_memory.offer(segment, memory_socket[:16] + bytes(16))
    world.settle()
    assert num_mapped() == before
    assert not caplog.records  # it happens in a healthy run
    assert shared_memory.offer(segment, memory_socket)
    world.until(lambda: num_mapped() == before + 1, first)


def test_silent_strangers_are_bounded(world, guests, monkeypatch):
    """They run as the same user, so they could read this worker's memory anyway."""
    monkeypatch.setattr(shared_memory, "MAX_STRANGERS", 4)
    first = world.shared(0)
    for _ in range(7):
        guests.append(stranger(first))
        world.settle(first, turns=2)
    assert [has_ended(guest) for guest in guests] == [True] * 3 + [False] * 4


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_another_user_is_not_heard(world):
    first = world.shared(0)
    code = """
        import os, socket, sys
        os.setuid(65534)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(bytes.fromhex(sys.argv[1]))
        print("connected", flush=True)
        sys.exit(0 if connection.recv(10) == b"" else 1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), name_of(first).hex()], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        world.until(lambda: process.poll() is not None, first)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# A peer that breaks the rules, with the secret and all.


def test_a_second_memory_socket_ends_the_link(world):
    first, second, *_ = world.pair(world.shared)
    header = pack_header(run_tag("run"), FrameType.MEMORY_SOCKET, 2, 32)
    first.transport.links[1].stream.send([header + bytes(32)])
    world.until(lambda: second.handler.of("link_down"))
    assert "a second memory socket" in second.handler.of("link_down")[0][1]
