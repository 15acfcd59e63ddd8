"""Memory that another process of this host reads in place, and the way it is passed.

A :class:`SharedSegment` is a worker's own memfd, in which it writes its chunks. It ends with the
last process that has it mapped or open, so ``kill -9`` leaves nothing. To offer it, a worker tells
the peer where the kernel shows it: the numbers of process and descriptor, and a random name that
the memory has. The peer opens ``/proc/PID/fd/N`` if that name is there. So "the same host" is
proved and never guessed: on another host, or in a container with other process numbers, the name is
not there. Nothing here waits.

A mapping lives as long as any view of it: memoryviews, slices of them and tensors made of them all
hold it. So no mapping ends during a read, whatever becomes of the link. A forked child has neither
the mapping (``MADV_DONTFORK``) nor, once :mod:`.sockets` has closed it, the descriptor: it must not
look at its copies of these objects; collecting them there does no harm.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
from typing import Any, final

from gossipdp.links import sockets
from gossipdp.links.frames import (
    MAX_SEGMENT,
    SEGMENT_ALIGNMENT_BYTES,
    SEGMENT_OFFER_BYTES,
    FrameError,
    Header,
)
from gossipdp.links.link import LinkHandler
from gossipdp.logs import OnceLog

# A bound on the memory mapped for a peer; slots are a few chunks.
MAX_SEGMENT_BYTES = 1 << 30

# An offer: process, descriptor, size and number of a segment, and the random part of its name.
_TOKEN_BYTES = 18
_OFFER = struct.Struct(f"<IIIH{_TOKEN_BYTES}s")
assert _OFFER.size == SEGMENT_OFFER_BYTES
# <linux/fcntl.h> and <linux/memfd.h>: a CPython that was built beside an old C library, as uv's and
# conda's are, has no names for them. The last seal is of Linux 5.1.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16
_SEALS = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which can be sealed, or raise OSError."""
    descriptor: int = _libc.memfd_create(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


@final
class _Mapping:
    """One mapping, which ends with this object; without a descriptor this process alone has it.

    Not ``mmap.mmap``, which keeps a duplicate of the descriptor: a forked child would hold that.
    """

    def __init__(self, descriptor: int | None, num_bytes: int, protection: int) -> None:
        self.address: int | None = None
        self.process_id = os.getpid()
        self.num_bytes = num_bytes
        if descriptor is None:
            place = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1
        else:
            place = mmap.MAP_SHARED, descriptor
        with sockets.descriptors_guard:  # no fork between the two
            address = _libc.mmap(None, num_bytes, protection, *place, 0)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
            self.address = address
            # A child that has private memory only keeps pages longer.
            if _libc.madvise(address, num_bytes, _MADV_DONTFORK) and descriptor is not None:
                raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")

    def __del__(self) -> None:
        """Unmap, but not in a forked child, which has other memory at that address."""
        if self.address is not None and self.process_id == os.getpid():
            _libc.munmap(self.address, self.num_bytes)

    def view(self) -> memoryview:
        """Return all of it as bytes, writable to Python whatever its protection is."""
        assert self.address is not None
        room: Any = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        room.mapping = self  # so the view holds the mapping
        return memoryview(room).cast("B")


@final
class SharedSegment(sockets.DescriptorOwner):
    """A worker's own ``memory``, page-aligned, which it writes and its peers read.

    It is sealed against a change of its size, so that a peer's read cannot run into a hole, and
    against others' writing. ``number``, 1 to 65535, names it among this worker's segments;
    ``offer`` tells peers where it is. Raises OSError if the system has no memfd that can be sealed
    so, or not that much memory.
    """

    def __init__(self, num_bytes: int, number: int) -> None:
        self.number = number
        self.descriptor = -1
        if not 0 < num_bytes <= MAX_SEGMENT_BYTES:
            raise OSError(errno.ENOMEM, f"a segment of {num_bytes} bytes")
        if not 0 < number <= MAX_SEGMENT:
            raise OSError(errno.EMFILE, f"there have been {number - 1} segments")
        token = secrets.token_bytes(_TOKEN_BYTES)
        with sockets.descriptors_guard:
            self.descriptor = memory_file(f"gossipdp-{token.hex()}")
            sockets.register(self)
        self.offer = _OFFER.pack(os.getpid(), self.descriptor, num_bytes, number, token)
        # Allocate at once, so that a lack of memory is an error here and not a signal later.
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.memory = _Mapping(self.descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE).view()
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEALS)

    def offset_of(self, payload: memoryview) -> int | None:
        """Return where in this segment ``payload`` lies; None if no frame can name the place."""
        if payload.obj is not self.memory.obj:
            return None
        offset = address_of(payload) - address_of(self.memory)
        return None if offset % SEGMENT_ALIGNMENT_BYTES else offset

    def close_in_child(self) -> None:
        sockets.close_descriptor(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        """Close the descriptor; the memory lives as long as a view of it."""
        with sockets.descriptors_guard:
            if self.descriptor >= 0:
                self.close_in_child()


def address_of(view: memoryview) -> int:
    """Return the address of the bytes of a contiguous, writable ``view``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def map_offered(offer: bytes) -> tuple[int, memoryview] | None:
    """Return number and memory of a peer's segment, mapped for reading; None: of another host.

    The view calls itself writable, since neither torch nor numba likes one that is not; the system
    ends a process that writes there all the same. Raises ValueError for memory that no worker
    offers: of another user or size, or not sealed.
    """
    process_id, number_of_file, num_bytes, number, token = _OFFER.unpack(offer)
    place = f"/proc/{process_id}/fd/{number_of_file}"
    try:
        if os.readlink(place) != f"/memfd:gossipdp-{token.hex()} (deleted)":
            return None
    except OSError:  # no such process or file, or another user's
        return None
    with sockets.descriptors_guard:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            # The kernel lets others of this user alone open it, and root, who may open any.
            if found.st_uid != os.geteuid():
                raise ValueError("the memory offered is another user's")
            if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise ValueError("the memory offered is not sealed against shrinking")
            if not 0 < num_bytes == found.st_size <= MAX_SEGMENT_BYTES:
                raise ValueError(
                    f"the memory offered has {found.st_size} bytes and not {num_bytes}"
                )
            return number, _Mapping(descriptor, num_bytes, mmap.PROT_READ).view()
        finally:
            os.close(descriptor)


@final
class PeerMemory:
    """The segment that a peer offered last, if any, mapped to be read in place.

    A peer takes fresh memory only before an exchange, so no chunk in its older segment is under
    way then, and the older one may go.
    """

    def __init__(self, handler: LinkHandler) -> None:
        self._handler = handler
        self._number, self._memory = 0, memoryview(b"")
        self._pin: object = None
        self._is_pinned = False

    def take(self, number: int, memory: memoryview) -> bool:
        """Take the peer's segment ``number``; return False if it is not a newer one."""
        if number <= self._number:
            return False
        self._number, self._memory = number, memory
        self._pin, self._is_pinned = None, False
        return True

    def find(self, frame: Header) -> memoryview:
        """Return the memory that ``frame`` names; pin the segment when it is read first."""
        end = frame.offset + frame.length
        if frame.segment != self._number or end > len(self._memory):
            raise FrameError(f"{frame.length} bytes at {frame.offset} of segment {frame.segment}")
        if not self._is_pinned:
            self._pin, self._is_pinned = self._handler.pin(self._memory, is_peers=True), True
        return self._memory[frame.offset : end]

    def close(self) -> None:
        self._memory, self._pin = memoryview(b""), None


@final
class SlotMemory:
    """The memory of this worker's exchange slots.

    Args:
        may_share: True if peers may read it in place, if the system has sealed memory.

    Attributes:
        segment: the memory that peers may read; None: they may not, or there is none yet.
    """

    def __init__(self, log: OnceLog, *, may_share: bool, handler: LinkHandler) -> None:
        self._log, self._may_share, self._handler = log, may_share, handler
        self._pinned: object = None
        self.segment: SharedSegment | None = None
        self._memory: memoryview | None = None
        self._num_segments = 0

    def allocate(self, num_bytes: int) -> memoryview:
        """Return memory for the slots of one exchange; see :meth:`.Transport.allocate`."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        self.segment = None
        if self._may_share:
            try:
                self.segment = SharedSegment(num_bytes, self._num_segments + 1)
                self._num_segments += 1
            except OSError as error:
                self._may_share = False
                text = "no memory is shared with workers of this host: %s"
                self._log.warn_once("memory", "none", text, error)
        if self.segment is not None:
            memory = self.segment.memory
        else:
            memory = _Mapping(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE).view()
        self._memory, self._pinned = memory, self._handler.pin(memory, is_peers=False)
        return memory

    def abandon(self) -> None:
        """Stop writing to the segment: the next exchange gets another one.

        A peer may be stopped in the middle of a read, and apply those values when it goes on. The
        segment ends when the peer has let go of it too.
        """
        self.segment = self._memory = self._pinned = None

    def map(self, peer: int, offer: bytes) -> tuple[int, memoryview] | None:
        """Map what a peer offers, as :func:`map_offered` does; None: nothing is shared with it."""
        try:
            return map_offered(offer) if self._may_share else None
        except (OSError, ValueError) as error:
            text = "cannot share memory with rank %s: %s"
            self._log.warn_once("memory", f"{peer}: {error}", text, peer, error)
            return None
