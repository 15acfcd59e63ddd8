"""How the workers of a run find one another, once, at the start.

Through the store go addresses, settings and, where nobody chose one, the secret; never
parameters. All keys begin with the run id and the restart count, so that the user's own
``init_process_group`` may share the store. Afterwards the store is needed no more.

    Environment.read → Rendezvous.open → bind links on choose_host() → meet → mark_ready
"""

import dataclasses
import hashlib
import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.runtime.environment import Environment
from gossipdp.runtime.reports import Report, send_report
from gossipdp.runtime.settings import Settings, Tensors
from gossipdp.runtime.store import connect, ready_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("gossipdp.runtime")

# Rendezvous of this process so far: every worker makes its models in the same order, so the
# number tells the first model's keys from the second's.
_numbers = itertools.count()


class _Reference(msgspec.Struct, frozen=True):
    """What worker 0 publishes; its settings' tensors lie apart."""

    run_id: str
    num_workers: int
    model: str
    settings: Settings
    # Exactly one of these: a secret made for this run, or the proof that worker 0 has one.
    secret: str | None
    proof: str | None


class _Arrival(msgspec.Struct, frozen=True):
    """What every worker publishes: where it listens, or why it left."""

    host: str = ""
    port: int = 0
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The outcome of a rendezvous: (host, port) by rank, the run's id and secret."""

    rank: int
    num_workers: int
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
        needed = (environment.num_workers > 1 or environment.agent_store) and not joins
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
        rank, num_workers = self.environment.rank, self.environment.num_workers
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
                f"something else under this run's keys ({error}); give the run another port"
            ) from error
        except RuntimeError as error:  # TCPStore's errors, all of them
            raise RendezvousError(
                f"worker {rank} lost the store at {self.environment.store_host}:"
                f"{self.environment.store_port} while the workers met "
                f"({str(error).splitlines()[0]}); whoever hosts it has ended"
            ) from error
        meeting = Meeting(
            rank=rank,
            num_workers=num_workers,
            addresses={other: (arrival.host, arrival.port) for other, arrival in arrivals.items()},
            run_id=reference.run_id,
            secret=secret or (reference.secret or "").encode(),
        )
        if self._number == 0:  # a worker that comes back joins the run of the first model
            send_report(
                Report(
                    addresses=dict(meeting.addresses),
                    run_id=meeting.run_id,
                    secret=meeting.secret.decode(),
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

    def close(self) -> None:
        """Drop the store; where rank 0 hosts it, end it."""
        self._store = None

    def _agree(self, store: "Store", settings: Settings, secret: bytes | None) -> _Reference:
        rank = self.environment.rank
        if store.add(f"{self._prefix}arrivals/{rank}", 1) > 1:
            raise RefusedError(
                f"another worker already has RANK {rank}; give each worker its own, 0 to "
                f"{self.environment.num_workers - 1}, and each run its own store or GOSSIPDP_RUN_ID"
            )
        if rank == 0:
            reference = self._reference(settings, secret)
            store.set(f"{self._prefix}tensors", msgspec.json.encode(settings.tensors).decode())
            self._publish(store, "reference", reference)
            return reference
        self._wait(store, {0: "reference"})
        reference = msgspec.json.decode(store.get(f"{self._prefix}reference"), type=_Reference)
        refused = self._difference(store, settings, secret, reference)
        if refused is not None:
            self._publish(store, f"worker/{rank}", _Arrival(refused=refused))
            raise RefusedError(f"worker {rank} cannot join: {refused}; start all workers alike")
        return reference

    def _reference(self, settings: Settings, secret: bytes | None) -> _Reference:
        environment = self.environment
        run_id = environment.run_id
        if not environment.unique_run_id:
            run_id = f"{run_id}-{secrets.token_hex(4)}"
        if environment.restart_count or self._number:
            run_id = f"{run_id}-{environment.restart_count}-{self._number}"
        made = None
        if secret is None:
            made = secrets.token_hex(16)
            if self._store is not None:
                logger.info(
                    "GOSSIPDP_SECRET is not set: worker 0 made a random secret and gave it to the "
                    "others through the store, where whoever reaches the store can read it"
                )
        return _Reference(
            run_id=run_id,
            num_workers=environment.num_workers,
            model=settings.model,
            settings=msgspec.structs.replace(settings, tensors=()),
            secret=made,
            proof=None if secret is None else _proof(secret, run_id),
        )

    def _difference(
        self, store: "Store", settings: Settings, secret: bytes | None, reference: _Reference
    ) -> str | None:
        here = self.environment.num_workers
        if here != reference.num_workers:
            return f"WORLD_SIZE is {here} here and {reference.num_workers} on worker 0"
        if secret is None and reference.secret is None:
            return "GOSSIPDP_SECRET is set on worker 0 but not here"
        if secret is not None and reference.proof is None:
            return "GOSSIPDP_SECRET is set here but not on worker 0"
        if secret is not None and reference.proof is not None:
            own = _proof(secret, reference.run_id)
            if not hmac.compare_digest(own, reference.proof):
                return "the secret differs from worker 0's"
        tensors = settings.tensors
        if settings.model != reference.model:
            tensors = msgspec.json.decode(store.get(f"{self._prefix}tensors"), type=Tensors)
        theirs = msgspec.structs.replace(reference.settings, tensors=tensors)
        return settings.difference(theirs)

    def _gather(self, store: "Store") -> dict[int, _Arrival]:
        keys = {rank: f"worker/{rank}" for rank in range(self.environment.num_workers)}
        arrivals: dict[int, _Arrival] = {}

        def note(ranks: Iterable[int]) -> None:
            for rank in ranks:
                value = store.get(self._prefix + keys[rank])
                arrivals[rank] = msgspec.json.decode(value, type=_Arrival)
                if arrivals[rank].refused:
                    raise RendezvousError(
                        f"worker {rank} was refused: {arrivals[rank].refused}; start all workers "
                        "alike"
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
            if self._clock() >= deadline:
                raise self._absence(store)
            self._sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)

    def _absence(self, store: "Store") -> RendezvousError:
        present: list[int] = []
        absent: list[int] = []
        for rank in range(self.environment.num_workers):
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

    def _publish(self, store: "Store", key: str, value: msgspec.Struct) -> None:
        store.set(self._prefix + key, msgspec.json.encode(value).decode())


def _proof(secret: bytes, run_id: str) -> str:
    return hmac.new(secret, f"gossipdp rendezvous {run_id}".encode(), hashlib.sha256).hexdigest()


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
