"""One established link: frames in and out of a non-blocking stream.

A chunk costs few system calls, since each gives up the interpreter lock and has to win it back from
the training loop: reads go straight into the handler's landing buffer, with the next header behind
it; writes hand header and payload to the kernel together.

A chunk in memory that the peer has mapped goes as a header alone, and the peer reads it there
(:mod:`.shared_memory`). It has left when the peer confirms that, in its next header or, by the next
turn, in a frame of its own. A chunk sent as bytes has left only when all before it have, so a
sender knows from the number of queued chunks which of its slots are free.
"""

import abc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, final

from gossipdp.links import frames, sockets
from gossipdp.links.frames import ChunkKey, FrameError, FrameType, Header
from gossipdp.links.handshake import Identity
from gossipdp.links.link import Link, LinkHandler, SendLimit
from gossipdp.links.shared_memory import PeerMemory, SlotMemory
from gossipdp.links.sockets import Stream

# One turn moves at most this much per link and direction, so that no link starves the others.
TURN_BYTES = 4 << 20
# Control frames that wait together leave in one call.
CONTROL_BATCH_BYTES = 64 << 10
# Bytes read behind a header that comes first, so that small frames arrive in one call.
READ_AHEAD_BYTES = 1024
# A peer that leaves this many bytes of messages unread counts as gone.
MAX_QUEUED_CONTROL_BYTES = 4 << 20
# The handler hears that a link is writable while fewer chunks than this are queued.
MAX_QUEUED_CHUNKS = 4


@dataclass(slots=True, eq=False)
class _Queued:
    """A frame that has not left; a chunk with a ``segment`` stays where it is."""

    frame_type: FrameType
    payload: bytes | memoryview
    packed_key: bytes | None = None
    segment: int = 0
    offset: int = 0
    is_done: bool = False  # handed over, or read in place: it leaves once all before it have


class LinkOwner(abc.ABC):
    """The part of a transport that its links use."""

    handler: LinkHandler
    tag: bytes
    clock: Callable[[], float]
    scratch: memoryview  # for payloads that are dropped
    memory: SlotMemory  # ours, which peers may read
    # Links whose ``read_some`` or ``write_some`` is to be called before sleeping.
    to_read: dict[Any, None]
    to_write: dict["TcpLink", None]
    limit: SendLimit | None  # of all links together

    @abc.abstractmethod
    def link_ended(self, link: "TcpLink", reason: str, *, broken: bool) -> None:
        """Close the link's socket and tell the handler from ``poll()``.

        ``broken``: the peer, though authenticated, sent bytes that no worker sends.
        """


