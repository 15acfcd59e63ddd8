"""The id of a run, asked from one of its workers by whoever wants to join it.

The id is no secret: a worker says it to any caller whose id differs, before any proof. So it is
trusted no further than that: the handshake that follows proves to both sides that the other holds
the run's secret, under that id.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.runtime.environment import show_address
from gossipdp.runtime.handshake import Handshake, HandshakeError
from gossipdp.runtime.identity import Identity
from gossipdp.runtime.tls import Tls

# An id that no run has.
ASKING = ""


def ask_run_id(
    addresses: Sequence[tuple[str, int]], tls: Tls | None = None, timeout_s: float = 5.0
) -> str:
    """The id of the run to which the worker at the first address that answers belongs.

    Args:
        addresses: (host, port) of workers, tried one after the other.
        tls: needed if the run uses it.
        timeout_s: for each of them.

    Raises:
        RefusedError: a worker answers, but with TLS where we have none, or in another version.
        RendezvousError: nobody answers.
    """
    failures = []
    for address in addresses:
        try:
            return _ask(address, tls, timeout_s)
        except (OSError, HandshakeError, EOFError) as error:
            failures.append(f"{show_address(*address)}: {error or 'closed the connection'}")
    raise RendezvousError(
        f"no worker to join answers ({'; '.join(failures)}); check that the run still goes on and "
        "that the address is one of its workers'"
    )


def _ask(address: tuple[str, int], tls: Tls | None, timeout_s: float) -> str:
    nobody = Identity(0, 0, 0, ASKING, "", "", "", "", "")
    # The secret is never used: no proof is made before the answer.
    handshake = Handshake(nobody, b"unused", dialler=True)
    plain = socket.create_connection(address, timeout_s)
    connection: socket.socket = plain
    try:
        if tls is not None:
            stream = tls.wrap(plain, server_side=False)
            connection = stream.connection  # it owns the descriptor from here on
            stream.do_handshake()
        connection.sendall(handshake.take_output())
        while handshake.num_wanted and handshake.refusal is None:
            data = connection.recv(handshake.num_wanted)
            if not data:
                raise EOFError
            handshake.receive(data)
    finally:
        connection.close()
    refusal = handshake.refusal
    if refusal is None:
        raise HandshakeError("it did not say which run it belongs to")
    if refusal.field != "run_id":
        raise RefusedError(f"the worker at {show_address(*address)} refuses: {refusal}")
    return refusal.ours
