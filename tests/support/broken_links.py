"""Cuts the TCP connections of other processes, from outside.

``pidfd_getfd`` (Linux 5.6) duplicates the descriptor of a socket, and a duplicate acts on the
socket itself. The system allows that to a process that may trace the other, such as its parent.
"""

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from random import Random

import psutil

PIDFD_OPEN, PIDFD_GETFD = 434, 438  # on all architectures
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
