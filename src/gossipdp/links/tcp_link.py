"""One established link: frames in and out of a non-blocking stream.

Reads go straight into the landing buffer that the handler named, with the next header behind it
in one call, and small frames several at once; writes hand header and payload to the kernel
together. So a chunk costs few system calls, each of which gives up the interpreter lock and has to
win it back from the training loop.

A chunk that lies in memory which the peer has mapped goes as a header alone and is read there
(:mod:`.shared_memory`). That it was read is said in the next header that goes the other way, or,
if none has gone by the next turn, in a frame of its own.
"""

import abc
import secrets
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

from gossipdp.links.frames import (
    BARE_TYPES,
    HEADER_BYTES,
    KEYLESS_TYPES,
    SEGMENT_ALIGNMENT_BYTES,
    SHARED_TYPES,
    TOKEN_BYTES,
    ChunkKey,
    FrameError,
    FrameType,
    Header,
    check_length,
    pack_header,
    pack_key,
    parse_header,
)
from gossipdp.links.handshake import Identity
from gossipdp.links.link import Link, LinkHandler
from gossipdp.links.shared_memory import SharedChunks, SharedSegment
from gossipdp.links.sockets import Stream

# One turn of the loop moves at most this much per link and direction, so that no link starves
# the others; a chunk fits.
TURN_BYTES = 4 << 20
# Control frames that wait together leave in one call.
CONTROL_BATCH_BYTES = 64 << 10
# Read behind a header that comes first: what is small arrives in one call.
READ_AHEAD_BYTES = 1024
# A peer that reads nothing for this long a list of messages is as good as gone.
MAX_QUEUED_CONTROL_BYTES = 4 << 20
# The handler hears that a link is writable while fewer chunks than this are queued.
MAX_QUEUED_CHUNKS = 4


class _Queued(NamedTuple):
    """A chunk that waits; with a ``segment`` its payload stays where it is."""

    frame_type: FrameType
    packed_key: bytes
    payload: memoryview
    segment: int = 0
    offset: int = 0


class LinkOwner(abc.ABC):
    """What a link needs of its transport."""

    handler: LinkHandler
    tag: bytes
    clock: Callable[[], float]
    scratch: memoryview  # where payloads land that nobody wants
    segment: SharedSegment | None  # our memory that peers may read

    @abc.abstractmethod
    def link_has_output(self, link: "TcpLink") -> None:
        """``link`` has something to write; call its ``write_some`` before sleeping."""

    @abc.abstractmethod
    def link_has_input(self, link: "TcpLink") -> None:
        """``link`` has something to read; call its ``read_some`` before sleeping."""

    @abc.abstractmethod
    def link_found_memory_socket(self, link: "TcpLink") -> None:
        """The peer said in ``link.memory_socket`` where it takes segments."""

    @abc.abstractmethod
    def link_ended(self, link: "TcpLink", reason: str, *, broken: bool, unread: bool) -> None:
        """``link`` is closed: close its socket and tell the handler from ``poll()``.

        ``broken``: the peer, authenticated as it is, sent what no worker sends. ``unread``: it may
        still be reading ``segment``.
        """


