"""How the workers of a run find one another, once, at the start.

Through the store go addresses, settings and, where nobody gave one, the secret; never
parameters. All keys begin with the run id and the restart count, so that the user's own
``init_process_group`` may share the store. Afterwards the store is needed no more.

    Environment.read → Rendezvous.open → bind links on choose_host() → meet → mark_ready

Who reads the store trusts nothing in it: values are bounded, addresses must be numeric, and text
loses its control characters before anybody sees it.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import Environment, check_secret
from gossipdp.launcher.reports import Report, send_report
from gossipdp.launcher.store import (
    CHECK_EVERY_S,
    CLOSE_AFTER_S,
    MAX_RUN_ID,
    connect,
    notice_key,
    proof_of,
    read_notice,
    ready_key,
)
from gossipdp.links.strangers import printable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("gossipdp")

# Rendezvous of this process so far: every worker makes its models in the same order, so the
# number tells the first model's keys from the second's.
_numbers = itertools.count()


# What is read from the store: a model of 100,000 tensors has about 8 MiB of names and shapes.
MAX_VALUE_BYTES, MAX_TENSORS_BYTES = 1 << 16, 1 << 24

# Name and shape of everything that is exchanged, in order.
Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Settings(msgspec.Struct, frozen=True):
    """What all workers of a run must have alike.

    ``tensors`` are the names and shapes of what is exchanged, in order; never the device, so that
    a CPU and a CUDA worker can train together. The others are short texts that an error can show.
    """

    tensors: Tensors
    method: str
    graph: str
    comm_rate: str
    wire_format: str
    start: str = "afresh"

    @property
    def model(self) -> str:
        """The fingerprint of ``tensors``, in parts, so that a refusal can say which differs."""
        names, shapes = [name for name, _ in self.tensors], [shape for _, shape in self.tensors]
        return f"tensors={len(names)} names_and_types={_digest(names)} shapes={_digest(shapes)}"

    def difference(self, reference: "Settings") -> str | None:
        """In what this worker differs from worker 0, in words; None where they agree."""
        for name in ("start", "method", "graph", "comm_rate", "wire_format"):
            here, there = getattr(self, name), getattr(reference, name)
            if here != there:
                if name == "start":
                    return f"this worker starts {here}, and worker 0 starts {there}"
                return f"{name} is {here!r} here and {there!r} on worker 0"
        for index, (here, there) in enumerate(
            itertools.zip_longest(self.tensors, reference.tensors)
        ):
            if here != there:
                return (
                    f"the models differ, first in tensor {index}: {_tensor(here)} here and "
                    f"{_tensor(there)} on worker 0"
                )
        return None


def _digest(values: list[str] | list[tuple[int, ...]]) -> str:
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:16]


def _tensor(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "none" if tensor is None else f"{tensor[0]} of shape {tensor[1]}"


class _Reference(msgspec.Struct, frozen=True):
    """What worker 0 publishes; its settings' tensors lie apart."""

    run_id: str
    world_size: int
    model: str
    settings: Settings
    # One of these: a secret made for this run, or the proof that worker 0 has one; or TLS is used.
    secret: str | None
    proof: str | None
    has_tls: bool = False

    def __post_init__(self) -> None:
        """Check the id; msgspec turns the ValueError into its ValidationError."""
        if not self.run_id.isprintable() or len(self.run_id) > MAX_RUN_ID:
            raise ValueError("the run id is too long or holds control characters")


class _Arrival(msgspec.Struct, frozen=True):
    """What every worker publishes: where it listens, or why it left."""

    host: str = ""
    port: int = 0
    refused: str = ""

    def __post_init__(self) -> None:
        """Check the address; msgspec turns the ValueError into its ValidationError."""
        if not self.refused:
            ipaddress.ip_address(self.host)
            if not 0 <= self.port < 65536:
                raise ValueError(f"port {self.port} is not in 0..65535")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The outcome of a rendezvous: (host, port) by rank, the run's id and secret."""

    rank: int
    world_size: int
    addresses: Mapping[int, tuple[str, int]]
    run_id: str
    secret: bytes = dataclasses.field(repr=False)


