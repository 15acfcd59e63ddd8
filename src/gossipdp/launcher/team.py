"""``Team``: what one supervisor knows of its run and tells each of its workers; their reports.

A worker tells the one who started it that it trains, and where the others are now. So whoever
restarts a worker knows live addresses without a store. Each worker has an end of a datagram socket
pair of its own, named by GOSSIPDP_REPORT; where nobody listens, reports go nowhere. Nothing here
waits: a report that does not fit the socket's queue is dropped, a later one follows.
"""

import dataclasses
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from gossipdp.launcher.environment import (
    Environment,
    identity_variables,
    key_prefix,
    with_launcher,
)
from gossipdp.launcher.networks import Network
from gossipdp.launcher.store import (
    CHECK_EVERY_S,
    CONNECT_S,
    HostedStore,
    reach,
)

# Of whose supervisor nothing is heard for so long, its host is gone, or it was killed.
LOST_AFTER_S = 300.0
# What another launcher says of our one worker, by torchrun's names; not which host this is, which
# Slurm counts in its own way.
TOLD = (
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
REPORT_VARIABLE = "GOSSIPDP_REPORT"
MAX_REPORT_BYTES = 1 << 16
# A joiner needs one live address, and these fit one datagram.
MAX_ADDRESSES = 256


@dataclasses.dataclass
class Team:
    """The workers of one supervisor, and the run they belong to.

    For workers that join a run make it directly, with ``networks`` and without a store.

    Attributes:
        num_local: workers here.
        world_size: workers of the run; 0 for workers that join one.
        first_rank: of the workers here; None where a live worker gives them their ranks.
        store: (host, port) where the workers meet; None for workers that join.
        hosted: that store, where this supervisor hosts it.
        run_id, secret: None while only the workers know.
        networks: that of the workers; where each is a replica of several processes, one a shard.
        told: the variables of the one worker here, where another launcher started us.
    """

    num_local: int
    world_size: int = 0
    first_rank: int | None = None
    store: tuple[str, int] | None = None
    hosted: HostedStore | None = None
    run_id: str | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    networks: Sequence[Network] = dataclasses.field(default_factory=lambda: [Network()])
    told: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def on_one_host(
        cls,
        num_workers: int,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str | None = None,
        *,
        num_shards: int = 1,
    ) -> "Team":
        """A run of its own; its id, and its secret if none is given, are chosen here.

        Raises:
            RendezvousError: the port is in use, or the address is not of this machine.
        """
        store = host, port
        team = cls.on_several_hosts(num_workers, 1, 0, store, secret, num_shards=num_shards)
        team.run_id, team.secret = secrets.token_hex(8), secret or secrets.token_hex(16)
        return team

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
            networks=[Network() for _ in range(num_shards)],
        )

    @classmethod
    def launched(cls, variables: Mapping[str, str], secret: str | None) -> "Team":
        """The one worker that torchrun, srun or an indexed Job told this process about.

        Raises:
            ValueError: see :meth:`Environment.read`.
        """
        given, environment = with_launcher(variables), Environment.read(variables)
        assert environment.store_host is not None
        return cls(
            1,
            environment.world_size,
            environment.rank,
            store=(environment.store_host, environment.store_port),
            run_id=environment.run_id if environment.unique_run_id else None,
            secret=secret,
            told={name: given[name] for name in TOLD if name in given},
        )

    @property
    def others_elsewhere(self) -> bool:
        """Whether workers of this run may live on other hosts."""
        return self.world_size != self.num_local

    @property
    def under_torchrun(self) -> bool:
        """Whether torchrun started us, which ends all its processes when one of them fails."""
        return self.told.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def key_prefix(self) -> str:
        """What our keys in the store begin with."""
        run_id = self.run_id or self.told.get("TORCHELASTIC_RUN_ID")
        return key_prefix(run_id, int(self.told.get("TORCHELASTIC_RESTART_COUNT") or 0))

    def variables(self, local_rank: int) -> dict[str, str]:
        """The variables of the worker of this local rank: what :meth:`Environment.read` reads."""
        own = {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.num_local)}
        own |= identity_variables(self.run_id, self.secret)
        if self.networks[0].join:
            return own | self.networks[0].join_variables()
        if self.told:
            return {**self.told, **identity_variables(self.run_id, self.secret)}
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
        """Begin to answer, in a thread: ``torch`` is imported."""
        if self.hosted is not None:
            self.hosted.open_in_background(self.key_prefix, self.world_size)

    def close(self) -> None:
        """Let go of the store."""
        if self.hosted is not None:
            self.hosted.close()

    def leave(self, addresses: Mapping[int, tuple[str, int]], *, wait: bool) -> list[int]:
        """Under torchrun: tell that this supervisor ends, and with ``wait`` do so after all others.

        So a supervisor whose worker failed stays until the others have ended, whom torchrun would
        end with it. SIGTERM ends it at any moment.

        Args:
            addresses: (host, port) of the workers by rank; one that listens there lives.
            wait: whether to wait for the others.

        Returns:
            The ranks waited for in vain: for LOST_AFTER_S they neither ended nor listened.
        """
        if not self.under_torchrun or self.store is None:
            return []
        others = [rank for rank in range(self.world_size) if rank != self.first_rank]
        heard_at = dict.fromkeys(others, time.monotonic())
        ended = f"{self.key_prefix}ended/"
        with suppress(OSError, RuntimeError):  # torchrun has ended, and with it everybody
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
    """Whether anybody takes connections there."""
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True


