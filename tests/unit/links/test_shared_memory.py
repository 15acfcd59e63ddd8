"""Memory that peers of the same host read in place: what it is, how it is passed, when it ends."""

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from links import EXCHANGE, Recorder, in_child, key
from run_processes import run_python

from gossipdp.links import shared_memory, tcp_link
from gossipdp.links.frames import MAX_SEGMENT, FrameType
from gossipdp.links.shared_memory import SharedSegment, map_offered

OFFER = shared_memory._OFFER
PAGE = mmap.PAGESIZE


def num_mapped() -> int:
    """Return the number of this process's mappings; none has a name that a kill would leave."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    assert "/dev/shm/gossipdp" not in maps
    return maps.count("/memfd:gossipdp")


def changed(offer: bytes, **changes: Any) -> bytes:
    """Return an offer that says something else."""
    names = ("process_id", "descriptor", "num_bytes", "number", "token")
    said = dict(zip(names, OFFER.unpack(offer), strict=True)) | changes
    return OFFER.pack(*said.values())


def test_only_the_owner_can_write_it_and_its_size_is_fixed():
    segment = SharedSegment(3 * PAGE, 1)
    _, peers = map_offered(segment.offer)
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
    ("num_bytes", "number"), [(0, 1), (PAGE + 1, 1), (PAGE, 0), (PAGE, MAX_SEGMENT + 1)]
)
def test_a_segment_that_no_frame_can_name_is_not_made(monkeypatch, num_bytes, number):
    """The largest one, of the last number, is; and what fails closes no file of others."""
    monkeypatch.setattr(shared_memory, "MAX_SEGMENT_BYTES", PAGE)
    last = SharedSegment(PAGE, MAX_SEGMENT)
    assert map_offered(last.offer)[0] == MAX_SEGMENT
    before = num_mapped(), os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="segment"):
        SharedSegment(num_bytes, number)
    assert (num_mapped(), os.listdir("/proc/self/fd")) == before


def test_a_mapping_lives_as_long_as_a_tensor_looks_at_it(recwarn):
    before = num_mapped()
    segment = SharedSegment(PAGE, 1)
    segment.memory[64:68] = b"\x00\x00\x80\x3f"
    _, peers = map_offered(segment.offer)
    assert num_mapped() == before + 2
    tensor = torch.frombuffer(peers[64:72], dtype=torch.float32)[:1]
    del segment, peers
    assert num_mapped() == before + 1
    assert tensor.item() == 1.0
    del tensor
    assert num_mapped() == before
    assert not recwarn.list


def test_a_forked_child_has_neither_the_memory_nor_its_descriptors(world):
    def look() -> tuple[int, int]:
        files = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        return num_mapped(), sum("memfd:gossipdp" in file for file in files)

    gc.collect()  # other tests may still hold some; none may be freed between two looks
    of_others = look()
    world.pair(world.shared)
    before = look()
    assert before == (of_others[0] + 4, of_others[1] + 2)
    assert in_child(look) == "(0, 0)"
    assert look() == before


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


def test_a_chunk_counts_until_the_peer_has_read_it(world):
    first, second, there, back = world.pair(world.shared)
    there.send_chunk(EXCHANGE, key(), first.payload(b"x"))
    world.settle(first)
    assert (there.queued_chunks, there.has_unsent) == (1, False)
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
    # Or on what its caller says before the next turn.
    del second.handler.hooks["chunk"]
    there.send_chunk(EXCHANGE, key(1), first.payload(b"y"))
    world.until(lambda: len(second.handler.of("chunk")) == 2)
    back.send_control(b"thanks")
    world.until(lambda: there.queued_chunks == 0)
    # A link that ends says only what was queued.
    there.send_chunk(EXCHANGE, key(2), first.payload(b"z"))
    world.until(lambda: len(second.handler.of("chunk")) == 3)
    back.close("enough")
    world.settle()
    assert there.bytes_received == received + 2 * (56 + len(b"thanks"))


def test_a_turn_that_ends_between_frames_read_at_once(world, monkeypatch):
    """No event tells of what was read ahead."""
    monkeypatch.setattr(tcp_link, "TURN_BYTES", 150)
    first, second, there, _ = world.pair(world.shared)
    payload = first.payload(bytes(100))
    for index in range(8):
        there.send_chunk(EXCHANGE, key(index), payload)
        there.send_control(b"%d" % index)
    world.settle(first)
    world.until(lambda: len(second.handler.of("chunk")) == 8, second)
    assert [data for _, data in second.handler.of("control")] == [b"%d" % n for n in range(8)]
    world.until(lambda: there.queued_chunks == 0)


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


def test_memory_is_mapped_and_pinned_as_long_as_it_is_held(world, monkeypatch):
    held: weakref.WeakKeyDictionary[Recorder, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def pin(_: Recorder, memory: memoryview, *, is_peers: bool) -> Recorder:
        held[made := Recorder()] = len(memory), is_peers  # any object would do
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
    second.memory = second.transport.allocate(PAGE)
    world.settle()
    assert (back.is_shared, there.is_shared) == (True, False)
    other, _ = world.join(first, world.tcp(2))
    first.memory = first.transport.allocate(PAGE)
    world.until(lambda: there.is_shared and back.is_shared and other.is_shared)


@pytest.mark.parametrize("changes", [{"shared_memory": "off"}, {"max_bytes_per_s": 1e9}])
def test_none_is_shared_where_it_is_not_wanted(world, changes):
    first, second = world.shared(0), world.tcp(1, **changes)
    second.transport.allocate(PAGE)[:3] = b"abc"
    assert second.transport.memory.segment is None
    links = world.join(first, second)
    world.settle()
    assert not any(link.is_shared for link in links)


@pytest.mark.parametrize(("call", "said"), [("memfd_create", ""), ("madvise", "madvise: ")])
def test_a_system_without_sealed_memory_sends_bytes_and_says_so(
    world, monkeypatch, caplog, call, said
):
    """Or where forked children would hold it."""

    def refuse(*_: Any) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(shared_memory._libc, call, refuse)
    first = world.shared(0)
    assert first.transport.memory.segment is None
    assert first.transport.allocate(len(first.memory)) is first.memory
    first.transport.allocate(PAGE)[PAGE - 3 :] = b"abc"
    text = f"no memory is shared with workers of this host: [Errno 1] {said}{os.strerror(1)}"
    assert caplog.messages == [text]


def test_a_cpython_beside_an_old_c_library_and_without_standard_input_shares_memory_too():
    """Those of uv and conda have no names for calls that the system has. A file may be number 0."""
    code = """
        import fcntl, os, socket
        named = {
            os: ("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING"),
            fcntl: [name for name in dir(fcntl) if "SEAL" in name],
            socket: ["TCP_NOTSENT_LOWAT"],
        }
        for module, names in named.items():
            for name in names:
                delattr(module, name)
        from gossipdp.links.shared_memory import SharedSegment, map_offered
        from gossipdp.links.sockets import set_options
        os.closerange(0, 1)
        segment = SharedSegment(4096, 1)
        print(segment.descriptor, len(map_offered(segment.offer)[1]))
        del segment
        print(os.path.lexists("/proc/self/fd/0"))
        with socket.socket() as connection:
            set_options(connection, "10.0.0.1")
            print(connection.getsockopt(socket.IPPROTO_TCP, 25))
    """
    done = run_python("-c", textwrap.dedent(code))
    assert (done.stdout, done.stderr) == (f"0 4096\nFalse\n{256 << 10}\n", "")


def test_memory_that_its_owner_could_take_away_is_not_mapped():
    segment = SharedSegment(PAGE, 1)
    *_, token = OFFER.unpack(segment.offer)
    loose = os.memfd_create(f"gossipdp-{token.hex()}", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, PAGE)
    with pytest.raises(ValueError, match="not sealed"):
        map_offered(changed(segment.offer, descriptor=loose))
    os.close(loose)
    with pytest.raises(ValueError, match=f"{PAGE} bytes and not {2 * PAGE}"):
        map_offered(changed(segment.offer, num_bytes=2 * PAGE))


def test_what_has_another_name_is_of_another_host(tmp_path):
    """Process and file may have the same numbers there as others here."""
    segment, other = SharedSegment(PAGE, 1), SharedSegment(PAGE, 1)
    before = num_mapped(), len(os.listdir("/proc/self/fd"))
    with open(tmp_path / "a file", "wb") as file:
        for change in (
            {"descriptor": other.descriptor},
            {"descriptor": file.fileno()},
            {"descriptor": 2**31},
            {"process_id": 2**31},
            {"token": b""},
        ):
            assert map_offered(changed(segment.offer, **change)) is None
        assert (num_mapped(), len(os.listdir("/proc/self/fd")) - 1) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_memory_of_another_user_is_not_mapped(world, caplog):
    """Root may open all files, so the kernel does not forbid it."""
    first = world.shared(0)
    code = """
        import os, sys
        from gossipdp.links.shared_memory import SharedSegment
        os.setuid(65534)
        segment = SharedSegment(4096, 1)
        print(segment.offer.hex(), flush=True)
        sys.stdin.read()
    """
    words, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        offer = bytes.fromhex(process.stdout.readline())
        with pytest.raises(ValueError, match="another user"):
            map_offered(offer)
        assert first.transport.memory.map(1, offer) is None
    text = "cannot share memory with rank 1: the memory offered is another user's"
    assert caplog.messages == [text]
