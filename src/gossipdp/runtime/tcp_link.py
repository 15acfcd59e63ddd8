"""One established link: frames in and out of a non-blocking stream.

Reads go straight into the landing buffer that the handler named, with the next header behind it
in one call; writes hand header and payload to the kernel together. So a chunk costs few system
calls, each of which gives up the interpreter lock and has to win it back from the training loop.
"""

import abc
import socket
from collections import deque
from collections.abc import Callable
from typing import final

from gossipdp.runtime.frames import (
    HEADER_BYTES,
    ChunkKey,
    FrameError,
    FrameType,
    Header,
    check_length,
    pack_header,
    pack_key,
    parse_header,
)
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.link import Link, LinkHandler
from gossipdp.runtime.tcp_stream import Stream

# One turn of the loop moves at most this much per link and direction, so that no link starves
# the others; a chunk fits.
TURN_BYTES = 4 << 20
# Control frames that wait together leave in one call.
CONTROL_BATCH_BYTES = 64 << 10
# A peer that reads nothing for this long a list of messages is as good as gone.
MAX_QUEUED_CONTROL_BYTES = 4 << 20


class LinkOwner(abc.ABC):
    """What a link needs of its transport."""

    handler: LinkHandler
    tag: bytes
    max_queued_chunks: int
    clock: Callable[[], float]
    scratch: memoryview  # where payloads land that nobody wants

    @abc.abstractmethod
    def link_has_output(self, link: "TcpLink") -> None:
        """``link`` has something to write; call its ``write_some`` before sleeping."""

    @abc.abstractmethod
    def link_has_input(self, link: "TcpLink") -> None:
        """``link`` has something to read; call its ``read_some`` before sleeping."""

    @abc.abstractmethod
    def link_broken(self, link: "TcpLink", reason: str) -> None:
        """The peer, authenticated as it is, sent what no worker sends; ``link`` is ended next."""

    @abc.abstractmethod
    def link_ended(self, link: "TcpLink", reason: str) -> None:
        """``link`` is closed: close its socket and tell the handler from ``poll()``."""