class Report(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message; what is None is not told.

    ``begins``: the worker has met the others and trains. ``rank``: the one that a joining worker
    was given. ``addresses``: (host, port) by rank of workers thought alive. ``run_id``, ``secret``:
    those of the run's first model, where the launcher did not choose them.
    """

    begins: bool | None = None
    rank: int | None = None
    addresses: dict[int, tuple[str, int]] | None = None
    run_id: str | None = None
    secret: str | None = None


def send_report(report: Report, variables: Mapping[str, str] = os.environ) -> bool:
    """Send it to whoever started this worker; whether it was taken."""
    descriptor, _, inode = variables.get(REPORT_VARIABLE, "").partition(":")
    if not descriptor.isdigit():
        return False
    if report.addresses is not None and len(report.addresses) > MAX_ADDRESSES:
        kept = dict(sorted(report.addresses.items())[:MAX_ADDRESSES])
        report = msgspec.structs.replace(report, addresses=kept)
    try:
        # In a program that the worker started, the number may name something else.
        status = os.fstat(int(descriptor))
        if not stat.S_ISSOCK(status.st_mode) or str(status.st_ino) != inode:
            return False
        copy = socket.socket(fileno=os.dup(int(descriptor)))
        with copy:
            copy.send(msgspec.json.encode(report), socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def report_variables(sender: socket.socket) -> dict[str, str]:
    """Tells a worker that has ``sender`` under the same descriptor to report through it."""
    number = sender.fileno()
    return {REPORT_VARIABLE: f"{number}:{os.fstat(number).st_ino}"}


class ReportChannel:
    """The receiving end, and the sending one until the worker has it."""

    def __init__(self) -> None:
        self.receiver, self.sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.receiver.setblocking(False)

    def take(self) -> list[Report]:
        """The reports that have arrived; one that is none is skipped. Never blocks."""
        reports = []
        try:
            while data := self.receiver.recv(MAX_REPORT_BYTES):
                try:
                    reports.append(msgspec.json.decode(data, type=Report))
                except msgspec.MsgspecError:
                    continue
        except OSError:  # nothing more, or closed
            pass
        return reports

    def close(self) -> None:
        """Close both ends here; the worker's stays open."""
        self.receiver.close()
        self.sender.close()
