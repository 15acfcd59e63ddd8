"""The environment variables that tell a worker who it is.

The names are torchrun's, so a script runs unchanged under torchrun, under our launcher, and under a
shell that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Ours begin with GOSSIPDP_. Those of
Slurm and Kubernetes are translated.

Accelerate, the Trainer of transformers and Lightning start ``torch.distributed`` when they find
these. :func:`without_launcher_variables` hides them; :meth:`Environment.read` still finds them.
"""

import dataclasses
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gossipdp.errors import RendezvousError
from gossipdp.rules import at_least_1, port_number

logger = logging.getLogger("gossipdp")

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The place of a worker, as torchrun says it. GROUP_RANK, the number of this host, is not among
# these: Slurm counts hosts in its own way.
PLACE = (
    *REQUIRED,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)

# To torch.distributed a replica of several processes is a world of its own. These names hold the
# place of the replica among the others.
OF_REPLICA = {name: f"GOSSIPDP_{name}" for name in REQUIRED}
# Rank and world size of a worker that joins a run, until it has asked for them.
UNKNOWN_RANK, UNKNOWN_WORLD_SIZE = -1, 0
MIN_SECRET_BYTES = 16
# Variables of torchrun, Slurm's srun, PMI, Open MPI and MVAPICH, by which the frameworks find out
# that a launcher started them.
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
LAUNCHER_NAMES = {
    *PLACE,
    *("GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"),
}

# Below the ports that Linux gives to programs that ask for any (32768 and up).
FIRST_SLURM_PORT, NUM_SLURM_PORTS, PORTS_A_JOB = 20000, 10000, 16

_taken_out: dict[str, str] = {}


def check_platform(platform: str = sys.platform) -> None:
    if platform != "linux":
        raise OSError(f"gossipdp trains on Linux, and this is {platform}; on Windows use WSL")


