"""The meeting of the workers of a run, once, at the start.

Addresses and settings go through the store, and so does the secret if worker 0 made it; parameters
never do. All keys begin with the run id and the restart count, so that the user's own
``init_process_group`` may share the store. After the meeting the store is not needed.

    Environment.read → Rendezvous.open → bind links on choose_host() → meet → mark_ready

Readers trust nothing in the store: values are bounded, addresses must be numeric, and text loses
its control characters before it is shown.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from gossipdp.errors import RefusedError, RendezvousError
from gossipdp.launcher.environment import Environment, check_secret, is_loopback
from gossipdp.launcher.reports import Report, say_instead_of_traceback, send_report
from gossipdp.launcher.store import (
    CHECK_EVERY_S,
    CLOSE_AFTER_S,
    MAX_RUN_ID,
    connect,
    have_begun,
    ready_key,
)
from gossipdp.links.handshake import UNLIKE_BASES
from gossipdp.logs import printable
from gossipdp.rules import port_number

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("gossipdp")

# Numbers the meetings of this process: every worker makes its models in the same order, so the
# number tells the first model's keys from the second's.
_numbers = itertools.count()

# Bounds on values from the store: a model of 100,000 tensors has about 8 MiB of names and shapes.
MAX_VALUE_BYTES, MAX_TENSORS_BYTES = 1 << 16, 1 << 24

# After this wait a line names the absent workers.
SAY_AFTER_S = 30.0
# The key under which a worker that was refused leaves its reason: the start fails for all.
_REFUSAL = "refusal"
MAX_REFUSAL = 1100

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Settings(msgspec.Struct, frozen=True):
    """The settings that must be the same on all workers of a run.

    ``tensors`` are the names and shapes of the exchanged tensors, in order. The device is not among
    them: a CPU and a CUDA worker can train together. The others are short texts that an error can
    show. ``base`` is the digest of the frozen parameters that are left where they are.
    """

    tensors: Tensors
    method: str
    graph: str
    comm_rate: str
    wire_format: str
    start: str = "afresh"
    base: str = ""
    budget_samples: int | None = None
    timeout_s: float | None = None

    @property
    def model(self) -> str:
        """Return the fingerprint of ``tensors``, in parts, so that a refusal can name a part."""
        names, shapes = [name for name, _ in self.tensors], [shape for _, shape in self.tensors]
        return (
            f"tensors={len(names)} names_and_types={_digest(names)} shapes={_digest(shapes)} "
            f"base={self.base or 'none'}"
        )

    def difference_of_models(self, reference: Tensors) -> str | None:
        """Return the first difference from worker 0's model in words; it has these tensors."""
        pairs = itertools.zip_longest(self.tensors, reference)
        for index, (one, other) in enumerate(pairs):
            if one != other:
                shown = [
                    f"{each[0]} of shape {each[1]}" if each else "none" for each in (one, other)
                ]
                return (
                    f"the models differ, first in tensor {index}: {shown[0]} here and {shown[1]} "
                    "on worker 0"
                )
        return f"the frozen bases differ: {UNLIKE_BASES}"


def _digest(values: list[str] | list[tuple[int, ...]]) -> str:
    return hashlib.sha256(msgspec.json.encode(values)).hexdigest()[:16]


class _Reference(msgspec.Struct, frozen=True):
    """The value that worker 0 publishes; the tensors of its settings have a key of their own.

    ``facts`` are compared one by one. If worker 0 was given no secret, ``secret`` was made for this
    run; with TLS it is None, as none is needed.
    """

    run_id: str
    facts: dict[str, str]
    secret: str | None

    def __post_init__(self) -> None:
        """Check the id; msgspec turns the ValueError into its ValidationError."""
        if not self.run_id.isprintable() or len(self.run_id) > MAX_RUN_ID:
            raise ValueError("the run id is too long or holds control characters")


class _Arrival(msgspec.Struct, frozen=True):
    """The value that each worker publishes: the address on which it listens.

    ``random_state`` is a digest of torch's random state; empty if the worker resumes. The samples
    are those of the run that its checkpoint knows of.
    """

    host: str
    port: int
    random_state: str = ""
    known_samples: int = 0

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.host)
        port_number("port", self.port)


