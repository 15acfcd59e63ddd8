"""Joining a run that goes on: by the addresses of live workers, and the run id that they answer.

If workers are single processes, a run is one network. If each is a replica of several processes,
those that hold the same shard make a network of their own, whose run id names the shard.
"""

import dataclasses
import re
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import (
    UNKNOWN_RANK,
    identity_variables,
    join_variables,
    show_address,
)
from gossipdp.launcher.store import MAX_RUN_ID
from gossipdp.links.handshake import Handshake, HandshakeError, Identity
from gossipdp.links.tls import Tls
from gossipdp.logs import printable

if TYPE_CHECKING:
    from gossipdp.launcher.reports import Report

# Belongs to no run, so the worker that it greets refuses it and names its own run.
NO_RUN = Identity(0, 0, 0, "", "", "", "", "", "")


@dataclasses.dataclass
class JoinInfo:
    """The facts that a worker needs to join a run, or with shards the network of one shard.

    Attributes:
        run_id, secret: as the workers have reported; None: as the launcher says.
        join: (host, port) of workers that the user has named.
        addresses: (host, port) by rank of the live workers, as they have reported, newest last.
    """

    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    join: tuple[tuple[str, int], ...] = ()
    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)

    def take(self, report: "Report") -> None:
        """Note the report of a worker."""
        for rank, address in (report.addresses or {}).items():
            self.addresses.pop(rank, None)  # the newest come last
            self.addresses[rank] = address
        self.run_id = report.run_id or self.run_id
        self.secret = report.secret or self.secret

    def join_variables(self, rank: int = UNKNOWN_RANK, num_restarts: int = 0) -> dict[str, str]:
        """Return the variables by which the worker of that rank joins the others."""
        others = [self.addresses[each] for each in reversed(self.addresses) if each != rank]
        joins = join_variables(others or self.join, num_restarts)
        return identity_variables(self.run_id, self.secret) | joins


def shard_run_id(run_id: str, shard: int, num_shards: int) -> str:
    """Return the id of the network of one shard, in the run of that id."""
    return f"{run_id}-shard-{shard}-of-{num_shards}"


def ask_join_infos(
    addresses: Sequence[tuple[str, int]], num_shards: int, tls: Tls | None = None
) -> list[JoinInfo]:
    """Ask the workers at these addresses how to join them, for each shard.

    Each process of a replica says by its run id (:func:`shard_run_id`) which shard it holds, and
    all are asked. If workers are single processes, one that answers will do.

    Raises:
        RefusedError, RendezvousError: see :func:`ask_run_id`.
        ValueError: the run's replicas have another number of processes, or the addresses are not
            one at least for each shard of one run.
    """
    infos, runs = [JoinInfo() for _ in range(num_shards)], set()
    for some in [addresses] if num_shards == 1 else [[each] for each in addresses]:
        run_id = ask_run_id(some, tls)
        match = re.fullmatch("(.*)-shard-([0-9]+)-of-([0-9]+)", run_id)
        run, shard, size = (match[1], int(match[2]), int(match[3])) if match else (run_id, 0, 1)
        if size != num_shards or shard >= size:
            raise ValueError(
                f"--nproc-per-replica is {num_shards}, and the run's replicas have {size} "
                f"processes: give {size}, and to --join the address of a process of each shard"
            )
        runs.add(run)
        infos[shard].run_id = run_id
        infos[shard].join += tuple(some)
    missing = [str(shard) for shard, info in enumerate(infos) if not info.join]
    if missing or len(runs) > 1:
        reason = f"none is of shard {', '.join(missing)}" if missing else "they are of two runs"
        raise ValueError(
            "--join needs the address of a process of each shard of one replica, or of several, "
            f"and of those given {reason}: the run's first gossipdp run has shown them"
        )
    return infos


def ask_run_id(
    addresses: Sequence[tuple[str, int]], tls: Tls | None = None, timeout_s: float = 5.0
) -> str:
    """Ask for the id of a run: of the worker at the first address that answers.

    The id is no secret: a worker says it to any caller whose id differs. So it proves nothing. The
    handshake that follows proves to both sides that they are of one run.

    Args:
        addresses: (host, port) of workers, tried one after the other.
        tls: needed if the run uses it.
        timeout_s: for each of them, from the dial to the answer.

    Raises:
        RefusedError: a worker answers, but with TLS where we have none, or in another version.
        RendezvousError: no worker answers.
    """
    failures = []
    for address in addresses:
        try:
            return _ask(address, tls, time.monotonic() + timeout_s)
        except (OSError, HandshakeError, EOFError) as error:
            text = printable(str(error)) or "closed the connection"
            failures.append(f"{show_address(*address)}: {text}")
    raise RendezvousError(
        f"no worker to join answers ({'; '.join(failures)}); check that the run still goes on and "
        "that the address is one of its workers'"
    )


def _ask(address: tuple[str, int], tls: Tls | None, deadline: float) -> str:
    def left_s() -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("did not answer in time")
        return left

    # The secret is never used: no proof is made before the answer.
    handshake = Handshake(NO_RUN, b"unused", dialler=True)
    connection: socket.socket = socket.create_connection(address, left_s())
    try:
        if tls is not None:
            stream = tls.wrap(connection, server_side=False)
            connection = stream.connection  # it owns the descriptor from here on
            connection.settimeout(left_s())
            stream.do_handshake()
        connection.settimeout(left_s())
        connection.sendall(handshake.take_output())
        while handshake.num_wanted and handshake.refusal is None:
            connection.settimeout(left_s())
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
        who = show_address(*address)
        raise RefusedError(f"the worker at {who} refuses: {printable(str(refusal))}")
    if not refusal.ours.isprintable() or len(refusal.ours) > MAX_RUN_ID:
        raise HandshakeError("it gave no usable run id")
    return refusal.ours