@dataclasses.dataclass(frozen=True)
class Environment:
    """The place of this worker in its run, and the place where workers meet.

    ``agent_store`` says that the launcher hosts the store, so that every worker is a client of
    it; else rank 0 hosts it. ``unique_run_id`` says that ``run_id`` belongs to one run only.
    ``local_world_size`` is None if it is unknown.

    If a replica of the model takes several processes, each holds one shard of it, ``shard`` of
    ``num_shards``. The processes of one shard make a network of their own. In it ``rank`` is the
    number of the replica, and ``world_size`` the number of replicas.

    ``join`` holds (host, port) of workers of a run that goes on without this one. This worker then
    uses no store, and asks any of these workers for the others; their newest addresses are in its
    launcher's ``join_file``. A worker that died and is back
    (``num_restarts`` > 0) has its old rank. A new worker has ``UNKNOWN_RANK`` and
    ``UNKNOWN_WORLD_SIZE``, and asks for a rank too.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = None
    shard: int = 0
    num_shards: int = 1
    store_host: str | None = None
    store_port: int = 0
    agent_store: bool = False
    run_id: str = "default"
    unique_run_id: bool = False
    restart_count: int = 0
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    host: str | None = None
    port: int = 0
    status_host: str | None = None
    status_port: int | None = None
    tls: Path | None = None
    join: tuple[tuple[str, int], ...] = ()
    join_file: str = ""
    num_restarts: int = 0

    def __post_init__(self) -> None:
        port_number("MASTER_PORT", self.store_port)
        port_number("GOSSIPDP_PORT", self.port)
        port_number("GOSSIPDP_STATUS_PORT", self.status_port or 0)
        if not 0 <= self.shard < self.num_shards:
            raise ValueError(
                f"this process is number {self.shard} (RANK) of a replica of {self.num_shards} "
                "(WORLD_SIZE): start it with `gossipdp run --nproc-per-replica`"
            )
        if self.is_joining:
            if not self.unique_run_id:
                raise ValueError(
                    "GOSSIPDP_JOIN is set, but not GOSSIPDP_RUN_ID: start the worker with "
                    "`gossipdp run --join HOST:PORT`, or set both"
                )
            return
        at_least_1("WORLD_SIZE", self.world_size)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"RANK is {self.rank}; with WORLD_SIZE {self.world_size} it must be in "
                f"0..{self.world_size - 1}"
            )

    @property
    def is_joining(self) -> bool:
        """Return whether this worker joins a run that goes on, instead of meeting the others."""
        return bool(self.join)

    @property
    def needs_rank(self) -> bool:
        """Return whether this worker has yet to ask a live one for its rank."""
        return self.rank == UNKNOWN_RANK

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> "Environment":
        """Read the environment from variables, by default from those of this process.

        :func:`without_launcher_variables` hides none of these. Without RANK and WORLD_SIZE, also
        of Slurm, Kubernetes or torch's process group, it is one worker alone.

        Raises:
            ValueError: only some of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are known, a value
                is no number or differs from the group's, or GOSSIPDP_JOIN holds no addresses.
        """
        if variables is None:
            variables = _with_process_group({**os.environ, **_taken_out})
        shard, num_shards = 0, 1
        if variables.get("GOSSIPDP_WORLD_SIZE"):
            shard, num_shards = _number(variables, "RANK", 0), _number(variables, "WORLD_SIZE", 1)
            of_replica = {name: variables.get(own, "") for name, own in OF_REPLICA.items()}
            variables = {**variables, **of_replica}
        given = {name: value for name, value in variables.items() if value}
        join = read_addresses("GOSSIPDP_JOIN", given.get("GOSSIPDP_JOIN", ""))
        if join and "RANK" not in given:  # it asks a live worker for one, and uses no store
            given = {name: given[name] for name in given.keys() - {"MASTER_ADDR", "MASTER_PORT"}}
        else:
            given = with_torchrun_names(given)
        if not join and not given.keys() & {"RANK", "WORLD_SIZE"}:  # one worker alone
            own = {name for name in given if name.startswith("GOSSIPDP_")} - {"GOSSIPDP_RUN_ID"}
            given = {name: given[name] for name in own}
        missing = [name for name in REQUIRED if name not in given]
        present = [name for name in REQUIRED if name in given]
        if missing and present and not join:
            raise ValueError(
                f"{', '.join(present)} set (in the environment, or by init_process_group), but not "
                f"{', '.join(missing)}: start the workers with `gossipdp run`, torchrun or srun, "
                "or set all four; set neither RANK nor WORLD_SIZE to train with one worker"
            )
        local_rank = _number(given, "LOCAL_RANK", 0)
        first_port = _number(given, "GOSSIPDP_PORT", 0)
        run_id, secret = given.get("GOSSIPDP_RUN_ID"), given.get("GOSSIPDP_SECRET")
        status_port = given.get("GOSSIPDP_STATUS_PORT")
        is_hosted = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=_number(given, "RANK", UNKNOWN_RANK if join else 0),
            world_size=_number(given, "WORLD_SIZE", UNKNOWN_WORLD_SIZE if join else 1),
            local_rank=local_rank,
            local_world_size=_number(given, "LOCAL_WORLD_SIZE", 0) // num_shards or None,
            shard=shard,
            num_shards=num_shards,
            store_host=given.get("MASTER_ADDR"),
            store_port=_number(given, "MASTER_PORT", 0),
            agent_store=is_hosted and "MASTER_ADDR" in given,
            run_id=run_id or given.get("TORCHELASTIC_RUN_ID", "default"),
            unique_run_id=bool(run_id),
            restart_count=_number(given, "TORCHELASTIC_RESTART_COUNT", 0),
            secret=check_secret(secret.encode(), "GOSSIPDP_SECRET") if secret else None,
            host=given.get("GOSSIPDP_HOST"),
            # A fixed port is the first of a block: local workers take one each.
            port=first_port + local_rank if first_port else 0,
            status_host=given.get("GOSSIPDP_STATUS_HOST"),
            status_port=_number(given, "GOSSIPDP_STATUS_PORT", 0) if status_port else None,
            tls=Path(tls) if (tls := given.get("GOSSIPDP_TLS")) else None,
            join=join,
            join_file=given.get("GOSSIPDP_JOIN_FILE", ""),
            num_restarts=_number(given, "GOSSIPDP_RESTARTS", 0),
        )

    def addresses_to_join(self) -> Sequence[tuple[str, int]]:
        """Return the newest addresses of others that the launcher here knows, else ``join``."""
        try:
            data = Path(self.join_file).read_bytes()
            known = msgspec.json.decode(data, type=dict[int, tuple[str, int]])
        except (OSError, msgspec.MsgspecError):  # there is no file, or the launcher writes it now
            known = {}
        return [known[each] for each in reversed(known) if each != self.rank] or self.join

    @property
    def hosts_store(self) -> bool:
        """Return whether this worker hosts the store, since no launcher does."""
        return self.rank == 0 and not self.agent_store and self.store_host is not None

    @property
    def key_prefix(self) -> str:
        """Return the prefix of all our keys, so that others may share the store."""
        return f"gossipdp/{self.run_id}/{self.restart_count}/"

    def choose_host(self) -> str:
        """Return the numeric address on which this worker listens.

        It is GOSSIPDP_HOST if set, else the address of the interface that routes to MASTER_ADDR,
        or if it joins to the first of GOSSIPDP_JOIN. If that is on loopback, so is the result,
        since then every worker is on this machine. It stands for all addresses only if
        GOSSIPDP_HOST does.

        Raises:
            RendezvousError: the name does not resolve, or no interface leads there.
        """
        return _look_up("GOSSIPDP_HOST", self.host) if self.host else self._routed_host()

    def announced_host(self, bound: str) -> str:
        """Return the address that a worker listening on ``bound`` announces to the others.

        It is ``bound`` itself, or if that stands for all addresses, the one that routes to
        MASTER_ADDR or GOSSIPDP_JOIN. Raise as :meth:`choose_host` does.
        """
        return self._routed_host() if ipaddress.ip_address(bound).is_unspecified else bound

    def _routed_host(self) -> str:
        name, target = "MASTER_ADDR", self.store_host or "127.0.0.1"
        if self.join:  # the store may be gone
            name, target = "GOSSIPDP_JOIN", self.join[0][0]
        host = _look_up(name, target, route=True)
        elsewhere = self.local_world_size is not None and self.local_world_size < self.world_size
        if elsewhere and ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "%s %s is loopback, so this worker listens on %s: workers on other "
                "machines cannot reach it. Set GOSSIPDP_HOST to an address of this machine if "
                "there are any.",
                name,
                target,
                host,
            )
        return host


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address leads to this machine alone."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each)).is_loopback for each in found)


def _look_up(name: str, host: str, *, route: bool = False) -> str:
    """Return the numeric address of a host, or with ``route`` the one of ours that leads there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        if not route:
            return str(address[0])
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; picks the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(
            f"cannot reach {name} {host!r} ({error}); check the name and the network"
        ) from error


