"""A link's account of chunks that are read in place: what has left, in order; what is owed."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from links import EXCHANGE, LoneOwner, Recorder, identity, key

from gossipdp.links.frames import FrameError, FrameType, Header, pack_header, pack_key, run_tag
from gossipdp.links.shared_memory import PeerMemory, SharedSegment
from gossipdp.links.sockets import Stream
from gossipdp.links.tcp_link import TcpLink

TAG, TURN_BYTES = run_tag("run"), 4 << 20


class Taking(Stream):
    """Takes all that is sent, and says nothing."""

    connection: Any = None

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        raise BlockingIOError

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        return sum(map(len, parts))


class Owner(LoneOwner):
    """Its peer has mapped all that is offered."""

    def __init__(self) -> None:
        super().__init__(Recorder(), may_share=True)
        self.memory.segment = self.segment = SharedSegment(4096, 1)
        self.link = TcpLink(self, Taking(), identity(1), dialler=0)
        self.link.offered = self.link.ready = 1
        self.handler.link_up(self.link)

    def send(self, is_shared: bool) -> None:
        payload = self.segment.memory[:64] if is_shared else memoryview(bytes(64))
        self.link.send_chunk(EXCHANGE, key(), payload)
        self.link.write_some(acknowledge=False)

    def hear(self, frame_type: FrameType, sequence: int = 0, **place: int) -> None:
        header = pack_header(TAG, frame_type, sequence, 0, **place)
        self.link._start_frame(memoryview(header))


@given(st.lists(st.sampled_from(["shared", "bytes", "read"]), max_size=60))
def test_chunks_leave_in_order(events):
    """Against a model: a chunk has left when it and all before it are read, or sent as bytes."""
    owner = Owner()
    link = owner.link
    model: deque[bool] = deque()  # of each chunk sent: whether the peer can still read it
    num_read = num_shared = 0
    for event in events:
        if event == "read":
            if num_read < num_shared:
                num_read += 1
                model[model.index(True)] = False
                owner.hear(FrameType.ACKNOWLEDGEMENT, num_read - 1, num_read=num_read)
        else:
            owner.send(event == "shared")
            model.append(event == "shared")
            num_shared += event == "shared"
        while model and not model[0]:
            model.popleft()
        assert link.queued_chunks == link.queued_of(EXCHANGE) == len(model)
    link.end("enough")
    assert (owner.memory.segment is None) == bool(model)  # the peer may still read in it


def test_neither_chunks_nor_segments_are_confirmed_that_were_not_sent():
    owner = Owner()
    owner.send(True)
    for num_read in (2, 2**32 - 1):
        with pytest.raises(FrameError, match="acknowledged"):
            owner.hear(FrameType.ACKNOWLEDGEMENT, num_read=num_read)
    owner.link.offered = 3
    owner.hear(FrameType.SEGMENT_READY, 0, segment=2)
    for number in (1, 2, 4):
        with pytest.raises(FrameError, match="last offered is 3"):
            owner.hear(FrameType.SEGMENT_READY, 1, segment=number)
    owner.hear(FrameType.SEGMENT_READY, 1, segment=3)
    assert owner.link.ready == 3


def chunk_at(segment: int, offset: int, length: int) -> Header:
    return Header(EXCHANGE, length, key(), segment=segment, offset=offset)


def test_a_place_lies_inside_the_newest_segment_that_was_offered():
    peer = PeerMemory(Recorder())
    memory = bytes(range(200))
    assert peer.take(1, memoryview(memory))
    assert peer.find(chunk_at(1, 64, 136)) == memory[64:200]
    for header in (chunk_at(1, 64, 137), chunk_at(1, 2**63, 1), chunk_at(2, 0, 1)):
        with pytest.raises(FrameError, match="of segment"):
            peer.find(header)
    assert peer.take(2, memoryview(b"\x02" * 64))
    assert not any(peer.take(number, memoryview(memory)) for number in (1, 2))
    assert peer.find(chunk_at(2, 0, 1)) == b"\x02"
    with pytest.raises(FrameError):
        peer.find(chunk_at(1, 0, 1))


class Endless(Taking):
    """A peer that sends one message after the other, as fast as they are read."""

    MESSAGE_BYTES = 1 << 16

    def __init__(self) -> None:
        self.num_read = self.num_calls = self._sequence = 0
        self._rest = b""

    def receive_into(self, rooms: Sequence[memoryview]) -> int:
        self.num_calls += 1
        for room in rooms:
            while len(self._rest) < len(room):
                header = pack_header(TAG, FrameType.CONTROL, self._sequence, self.MESSAGE_BYTES)
                self._rest += header + bytes(self.MESSAGE_BYTES)
                self._sequence += 1
            room[:], self._rest = self._rest[: len(room)], self._rest[len(room) :]
            self.num_read += len(room)
        assert self.num_read < 2 * TURN_BYTES, "no other link gets its turn"
        return sum(map(len, rooms))


def test_a_turn_ends_however_much_there_is_to_read():
    owner, stream = Owner(), Endless()
    link = TcpLink(owner, stream, identity(2), dialler=0)
    owner.handler.link_up(link)
    link.read_some()
    assert TURN_BYTES <= stream.num_read < TURN_BYTES + 2 * stream.MESSAGE_BYTES
    most = TURN_BYTES // stream.MESSAGE_BYTES + 2
    assert stream.num_calls <= most, "each message comes with the header of the next"
    assert link.has_input, "the rest has its turn after the others"


class Narrow(Taking):
    """Takes less than a header at a time."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def send(self, parts: Sequence[bytes | memoryview]) -> int:
        part = b"".join(parts)[:40]
        self.taken += part
        return len(part)


def test_chunks_leave_whole_in_any_pieces_and_the_handler_hears_when_fewer_than_four_wait():
    owner, stream, kind = Owner(), Narrow(), FrameType.STATE_CHUNK
    link = TcpLink(owner, stream, identity(2), dialler=0)
    waiting: list[int] = []
    owner.handler.hooks["writable"] = lambda link: waiting.append(link.queued_chunks)
    payload, expected = bytes(range(64)), b""
    for index in range(5):
        link.send_chunk(kind, key(index), memoryview(payload))
        expected += pack_header(TAG, kind, index, 64, pack_key(key(index))) + payload
    while link.has_unsent:
        link.can_write = True  # as an event says
        link.write_some(acknowledge=False)
    assert stream.taken == expected
    assert waiting == [3, 2, 1, 0]
    assert link.chunk_bytes_sent == {kind: 5 * 64}
