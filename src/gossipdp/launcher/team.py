"""``Team``: what one supervisor knows of its run, and tells each of its workers."""

import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import (
    Environment,
    identity_variables,
    join_variables,
    key_prefix,
    show_address,
    worker_variables,
)
from gossipdp.launcher.store import MAX_RUN_ID, HostedStore, put_notice
from gossipdp.links.handshake import Handshake, HandshakeError, Identity
from gossipdp.links.strangers import printable
from gossipdp.links.tls import Tls

# How long the end of a run that failed before it began waits until the others are told: host 0 may
# not have started yet, and on a busy machine the import of torch takes long, here and there.
NOTICE_S = 60.0
# The id of no run, by which a caller asks for one.
NO_RUN = ""


@dataclasses.dataclass
class Team:
    """The workers of one supervisor, and the run they belong to.

    Make it by :meth:`on_one_host`, :meth:`on_several_hosts`, :meth:`joining` or :meth:`launched`.

    Attributes:
        num_local: workers here.
        world_size: workers of the run; 0 for workers that join one.
        first_rank: of the workers here; None where a live worker gives them their ranks.
        store: (host, port) where the workers meet; None for workers that join.
        hosted: that store, where this supervisor hosts it.
        run_id, secret: None while only the workers know.
        join: addresses of live workers, where these join a run.
        told: the variables of the one worker here, where another launcher started us.
        num_rounds: how often all workers of the run have died and met anew.
    """

    num_local: int
    world_size: int
    first_rank: int | None = 0
    store: tuple[str, int] | None = None
    hosted: HostedStore | None = None
    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    join: tuple[tuple[str, int], ...] = ()
    told: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_rounds: int = 0
    _notice: threading.Thread | None = None

    @classmethod
    def on_one_host(
        cls, num_workers: int, host: str = "127.0.0.1", port: int = 0, secret: str | None = None
    ) -> "Team":
        """A run of its own; its id, and its secret if none is given, are chosen here.

        Raises:
            RendezvousError: the port is in use, or the address is not of this machine.
        """
        hosted = HostedStore(host, port)
        return cls(
            num_workers,
            num_workers,
            store=(hosted.host, hosted.port),
            hosted=hosted,
            run_id=secrets.token_hex(8),
            secret=secret or secrets.token_hex(16),
        )

    @classmethod
    def on_several_hosts(
        cls,
        num_local: int,
        num_hosts: int,
        host_rank: int,
        store: tuple[str, int],
        secret: str | None,
    ) -> "Team":
        """The same number of workers on each host; the first host has the store.

        Raises:
            ValueError: the number of hosts, or this one's, is impossible.
            RendezvousError: the port is in use, or the address is not of this machine.
        """
        if num_hosts < 1:
            raise ValueError(f"--nnodes is {num_hosts}; it must be at least 1")
        if not 0 <= host_rank < num_hosts:
            raise ValueError(
                f"--node-rank is {host_rank}; with --nnodes {num_hosts} it must be in "
                f"0..{num_hosts - 1}"
            )
        hosted = HostedStore(*store) if host_rank == 0 else None
        return cls(
            num_local,
            num_local * num_hosts,
            host_rank * num_local,
            store=(hosted.host, hosted.port) if hosted else store,
            hosted=hosted,
            secret=secret,
        )

    @classmethod
    def joining(
        cls,
        num_workers: int,
        addresses: tuple[tuple[str, int], ...],
        run_id: str,
        secret: str | None,
    ) -> "Team":
        """Workers that join a run which goes on, each by any of these addresses.

        They need the run's secret, or its TLS files.
        """
        if not addresses:
            raise RendezvousError("no address to join")
        return cls(num_workers, 0, None, run_id=run_id, secret=secret, join=addresses)

    @classmethod
    def launched(cls, environment: Environment, secret: str | None) -> "Team":
        """The one worker that torchrun, srun or an indexed Job told this process about."""
        assert environment.store_host is not None
        told = worker_variables(
            environment.rank,
            environment.world_size,
            host=environment.store_host,
            port=environment.store_port,
            run_id=None,
            secret=None,
            local_rank=environment.local_rank,
            local_world_size=environment.local_world_size,
        )
        told["TORCHELASTIC_RUN_ID"] = environment.run_id
        told["TORCHELASTIC_USE_AGENT_STORE"] = str(environment.agent_store)
        if environment.local_world_size is None:
            del told["LOCAL_WORLD_SIZE"]
        del told["GROUP_RANK"]  # which host this is, nobody has told
        return cls(
            1,
            environment.world_size,
            environment.rank,
            store=(environment.store_host, environment.store_port),
            run_id=environment.run_id if environment.unique_run_id else None,
            secret=secret,
            told=told,
            num_rounds=environment.restart_count,
        )

    @property
    def others_elsewhere(self) -> bool:
        """Whether workers of this run may live on other hosts."""
        return self.world_size != self.num_local

    def rank(self, local_rank: int) -> int | None:
        """The rank in the run; None for one that is given its rank by a live worker."""
        return None if self.first_rank is None else self.first_rank + local_rank

    def variables(self, local_rank: int) -> dict[str, str]:
        """The variables of the worker of this local rank."""
        identity = identity_variables(self.run_id, self.secret)
        if self.join:
            local = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.num_local)}
            return {**local, **identity, **join_variables(self.join, 0)}
        if self.told:
            return {**self.told, "TORCHELASTIC_RESTART_COUNT": str(self.num_rounds), **identity}
        assert self.store is not None
        assert self.first_rank is not None
        return worker_variables(
            self.first_rank + local_rank,
            self.world_size,
            host=self.store[0],
            port=self.store[1],
            run_id=self.run_id,
            secret=self.secret,
            local_rank=local_rank,
            local_world_size=self.num_local,
            node_rank=self.first_rank // self.num_local,
            round_number=self.num_rounds,
        )

    @property
    def key_prefix(self) -> str:
        """What our keys in the store begin with."""
        run_id = self.run_id or self.told.get("TORCHELASTIC_RUN_ID")
        return key_prefix(run_id, self.num_rounds)

    def open(self) -> None:
        """Begin to answer, in a thread: ``torch`` is imported."""
        if self.hosted is not None:
            self.hosted.open_in_background(self.key_prefix, self.world_size)

    def others_told(self, timeout_s: float) -> bool:
        """Whether the others have been told what is to be told; waits at most so long for it."""
        if self._notice is not None:
            self._notice.join(timeout_s)
        return self._notice is None or not self._notice.is_alive()

    def close(self) -> None:
        """Let go of the store."""
        if self.hosted is not None:
            self.hosted.close()

    def begin_anew(self) -> None:
        """Prepare that all workers, none of whom is left anywhere, meet again."""
        assert not self.others_elsewhere
        self.num_rounds += 1
        if self.hosted is not None:
            self.hosted.close()
            self.hosted = HostedStore(self.hosted.host, self.hosted.port)
            self.hosted.open_in_background(self.key_prefix, self.world_size)

    def tell_failed(self, reason: str) -> None:
        """Let workers on other hosts, who wait for ours, know that the run ends here.

        The first reason is told, by a thread: it may have to import ``torch``.
        """
        if not self.others_elsewhere or self.store is None or self._notice is not None:
            return
        self._notice = threading.Thread(
            target=put_notice,
            args=(self.store, self.key_prefix, reason, self.secret, NOTICE_S),
            name="gossipdp notice",
            daemon=True,
        )
        self._notice.start()


