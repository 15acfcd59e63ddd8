"""Cuts the TCP connections of other processes and takes them down, from outside.

``pidfd_getfd`` (Linux 5.6) duplicates the descriptor of a socket, and a duplicate acts on the
socket itself. The system allows that to a process that may trace the other, such as its parent.
"""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from random import Random

import psutil

PIDFD_OPEN, PIDFD_GETFD = 434, 438  # on all architectures
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
# A packet filter of one instruction: keep 0 bytes of every packet, that is, drop it.
DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
LOOK_EVERY_S = 0.02
_syscall = ctypes.CDLL(None).syscall


def drawn_link(pids: Iterable[int], random: Random) -> tuple[int, int] | None:
    """Draw two of these processes that are connected; None if there are none."""
    pairs = list(combinations(pids, 2))
    random.shuffle(pairs)
    return next((pair for pair in pairs if any(_connected(*pair))), None)


def cut(first: int, second: int) -> bool:
    """Shut down the connections of two processes: both see their end. False: it cannot be done."""
    ends = _connection_ends(first, second)
    for end in ends:
        with end, suppress(OSError):  # the other end was shut down just before
            end.shutdown(socket.SHUT_RDWR)
    return bool(ends)


def keep_down(first: int, second: int, for_s: float) -> None:
    """Let what two processes send each other be lost for so long, also if they dial again.

    A new connection lets messages pass until it is found.
    """
    program = struct.pack("@HP", 1, ctypes.addressof(DROP_ALL))
    ends_s = time.monotonic() + for_s
    # Our duplicate keeps a connection open that its process gives up: the goodbye goes out when the
    # link is up again. Through a bad cable it would be sent again until then.
    blocked: dict[object, socket.socket] = {}
    while time.monotonic() < ends_s:
        for end in _connection_ends(first, second):
            if blocked.setdefault((end.getsockname(), end.getpeername()), end) is end:
                end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            else:
                end.close()
        time.sleep(LOOK_EVERY_S)
    for end in blocked.values():
        end.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        end.close()


def _connected(first: int, second: int) -> Iterator[tuple[int, int, tuple[object, object]]]:
    """Yield both ends of each connection of two processes: process, descriptor and addresses."""
    found = {}
    for pid in (first, second):
        with suppress(psutil.Error):  # it has ended
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    found[tuple(each.laddr), tuple(each.raddr)] = pid, each.fd
    for (here, there), (pid, descriptor) in found.items():
        if found.get((there, here), (pid,))[0] != pid:
            yield pid, descriptor, (here, there)


def _connection_ends(first: int, second: int) -> list[socket.socket]:
    """Return duplicates of both ends of each connection of two processes."""
    ends = []
    for pid, descriptor, addresses in _connected(first, second):
        process = _syscall(PIDFD_OPEN, pid, 0)
        number = _syscall(PIDFD_GETFD, process, descriptor, 0)
        with suppress(OSError):  # the process has ended
            os.close(process)
        if number < 0:
            continue
        end = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, number)
        with suppress(OSError):
            if (end.getsockname(), end.getpeername()) == addresses:
                ends.append(end)
                continue
        end.close()  # the process had closed it meanwhile, and the number is another file's
    return ends
