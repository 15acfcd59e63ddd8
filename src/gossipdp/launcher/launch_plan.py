"""``LaunchPlan``: the workers that one supervisor starts, and the run that they belong to.

A worker joins a running job by the addresses of live workers and the run id that they answer. If
workers are single processes, a run is one network. If each is a replica of several processes,
the processes of one shard make a network of their own, whose run id names the shard.
"""

import dataclasses
import os
import re
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import (
    UNKNOWN_RANK,
    Environment,
    identity_variables,
    show_address,
)
from gossipdp.launcher.reports import Report
from gossipdp.launcher.schedulers import with_torchrun_names
from gossipdp.launcher.store import CHECK_EVERY_S, CONNECT_S, MAX_RUN_ID, HostedStore, reach
from gossipdp.links.handshake import Handshake, HandshakeError, Identity
from gossipdp.links.tls import Tls
from gossipdp.logs import printable
from gossipdp.rules import at_least_1

# A supervisor that is silent for so long was killed, or its host is gone.
LOST_AFTER_S = 300.0
# The variables of torchrun that the one worker of a launched supervisor inherits. GROUP_RANK, the
# number of this host, is not among them: Slurm counts hosts in its own way.
INHERITED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
# One of these addresses must be live for a worker to join.
MAX_JOIN_ADDRESSES = 32
# An identity of no run: a worker that gets this hello refuses it and names its own run.
NO_RUN = Identity(0, 0, 0, "", "", "", "", "", "")


@dataclasses.dataclass
class JoinInfo:
    """The facts that a worker needs to join a run, or with shards the network of one shard.

    Attributes:
        run_id, secret: as the workers have reported; None: as the launcher says.
        join: (host, port) of workers that the user has named.
        addresses: (host, port) by rank of the live workers, as they have reported, newest last;
            also in a file in memory, which a worker that joins reads again and again.
    """

    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    join: tuple[tuple[str, int], ...] = ()
    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    _file: int | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def take(self, report: Report) -> None:
        """Note the report of a worker."""
        for rank, address in (report.addresses or {}).items():
            self.addresses.pop(rank, None)  # the newest come last
            self.addresses[rank] = address
        self.run_id = report.run_id or self.run_id
        self.secret = report.secret or self.secret
        if self._file is not None:  # a reader between the two calls keeps to what it knows
            newest = dict([*self.addresses.items()][-MAX_JOIN_ADDRESSES:])
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, msgspec.json.encode(newest), 0)

    def join_variables(self, rank: int = UNKNOWN_RANK, num_restarts: int = 0) -> dict[str, str]:
        """Return the variables by which the worker of that rank, on this host, joins the others."""
        if self._file is None:
            self._file = os.memfd_create("gossipdp addresses")
            weakref.finalize(self, os.close, self._file)
            self.take(Report())
        others = [self.addresses[each] for each in reversed(self.addresses) if each != rank]
        shown = [show_address(*each) for each in (others or self.join)[:MAX_JOIN_ADDRESSES]]
        return identity_variables(self.run_id, self.secret) | {
            "GOSSIPDP_JOIN": ",".join(shown),
            "GOSSIPDP_JOIN_FILE": f"/proc/{os.getpid()}/fd/{self._file}",
            "GOSSIPDP_RESTARTS": str(num_restarts),
        }


