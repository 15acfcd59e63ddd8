"""``LaunchPlan``: the workers that one supervisor starts, and the run that they belong to."""

import dataclasses
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gossipdp.launcher.environment import (
    Environment,
    identity_variables,
    key_prefix,
)
from gossipdp.launcher.joining import JoinInfo
from gossipdp.launcher.schedulers import with_torchrun_names
from gossipdp.launcher.store import CHECK_EVERY_S, CONNECT_S, HostedStore, reach

# A supervisor that is silent for so long was killed, or its host is gone.
LOST_AFTER_S = 300.0
# The variables of torchrun that the one worker of a launched supervisor inherits. GROUP_RANK, the
# number of this host, is not among them: Slurm counts hosts in its own way.
INHERITED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


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
        """Return the prefix of our keys in the store."""
        given = self.launcher_variables
        count = int(given.get("TORCHELASTIC_RESTART_COUNT") or 0)
        return key_prefix(self.run_id or given.get("TORCHELASTIC_RUN_ID"), count)

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
            "TORCHELASTIC_RESTART_COUNT": "0",  # torch's process groups read it
        }

    def open(self) -> None:
        """Begin to answer at the store, in a thread that imports ``torch``."""
        if self.hosted is not None:
            self.hosted.open_in_background(self.key_prefix, self.world_size)

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
