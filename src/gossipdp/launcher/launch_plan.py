"""``LaunchPlan``: the workers that one supervisor starts, and the run that they belong to.

A worker joins a running job by the addresses of live workers and the run id that they answer. A
replica of several processes joins the networks of all shards, each with a run id of its own, under
one rank, which its first process asks for and passes to the others.
"""

import dataclasses
import os
import re
import secrets
import select
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import (
    OF_REPLICA,
    PLACE,
    UNKNOWN_RANK,
    UNKNOWN_WORLD_SIZE,
    Environment,
    show_address,
    with_torchrun_names,
)
from gossipdp.launcher.reports import Report
from gossipdp.launcher.store import CHECK_EVERY_S, CONNECT_S, MAX_RUN_ID, HostedStore, connect
from gossipdp.links.handshake import Handshake, HandshakeError, Identity
from gossipdp.links.opening import Opening
from gossipdp.links.shared_memory import memory_file
from gossipdp.links.tls import Tls
from gossipdp.logs import printable
from gossipdp.rules import at_least_1

# Variables of another launcher that started us: they would mislead a worker.
NOT_INHERITED = {
    *PLACE,
    *OF_REPLICA.values(),
    *("GROUP_RANK", "GOSSIPDP_JOIN", "GOSSIPDP_JOIN_FILE", "GOSSIPDP_RESTARTS"),
    *("GOSSIPDP_REPORT", "GOSSIPDP_RUN_ID", "GOSSIPDP_SECRET"),
}
# A supervisor that is silent for so long was killed, or its host is gone.
LOST_AFTER_S = 300.0
# One of these addresses must be live for a worker to join; the file that holds them has this size.
MAX_JOIN_ADDRESSES, FILE_BYTES = 32, 4096
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
        live: the ranks in the newest report of addresses.
    """

    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    join: tuple[tuple[str, int], ...] = ()
    addresses: dict[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    live: frozenset[int] = frozenset()
    _file: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._file = memory_file("gossipdp addresses")
        weakref.finalize(self, os.close, self._file)

    def take(self, report: Report) -> None:
        for rank, address in (report.addresses or {}).items():
            self.addresses.pop(rank, None)  # the newest come last
            self.addresses[rank] = address
        self.run_id = report.run_id or self.run_id
        self.secret = report.secret or self.secret
        if report.addresses:
            self.live = frozenset(report.addresses)
            # A reader finds the old ones or the new: the file never shrinks.
            newest = dict([*self.addresses.items()][-MAX_JOIN_ADDRESSES:])
            os.pwrite(self._file, msgspec.json.encode(newest).ljust(FILE_BYTES), 0)

    def join_variables(self, rank: int, num_restarts: int) -> dict[str, str]:
        """Return the variables by which the worker of that rank, on this host, joins the others."""
        others = [self.addresses[each] for each in reversed(self.addresses) if each != rank]
        shown = [show_address(*each) for each in (others or self.join)[:MAX_JOIN_ADDRESSES]]
        return {
            "GOSSIPDP_JOIN": ",".join(shown),
            "GOSSIPDP_JOIN_FILE": f"/proc/{os.getpid()}/fd/{self._file}",
            "GOSSIPDP_RESTARTS": str(num_restarts),
        }


@dataclasses.dataclass
class LaunchPlan:
    """The workers of one supervisor, and the run they belong to.

    For workers that join a run make it directly, with ``join_infos`` and without a store.

    Attributes:
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
    def on_hosts(
        cls,
        num_local: int,
        store: tuple[str, int] = ("127.0.0.1", 0),
        secret: str | None = None,
        *,
        num_hosts: int = 1,
        host_rank: int = 0,
        num_shards: int = 1,
    ) -> "LaunchPlan":
        """Plan a run of the same number of workers on each host; the first host has the store.

        On one host it has a new id and, unless one is given, a new secret.

        Raises:
            ValueError: the number of hosts, or this one's, is impossible.
        """
        at_least_1("--nnodes", num_hosts)
        if not 0 <= host_rank < num_hosts:
            raise ValueError(
                f"--node-rank is {host_rank}; with --nnodes {num_hosts} it must be in "
                f"0..{num_hosts - 1}"
            )
        hosted = HostedStore(*store) if host_rank == 0 else None
        plan = cls(
            num_local,
            num_local * num_hosts,
            host_rank * num_local,
            store=hosted.address if hosted else store,
            hosted=hosted,
            secret=secret,
            join_infos=[JoinInfo() for _ in range(num_shards)],
        )
        if num_hosts == 1:
            plan.run_id, plan.secret = secrets.token_hex(8), secret or secrets.token_hex(16)
        return plan

    @classmethod
    def launched(cls, variables: Mapping[str, str], secret: str | None) -> "LaunchPlan":
        """Plan the one worker that torchrun, srun or an indexed Job assigned to this process."""
        given, environment = with_torchrun_names(variables), Environment.read(variables)
        assert environment.store_host is not None
        return cls(
            1,
            environment.world_size,
            environment.rank,
            store=(environment.store_host, environment.store_port),
            run_id=environment.run_id if environment.unique_run_id else None,
            secret=secret,
            launcher_variables={name: given[name] for name in PLACE if name in given},
        )

    @property
    def others_elsewhere(self) -> bool:
        """Return whether the run may have live workers that are not ours: elsewhere, or joined."""
        live = self.join_infos[0].live  # who joins has a rank above those of the beginning
        return self.world_size != self.num_local or any(rank >= self.world_size for rank in live)

    @property
    def under_torchrun(self) -> bool:
        """Return whether torchrun started us: it ends all its processes when one of them fails."""
        return self.launcher_variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def key_prefix(self) -> str:
        """Return the prefix of our keys in the store, which is that of the workers."""
        return Environment.read(self.worker_variables(0)).key_prefix

    def worker_variables(
        self,
        local_rank: int,
        shard: int = 0,
        replica_store: tuple[str, int] | None = None,
        *,
        rejoins: tuple[int, int] | None = None,
    ) -> dict[str, str]:
        """Return the variables of a process of a worker, as :meth:`Environment.read` reads them.

        ``replica_store``: (host, port) where the processes of a replica meet. ``rejoins``: rank and
        number of restarts of a worker that died and joins the others again.
        """
        here = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.num_local)}
        own = dict(self.launcher_variables or here)
        if self.store is not None and not self.launcher_variables:
            assert self.first_rank is not None
            own |= {
                "RANK": str(self.first_rank + local_rank),
                "WORLD_SIZE": str(self.world_size),
                "GROUP_RANK": str(self.first_rank // self.num_local),  # torchrun's, for scripts
                "MASTER_ADDR": self.store[0],
                "MASTER_PORT": str(self.store[1]),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": self.run_id or "default",
                # torch's process groups read it
                "TORCHELASTIC_RESTART_COUNT": str(self.num_meetings),
            }
        run_id, secret = self.run_id, self.secret
        if rejoins is not None or self.store is None:
            info, (rank, num_restarts) = self.join_infos[shard], rejoins or (UNKNOWN_RANK, 0)
            run_id, secret = info.run_id or run_id, info.secret or secret
            own |= info.join_variables(rank, num_restarts)
            own |= {"RANK": str(rank)} if rank >= 0 else {}
        identity = {"GOSSIPDP_RUN_ID": run_id, "GOSSIPDP_SECRET": secret}
        own |= {name: value for name, value in identity.items() if value}
        if replica_store is None:
            return own
        num_shards = len(self.join_infos)
        return own | {
            **{of_replica: own.get(name, "") for name, of_replica in OF_REPLICA.items()},
            OF_REPLICA["WORLD_SIZE"]: own.get("WORLD_SIZE", str(UNKNOWN_WORLD_SIZE)),
            "RANK": str(shard),
            "WORLD_SIZE": str(num_shards),
            "LOCAL_RANK": str(local_rank * num_shards + shard),
            "LOCAL_WORLD_SIZE": str(self.num_local * num_shards),
            "MASTER_ADDR": replica_store[0],
            "MASTER_PORT": str(replica_store[1]),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def open(self) -> None:
        if self.hosted is not None:
            self.hosted.open_in_background(self.key_prefix, self.world_size)

    def meet_again(self) -> None:
        """Prepare a meeting at a new store, for workers of this host alone, which have all died."""
        assert self.hosted is not None
        self.hosted.close()
        self.hosted = HostedStore(self.hosted.address[0])
        self.store = self.hosted.address
        self.num_meetings += 1
        for join_info in self.join_infos:
            join_info.addresses.clear()
            join_info.live = frozenset()

    def close(self) -> None:
        if self.hosted is not None:
            self.hosted.close()

    def leave(self, *, wait: bool) -> list[int]:
        """Note in torchrun's store that this supervisor ends, and wait for the others if asked.

        A supervisor whose worker failed waits, since torchrun would end the others with it.
        SIGTERM ends the wait at any moment, as torchrun sends it. Without torchrun nothing happens.
        A host whose supervisor and torchrun were both killed is waited for as long as it answers.

        Returns:
            The ranks that have not ended, and whose hosts have not answered for LOST_AFTER_S.
        """
        if not self.under_torchrun:
            return []
        others = [rank for rank in range(self.world_size) if rank != self.first_rank]
        addresses = self.join_infos[0].addresses
        heard_at = dict.fromkeys(others, time.monotonic())
        environment = Environment.read(self.worker_variables(0))
        ended = f"{environment.key_prefix}ended/"
        with suppress(OSError, RuntimeError):  # torchrun has ended, and all workers with it
            store = connect(environment, CONNECT_S)
            store.set(f"{ended}{self.first_rank}", "1")
            while wait:
                others = [rank for rank in others if not store.check([f"{ended}{rank}"])]
                now = time.monotonic()
                for rank in others:
                    if rank in addresses and answers(addresses[rank]):
                        heard_at[rank] = now
                if all(now - heard_at[rank] > LOST_AFTER_S for rank in others):
                    return others
                time.sleep(CHECK_EVERY_S)
        return []


def inherited_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker takes over, without those of another launcher."""
    return {name: value for name, value in given.items() if name not in NOT_INHERITED}


def answers(address: tuple[str, int]) -> bool:
    """Return whether a host answers at an address: a worker that came back has another port."""
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


def ask_join_infos(
    addresses: Sequence[tuple[str, int]],
    num_shards: int,
    tls: Tls | None = None,
    timeout_s: float = 5.0,
) -> list[JoinInfo]:
    """Ask the workers at these addresses for the id of their run, for each shard.

    The id is no secret and proves nothing: a worker tells it to any caller whose id differs. The
    handshake that follows proves to both sides that they are in one run. The id names the shard of
    a replica's process, so all (host, port) are asked, each for ``timeout_s`` from the dial to the
    answer. If workers are single processes, one answer is enough.

    Raises:
        RefusedError: a worker answers, but with TLS where we have none, or in another version.
        RendezvousError: no worker answers, or none of some shard.
        ValueError: the run's replicas have another number of processes, or the addresses are not
            one at least for each shard of one run.
    """
    run_ids, joins = dict[int, str](), dict[int, list[tuple[str, int]]]()
    runs, failures = set(), []
    for address in addresses:
        try:
            run_id = _ask(address, tls, time.monotonic() + timeout_s)
        except (OSError, HandshakeError, EOFError) as error:
            text = printable(str(error)) or "closed the connection"
            failures.append(f"{show_address(*address)}: {text}")
            continue
        match = re.fullmatch("(.*)-shard-([0-9]+)-of-([0-9]+)", run_id)
        run, shard, size = (match[1], int(match[2]), int(match[3])) if match else (run_id, 0, 1)
        if size != num_shards or shard >= size:
            raise ValueError(
                f"--nproc-per-replica is {num_shards}, and the run's replicas have {size} "
                f"processes: give {size}, and to --join the address of a process of each shard"
            )
        runs.add(run)
        run_ids[shard] = run_id
        joins.setdefault(shard, []).append(address)
        if num_shards == 1:
            joins[0] = list(addresses)
            break
    missing = [str(shard) for shard in range(num_shards) if shard not in joins]
    if missing and failures:
        raise RendezvousError(
            f"no worker to join answers ({'; '.join(failures)}); check that the run still goes on "
            "and that the address is one of its workers'"
        )
    if missing or len(runs) > 1:
        reason = f"none is of shard {', '.join(missing)}" if missing else "they are of two runs"
        raise ValueError(
            "--join needs the address of a process of each shard of one replica, or of several, "
            f"and of those given {reason}: the run's first gossipdp run has shown them"
        )
    return [JoinInfo(run_ids[each], join=tuple(joins[each])) for each in range(num_shards)]


def _ask(address: tuple[str, int], tls: Tls | None, deadline_s: float) -> str:
    # The secret is never used: no proof is made before the answer.
    handshake = Handshake(NO_RUN, b"unused", dialler=True)
    connection = socket.create_connection(address, max(0.001, deadline_s - time.monotonic()))
    connection.setblocking(False)
    opening = Opening(connection, handshake, address, deadline_s, tls)
    events = select.poll()
    events.register(connection, select.POLLIN)
    try:
        while handshake.num_wanted:
            try:
                opening.advance()
            except BlockingIOError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not events.poll(1e3 * left_s):
                    raise TimeoutError("timed out") from None
    finally:
        opening.connection.close()
    refusal = handshake.refusal
    if refusal is None:
        raise HandshakeError("it did not say which run it belongs to")
    if refusal.field != "run_id":
        who = show_address(*address)
        raise RefusedError(f"the worker at {who} refuses: {printable(str(refusal))}")
    if not refusal.ours.isprintable() or len(refusal.ours) > MAX_RUN_ID:
        raise HandshakeError("it gave no usable run id")
    return refusal.ours
