"""The bytes that this process has sent through its sockets, by the kernel's own count."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

# struct tcp_info of Linux, uapi/linux/tcp.h: tcpi_bytes_sent, since Linux 4.19.
BYTES_SENT = struct.Struct("Q")
BYTES_SENT_AT = 200


def tcp_bytes_sent() -> int:
    """Payload that all TCP connections of this process have sent since they were opened.

    Whoever opened them: a library in C++ or Rust is counted like Python. Headers are not counted,
    repeated segments are; neither are connections that are closed by now.

    Raises:
        OSError: this kernel does not count it.
    """
    return sum(bytes_by_connection().values())


def bytes_by_connection() -> dict[str, int]:
    """Return the same for each connection, by the kernel's own name of its socket."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            socket_name = os.readlink(f"/proc/self/fd/{name}")
            if socket_name.startswith("socket:"):
                found[socket_name] = _bytes_sent(int(name))
    return found


def _bytes_sent(descriptor: int) -> int:
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile by its owner, another thread
        return 0
    with socket.socket(fileno=copy) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return 0
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_SENT_AT + BYTES_SENT.size)
    if len(info) < BYTES_SENT_AT + BYTES_SENT.size:
        raise OSError("this kernel does not count the bytes that a connection sent (Linux 4.19)")
    return int(BYTES_SENT.unpack_from(info, BYTES_SENT_AT)[0])