@dataclasses.dataclass
class LaunchPlan:
    """The workers of one supervisor, and the run they belong to.

    For workers that join a run make it directly, with ``join_infos`` and without a store.

    Attributes:
        num_local: workers here.
        world_size: workers of the run; 0 for workers that join one.
        first_rank: lowest rank of the workers here; None if a live worker gives them their ranks.
        store: (host, port) where the workers meet; None for workers that join.
        hosted: that store, if this supervisor hosts it.
        run_id, secret: None while only the workers know them.
        join_infos: how to join the workers; one for each shard of a replica.
        launcher_variables: variables of the one worker here, if another launcher started us.
        num_meetings: how often the workers have met before, and all have died since.
    """

    num_local: int
    world_size: int = 0
    first_rank: int | None = None
    store: tuple[str, int] | None = None
    hosted: HostedStore | None = None
    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    join_infos: Sequence[JoinInfo] = dataclasses.field(default_factory=lambda: [JoinInfo()])
    launcher_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_meetings: int = 0

    @classmethod
    def on_one_host(
        cls,
        num_workers: int,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        *,
        num_shards: int = 1,
    ) -> "LaunchPlan":
        """Plan a run on this host, with a new id and, unless one is given, a new secret.

        Raises:
            RendezvousError: the port is in use, or the address is not of this machine.
        """
        store = host, port
        plan = cls.on_several_hosts(num_workers, 1, 0, store, secret, num_shards=num_shards)
        plan.run_id, plan.secret = secrets.token_hex(8), secret or secrets.token_hex(16)
        return plan

    @classmethod
    def on_several_hosts(
        cls,
        num_local: int,
        num_hosts: int,
        host_rank: int,
        store: tuple[str, int],
        secret: str | None,
        *,
        num_shards: int = 1,
    ) -> "LaunchPlan":
        """Plan the same number of workers on each host; the first host has the store.

        Raises:
            ValueError: the number of hosts, or this one's, is impossible.
            RendezvousError: the port is in use, or the address is not of this machine.
        """
        at_least_1("--nnodes", num_hosts)
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
            join_infos=[JoinInfo() for _ in range(num_shards)],
        )

    @classmethod
    def launched(cls, variables: Mapping[str, str], secret: str | None) -> "LaunchPlan":
        """Plan the one worker that torchrun, srun or an indexed Job assigned to this process.

        Raises:
            ValueError: see :meth:`Environment.read`.
        """
        given, environment = with_torchrun_names(variables), Environment.read(variables)
        assert environment.store_host is not None
        return cls(
            1,
            environment.world_size,
            environment.rank,
            store=(environment.store_host, environment.store_port),
            run_id=environment.run_id if environment.unique_run_id else None,
            secret=secret,
            launcher_variables={name: given[name] for name in INHERITED if name in given},
        )

    @property
    def others_elsewhere(self) -> bool:
        """Return whether workers of this run may live on other hosts."""
        return self.world_size != self.num_local

    @property
    def under_torchrun(self) -> bool:
        """Return whether torchrun started us: it ends all its processes when one of them fails."""
        return self.launcher_variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def key_prefix(self) -> str:
        """Return the prefix of our keys in the store, which is that of the workers."""
        return Environment.read(self.worker_variables(0)).key_prefix

    def worker_variables(self, local_rank: int) -> dict[str, str]:
        """Return the variables of a worker, as :meth:`Environment.read` reads them."""
        identity = identity_variables(self.run_id, self.secret)
        if self.launcher_variables:
            return {**self.launcher_variables, **identity}
        own = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.num_local)} | identity
        if self.join_infos[0].join:
            return own | self.join_infos[0].join_variables()
        assert self.store is not None
        assert self.first_rank is not None
        return own | {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": str(self.first_rank // self.num_local),  # torchrun's, for scripts
            "MASTER_ADDR": self.store[0],
            "MASTER_PORT": str(self.store[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": self.run_id or "default",
            "TORCHELASTIC_RESTART_COUNT": str(self.num_meetings),  # torch's process groups read it
        }

    def open(self) -> None:
        """Begin to answer at the store, in a thread that imports ``torch``."""
        if self.hosted is not None:
            self.hosted.open_in_background(self.key_prefix, self.world_size)

    def meet_again(self) -> None:
        """Prepare a meeting at a new store, for workers of this host alone, which have all died."""
        assert self.hosted is not None
        self.hosted.close()
        self.hosted = HostedStore(self.hosted.host)
        self.store = self.hosted.host, self.hosted.port
        self.num_meetings += 1
        for join_info in self.join_infos:
            join_info.addresses.clear()

    def close(self) -> None:
        """Let go of the store."""
        if self.hosted is not None:
            self.hosted.close()

    def leave(self, addresses: Mapping[int, tuple[str, int]], *, wait: bool) -> list[int]:
        """Note in torchrun's store that this supervisor ends, and wait for the others if asked.

        A supervisor whose worker failed waits, since torchrun would end the others with it.
        SIGTERM ends the wait at any moment. Without torchrun nothing happens.

        Args:
            addresses: (host, port) of the workers by rank; a worker that listens there lives.
            wait: whether to wait for the others.

        Returns:
            The ranks that neither ended nor listened for LOST_AFTER_S.
        """
        if not self.under_torchrun or self.store is None:
            return []
        others = [rank for rank in range(self.world_size) if rank != self.first_rank]
        heard_at = dict.fromkeys(others, time.monotonic())
        ended = f"{self.key_prefix}ended/"
        with suppress(OSError, RuntimeError):  # torchrun has ended, and all workers with it
            store = reach(self.store)
            store.set(f"{ended}{self.first_rank}", "1")
            while wait:
                others = [rank for rank in others if not store.check([f"{ended}{rank}"])]
                now = time.monotonic()
                for rank in others:
                    if rank in addresses and listens(addresses[rank]):
                        heard_at[rank] = now
                if all(now - heard_at[rank] > LOST_AFTER_S for rank in others):
                    return others
                time.sleep(CHECK_EVERY_S)
        return []


def listens(address: tuple[str, int]) -> bool:
    """Return whether a process takes connections at an address."""
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True


def ask_join_infos(
    addresses: Sequence[tuple[str, int]], num_shards: int, tls: Tls | None = None
) -> list[JoinInfo]:
    """Ask the workers at these addresses how to join them, for each shard.

    The run id of a replica's process names its shard (:func:`shard_run_id`), so all addresses are
    asked. If workers are single processes, one answer is enough.

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
    """Ask the worker at the first address that answers for the id of its run.

    The id is no secret and proves nothing: a worker tells it to any caller whose id differs. The
    handshake that follows proves to both sides that they are in one run.

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