@final
class TcpLink(Link):
    """A link over one connection.

    Attributes:
        dialler: rank of the end that dialled.
        offered, ready: numbers of the last segments of ours that the peer was offered, and that it
            has mapped; 0: none.
        can_read, can_write: set by events, cleared when the kernel has no more (room).
    """

    def __init__(
        self, owner: LinkOwner, stream: Stream, peer_identity: Identity, dialler: int
    ) -> None:
        super().__init__()
        self.peer_identity = peer_identity
        self.stream = stream
        self.connection = stream.connection
        self.dialler = dialler
        self.offered = self.ready = 0
        self._peer_memory = PeerMemory(owner.handler)
        self.can_read = self.can_write = True
        self.hung_up = False
        self.last_heard_s = owner.clock()
        self._owner = owner
        self._write_error: str | None = None

        # Bytes read beyond the last payload: at most one header, or a header and small frames.
        self._inbox = memoryview(bytearray(frames.HEADER_BYTES + READ_AHEAD_BYTES))
        self._ahead = self._inbox[:0]
        self._frame: Header | None = None
        self._landing: memoryview | None = None
        self._payload_rest = 0
        self._next_received = 0
        self._num_read = self._num_said = 0  # peer's chunks that were read in place, and confirmed

        self._small: deque[_Queued] = deque()
        self._queued_small_bytes = 0
        self._waiting: deque[_Queued] = deque()  # chunks that have not been started
        self._leaving: deque[_Queued] = deque()  # chunks on their way
        self._sending: list[bytes | memoryview] = []
        self._sending_chunk: _Queued | None = None
        self._granted = 0  # bytes of it that the limit has let pass and that have not left
        self._next_sent = 0
        self._num_confirmed = self._num_unread = 0  # chunks of ours that are read in place
        self._writable_due = False

    @property
    def queued_chunks(self) -> int:
        return len(self._leaving) + len(self._waiting)

    @property
    def has_unsent(self) -> bool:
        return bool(self._sending or self._small or self._waiting)

    def queued_of(self, *frame_types: FrameType) -> int:
        return sum(each.frame_type in frame_types for each in chain(self._leaving, self._waiting))

    @property
    def is_shared(self) -> bool:
        segment = self._owner.memory.segment
        return segment is not None and segment.number == self.ready

    @property
    def is_aging(self) -> bool:
        return self.stream.is_aging

    def send_control(self, data: bytes) -> None:
        frames.check_length(FrameType.CONTROL, len(data))
        self._send_small(FrameType.CONTROL, data)

    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        frames.check_length(frame_type, payload.nbytes)
        chunk = _Queued(frame_type, payload.cast("B"), frames.pack_key(key))
        if self.closed:
            return
        segment = self._owner.memory.segment
        if segment is not None and self.is_shared and frame_type in frames.SHARED_TYPES:
            offset = segment.offset_of(payload)
            if offset is not None:
                chunk.segment, chunk.offset = segment.number, offset
        self._waiting.append(chunk)
        self._owner.to_write[self] = None

    def offer_memory(self) -> None:
        """Tell the peer where our segment is, if there is one; on another host it finds nothing."""
        segment = self._owner.memory.segment
        if segment is not None:
            self.offered = segment.number
            self._send_small(FrameType.SEGMENT_OFFER, segment.offer)

    def close(self, reason: str) -> None:
        if not self.closed:
            self.flush_controls()
            sockets.empty(self.connection, self._owner.scratch)
            self.end(reason)

    def flush_controls(self) -> None:
        """Hand waiting control frames to the kernel where no chunk is half sent."""
        if self._sending_chunk is None:
            self._waiting.clear()
            self._send(TURN_BYTES)

    def end(self, reason: str, *, broken: bool = False) -> None:
        """Close without sending anything more, and touch no buffer of a user from here on."""
        if self.closed:
            return
        self.closed = True
        self._small.clear()
        self._waiting.clear()
        self._leaving.clear()
        self._sending.clear()
        self._sending_chunk = self._landing = None
        self._peer_memory.close()
        if self._num_unread > 0:  # the peer may still read
            self._owner.memory.abandon()
        self._owner.link_ended(self, reason, broken=broken)

    @property
    def has_input(self) -> bool:
        """True if ``read_some`` could do anything now."""
        wanted = frames.HEADER_BYTES if self._frame is None else min(1, self._payload_rest)
        waits = self.can_read or self._writable_due or len(self._ahead) >= wanted
        return waits and not self.closed

    @property
    def has_output(self) -> bool:
        """True if ``write_some`` could send a frame now, acknowledgements aside."""
        limit = self._owner.limit
        is_free = self.can_write and (limit is None or self not in limit.held)
        return self.has_unsent and is_free and not self.closed

    @property
    def owes(self) -> bool:
        """True if ``write_some`` could send an acknowledgement now."""
        return self._num_read != self._num_said and self.can_write and not self.closed

    # Reading.

    def read_some(self) -> None:
        """Read up to the turn's share, and pass complete frames to the handler.

        Every callback may close this link. State moves on before it: if it raises, the next call
        continues with the next frame.
        """
        budget = TURN_BYTES
        while budget > 0 and not self.closed:
            if self._writable_due:
                self._writable_due = False
                self._owner.handler.writable(self)
            elif self._frame is not None and self._payload_rest == 0:
                budget -= self._frame.length if self._frame.segment else 0
                self._finish_frame(self._frame)
            elif self._frame is not None and self._ahead:
                part = self._ahead[: self._payload_rest]
                if self._landing is not None:
                    start = len(self._landing) - self._payload_rest
                    self._landing[start : start + len(part)] = part
                self._came(len(part))
                self._ahead = self._ahead[len(part) :]
            elif len(self._ahead) >= frames.HEADER_BYTES:
                header = self._ahead[: frames.HEADER_BYTES]
                self._ahead = self._ahead[frames.HEADER_BYTES :]
                try:
                    self._start_frame(header)
                except FrameError as error:
                    self.end(f"the peer broke the protocol: {error}", broken=True)
            elif not self.can_read:
                break
            else:
                budget -= self._receive()
        if self._write_error is not None and not self.has_input:
            self.end(self._write_error)

    def _receive(self) -> int:
        """Read once: the rest of the payload, then the bytes behind it; return their number."""
        num_ahead, rest = len(self._ahead), self._payload_rest
        if num_ahead:  # a header cut short
            self._inbox[:num_ahead] = self._ahead
        room = self._inbox[num_ahead:]
        rooms = [room]
        if rest:
            # Read only the next header behind a payload: the bytes after it have their own place.
            payload = self._owner.scratch[:rest] if self._landing is None else self._landing[-rest:]
            rooms = [payload, room[: frames.HEADER_BYTES]] if len(payload) == rest else [payload]
        try:
            count = self.stream.receive_into(rooms)
        except BlockingIOError:
            self.can_read = self.stream.gather(self._payload_rest)
            return 0
        except OSError as error:
            self.end(f"connection lost: {error.strerror}")
            return 0
        if count == 0:
            self.end(self._write_error or "closed by the peer")
            return 0
        now_s = self._owner.clock()
        gap_s, self.last_heard_s = now_s - self.last_heard_s, now_s
        self.bytes_received += count
        # A short read has emptied the socket; then only an end is still to be read.
        is_short = count < sum(map(len, rooms))
        self.can_read = not is_short or self.hung_up or self.stream.has_more
        self._came(min(count, rest))
        self._ahead = self._inbox[: num_ahead + max(0, count - rest)]
        if not self.can_read:
            self.can_read = self.stream.gather(self._payload_rest, count, gap_s)
        return count

    def _came(self, count: int) -> None:
        self._payload_rest -= count
        if self._landing is not None and self._frame is not None and self._frame.key is not None:
            self.chunk_bytes_received[self._frame.frame_type] += count

    def _start_frame(self, data: memoryview) -> None:
        """Look at a whole header; raise FrameError if no worker would send it."""
        frame = frames.parse_header(data, self._owner.tag, self._next_received)
        self._confirm(frame.num_read)
        if frame.frame_type is FrameType.SEGMENT_READY:
            if not self.ready < frame.segment <= self.offered:
                text = f"segment {frame.segment} is mapped; the last offered is {self.offered}"
                raise FrameError(text)
            self.ready = frame.segment
        self._next_received += 1
        if frame.frame_type in frames.BARE_TYPES:
            return
        in_place = self._peer_memory.find(frame) if frame.segment else None
        # If the handler raises here, the payload is dropped and the stream stays in step.
        self._frame, self._landing = frame, None
        self._payload_rest = frame.length if in_place is None else 0
        if frame.key is None:
            self._landing = memoryview(bytearray(frame.length))
            return
        handler = self._owner.handler
        landing = handler.chunk_buffer(self, frame.frame_type, frame.key, frame.length)
        if landing is None or self.closed:
            return
        if landing.nbytes != frame.length:
            raise FrameError(f"a chunk of {frame.length} bytes, not {landing.nbytes}")
        self._landing = landing.cast("B") if in_place is None else in_place

    def _finish_frame(self, frame: Header) -> None:
        landing = self._landing
        self._frame = self._landing = None
        if frame.key is not None:
            try:
                self._owner.handler.chunk(self, frame.frame_type, frame.key, landing)
            finally:
                # Acknowledge only now: the peer may write there again as soon as it hears.
                if frame.segment and not self.closed:
                    self.shared_bytes_received += frame.length
                    if landing is not None:
                        self.chunk_bytes_received[frame.frame_type] += frame.length
                    self._num_read += 1
                    self._owner.to_write[self] = None
            return
        assert landing is not None
        if frame.frame_type is FrameType.CONTROL:
            self._owner.handler.control(self, bytes(landing))
            return
        offered = self._owner.memory.map(self.peer, bytes(landing))
        if offered is not None and self._peer_memory.take(*offered):
            self._send_small(FrameType.SEGMENT_READY, segment=offered[0])

    def _confirm(self, num_read: int) -> None:
        """Take note of the number of chunks that the peer has read in place, modulo 2**32."""
        news = (num_read - self._num_confirmed) % frames.SEQUENCE_MODULUS
        if not news:
            return
        if news > self._num_unread:
            raise FrameError(f"{news} chunks acknowledged, {self._num_unread} unread")
        self._num_confirmed += news
        self._num_unread -= news
        unread = (chunk for chunk in self._leaving if chunk.segment and not chunk.is_done)
        for chunk in list(islice(unread, news)):
            chunk.is_done = True
        self._let_go()

    # Writing.

    def write_some(self, acknowledge: bool) -> None:
        """Write up to the turn's share, as the kernel takes it; report chunks that left.

        ``acknowledge``: confirm the chunks read, with a frame of its own if no other goes out.
        """
        self._send(TURN_BYTES, acknowledge)
        if self.stream.is_worn and not self._sending:
            self.close("its TLS key has protected as much as one may; a new link takes its place")
        if self._writable_due and not self.closed:
            self._writable_due = False
            self._owner.handler.writable(self)

    def _send_small(self, frame_type: FrameType, data: bytes = b"", *, segment: int = 0) -> None:
        num_bytes = frames.HEADER_BYTES + len(data)  # many that are tiny take memory too
        if self._queued_small_bytes + num_bytes > MAX_QUEUED_CONTROL_BYTES:
            self.end(f"the peer leaves {self._queued_small_bytes} bytes of messages unread")
        if self.closed:
            return
        self._small.append(_Queued(frame_type, data, segment=segment))
        self._queued_small_bytes += num_bytes
        self._owner.to_write[self] = None

    def _send(self, budget: int, acknowledge: bool = False) -> None:
        while budget > 0 and (self.has_output or (acknowledge and self.owes)):
            if not self._sending:
                self._start_sending()
            parts = self._admitted()
            if not parts:
                return
            try:
                count = self.stream.send(parts)
            except BlockingIOError:
                self.can_write = False
                return
            except OSError as error:
                # The peer's last words are still to be read, so reading ends the link.
                self.can_write = False
                self.can_read = True
                self._write_error = f"connection lost: {error.strerror}"
                self._owner.to_read[self] = None
                return
            if (limit := self._owner.limit) is not None:
                if self._sending_chunk is not None:
                    self._granted -= count
                else:
                    limit.spend(count)
            self.bytes_sent += count
            budget -= count
            # A short write has filled the socket; an event says when there is room again.
            self.can_write = count == sum(map(len, parts))
            if (chunk := self._sending_chunk) is not None:  # its payload comes last
                header_rest = sum(map(len, self._sending[:-1]))
                self.chunk_bytes_sent[chunk.frame_type] += max(0, count - header_rest)
            while count:
                if count < len(self._sending[0]):
                    self._sending[0] = self._sending[0][count:]
                    break
                count -= len(self._sending.pop(0))
            if self._sending_chunk is not None and not self._sending:
                self._sending_chunk.is_done = True
                self._sending_chunk = None
                self._let_go()
                if self.stream.is_worn:
                    return  # the link ends here, even if more frames wait

    def _admitted(self) -> list[bytes | memoryview]:
        """Return the part of what is being sent that the limit lets pass; [] if it must wait.

        A part that found no room comes again as it was: TLS needs that.
        """
        limit = self._owner.limit
        if limit is None or self._sending_chunk is None:
            return self._sending
        if not self._granted:
            num_bytes = sum(map(len, self._sending))
            self._granted = limit.take(num_bytes, self._owner.clock())
            if not self._granted:
                limit.held[self] = None
                return []
        header_rest = sum(map(len, self._sending[:-1]))  # less than a portion
        return [*self._sending[:-1], self._sending[-1][: self._granted - header_rest]]

    def _start_sending(self) -> None:
        """Lay out the next frames with their numbers: first all that are small, in one part."""
        parts: list[bytes | memoryview] = []
        size = 0
        while self._small and size < CONTROL_BATCH_BYTES:
            frame = self._small.popleft()
            self._queued_small_bytes -= frames.HEADER_BYTES + len(frame.payload)
            parts += (self._header_of(frame), frame.payload)
            size += frames.HEADER_BYTES + len(frame.payload)
        while self._waiting and self._waiting[0].segment and not self._small:
            chunk = self._waiting.popleft()
            self._leaving.append(chunk)
            self._num_unread += 1
            self.shared_bytes_sent += len(chunk.payload)
            self.chunk_bytes_sent[chunk.frame_type] += len(chunk.payload)
            parts.append(self._header_of(chunk))
        if not parts and not self._waiting:
            parts.append(self._header_of(_Queued(FrameType.ACKNOWLEDGEMENT, b"")))
        if parts:
            self._sending = [memoryview(b"".join(parts))]
            return
        self._sending_chunk = chunk = self._waiting.popleft()
        self._leaving.append(chunk)
        self._sending = [memoryview(self._header_of(chunk)), chunk.payload]

    def _let_go(self) -> None:
        """Drop the chunks that have left, and owe the handler a call."""
        while self._leaving and self._leaving[0].is_done:
            self._leaving.popleft()
            self._writable_due = True
        self._writable_due &= self.queued_chunks < MAX_QUEUED_CHUNKS

    def _header_of(self, frame: _Queued) -> bytes:
        header = frames.pack_header(
            self._owner.tag,
            frame.frame_type,
            self._next_sent,
            len(frame.payload),
            frame.packed_key,
            num_read=self._num_read,
            segment=frame.segment,
            offset=frame.offset,
        )
        self._next_sent += 1
        self._num_said = self._num_read
        return header