@dataclasses.dataclass(frozen=True)
class RendezvousResult:
    """The outcome of a rendezvous: the run's id and secret, and each worker's (host, port) by rank.

    ``common_random_state`` is the random state with which all workers begin; empty if they differ.
    ``known_samples`` are those of the run that each worker's checkpoint knows of, by rank.
    """

    addresses: Mapping[int, tuple[str, int]]
    common_random_state: str
    run_id: str
    secret: bytes = dataclasses.field(repr=False)
    known_samples: Mapping[int, int]


class Rendezvous:
    """One worker's part in one meeting.

    Keep it until the run ends: if rank 0 hosts the store, dropping it ends the store.

    Args:
        store: where all meet; None for a worker alone.
        number: counts the meetings of this process, from 0.
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
        self._environment, self._store = environment, store
        self._timeout_s, self._number = timeout_s, number
        self._prefix = f"{environment.key_prefix}{number}/"
        if environment.num_shards > 1:  # the processes of each shard meet apart
            self._prefix += f"shard-{environment.shard}/"
        self._clock, self._sleep = clock, sleep

    @classmethod
    def open(cls, environment: Environment, timeout_s: float) -> "Rendezvous":
        """Connect to the store that the environment names; a worker alone needs none."""
        part = cls(environment, None, timeout_s=timeout_s, number=next(_numbers))
        if environment.needs_rank and not part.joins:
            raise RendezvousError(
                "a worker that was given its rank by a run joins that run's first model, and can "
                "meet the others for no second one"
            )
        if (environment.world_size > 1 or environment.agent_store) and not part.joins:
            part._store = connect(environment, timeout_s)
        return part

    @property
    def joins(self) -> bool:
        """Return whether this worker joins a run under way, and so asks a live worker."""
        return self._environment.is_joining and self._number == 0

    def meet(
        self,
        address: tuple[str, int],
        settings: Settings,
        secret: bytes | None = None,
        random_state: str = "",
        known_samples: int = 0,
    ) -> RendezvousResult:
        """Publish this worker's address, compare settings with worker 0's, wait for all.

        Args:
            address: where this worker listens: a numeric host that the others reach, and a port.
            secret: all workers' common secret, instead of GOSSIPDP_SECRET.
            random_state: a digest of torch's random state here, to compare with the others'.
            known_samples: those of the run that this worker's checkpoint knows of.

        Raises:
            RefusedError: this worker's settings or secret differ from worker 0's, or another has
                its rank.
            RendezvousError: a worker did not arrive in time or was refused, or the store went away.
        """
        environment = self._environment
        if secret is not None:
            check_secret(secret)
        secret = secret or environment.secret
        where = f"the store at {environment.store_host}:{environment.store_port}"
        own = _Arrival(*address, random_state, known_samples)
        try:
            if self._store is None:
                reference = self._reference(settings, secret)
                arrivals = {0: own}
            else:
                reference = self._agree(self._store, settings, secret)
                self._publish(self._store, f"worker/{environment.rank}", own)
                keys = [f"worker/{rank}" for rank in range(environment.world_size)]
                self._wait(self._store, keys)
                found = (self._take(self._store, key, _Arrival) for key in keys)
                arrivals = dict(enumerate(found))
        except (RefusedError, RendezvousError):
            say_instead_of_traceback()
            raise
        except msgspec.MsgspecError as error:
            raise RendezvousError(
                f"{where} holds something else under this run's keys ({printable(str(error))}); "
                "give the run another port"
            ) from error
        except RuntimeError as error:  # TCPStore's errors, all of them
            raise RendezvousError(
                f"worker {environment.rank} lost {where} while the workers met "
                f"({str(error).splitlines()[0]}); the process that hosts it has ended"
            ) from error
        addresses = {rank: (arrival.host, arrival.port) for rank, arrival in arrivals.items()}
        made = (reference.secret or "").encode()
        states = {arrival.random_state for arrival in arrivals.values()}
        common = random_state if len(states) == 1 else ""
        samples = {rank: arrival.known_samples for rank, arrival in arrivals.items()}
        meeting = RendezvousResult(addresses, common, reference.run_id, secret or made, samples)
        known = meeting.secret.decode() or None
        self.report(Report(addresses=addresses, run_id=meeting.run_id, secret=known))
        return meeting

    def report(self, report: Report) -> None:
        """Report to the launcher, unless this is not the first model: a worker joins that alone."""
        if self._number == 0:
            send_report(report)

    def mark_ready(self, rank: int | None = None) -> None:
        """Report to the launcher that this worker begins.

        Once all have begun, the failure of one ends no other. ``rank`` is the rank that a joining
        worker was given.
        """
        send_report(Report(begins=True, rank=rank if self.joins else None))
        if self._store is None:
            return
        environment = self._environment
        try:
            self._store.set(ready_key(environment.key_prefix, environment.rank), "1")
        except RuntimeError:
            logger.warning("the store went away before this worker began; training goes on")
        if environment.hosts_store:
            end = self._end_store_soon
            threading.Thread(target=end, name="gossipdp store", daemon=True).start()

    def _end_store_soon(self) -> None:
        """End the store that this worker hosts, once all train: then it is not needed."""
        environment = self._environment
        assert self._store is not None
        with suppress(RuntimeError):  # it is gone already
            while not have_begun(self._store, environment.key_prefix, environment.world_size):
                time.sleep(CHECK_EVERY_S)
        time.sleep(CLOSE_AFTER_S)
        self._store = None

    def _agree(self, store: "Store", settings: Settings, secret: bytes | None) -> _Reference:
        rank = self._environment.rank
        if store.add(self._arrival(rank), 1) > 1:
            if self._environment.is_joining:
                raise RefusedError(
                    f"worker {rank} was started again, and its earlier process had met the others "
                    f"for the script's model number {self._number + 1}: it can join the first one "
                    "alone. Start a script of several models without restarts, and go on from "
                    'checkpoints with resume="auto"'
                )
            raise RefusedError(
                f"another worker already has RANK {rank}; give each worker its own, 0 to "
                f"{self._environment.world_size - 1}, and each run its own store or GOSSIPDP_RUN_ID"
                "; if the script starts processes, as a loader does from Python 3.14 on or with "
                "multiprocessing_context='spawn', let its training begin below "
                '`if __name__ == "__main__":`; if an earlier process of this worker had arrived '
                "and ended, start all workers again, with another GOSSIPDP_RUN_ID or port"
            )
        if rank == 0:
            reference = self._reference(settings, secret)
            store.set(f"{self._prefix}tensors", msgspec.json.encode(settings.tensors).decode())
            self._publish(store, "reference", reference)
            return reference
        self._wait(store, ["reference"])
        found: _Reference = self._take(store, "reference", _Reference)
        refused = self._difference(store, settings, secret, found)
        if refused is not None:
            text = f"worker {rank} cannot join: {printable(refused, 1000)}; start all workers alike"
            # Without this key the others would wait in vain for this worker. If worker 0 differs
            # from all others, all are refused: then all give the reason that was set first.
            first = store.compare_set(f"{self._prefix}{_REFUSAL}", "", text)
            raise RefusedError(printable(first.decode(errors="replace"), MAX_REFUSAL))
        return found

    def _reference(self, settings: Settings, secret: bytes | None) -> _Reference:
        environment = self._environment
        run_id = environment.run_id
        if not environment.unique_run_id:
            token = secrets.token_hex(4)
            if self._store is not None and environment.num_shards > 1:  # one for all shards
                key = f"{environment.key_prefix}{self._number}/token"
                known = self._store.compare_set(key, "", token).decode(errors="replace")
                token = printable(known, 8)
            run_id = f"{run_id}-{token}"
        if environment.restart_count or self._number:
            run_id = f"{run_id}-{environment.restart_count}-{self._number}"
        if environment.num_shards > 1:  # a launcher that joins workers reads it
            run_id = f"{run_id}-shard-{environment.shard}-of-{environment.num_shards}"
        made = None
        if secret is None and environment.tls is None:  # with TLS, its key is membership
            made = secrets.token_hex(16)
            host = environment.store_host
            if self._store is not None and host is not None and not is_loopback(host):
                logger.warning(
                    "no secret is given, so everyone who reaches the store at %s:%d can read the "
                    "one that worker 0 made, and take part in this run: set GOSSIPDP_SECRET to the "
                    "same long random text on all workers, or use TLS (gossipdp tls-init)",
                    host,
                    environment.store_port,
                )
        return _Reference(run_id, self._facts(settings, secret, run_id), secret=made)

    def _facts(self, settings: Settings, secret: bytes | None, run_id: str) -> dict[str, str]:
        shown = f"gossipdp rendezvous {run_id}".encode()
        named = ("method", "graph", "comm_rate", "wire_format", "budget_samples", "timeout_s")
        return {
            "WORLD_SIZE": str(self._environment.world_size),
            "TLS": "not used" if self._environment.tls is None else "used",
            "GOSSIPDP_SECRET": "not set" if secret is None else "set",
            "start": settings.start,
            **{name: repr(getattr(settings, name)) for name in named},
            "model": settings.model,
            # It shows whoever knows the secret that worker 0 does.
            "proof": hmac.new(secret, shown, hashlib.sha256).hexdigest() if secret else "",
        }

    def _difference(
        self, store: "Store", settings: Settings, secret: bytes | None, reference: _Reference
    ) -> str | None:
        for name, here in self._facts(settings, secret, reference.run_id).items():
            there = reference.facts.get(name)
            if here == there:
                continue
            if name == "start":
                return f"this worker starts {here}, and worker 0 starts {there}"
            if name == "model":
                tensors = self._take(store, "tensors", Tensors, MAX_TENSORS_BYTES)
                return settings.difference_of_models(tensors)
            if name == "proof":
                return "the secret differs from worker 0's"
            return f"{name} is {here} here and {there} on worker 0"
        return None

    def _wait(self, store: "Store", keys: list[str]) -> None:
        """Poll until all keys are set; raise RendezvousError after a refusal or the time-out.

        It polls in Python, because Ctrl+C cannot interrupt the store's own wait.
        """
        began = self._clock()
        pause_s, has_said = 0.01, False
        while not store.check([self._prefix + key for key in keys]):
            if store.check([self._prefix + _REFUSAL]):
                refusal = store.get(self._prefix + _REFUSAL).decode(errors="replace")
                raise RendezvousError(printable(refusal, MAX_REFUSAL))
            waited_s = self._clock() - began
            if waited_s >= self._timeout_s:
                raise RendezvousError(self._absence(store))
            if waited_s >= SAY_AFTER_S and not has_said:
                has_said = True
                present, absent = self._present(store)
                if absent and present[0] == self._environment.rank:
                    who, most_s = _listed(absent), self._timeout_s
                    logger.warning("waiting for workers %s to arrive, at most %g s", who, most_s)
            self._sleep(pause_s)
            pause_s = min(0.1, pause_s * 1.5)

    def _present(self, store: "Store") -> tuple[list[int], list[int]]:
        ranks = range(self._environment.world_size)
        present = [rank for rank in ranks if store.check([self._arrival(rank)])]
        return present, [rank for rank in ranks if rank not in present]

    def _arrival(self, rank: int) -> str:
        return f"{self._prefix}arrivals/{rank}"

    def _absence(self, store: "Store") -> str:
        present, absent = self._present(store)
        if not absent:
            return (
                f"all workers arrived but did not finish meeting within {self._timeout_s:g} s; "
                "one of them is stuck or has ended: look at the output of all hosts"
            )
        noun = "worker" if len(absent) == 1 else "workers"
        return (
            f"{noun} {_listed(absent)} did not arrive within {self._timeout_s:g} s; present: "
            f"{_listed(present)}; check that every worker was started, that it runs the same "
            "script, and its output; a slow start needs a longer start_timeout_s"
        )

    def _take(
        self, store: "Store", key: str, kind: type[Any], max_bytes: int = MAX_VALUE_BYTES
    ) -> Any:
        value = store.get(self._prefix + key)
        if len(value) > max_bytes:
            raise msgspec.ValidationError(f"{key} has {len(value)} bytes, over {max_bytes}")
        return msgspec.json.decode(value, type=kind)

    def _publish(self, store: "Store", key: str, value: msgspec.Struct) -> None:
        store.set(self._prefix + key, msgspec.json.encode(value).decode())


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
