"""Socket calls of the TCP transport that need none of its state."""

import errno
import ipaddress
import socket
from typing import final

from gossipdp.errors import RendezvousError
from gossipdp.runtime import fork

# Unsent bytes that the kernel takes at most, so that a control message on a slow link waits behind
# these and one chunk, not behind megabytes.
NOTSENT_LOWAT_BYTES = 256 << 10
BACKLOG = 128
_MAX_EMPTIED_BYTES = 16 << 20


@final
class Listener(socket.socket, fork.DescriptorOwner):
    """A listening socket that no forked child keeps.

    A child that held it would take connections in after its parent's death, and the others would
    wait for an answer where a refusal tells them that the worker is dead.
    """

    def close_in_child(self) -> None:
        """See :class:`~gossipdp.runtime.fork.DescriptorOwner`."""
        fork.close_descriptor(self.detach())


def listen(host: str, port: int) -> Listener:
    """A non-blocking listening socket; port 0 takes a free one.

    Raises:
        RendezvousError: The port is in use, or the host is not an address of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with fork.descriptors_guard:
            listener = Listener(family, kind | socket.SOCK_NONBLOCK)
            fork.register(listener)
    except OSError as error:
        raise RendezvousError(_cannot_listen(host, port, error)) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RendezvousError(_cannot_listen(host, port, error)) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another, or port 0 for any free one"
    return f"cannot listen on {host}:{port}: {error.strerror}; name an address of this machine"


def set_options(connection: socket.socket, peer_host: str) -> None:
    """Make a data connection non-blocking and undelayed, and bound its unsent bytes.

    Not on loopback: nothing queues there but what the peer has not read, and the bound costs a
    quarter more CPU time.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(peer_host).is_loopback:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)


def is_connected(connection: socket.socket) -> bool:
    """Whether a non-blocking ``connect`` has got through; False: not yet.

    Raises:
        OSError: It failed. ``ConnectionRefusedError``: nobody listens there.
    """
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, str(code)))
    try:
        peer_name = connection.getpeername()
    except OSError:
        return False
    if connection.getsockname() == peer_name:
        # Dialling a free port of one's own host may be given that very port as its own and
        # connect to itself: nobody listens there.
        raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    return True


def empty(connection: socket.socket, scratch: memoryview) -> None:
    """Drop what has arrived on a socket about to be closed.

    Closing with unread data resets the connection, and the reset overtakes what was just sent.
    """
    dropped = 0
    while dropped < _MAX_EMPTIED_BYTES:
        try:
            count = connection.recv_into(scratch)
        except OSError:
            return
        if count == 0:
            return
        dropped += count
