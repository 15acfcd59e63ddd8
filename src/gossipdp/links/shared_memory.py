"""Memory that another process of this host reads in place, and the way it is passed.

A :class:`SharedSegment` is a worker's own memfd, in which it writes its chunks. It ends with the
last process that has it mapped or open, so ``kill -9`` leaves nothing. It is sealed against a
change of its size, so that a peer's read cannot run into a hole, and against others' writing.

Every worker that has a segment listens on an abstract Unix socket of a random name, its
:class:`MemorySocket`. It sends a peer the name and a random token of their link over that link
itself. To offer its segment, a worker connects to the peer's socket, sends one packet, the
segment's descriptor with it, and closes. The answer comes over the link. A refused connection shows
that the peer is not in the same network namespace, so "the same host" is proved and never guessed
from names.

Guarantees:

- A mapping lives as long as any view of it: memoryviews, slices of them and tensors made of them
  all hold it. So no mapping ends during a read, whatever becomes of the link.
- A forked child has neither the mapping (``MADV_DONTFORK``) nor, once :mod:`.sockets` has closed
  it, the descriptor. So the child must not look at its copies of these objects; collecting them
  there does no harm.
- Each end looks at the other's user id, for which the kernel vouches: a process of another user
  gets nothing and is not read. One of the same user could read a worker's memory anyway.
- Nothing here waits: a peer whose queue is full is offered nothing, and its link stays as it is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, final

from gossipdp.links import sockets
from gossipdp.links.frames import (
    MAX_SEGMENT,
    NAME_BYTES,
    SEGMENT_ALIGNMENT_BYTES,
    TOKEN_BYTES,
    FrameError,
    FrameType,
    Header,
)
from gossipdp.logs import OnceLog

# A bound on the memory mapped for a peer; slots are a few chunks.
MAX_SEGMENT_BYTES = 1 << 30
# A peer passes another segment only when one that had mapped the last is gone.
MAX_SEGMENTS = 2
# All workers of a host may offer at once.
BACKLOG = 1024
# Connections of this user's processes that have not said anything yet; the oldest goes first.
MAX_STRANGERS = 64

_EVENTS = select.EPOLLIN | select.EPOLLET
_OFFER = struct.Struct(f"<8s{TOKEN_BYTES}sIQ")
_MAGIC = b"GDPMEM2\0"
_CREDENTIALS = struct.Struct("3i")
# <linux/fcntl.h>; Python names it only since 3.13. Linux 5.1.
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10


class Pin(Protocol):
    """The type of :meth:`.LinkHandler.pin`."""

    def __call__(self, memory: memoryview, /, *, is_peers: bool) -> object: ...


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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

    ``number``, 1 to 65535, names it among the segments of this worker. Raises OSError if the system
    has no memfd that can be sealed so, or not that much memory.
    """

    def __init__(self, num_bytes: int, number: int) -> None:
        self.number = number
        self.descriptor = -1
        if not 0 < num_bytes <= MAX_SEGMENT_BYTES:
            raise OSError(errno.ENOMEM, f"a segment of {num_bytes} bytes")
        if not 0 < number <= MAX_SEGMENT:
            raise OSError(errno.EMFILE, f"there have been {number - 1} segments")
        with sockets.descriptors_guard:
            self.descriptor = os.memfd_create("gossipdp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            sockets.register(self)
        # Allocate at once, so that a lack of memory is an error here and not a signal later.
        os.posix_fallocate(self.descriptor, 0, num_bytes)
        self.memory = _Mapping(self.descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE).view()
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

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


def map_peers_segment(descriptor: int, num_bytes: int) -> memoryview:
    """Map a peer's segment for reading; the descriptor may be closed afterwards.

    The view calls itself writable, since neither torch nor numba likes one that is not; the system
    ends a process that writes there all the same. Raises ValueError for memory that no worker
    passes: of another size, or not sealed.
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


@final
class PeerMemory:
    """The memory that the two ends of one link share.

    Args:
        peer: the peer's rank.
        send: queues a frame on the link: its type, its payload and the segment that it names.
        pin: as :meth:`.LinkHandler.pin`; called when a segment is read first.

    Attributes:
        token: the peer shows it with a segment for this link.
        socket: name and token of the socket where the peer takes segments; None until it has told
            us, empty once it was found to be on another host.
        offered, ready: numbers of the last segments of ours that the peer was offered, and that it
            has mapped; 0: none.
    """

    def __init__(self, peer: int, send: Callable[[FrameType, bytes, int], None], pin: Pin) -> None:
        self.peer = peer
        self._pin = pin
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket: bytes | None = None
        self.offered = self.ready = 0
        self._send = send
        self._segments: dict[int, memoryview] = {}
        self._pins: dict[int, object] = {}

    def invite(self, name: bytes) -> None:
        """Tell the peer, once, that it may pass segments to the Unix socket ``name``."""
        self._send(FrameType.MEMORY_SOCKET, name + self.token, 0)

    def map(self, number: int, memory: memoryview) -> None:
        """Take the peer's segment ``number``, unless it is an older one, and confirm it."""
        if number <= max(self._segments, default=0):
            return
        self._segments[number] = memory
        if len(self._segments) > MAX_SEGMENTS:
            self._drop_oldest()
        self._send(FrameType.SEGMENT_READY, b"", number)

    def confirmed(self, number: int) -> None:
        """Take note that the peer has mapped our segment ``number``."""
        if not self.ready < number <= self.offered:
            raise FrameError(f"segment {number} is mapped; the last offered is {self.offered}")
        self.ready = number

    def find(self, frame: Header) -> memoryview:
        """Return the memory that ``frame`` names.

        Chunks come in order, so older segments may go.
        """
        memory = self._segments.get(frame.segment)
        if memory is None or frame.offset + frame.length > len(memory):
            raise FrameError(f"{frame.length} bytes at {frame.offset} of segment {frame.segment}")
        while min(self._segments) < frame.segment:
            self._drop_oldest()
        if frame.segment not in self._pins:
            self._pins[frame.segment] = self._pin(memory, is_peers=True)
        return memory[frame.offset : frame.offset + frame.length]

    def close(self) -> None:
        """Let go of the peer's segments and of the link, which has ended."""
        self._pins.clear()
        self._segments.clear()
        self._send = lambda *_: None  # no circle of references keeps what has ended

    def _drop_oldest(self) -> None:
        oldest = min(self._segments)
        self._pins.pop(oldest, None)
        del self._segments[oldest]


def offer(segment: SharedSegment, memory_socket: bytes) -> bool:
    """Offer ``segment`` to the peer with this ``memory_socket``; return False if on another host.

    Raises OSError if its socket did not take it, or belongs to another user.
    """
    name, token = memory_socket[:NAME_BYTES], memory_socket[NAME_BYTES:]
    packet = _OFFER.pack(_MAGIC, token, segment.number, len(segment.memory))
    with sockets.descriptors_guard, _socket() as connection:
        try:
            connection.connect(_address(name))
        except OSError as error:
            # No such socket, or a system without any.
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return False
            raise
        if _user_of(connection) != os.geteuid():
            raise PermissionError(errno.EPERM, "it runs as another user")
        socket.send_fds(connection, [packet], [segment.descriptor])
    return True


@final
class MemorySocket:
    """The socket by which one worker takes its peers' segments; its owner sees to forks.

    ``epoll`` watches every socket for :meth:`take`, edge-triggered. ``sockets`` are all that are
    open: the listening one, then those of strangers, the oldest first.
    """

    def __init__(self, log: OnceLog, epoll: select.epoll) -> None:
        self.name = secrets.token_bytes(NAME_BYTES)
        self._log = log
        self._epoll = epoll
        with sockets.descriptors_guard:
            listener = _socket()
            try:
                listener.bind(_address(self.name))
                listener.listen(BACKLOG)
                epoll.register(listener, _EVENTS)
            except OSError:
                listener.close()
                raise
            self.sockets = [listener]

    def take(self, tokens: Collection[bytes]) -> Iterator[tuple[bytes, int, memoryview]]:
        """Yield token, number and memory of each segment that came for links with these tokens."""
        for connection in self._connections():
            try:
                offered = self._receive(connection, tokens)
            except BlockingIOError:
                if len(self.sockets) > 1 + MAX_STRANGERS:
                    self._drop(self.sockets[1])
                continue
            except (OSError, ValueError) as error:
                self._warn("dropped a connection to the memory socket", error)
                offered = None
            self._drop(connection)
            if offered is not None:
                yield offered

    def _connections(self) -> Iterator[socket.socket]:
        """Yield those that have said nothing yet, then those that wait to be accepted."""
        yield from self.sockets[1:]
        for _ in range(BACKLOG):
            with sockets.descriptors_guard:
                try:
                    connection = self.sockets[0].accept()[0]
                except BlockingIOError:
                    return
                except ConnectionError:
                    continue
                except OSError as error:  # no descriptor left: look again at the next event
                    self._warn("cannot take offered memory", error)
                    return
                if _user_of(connection) != os.geteuid():
                    connection.close()
                    continue
                connection.setblocking(False)
                self.sockets.append(connection)
                self._epoll.register(connection, _EVENTS)
            yield connection

    def _drop(self, connection: socket.socket) -> None:
        with sockets.descriptors_guard:
            self.sockets.remove(connection)
            self._epoll.unregister(connection)
            connection.close()

    def _receive(
        self, connection: socket.socket, tokens: Collection[bytes]
    ) -> tuple[bytes, int, memoryview] | None:
        """Return the offer, None if its link has ended; raise ValueError if it is no offer."""
        with sockets.descriptors_guard:
            packet, descriptors, flags, _ = socket.recv_fds(
                connection, _OFFER.size, 1, socket.MSG_CMSG_CLOEXEC
            )
            try:
                if len(packet) != _OFFER.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    raise ValueError(f"a packet of {len(packet)} bytes is no offer")
                magic, token, number, num_bytes = _OFFER.unpack(packet)
                if magic != _MAGIC or len(descriptors) != 1 or not 0 < number <= MAX_SEGMENT:
                    raise ValueError("a packet that is no offer")
                if token not in tokens:
                    return None
                return token, number, map_peers_segment(descriptors[0], num_bytes)
            finally:
                for descriptor in descriptors:
                    sockets.close_descriptor(descriptor)

    def _warn(self, what: str, why: object) -> None:
        self._log.warn_once("memory", f"{what}: {why}", "%s: %s", what, why)


@final
class SlotMemory:
    """The memory of this worker's exchange slots, and the peers of this host that may read it.

    Args:
        log, epoll: as of :class:`MemorySocket`.
        may_share: True if peers may read it in place, if the system has sealed memory.
        pin: as :meth:`.LinkHandler.pin`.

    Attributes:
        segment: the memory that peers may read; None: they may not, or there is none yet.
    """

    def __init__(
        self,
        log: OnceLog,
        epoll: select.epoll,
        *,
        may_share: bool,
        pin: Pin,
    ) -> None:
        self._pin = pin
        self._pinned: object = None
        self.segment: SharedSegment | None = None
        self._memory: memoryview | None = None
        self._num_segments = 0
        self._peers: dict[bytes, PeerMemory] = {}  # of links that are up, by token
        self._log = log
        self._epoll = epoll
        self._may_share = may_share
        self._socket: MemorySocket | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """All that are open."""
        return self._socket.sockets if self._socket is not None else []

    def allocate(self, num_bytes: int) -> memoryview:
        """Return memory for the slots of one exchange; see :meth:`.Transport.allocate`."""
        if self._memory is not None and len(self._memory) == num_bytes:
            return self._memory
        self.segment = self._make_segment(num_bytes) if self._may_share else None
        if self.segment is not None:
            self._memory = self.segment.memory
            for peer in self._peers.values():
                self.offer_to(peer)
        else:
            self._memory = _Mapping(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE).view()
        self._pinned = self._pin(self._memory, is_peers=False)
        return self._memory

    def abandon(self) -> None:
        """Stop writing to the segment: the next exchange gets another one.

        A peer may be stopped in the middle of a read, and apply those values when it goes on. The
        segment ends when the peer has let go of it too.
        """
        self.segment = self._memory = self._pinned = None

    def add(self, peer: PeerMemory) -> None:
        """Share with the peer of a new link, if it is on this host."""
        self._peers[peer.token] = peer
        if self._socket is not None:
            peer.invite(self._socket.name)

    def remove(self, peer: PeerMemory, *, is_reading: bool) -> None:
        """Forget the peer of a link that ended; if it still ``is_reading``, abandon our segment."""
        self._peers.pop(peer.token, None)
        peer.close()
        if is_reading:
            self.abandon()

    def offer_to(self, peer: PeerMemory) -> None:
        """Offer our segment to a peer that said where it takes them, once."""
        segment = self.segment
        if segment is None or not peer.socket or peer.offered == segment.number:
            return
        try:
            if offer(segment, peer.socket):
                peer.offered = segment.number
            else:
                peer.socket = b""  # on another host
        except OSError as error:
            text = "cannot share memory with rank %s: %s"
            self._log.warn_once("memory", f"{peer.peer}: {error}", text, peer.peer, error)

    def take_offers(self) -> None:
        """Map what peers have offered."""
        if self._socket is not None:
            for token, number, memory in self._socket.take(self._peers):
                self._peers[token].map(number, memory)

    def _make_segment(self, num_bytes: int) -> SharedSegment | None:
        try:
            if self._socket is None:
                with sockets.descriptors_guard:  # no fork before it is listed here
                    self._socket = MemorySocket(self._log, self._epoll)
                for peer in list(self._peers.values()):
                    peer.invite(self._socket.name)
            segment = SharedSegment(num_bytes, self._num_segments + 1)
        except OSError as error:
            self._may_share = False
            text = "no memory is shared with workers of this host: %s"
            self._log.warn_once("memory", "none", text, error)
            return None
        self._num_segments += 1
        return segment


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _address(name: bytes) -> bytes:
    return b"\0gossipdp-" + name.hex().encode()


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel saw it connect."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user_id: int = _CREDENTIALS.unpack(data)[1]
    return user_id
