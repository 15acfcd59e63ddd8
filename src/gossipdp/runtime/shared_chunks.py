"""One link's account of the chunks that are read in place: which went out so, and which were read.

A chunk in the sender's segment goes out as a header alone, once the peer has said that it has that
segment mapped. It has left only when the peer has said that it read it: every frame carries the
number of chunks that its sender has read so far.

Order is kept: a chunk that went out as bytes has left only when all before it have, so a sender
may tell from the number of chunks queued which of its slots are free.
"""

from __future__ import annotations

from collections import deque
from typing import final

from gossipdp.runtime.frames import SEQUENCE_MODULUS, FrameError, Header

# A peer passes another segment only when one that had mapped the last is gone.
MAX_SEGMENTS = 2


@final
class SharedChunks:
    """The account of one link, both directions.

    Attributes:
        offered: number of the last segment of ours that the peer was offered; 0: none.
        ready: number of the last segment of ours that the peer has mapped; 0: none.
        bytes_sent, bytes_received: of chunks that went by memory.
    """

    def __init__(self) -> None:
        self.offered = 0
        self.ready = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._sent: deque[bool] = deque()  # of each chunk that has not left: whether it is shared
        self._num_shared_sent = 0
        self._num_confirmed = 0
        self._num_read = 0
        self._num_said = 0
        self._segments: dict[int, memoryview] = {}

    # Chunks of ours.

    @property
    def num_unread(self) -> int:
        """Chunks that went out and have not left: shared ones, and bytes behind them."""
        return len(self._sent)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the peer may be reading our memory."""
        return bool(self._sent)

    def sent(self, length: int) -> None:
        """The header of a shared chunk was laid out."""
        self._sent.append(True)
        self._num_shared_sent += 1
        self.bytes_sent += length

    def sent_as_bytes(self) -> None:
        """The last byte of another chunk was handed over."""
        if self._sent:
            self._sent.append(False)

    def confirm(self, num_read: int) -> bool:
        """The peer says how many it has read, modulo 2**32; whether it is more than before.

        Raises:
            FrameError: That many were not sent.
        """
        news = (num_read - self._num_confirmed) % SEQUENCE_MODULUS
        if news > self._num_shared_sent - self._num_confirmed:
            raise FrameError(f"{news} chunks acknowledged, {self.num_unread} unread")
        self._num_confirmed += news
        for _ in range(news):
            self._sent.popleft()
            while self._sent and not self._sent[0]:
                self._sent.popleft()
        return news > 0

    def confirm_segment(self, number: int) -> None:
        """The peer says that it has mapped segment ``number``.

        Raises:
            FrameError: It was not offered.
        """
        if not self.ready < number <= self.offered:
            raise FrameError(f"segment {number} is mapped; the last offered is {self.offered}")
        self.ready = number

    # Chunks of the peer.

    @property
    def owes(self) -> bool:
        """Whether the peer does not know yet of all that was read."""
        return self._num_read != self._num_said

    def say(self) -> int:
        """How many were read, to be told in the next header."""
        self._num_said = self._num_read
        return self._num_read

    def map(self, number: int, memory: memoryview) -> bool:
        """Take a segment of the peer, mapped; False: an old one."""
        if number <= max(self._segments, default=0):
            return False
        self._segments[number] = memory
        if len(self._segments) > MAX_SEGMENTS:
            del self._segments[min(self._segments)]
        return True

    def find(self, frame: Header) -> memoryview:
        """The memory that ``frame`` speaks of. Chunks come in order, so older segments may go.

        Raises:
            FrameError: It is not in a segment that was offered.
        """
        memory = self._segments.get(frame.segment)
        if memory is None or frame.offset + frame.length > len(memory):
            raise FrameError(f"{frame.length} bytes at {frame.offset} of segment {frame.segment}")
        for number in [number for number in self._segments if number < frame.segment]:
            del self._segments[number]
        self.bytes_received += frame.length
        return memory[frame.offset : frame.offset + frame.length]

    def read(self) -> None:
        """A chunk was read, or is not wanted; nobody looks at it any more."""
        self._num_read += 1

    def end(self) -> None:
        """Let go of the peer's memory; what is being read holds it so long."""
        self._segments.clear()
        self._sent.clear()