def ask_run_id(
    addresses: Sequence[tuple[str, int]], tls: Tls | None = None, timeout_s: float = 5.0
) -> str:
    """The id of the run to which the worker at the first address that answers belongs.

    The id is no secret: a worker says it to any caller whose id differs. So it is trusted no
    further than that: the handshake that follows proves to both sides that they are of one run.

    Args:
        addresses: (host, port) of workers, tried one after the other.
        tls: needed if the run uses it.
        timeout_s: for each of them, from the dial to the answer.

    Raises:
        RefusedError: a worker answers, but with TLS where we have none, or in another version.
        RendezvousError: nobody answers.
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

    nobody = Identity(0, 0, 0, NO_RUN, "", "", "", "", "")
    # The secret is never used: no proof is made before the answer.
    handshake = Handshake(nobody, b"unused", dialler=True)
    plain = socket.create_connection(address, left_s())
    connection: socket.socket = plain
    try:
        if tls is not None:
            stream = tls.wrap(plain, server_side=False)
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
        raise RefusedError(
            f"the worker at {show_address(*address)} refuses: {printable(str(refusal))}"
        )
    if not refusal.ours.isprintable() or len(refusal.ours) > MAX_RUN_ID:
        raise HandshakeError("it gave no usable run id")
    return refusal.ours
