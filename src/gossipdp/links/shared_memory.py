"""Memory that another process of this host reads in place: sealed memfds and their mappings.

A :class:`SharedSegment` is a worker's own: it writes there what it sends, and passes the descriptor
to its peers (:mod:`.shared_offers`). It has no name in any file system and ends with the last
process that has it mapped or open, so that nothing is left after ``kill -9`` of all workers. Its
size is sealed, so a peer's read cannot run into a hole, and so is writing by anybody else.

Guarantees:

- A mapping lives as long as anything that looks at it: memoryviews, slices of them, tensors made of
  them all hold it. So none ends under a running read, whatever became of the link.
- A forked child has neither the mapping (``MADV_DONTFORK``) nor, once :mod:`.fork` has closed it,
  the descriptor. So its copies of these objects are not to be looked at; that they are collected
  there does no harm.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque
from typing import Any, final

from gossipdp.links import fork
from gossipdp.links.frames import MAX_SEGMENT, SEQUENCE_MODULUS, FrameError, Header

# A bound on what is mapped for a peer; slots are a few chunks.
MAX_SEGMENT_BYTES = 1 << 30
# A peer passes another segment only when one that had mapped the last is gone.
MAX_SEGMENTS = 2

# <linux/fcntl.h>; Python names it only since 3.13. Linux 5.1.
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@final
class _Mapping:
    """One mapping, which ends with this object.

    Not ``mmap.mmap``: that keeps a duplicate of the descriptor, which a forked child would hold.
    """

    def __init__(self, descriptor: int, num_bytes: int, protection: int) -> None:
        self.address: int | None = None
        self.process_id = os.getpid()
        self.num_bytes = num_bytes
        with fork.descriptors_guard:  # no fork between the two
            address = _libc.mmap(None, num_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
            if address == _MAP_FAILED:
                raise _error("mmap")
            self.address = address
            if _libc.madvise(address, num_bytes, _MADV_DONTFORK):
                raise _error("madvise")

    def __del__(self) -> None:
        """Unmap, but not in a forked child: what it has at that address is something else."""
        if self.address is not None and self.process_id == os.getpid():
            _libc.munmap(self.address, self.num_bytes)

    def view(self) -> memoryview:
        """All of it as bytes. Writable to Python, whatever its protection is."""
        assert self.address is not None
        room: Any = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        room.mapping = self  # whoever holds the view holds the mapping
        return memoryview(room).cast("B")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


@final
class SharedSegment(fork.DescriptorOwner):
    """A worker's own memory, which it writes and its peers read.

    Args:
        num_bytes: how much; all of it is allocated at once.
        number: names it among the segments of this worker, 1 to 65535.

    Attributes:
        memory: the bytes, at the start of a page.
        descriptor: what a peer maps; valid while the segment lives.

    Raises:
        OSError: The system has no memfd that can be sealed so, or not that much memory;
            or the numbers are used up.
    """

    def __init__(self, num_bytes: int, number: int) -> None:
        self.number = number
        self.descriptor = -1
        if not 0 < num_bytes <= MAX_SEGMENT_BYTES:
            raise OSError(errno.ENOMEM, f"a segment of {num_bytes} bytes")
        if not 0 < number <= MAX_SEGMENT:
            raise OSError(errno.EMFILE, f"there have been {number - 1} segments")
        with fork.descriptors_guard:
            self.descriptor = os.memfd_create("gossipdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            fork.register(self)
        # At once, so that too little memory is an error here and no signal later.
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.memory = _Mapping(self.descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE).view()
        fcntl.fcntl(
            self.descriptor,
            fcntl.F_ADD_SEALS,
            _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL,
        )

    def offset_of(self, payload: memoryview) -> int | None:
        """Where in this segment ``payload`` lies; None: elsewhere."""
        if payload.obj is not self.memory.obj:
            return None
        return address_of(payload) - address_of(self.memory)

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.links.fork.DescriptorOwner`."""
        fork.close_descriptor(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        """Close the descriptor; the memory lives as long as somebody looks at it."""
        with fork.descriptors_guard:
            if self.descriptor >= 0:
                fork.close_descriptor(self.descriptor)
                self.descriptor = -1


def map_peers_segment(descriptor: int, num_bytes: int) -> memoryview:
    """Map a peer's segment for reading; the descriptor may be closed afterwards.

    The view calls itself writable, since neither torch nor numba likes one that is not; whoever
    writes there all the same is ended by the system.

    Raises:
        OSError: It cannot be mapped.
        ValueError: It is not what a peer of ours passes: its size is another or not sealed.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("the memory passed is not sealed against shrinking")
    size = os.fstat(descriptor).st_size
    if not 0 < num_bytes == size <= MAX_SEGMENT_BYTES:
        raise ValueError(f"the memory passed has {size} bytes and not {num_bytes}")
    return _Mapping(descriptor, num_bytes, mmap.PROT_READ).view()


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous, writable ``view`` begin in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@final
class SharedChunks:
    """One link's account of the chunks that are read in place, both directions.

    A chunk in the sender's segment goes out as a header alone, once the peer has said that it has
    that segment mapped. It has left only when the peer has said that it read it: every frame
    carries the number of chunks that its sender has read so far. Order is kept: a chunk that went
    out as bytes has left only when all before it have, so a sender may tell from the number of
    chunks queued which of its slots are free.

    Attributes:
        offered: number of the last segment of ours that the peer was offered; 0: none.
        ready: number of the last segment of ours that the peer has mapped; 0: none.
    """

    def __init__(self) -> None:
        self.offered = 0
        self.ready = 0
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

    def sent(self) -> None:
        """The header of a shared chunk was laid out."""
        self._sent.append(True)
        self._num_shared_sent += 1

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
        return memory[frame.offset : frame.offset + frame.length]

    def read(self) -> None:
        """A chunk was read, or is not wanted; nobody looks at it any more."""
        self._num_read += 1

    def end(self) -> None:
        """Let go of the peer's memory; what is being read holds it so long."""
        self._segments.clear()
        self._sent.clear()
