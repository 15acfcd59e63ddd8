"""The TCP connections between processes, found, cut and blocked from outside, as a network would.

The kernel lists the connections of a network namespace by inode (``/proc/PID/net/tcp``), and the
descriptors of a process too (``/proc/PID/fd``). The two ends of a connection have each other's
addresses. To act on an end we duplicate its descriptor (``pidfd_getfd``, Linux 5.6). The system
allows that to a process that may trace the other one, such as its parent. The processes take no
part.
"""

import ctypes
import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

ESTABLISHED = "01"
PIDFD_OPEN, PIDFD_GETFD = 434, 438  # on all architectures
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
# A packet filter of one instruction: keep 0 bytes of every packet, that is, drop it.
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
# An IPv4 address in the table of IPv6: two words of zeros, then this one.
MAPPED = "0000000000000000FFFF0000"
PF_EXITING = 0x4


@dataclass(frozen=True)
class ConnectionEnd:
    """One end of an established connection; ``inode`` belongs to no other socket."""

    pid: int
    descriptor: int
    inode: int

    def act(self, what: Callable[[socket.socket], object], *, harmless: int) -> None:
        """Act on the socket; do nothing if it is there no more.

        Raises:
            OSError: the system does not allow it; not if ``what`` fails with the error number
                ``harmless``.
        """
        duplicate = self._duplicate()
        if duplicate is None:
            return
        # The process may have closed it, and the number may be another file's by now.
        status = os.fstat(duplicate)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino != self.inode:
            os.close(duplicate)
            return
        with socket.socket(fileno=duplicate) as end:
            try:
                what(end)
            except OSError as error:
                if error.errno != harmless:
                    raise

    def _duplicate(self) -> int | None:
        """Return a duplicate of the descriptor; None if process or descriptor is there no more."""
        try:
            process = _call(PIDFD_OPEN, self.pid, 0)
            try:
                return _call(PIDFD_GETFD, process, self.descriptor, 0)
            finally:
                os.close(process)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ESRCH) or _has_ended(self.pid):
                return None
            raise


@dataclass(frozen=True)
class Connection:
    """A connection between two workers."""

    ends: tuple[ConnectionEnd, ConnectionEnd]

    def cut(self) -> None:
        """Shut it down: both workers see its end. Raises OSError if the system forbids it."""
        self.ends[0].act(lambda end: end.shutdown(socket.SHUT_RDWR), harmless=errno.ENOTCONN)

    def block(self) -> None:
        """Let it lose all that is sent, as a cable that is pulled. Raises OSError, as :meth:`cut`.

        What a worker sends meanwhile arrives once the connection is unblocked, if it lasts as long.
        """
        program = struct.pack("@HP", 1, ctypes.addressof(DROP_ALL))

        def block(end: socket.socket) -> None:
            end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

        for each in self.ends:
            each.act(block, harmless=0)

    def unblock(self) -> None:
        """Let all pass again, also at an end that alone is left. Raises OSError, as :meth:`cut`."""

        def unblock(end: socket.socket) -> None:
            end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

        try:
            self.ends[0].act(unblock, harmless=errno.ENOENT)
        finally:
            self.ends[1].act(unblock, harmless=errno.ENOENT)


def find_connections(
    workers: Mapping[int, Sequence[int]],
) -> dict[tuple[int, int], list[Connection]]:
    """Return the connections between workers.

    Args:
        workers: by rank, the ids of a worker's processes.

    Returns:
        by pair of ranks, in the order of ``workers``; a pair without a connection is missing.

    Raises:
        OSError: the system does not show a process's descriptors.
    """
    tables: dict[int, dict[int, tuple[str, str]]] = {}
    ends: dict[int, dict[tuple[str, str], ConnectionEnd]] = {}
    for rank, pids in workers.items():
        ends[rank] = {}
        for pid in pids:
            try:
                namespace = os.stat(f"/proc/{pid}/ns/net").st_ino
                if namespace not in tables:
                    tables[namespace] = _established(pid)
                for descriptor, inode in _sockets(pid):
                    addresses = tables[namespace].get(inode)
                    if addresses is not None:
                        ends[rank][addresses] = ConnectionEnd(pid, descriptor, inode)
            except OSError:
                if not _has_ended(pid):
                    raise
    found: dict[tuple[int, int], list[Connection]] = {}
    for first, second in combinations(workers, 2):
        for (local, remote), end in ends[first].items():
            other = ends[second].get((remote, local))
            if other is not None:
                found.setdefault((first, second), []).append(Connection((end, other)))
    return found


def _call(number: int, *arguments: int) -> int:
    """Make a call of the system that Python may not have."""
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, or is ending: then only root may look at it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & PF_EXITING)


def _established(pid: int) -> dict[int, tuple[str, str]]:
    """Return the connections of a process's network: (local, remote) by inode."""
    with open(f"/proc/{pid}/net/tcp") as file:
        lines = file.readlines()[1:]
    with suppress(FileNotFoundError), open(f"/proc/{pid}/net/tcp6") as file:  # no IPv6 here
        lines += file.readlines()[1:]
    found = {}
    for line in lines:
        fields = line.split()
        if fields[3] == ESTABLISHED:
            found[int(fields[9])] = _plain(fields[1]), _plain(fields[2])
    return found


def _plain(address: str) -> str:
    """Return an address and port as the kernel writes them, IPv4 in IPv6 as IPv4."""
    return address.removeprefix(MAPPED)


def _sockets(pid: int) -> list[tuple[int, int]]:
    """Return the (descriptor, inode) of a process's sockets."""
    found = []
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            kind, _, inode = os.readlink(f"{folder}/{name}").partition(":")
            if kind == "socket":
                found.append((int(name), int(inode.strip("[]"))))
    return found