def check_secret(secret: bytes, name: str = "the secret") -> bytes:
    """Return ``secret``; raise ValueError if it is so short that it could be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{name} has {len(secret)} bytes; give at least {MIN_SECRET_BYTES}, for example from "
            "`openssl rand -hex 16`"
        )
    return secret


def read_addresses(name: str, text: str) -> tuple[tuple[str, int], ...]:
    """Return the (host, port) pairs that ``text``, the value of ``name``, lists."""
    if not text.strip():
        return ()
    addresses = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if not host or not is_port or (":" in host) != part.strip().startswith("["):
            raise ValueError(
                f"{name} is {text!r}; write HOST:PORT, or several with commas between them"
            )
        addresses.append((host, int(port)))
    return tuple(addresses)


def show_address(host: str, port: int) -> str:
    """Return the text that :func:`read_addresses` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _with_process_group(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Add the rank and size of torch's process group, unless that is of this process alone."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return variables
    group = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    for name, number in group.items():
        if (said := _number(variables, name, number)) != number:
            raise ValueError(
                f"{name} is {said} in the environment and {number} in torch.distributed's process "
                "group: give both the same, or remove RANK and WORLD_SIZE from os.environ"
            )
    return with_torchrun_names(variables) | {name: str(group[name]) for name in group}


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a whole number") from None


def with_torchrun_names(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` with torchrun's names, if Slurm or Kubernetes started this process.

    Variables that are set stay as they are. If RANK is set nothing is added: it was set nearer to
    this process. Slurm's srun sets SLURM_* for each task of a step. The shell of an sbatch script
    has no SLURM_STEP_NUM_TASKS, so a script that runs there without srun stays one worker. An
    indexed Job of Kubernetes sets JOB_COMPLETION_INDEX; its manifest must say how many pods there
    are (WORLD_SIZE).

    Sources: srun(1), "Output environment variables"; kubernetes.io, "Jobs", completion mode
    Indexed.
    """
    given = {name: value for name, value in variables.items() if value}
    if "RANK" in given:
        return given
    if "SLURM_PROCID" in given and "SLURM_STEP_NUM_TASKS" in given:
        return _slurm_variables(given) | given
    if "JOB_COMPLETION_INDEX" in given and "WORLD_SIZE" in given:
        rank = given["JOB_COMPLETION_INDEX"]
        return {"RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} | given
    return given


def _slurm_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return RANK and the like of one task of a Slurm step.

    The workers meet at the step's first node, on a port that follows from the job and the step:
    20000 + (16 · job + step) mod 10000.
    """
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID")
    job, step, node = (_number(given, name, 0) for name in names)
    tasks = tasks_per_node(given.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if not 0 <= node < len(tasks):
        raise ValueError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE has {len(tasks)} nodes; set "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
        )
    on_one_node = given.get("SLURM_STEP_NUM_NODES") == "1"
    hosts = "127.0.0.1" if on_one_node else given.get("SLURM_STEP_NODELIST", "127.0.0.1")
    return {
        "RANK": given["SLURM_PROCID"],
        "WORLD_SIZE": given["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": given.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(FIRST_SLURM_PORT + (PORTS_A_JOB * job + step) % NUM_SLURM_PORTS),
    }


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's short form."""
    match = re.match(r"(?:[^\[\],]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"no host in the Slurm host list {hosts!r}; set MASTER_ADDR yourself")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks of each node, from Slurm's short form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which is not of the form 4(x2),3; set "
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT yourself"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@contextmanager
def without_launcher_variables() -> Iterator[None]:
    """Take the variables that name other workers out of ``os.environ``, and put them back.

    This is the process's environment: threads see it too, and processes that are started meanwhile
    inherit it. A second one within the first does nothing.
    """
    taken = {
        name: value
        for name, value in os.environ.items()
        if name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES)
    }
    for name in taken:
        del os.environ[name]
    _taken_out.update(taken)
    try:
        yield
    finally:
        for name, value in taken.items():
            os.environ[name] = value
            del _taken_out[name]