class Rendezvous:
    """One worker's part in one meeting.

    Keep it until the run ends: where rank 0 hosts the store, dropping it ends the store.

    Args:
        environment: who this worker is.
        store: where all meet; None for a worker alone.
        timeout_s: the longest wait for another worker, in seconds.
        number: which meeting of this process it is, from 0.
    """

    def __init__(
        self,
        environment: Environment,
        store: "Store | None",
        *,
        timeout_s: float,
        number: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.environment = environment
        self._store = store
        self._timeout_s = timeout_s
        self._number = number
        self._prefix = f"{environment.key_prefix}{number}/"
        self._clock, self._sleep = clock, sleep
        self._closing = threading.Event()
        self._closer: threading.Thread | None = None

    @classmethod
    def open(cls, environment: Environment, timeout_s: float) -> "Rendezvous":
        """Connect to the store that the environment names; a worker alone needs none.

        Raises:
            RendezvousError: the store did not answer within ``timeout_s``.
        """
        number = next(_numbers)
        joins = environment.is_joining and number == 0
        if environment.needs_rank and not joins:
            raise RendezvousError(
                "a worker that was given its rank by a run joins that run's first model, and can "
                "meet the others for no second one"
            )
        needed = (environment.world_size > 1 or environment.agent_store) and not joins
        store = connect(environment, timeout_s) if needed else None
        return cls(environment, store, timeout_s=timeout_s, number=number)

    @property
    def joins(self) -> bool:
        """Whether this worker comes into a run that goes on: it asks others, and does not meet."""
        return self.environment.is_joining and self._number == 0

    def meet(
        self, address: tuple[str, int], settings: Settings, secret: bytes | None = None
    ) -> Meeting:
        """Publish this worker's address, compare settings with worker 0's, wait for all.

        Args:
            address: where this worker listens: a numeric host that the others reach, and a port.
            settings: compared field by field with worker 0's.
            secret: all workers' common secret, instead of GOSSIPDP_SECRET.

        Raises:
            RefusedError: this worker's settings or secret differ from worker 0's, or another has
                its rank.
            RendezvousError: some worker did not arrive in time or was refused, or the store went.
        """
        rank, world_size = self.environment.rank, self.environment.world_size
        if secret is not None:
            check_secret(secret)
        secret = secret or self.environment.secret
        try:
            if self._store is None:
                reference = self._reference(settings, secret)
                arrivals = {0: _Arrival(*address)}
            else:
                reference = self._agree(self._store, settings, secret)
                self._publish(self._store, f"worker/{rank}", _Arrival(*address))
                arrivals = self._gather(self._store)
        except (RefusedError, RendezvousError):
            raise
        except msgspec.MsgspecError as error:
            raise RendezvousError(
                f"the store at {self.environment.store_host}:{self.environment.store_port} holds "
                f"something else under this run's keys ({printable(str(error))}); give the run "
                "another port"
            ) from error
        except RuntimeError as error:  # TCPStore's errors, all of them
            raise RendezvousError(
                f"worker {rank} lost the store at {self.environment.store_host}:"
                f"{self.environment.store_port} while the workers met "
                f"({str(error).splitlines()[0]}); whoever hosts it has ended"
            ) from error
        meeting = Meeting(
            rank=rank,
            world_size=world_size,
            addresses={other: (arrival.host, arrival.port) for other, arrival in arrivals.items()},
            run_id=reference.run_id,
            secret=secret or (reference.secret or "").encode(),
        )
        if self._number == 0:  # a worker that comes back joins the run of the first model
            send_report(
                Report(
                    addresses=dict(meeting.addresses),
                    run_id=meeting.run_id,
                    secret=meeting.secret.decode() or None,
                )
            )
        return meeting

    def mark_ready(self, rank: int | None = None) -> None:
        """Tell the launcher that this worker begins; when all have, one's failure ends no other.

        ``rank`` is the one that a joining worker was given.

        A method that cannot go on without every worker (``allreduce``) does not call it.
        """
        send_report(Report(begins=True, rank=rank if self.joins else None))
        if self._store is None:
            return
        try:
            self._store.set(ready_key(self.environment.key_prefix, self.environment.rank), "1")
        except RuntimeError:
            logger.warning("the store went away before this worker began; training goes on")
        if self.environment.hosts_store and self._closer is None:
            self._closer = threading.Thread(
                target=self._close_store_soon, name="gossipdp store", daemon=True
            )
            self._closer.start()

    def close(self) -> None:
        """Drop the store; where rank 0 hosts it, end it."""
        self._closing.set()
        if self._closer is not None:
            self._closer.join(1.0)
        self._store = None

    def _close_store_soon(self) -> None:
        """End the store that this worker hosts: nobody needs it once all train."""
        store = self._store
        if store is None:
            return
        ranks = range(self.environment.world_size)
        missing = [ready_key(self.environment.key_prefix, rank) for rank in ranks]
        try:
            while missing and not self._closing.wait(CHECK_EVERY_S):
                missing = [key for key in missing if not store.check([key])]
        except RuntimeError:  # it is gone already
            pass
        self._closing.wait(CLOSE_AFTER_S)
        self._store = None

    def _agree(self, store: "Store", settings: Settings, secret: bytes | None) -> _Reference:
        rank = self.environment.rank
        if store.add(f"{self._prefix}arrivals/{rank}", 1) > 1:
            raise RefusedError(
                f"another worker already has RANK {rank}; give each worker its own, 0 to "
                f"{self.environment.world_size - 1}, and each run its own store or GOSSIPDP_RUN_ID"
            )
        if rank == 0:
            reference: _Reference = self._reference(settings, secret)
            store.set(f"{self._prefix}tensors", msgspec.json.encode(settings.tensors).decode())
            self._publish(store, "reference", reference)
            return reference
        self._wait(store, {0: "reference"})
        reference = self._take(store, "reference", _Reference)
        refused = self._difference(store, settings, secret, reference)
        if refused is not None:
            self._publish(store, f"worker/{rank}", _Arrival(refused=refused))
            raise RefusedError(
                f"worker {rank} cannot join: {printable(refused)}; start all workers alike"
            )
        return reference

    def _reference(self, settings: Settings, secret: bytes | None) -> _Reference:
        environment = self.environment
        run_id = environment.run_id
        if not environment.unique_run_id:
            run_id = f"{run_id}-{secrets.token_hex(4)}"
        if environment.restart_count or self._number:
            run_id = f"{run_id}-{environment.restart_count}-{self._number}"
        made = None
        if secret is None and environment.tls is None:  # with TLS, its key is membership
            made = secrets.token_hex(16)
            if self._store is not None:
                self._warn_of_open_secret()
        return _Reference(
            run_id=run_id,
            world_size=environment.world_size,
            model=settings.model,
            settings=msgspec.structs.replace(settings, tensors=()),
            secret=made,
            proof=None if secret is None else proof_of(secret, run_id),
            has_tls=environment.tls is not None,
        )

    def _warn_of_open_secret(self) -> None:
        """Worker 0 made a secret, and the others get it through the store."""
        environment = self.environment
        assert environment.store_host is not None
        if not is_loopback(environment.store_host):
            logger.warning(
                "no secret is given, so whoever reaches the store at %s:%d can read the one that "
                "worker 0 made, and take part in this run: set GOSSIPDP_SECRET to the same long "
                "random text on all workers, or use TLS (gossipdp tls-init)",
                environment.store_host,
                environment.store_port,
            )

    def _difference(
        self, store: "Store", settings: Settings, secret: bytes | None, reference: _Reference
    ) -> str | None:
        here = self.environment.world_size
        if here != reference.world_size:
            return f"WORLD_SIZE is {here} here and {reference.world_size} on worker 0"
        has_tls = self.environment.tls is not None
        if has_tls != reference.has_tls:
            return f"TLS is {'on' if has_tls else 'off'} here and not so on worker 0"
        if secret is None and reference.proof is not None:
            return "GOSSIPDP_SECRET is set on worker 0 but not here"
        if secret is not None and reference.proof is None:
            return "GOSSIPDP_SECRET is set here but not on worker 0"
        if secret is not None and reference.proof is not None:
            own = proof_of(secret, reference.run_id)
            if not hmac.compare_digest(own, reference.proof):
                return "the secret differs from worker 0's"
        tensors = settings.tensors
        if settings.model != reference.model:
            tensors = self._take(store, "tensors", Tensors, MAX_TENSORS_BYTES)
        theirs = msgspec.structs.replace(reference.settings, tensors=tensors)
        return settings.difference(theirs)

    def _gather(self, store: "Store") -> dict[int, _Arrival]:
        keys = {rank: f"worker/{rank}" for rank in range(self.environment.world_size)}
        arrivals: dict[int, _Arrival] = {}

        def note(ranks: Iterable[int]) -> None:
            for rank in ranks:
                arrivals[rank] = self._take(store, keys[rank], _Arrival)
                if arrivals[rank].refused:
                    raise RendezvousError(
                        f"worker {rank} was refused: {printable(arrivals[rank].refused)}; "
                        "start all workers alike"
                    )

        self._wait(store, keys, note)
        return dict(sorted(arrivals.items()))

    def _wait(
        self,
        store: "Store",
        keys: Mapping[int, str],
        note: Callable[[Iterable[int]], None] = lambda ranks: None,
    ) -> None:
        """Poll until every worker of ``keys`` has set its key; ``note`` gets each rank once.

        Polled in Python, because the store's own wait cannot be interrupted by Ctrl+C.
        """
        deadline = self._clock() + self._timeout_s
        missing = dict(keys)
        pause_s = 0.01
        while True:
            arrived = [rank for rank, key in missing.items() if store.check([self._prefix + key])]
            for rank in arrived:
                del missing[rank]
            note(arrived)
            if not missing:
                return
            self._heed_notice(store)
            if self._clock() >= deadline:
                raise self._absence(store)
            self._sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)

    def _absence(self, store: "Store") -> RendezvousError:
        present: list[int] = []
        absent: list[int] = []
        for rank in range(self.environment.world_size):
            here = store.check([f"{self._prefix}arrivals/{rank}"])
            (present if here else absent).append(rank)
        if not absent:
            return RendezvousError(
                f"all workers arrived but did not finish meeting within {self._timeout_s:g} s; "
                "one of them is stuck or has ended: look at their output"
            )
        noun = "worker" if len(absent) == 1 else "workers"
        return RendezvousError(
            f"{noun} {_join(absent)} did not arrive within {self._timeout_s:g} s; present: "
            f"{_join(present)}; check that every worker was started, that it runs the same script, "
            "and its output; a slow start needs a longer start_timeout_s"
        )

    def _heed_notice(self, store: "Store") -> None:
        """Raise RendezvousError where the run has ended on another host before it began."""
        prefix = self.environment.key_prefix
        if not store.check([notice_key(prefix)]):
            return
        text = read_notice(prefix, store.get(notice_key(prefix)), self.environment.secret)
        if text is not None:
            raise RendezvousError(f"the run ended on another host before it began: {text}")

    def _take(
        self, store: "Store", key: str, kind: type[Any], max_bytes: int = MAX_VALUE_BYTES
    ) -> Any:
        value = store.get(self._prefix + key)
        if len(value) > max_bytes:
            raise msgspec.ValidationError(f"{key} has {len(value)} bytes, over {max_bytes}")
        return msgspec.json.decode(value, type=kind)

    def _publish(self, store: "Store", key: str, value: msgspec.Struct) -> None:
        store.set(self._prefix + key, msgspec.json.encode(value).decode())


def is_loopback(host: str) -> bool:
    """Whether a host's name or address leads to this machine alone.

    Example:
        >>> is_loopback("127.0.0.2"), is_loopback("::1"), is_loopback("10.0.0.1")
        (True, True, False)
    """
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each)).is_loopback for each in found)


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