@final
class TcpLink(Link):
    """A :class:`~gossipdp.links.link.Link` over one TCP connection, plain or TLS.

    Args:
        owner: the transport.
        stream: the connection, in the clear or through TLS.
        peer_identity: from the handshake.
        dialler: rank of the end that dialled.

    Attributes:
        memory_token: what a peer of this host shows with a segment for this link.
        memory_socket: where the peer takes segments, a name and a token; None until it said so,
            empty once it was found to be on another host.
        shared: the account of chunks that are read in place.
    """

    def __init__(
        self,
        owner: LinkOwner,
        stream: Stream,
        peer_identity: Identity,
        dialler: int,
    ) -> None:
        self.peer_identity = peer_identity
        self.stream = stream
        self.connection = stream.connection
        self.dialler = dialler
        self.memory_token = secrets.token_bytes(TOKEN_BYTES)
        self.memory_socket: bytes | None = None
        # Edge-triggered readiness: set by events, cleared when the kernel has no more (room).
        self.can_read = True
        self.can_write = True
        self.hung_up = False
        self._owner = owner
        self._write_error: str | None = None
        self.last_heard_s = owner.clock()

        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_filled = 0
        self._spare = memoryview(bytearray(READ_AHEAD_BYTES))
        self._ahead = self._spare[:0]
        self._frame: Header | None = None
        self._landing: memoryview | None = None
        self._payload_rest = 0
        self._next_received = 0

        self._controls: deque[bytes] = deque()
        self._queued_control_bytes = 0
        self._chunks: deque[_Queued] = deque()
        self._sending: list[memoryview] = []
        self._sending_chunk: FrameType | None = None
        self._next_sent = 0

        self.shared = SharedChunks()
        # Frames of the link itself: type, payload, segment.
        self._own: deque[tuple[FrameType, bytes, int]] = deque()
        self._writable_due = False

    @property
    def queued_chunks(self) -> int:
        """See :class:`Link`."""
        num_sending = self._sending_chunk is not None
        return len(self._chunks) + num_sending + self.shared.num_unread

    def queued_of(self, *frame_types: FrameType) -> int:
        """See :class:`Link`."""
        num_here = sum(chunk.frame_type in frame_types for chunk in self._chunks)
        num_unread = self.shared.num_unread if set(frame_types) & set(SHARED_TYPES) else 0
        return num_here + (self._sending_chunk in frame_types) + num_unread

    @property
    def is_shared(self) -> bool:
        """See :class:`Link`."""
        segment = self._owner.segment
        return segment is not None and segment.number == self.shared.ready

    def send_control(self, data: bytes) -> None:
        """See :class:`Link`."""
        check_length(FrameType.CONTROL, len(data))
        if self.closed:
            return
        if self._queued_control_bytes + len(data) > MAX_QUEUED_CONTROL_BYTES:
            self.end(f"the peer leaves {self._queued_control_bytes} bytes of messages unread")
            return
        self._controls.append(data)
        self._queued_control_bytes += len(data)
        self.queued_bytes += len(data)
        self._owner.link_has_output(self)

    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """See :class:`Link`."""
        if frame_type in KEYLESS_TYPES:
            raise ValueError(f"a {frame_type.name} frame is not a chunk; use send_control")
        check_length(frame_type, payload.nbytes)
        packed_key = pack_key(key)
        if self.closed:
            return
        offset = None
        if self.is_shared and frame_type in SHARED_TYPES:
            assert self._owner.segment is not None
            offset = self._owner.segment.offset_of(payload)
        chunk = _Queued(frame_type, packed_key, payload.cast("B"))
        if offset is not None and offset % SEGMENT_ALIGNMENT_BYTES == 0:
            chunk = chunk._replace(segment=self.shared.ready, offset=offset)
        else:
            self.queued_bytes += payload.nbytes
        self._chunks.append(chunk)
        self._owner.link_has_output(self)

    def invite(self, name: bytes) -> None:
        """Tell the peer, once, that it may pass segments to the Unix socket ``name``."""
        self._own.append((FrameType.MEMORY_SOCKET, name + self.memory_token, 0))
        self._owner.link_has_output(self)

    def map(self, number: int, memory: memoryview) -> None:
        """``memory`` is the peer's segment ``number``; tell it so."""
        if not self.closed and self.shared.map(number, memory):
            self._own.append((FrameType.SEGMENT_READY, b"", number))
            self._owner.link_has_output(self)

    def close(self, reason: str) -> None:
        """See :class:`Link`."""
        if self.closed:
            return
        self.flush_controls()
        self.end(reason)

    def flush_controls(self) -> None:
        """Hand waiting control frames to the kernel where no chunk is half sent."""
        if not self._sending_chunk and (self._sending or self._controls):
            self._chunks.clear()
            self._send(TURN_BYTES)

    def end(self, reason: str, *, broken: bool = False) -> None:
        """Close without sending anything more. No buffer of a user is touched from here on."""
        if self.closed:
            return
        self.closed = True
        unread = self.shared.is_in_doubt
        self.shared.end()
        self._controls.clear()
        self._chunks.clear()
        self._sending.clear()
        self._sending_chunk = None
        self.queued_bytes = 0
        self._landing = None
        self._owner.link_ended(self, reason, broken=broken, unread=unread)

    def read_some(self) -> None:
        """Read what there is, up to the turn's share, and pass complete frames to the handler.

        Every callback may close this link, so ``closed`` is looked at after each. State moves on
        before the callback: should it raise, the next call continues with the next frame.
        """
        budget = TURN_BYTES
        while budget > 0 and not self.closed:
            if self._writable_due:
                self._writable_due = False
                self._owner.handler.writable(self)
                continue
            if self._frame is not None and self._frame.segment:
                budget -= self._frame.length
                self._read_in_place()
                continue
            if self._header_filled == HEADER_BYTES:
                try:
                    self._start_frame()
                except FrameError as error:
                    self.end(f"the peer broke the protocol: {error}", broken=True)
                continue
            room = self._room()
            if self._ahead:
                self._take(self._take_ahead(room))
                continue
            if not self.can_read:
                break
            if self._payload_rest == 0:
                room.append(self._spare)
            try:
                count = self.stream.receive_into(room)
            except BlockingIOError:
                self.can_read = False
                break
            except OSError as error:
                self.end(f"connection lost: {error.strerror}")
                return
            if count == 0:
                self.end(self._write_error or "closed by the peer")
                return
            self.last_heard_s = self._owner.clock()
            self.bytes_received += count
            budget -= count
            # A short read has emptied the socket; only an end is then still to be read.
            short = count < sum(map(len, room))
            self.can_read = not short or self.hung_up or self.stream.has_more
            if self._payload_rest == 0:
                num_ahead = max(0, count - (HEADER_BYTES - self._header_filled))
                self._ahead = self._spare[:num_ahead]
                count -= num_ahead
            self._take(count)
        if self._write_error is not None and not self.has_input:
            self.end(self._write_error)

    def write_some(self, acknowledge: bool) -> None:
        """Write what the kernel takes, up to the turn's share; report chunks that left.

        ``acknowledge``: say what was read, although no frame goes out that could.
        """
        queued_before = self.queued_chunks
        self._send(TURN_BYTES, acknowledge)
        if self.stream.is_worn and not self._sending:
            self.close("its TLS key has protected as much as one may; a new link takes its place")
        if not self.closed and self.queued_chunks < min(queued_before, MAX_QUEUED_CHUNKS):
            self._owner.handler.writable(self)

    @property
    def has_input(self) -> bool:
        """Whether ``read_some`` could do anything now."""
        is_begun = self._header_filled == HEADER_BYTES or (
            self._frame is not None and self._frame.segment != 0
        )
        waits = self.can_read or self._writable_due or is_begun or len(self._ahead) > 0
        return waits and not self.closed

    @property
    def has_output(self) -> bool:
        """Whether ``write_some`` could send something now, acknowledgements aside."""
        waiting = self._sending or self._own or self._controls or self._chunks
        return bool(waiting) and self.can_write and not self.closed

    @property
    def owes(self) -> bool:
        """Whether ``write_some`` could send an acknowledgement now."""
        return self.shared.owes and self.can_write and not self.closed

    def _room(self) -> list[memoryview]:
        """Where the next bytes belong: the rest of the payload, then the next header."""
        header_rest = self._header[self._header_filled :]
        rest = self._payload_rest
        if rest == 0:
            return [header_rest]
        if self._landing is not None:
            return [self._landing[-rest:], header_rest]
        scratch = self._owner.scratch
        if rest > len(scratch):
            return [scratch]
        return [scratch[:rest], header_rest]

    def _take_ahead(self, rooms: list[memoryview]) -> int:
        """Fill ``rooms`` from what was read ahead; how many bytes."""
        total = 0
        for room in rooms:
            part = self._ahead[: len(room)]
            room[: len(part)] = part
            self._ahead = self._ahead[len(part) :]
            total += len(part)
        return total

    def _take(self, count: int) -> None:
        """Account for ``count`` bytes that were read into ``_room()``."""
        in_payload = min(count, self._payload_rest)
        self._payload_rest -= in_payload
        self._header_filled += count - in_payload
        if self._frame is None or self._payload_rest:
            return
        frame, landing = self._frame, self._landing
        self._frame = self._landing = None
        if frame.key is None:
            assert landing is not None
            if frame.frame_type is FrameType.CONTROL:
                self._owner.handler.control(self, bytes(landing))
            else:
                self.memory_socket = bytes(landing)
                self._owner.link_found_memory_socket(self)
        else:
            self._owner.handler.chunk(self, frame.frame_type, frame.key, landing)

    def _start_frame(self) -> None:
        """Look at a whole header; raises FrameError where no worker would send it."""
        self._header_filled = 0
        queued_before = self.queued_chunks
        frame = parse_header(self._header, self._owner.tag, self._next_received)
        if self.shared.confirm(frame.num_read):
            bound = min(queued_before, MAX_QUEUED_CHUNKS)
            self._writable_due = self.queued_chunks < bound
        if frame.frame_type is FrameType.SEGMENT_READY:
            self.shared.confirm_segment(frame.segment)
        if frame.frame_type is FrameType.MEMORY_SOCKET and self.memory_socket is not None:
            raise FrameError("a second memory socket")
        self._next_received += 1
        if frame.frame_type in BARE_TYPES:
            return
        if frame.key is None:
            self._frame, self._payload_rest = frame, frame.length
            self._landing = memoryview(bytearray(frame.length))
            return
        in_place = None
        if frame.segment:
            in_place = self.shared.find(frame)
            self.shared_bytes_received += frame.length
        else:
            self._payload_rest = frame.length
        # Should the handler raise here, the payload is dropped and the stream stays in step.
        self._frame = frame
        handler = self._owner.handler
        landing = handler.chunk_buffer(self, frame.frame_type, frame.key, frame.length)
        if landing is None or self.closed:
            return
        if landing.nbytes != frame.length:
            raise FrameError(f"a chunk of {frame.length} bytes, not {landing.nbytes}")
        self._landing = landing.cast("B") if in_place is None else in_place

    def _read_in_place(self) -> None:
        """Let the handler read a chunk where the peer holds it, and owe the peer word of it."""
        frame, memory = self._frame, self._landing
        assert frame is not None
        assert frame.key is not None
        self._frame = self._landing = None
        try:
            self._owner.handler.chunk(self, frame.frame_type, frame.key, memory)
        finally:
            # Only now: the peer may write there again as soon as it hears.
            self.shared.read()
            if not self.closed:
                self._owner.link_has_output(self)

    def _send(self, budget: int, acknowledge: bool = False) -> None:
        while budget > 0 and (self.has_output or (acknowledge and self.owes)):
            if not self._sending:
                self._start_sending()
            try:
                count = self.stream.send(self._sending)
            except BlockingIOError:
                self.can_write = False
                return
            except OSError as error:
                # What the peer said before it went is still to be read, so reading ends the link.
                self.can_write = False
                self.can_read = True
                self._write_error = f"connection lost: {error.strerror}"
                self._owner.link_has_input(self)
                return
            self.bytes_sent += count
            self.queued_bytes -= count
            budget -= count
            # A short write has filled the socket; an event says when there is room again.
            self.can_write = count == sum(map(len, self._sending))
            while count:
                if count < len(self._sending[0]):
                    self._sending[0] = self._sending[0][count:]
                    break
                count -= len(self._sending.pop(0))
            if self._sending_chunk and not self._sending:
                self._sending_chunk = None
                self.shared.sent_as_bytes()
                if self.stream.is_worn:
                    return  # the link ends here, however much waits

    def _start_sending(self) -> None:
        """Number the next frames and lay them out: first all that are small, in one part."""
        parts: list[bytes] = []
        size = 0
        while self._own:
            frame_type, data, segment = self._own.popleft()
            parts += (self._header_of(frame_type, len(data), segment=segment), data)
        while self._controls and size < CONTROL_BATCH_BYTES:
            data = self._controls.popleft()
            self._queued_control_bytes -= len(data)
            self.queued_bytes -= len(data)
            parts += (self._header_of(FrameType.CONTROL, len(data)), data)
            size += HEADER_BYTES + len(data)
        while self._chunks and self._chunks[0].segment and not self._controls:
            chunk = self._chunks.popleft()
            parts.append(self._header_of_chunk(chunk))
            self.shared.sent()
            self.shared_bytes_sent += len(chunk.payload)
        if not parts and not self._chunks:
            parts.append(self._header_of(FrameType.ACKNOWLEDGEMENT, 0))
        if parts:
            self._sending = [memoryview(b"".join(parts))]
            self.queued_bytes += len(self._sending[0])
            return
        chunk = self._chunks.popleft()
        self._sending = [memoryview(self._header_of_chunk(chunk)), chunk.payload]
        self.queued_bytes += HEADER_BYTES
        self._sending_chunk = chunk.frame_type

    def _header_of_chunk(self, chunk: _Queued) -> bytes:
        place = (chunk.segment, chunk.offset)
        return self._header_of(chunk.frame_type, len(chunk.payload), chunk.packed_key, *place)

    def _header_of(
        self,
        frame_type: FrameType,
        length: int,
        packed_key: bytes | None = None,
        segment: int = 0,
        offset: int = 0,
    ) -> bytes:
        """The next header; it tells how many chunks were read."""
        header = pack_header(
            self._owner.tag,
            frame_type,
            self._next_sent,
            length,
            packed_key,
            num_read=self.shared.say(),
            segment=segment,
            offset=offset,
        )
        self._next_sent += 1
        return header