@final
class TcpLink(Link):
    """A :class:`~gossipdp.runtime.link.Link` over one TCP connection, plain or TLS.

    Args:
        owner: the transport.
        stream: the connection, in the clear or through TLS.
        peer_identity: as proved by the handshake.
        link_id: names the link at both ends.
        dialler: rank of the end that dialled.
    """

    def __init__(
        self,
        owner: LinkOwner,
        stream: Stream,
        peer_identity: Identity,
        *,
        link_id: bytes,
        dialler: int,
    ) -> None:
        self.peer_identity = peer_identity
        self.stream = stream
        self.link_id = link_id
        self.dialler = dialler
        # Edge-triggered readiness: set by events, cleared when the kernel has no more (room).
        self.can_read = True
        self.can_write = True
        self.hung_up = False
        self._owner = owner
        self._closed = False
        self._write_error: str | None = None
        self._last_heard_s = owner.clock()
        self._bytes_sent = 0
        self._bytes_received = 0

        self._header = memoryview(bytearray(HEADER_BYTES))
        self._header_filled = 0
        self._frame: Header | None = None
        self._landing: memoryview | None = None
        self._payload_rest = 0
        self._next_received = 0

        self._controls: deque[bytes] = deque()
        self._queued_control_bytes = 0
        self._chunks: deque[tuple[FrameType, bytes, memoryview]] = deque()
        self._sending: list[memoryview] = []
        self._sending_chunk = False
        self._queued_bytes = 0
        self._next_sent = 0

    @property
    def connection(self) -> socket.socket:
        """The socket beneath."""
        return self.stream.connection

    @property
    def queued_chunks(self) -> int:
        """See :class:`Link`."""
        return len(self._chunks) + self._sending_chunk

    @property
    def queued_bytes(self) -> int:
        """See :class:`Link`."""
        return self._queued_bytes

    @property
    def bytes_sent(self) -> int:
        """See :class:`Link`."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """See :class:`Link`."""
        return self._bytes_received

    @property
    def last_heard_s(self) -> float:
        """See :class:`Link`."""
        return self._last_heard_s

    @property
    def closed(self) -> bool:
        """See :class:`Link`."""
        return self._closed

    def send_control(self, data: bytes) -> None:
        """See :class:`Link`."""
        check_length(FrameType.CONTROL, len(data))
        if self._closed:
            return
        if self._queued_control_bytes + len(data) > MAX_QUEUED_CONTROL_BYTES:
            self.end(f"the peer leaves {self._queued_control_bytes} bytes of messages unread")
            return
        self._controls.append(data)
        self._queued_control_bytes += len(data)
        self._queued_bytes += len(data)
        self._owner.link_has_output(self)

    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """See :class:`Link`."""
        if frame_type is FrameType.CONTROL:
            raise ValueError("a control frame is not a chunk; use send_control")
        check_length(frame_type, payload.nbytes)
        packed_key = pack_key(key)
        if self._closed:
            return
        self._chunks.append((frame_type, packed_key, payload.cast("B")))
        self._queued_bytes += payload.nbytes
        self._owner.link_has_output(self)

    def close(self, reason: str) -> None:
        """See :class:`Link`."""
        if self._closed:
            return
        self.flush_controls()
        self.end(reason)

    def flush_controls(self) -> None:
        """Hand waiting control frames to the kernel where no chunk is half sent."""
        if not self._sending_chunk and (self._sending or self._controls):
            self._chunks.clear()
            self._send(TURN_BYTES)

    def end(self, reason: str) -> None:
        """Close without sending anything more. No buffer of a user is touched from here on."""
        if self._closed:
            return
        self._closed = True
        self._controls.clear()
        self._chunks.clear()
        self._sending.clear()
        self._sending_chunk = False
        self._queued_bytes = 0
        self._landing = None
        self._owner.link_ended(self, reason)

    def read_some(self) -> None:
        """Read what there is, up to the turn's share, and pass complete frames to the handler.

        Every callback may close this link, so ``_closed`` is looked at after each. State moves on
        before the callback: should it raise, the next call continues with the next frame.
        """
        budget = TURN_BYTES
        while budget > 0 and not self._closed:
            if self._header_filled == HEADER_BYTES:
                self._start_frame()
                continue
            if not self.can_read:
                break
            room = self._room()
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
            self._last_heard_s = self._owner.clock()
            self._bytes_received += count
            budget -= count
            # A short read has emptied the socket; only an end is then still to be read.
            short = count < sum(map(len, room))
            self.can_read = not short or self.hung_up or self.stream.has_more
            self._take(count)
        if not self.can_read and self._write_error is not None:
            self.end(self._write_error)

    def write_some(self) -> None:
        """Write what the kernel takes, up to the turn's share; report chunks that left."""
        queued_before = self.queued_chunks
        self._send(TURN_BYTES)
        if not self._closed and self.queued_chunks < min(
            queued_before, self._owner.max_queued_chunks
        ):
            self._owner.handler.writable(self)

    @property
    def has_input(self) -> bool:
        """Whether ``read_some`` could do anything now."""
        return self.can_read and not self._closed

    @property
    def has_output(self) -> bool:
        """Whether ``write_some`` could do anything now."""
        waiting = bool(self._sending or self._controls or self._chunks)
        return waiting and self.can_write and not self._closed

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
            self._owner.handler.control(self, bytes(landing))
        else:
            self._owner.handler.chunk(self, frame.frame_type, frame.key, landing)

    def _start_frame(self) -> None:
        self._header_filled = 0
        try:
            frame = parse_header(self._header, self._owner.tag, self._next_received)
        except FrameError as error:
            self._end_broken(f"the peer broke the protocol: {error}")
            return
        self._next_received += 1
        self._frame = frame
        self._payload_rest = frame.length
        if frame.key is None:
            self._landing = memoryview(bytearray(frame.length))
            return
        # Should the handler raise here, the payload is dropped and the stream stays in step.
        landing = self._owner.handler.chunk_buffer(self, frame.frame_type, frame.key, frame.length)
        if landing is None or self._closed:
            return
        if landing.nbytes != frame.length:
            self._end_broken(f"the peer sent a chunk of {frame.length} bytes, not {landing.nbytes}")
            return
        self._landing = landing.cast("B")

    def _end_broken(self, reason: str) -> None:
        self._owner.link_broken(self, reason)
        self.end(reason)

    def _send(self, budget: int) -> None:
        while self.has_output and budget > 0:
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
            self._bytes_sent += count
            self._queued_bytes -= count
            budget -= count
            # A short write has filled the socket; an event says when there is room again.
            self.can_write = count == sum(map(len, self._sending))
            while count:
                if count < len(self._sending[0]):
                    self._sending[0] = self._sending[0][count:]
                    break
                count -= len(self._sending.pop(0))
            self._sending_chunk = self._sending_chunk and bool(self._sending)

    def _start_sending(self) -> None:
        """Number the next frames and lay them out; all waiting control frames go first."""
        tag = self._owner.tag
        parts: list[bytes] = []
        size = 0
        while self._controls and size < CONTROL_BATCH_BYTES:
            data = self._controls.popleft()
            self._queued_control_bytes -= len(data)
            parts += (pack_header(tag, FrameType.CONTROL, self._next_sent, len(data)), data)
            self._next_sent += 1
            size += HEADER_BYTES + len(data)
        if parts:
            self._queued_bytes += HEADER_BYTES * (len(parts) // 2)
            self._sending = [memoryview(b"".join(parts))]
            return
        frame_type, packed_key, payload = self._chunks.popleft()
        header = pack_header(tag, frame_type, self._next_sent, len(payload), packed_key)
        self._next_sent += 1
        self._queued_bytes += HEADER_BYTES
        self._sending = [memoryview(header), payload]
        self._sending_chunk = True
