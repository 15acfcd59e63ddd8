"""The environment variables through which a launcher tells a worker who it is.

The names are torchrun's, so that a script runs unchanged under torchrun, under our launcher, and
under Slurm or a shell that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Ours begin with
GOSSIPDP_.
"""

import dataclasses
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Mapping

from gossipdp.errors import RendezvousError
from gossipdp.runtime.tls import TlsFiles, tls_files

logger = logging.getLogger("gossipdp.runtime")

REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check_platform(platform: str = sys.platform) -> None:
    """Say at once that training does not run on Windows.

    Raises:
        OSError: the platform is Windows.
    """
    if platform == "win32":
        raise OSError(
            "gossipdp trains on Linux; on Windows only `gossipdp plan` and `gossipdp simulate` are "
            "meant to work, which was not tried (under WSL everything is)"
        )


@dataclasses.dataclass(frozen=True)
class Environment:
    """Who this worker is and where the others are to be met.

    ``agent_store`` says that the launcher hosts the store, so that every worker is a client of
    it; else rank 0 hosts it. ``unique_run_id`` says that ``run_id`` belongs to one run only.
    ``num_local_workers`` is None where nobody told.
    """

    rank: int = 0
    num_workers: int = 1
    local_rank: int = 0
    num_local_workers: int | None = None
    store_host: str | None = None
    store_port: int = 0
    agent_store: bool = False
    run_id: str = "default"
    unique_run_id: bool = False
    restart_count: int = 0
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    host: str | None = None
    port: int = 0
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        """Check the values against one another."""
        if self.num_workers < 1:
            raise ValueError(f"WORLD_SIZE is {self.num_workers}; it must be at least 1")
        if not 0 <= self.rank < self.num_workers:
            raise ValueError(
                f"RANK is {self.rank}; with WORLD_SIZE {self.num_workers} it must be in "
                f"0..{self.num_workers - 1}"
            )
        for name, port in (("MASTER_PORT", self.store_port), ("GOSSIPDP_PORT", self.port)):
            if not 0 <= port < 65536:
                raise ValueError(f"{name} is {port}; it must be in 0..65535")

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> "Environment":
        """The environment that ``variables`` describe; one worker alone without RANK, WORLD_SIZE.

        Raises:
            ValueError: only some of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set, or of the
                GOSSIPDP_TLS_ three, or a number is none.

        Example:
            >>> Environment.read({}).num_workers
            1
        """
        own_port = _number(variables, "GOSSIPDP_PORT", 0)
        ours = {
            "secret": (variables.get("GOSSIPDP_SECRET") or "").encode() or None,
            "host": variables.get("GOSSIPDP_HOST") or None,
            "tls": tls_from(variables),
        }
        if not variables.get("RANK") and not variables.get("WORLD_SIZE"):
            return cls(port=own_port, **ours)  # type: ignore[arg-type]
        missing = [name for name in REQUIRED if not variables.get(name)]
        if missing:
            present = [name for name in REQUIRED if variables.get(name)]
            raise ValueError(
                f"{', '.join(present)} set, but not {', '.join(missing)}: start the workers with "
                "`gossipdp run` or torchrun, or set all four; set neither RANK nor WORLD_SIZE to "
                "train with one worker"
            )
        local_rank = _number(variables, "LOCAL_RANK", 0)
        local = _number(variables, "LOCAL_WORLD_SIZE", 0)
        given_run_id = variables.get("GOSSIPDP_RUN_ID") or ""
        return cls(
            rank=_number(variables, "RANK", 0),
            num_workers=_number(variables, "WORLD_SIZE", 1),
            local_rank=local_rank,
            num_local_workers=local or None,
            store_host=variables["MASTER_ADDR"],
            store_port=_number(variables, "MASTER_PORT", 0),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=given_run_id or variables.get("TORCHELASTIC_RUN_ID") or "default",
            unique_run_id=bool(given_run_id),
            restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            # A fixed port is the first of a block: local workers take one each.
            port=own_port + local_rank if own_port else 0,
            **ours,  # type: ignore[arg-type]
        )

    @property
    def key_prefix(self) -> str:
        """What all our keys in the store begin with, so that others may share the store."""
        return f"gossipdp/{self.run_id}/{self.restart_count}/"

    def choose_host(self) -> str:
        """The numeric address on which this worker listens.

        GOSSIPDP_HOST if set, else the address of the interface that routes to MASTER_ADDR: loopback
        when the store is on loopback, since then every worker is on this machine. Never all
        addresses at once, unless GOSSIPDP_HOST says so.

        Raises:
            RendezvousError: the name does not resolve, or no interface leads there.
        """
        if self.host:
            try:
                return str(socket.getaddrinfo(self.host, 9, type=socket.SOCK_DGRAM)[0][4][0])
            except OSError as error:
                raise RendezvousError(_unreachable("GOSSIPDP_HOST", self.host, error)) from error
        return self._routed_host()

    def announced_host(self, bound: str) -> str:
        """The address that a worker listening on ``bound`` tells the others.

        It is ``bound`` itself; where that stands for all addresses, the one that routes to
        MASTER_ADDR.

        Raises:
            RendezvousError: see :meth:`choose_host`.
        """
        return self._routed_host() if ipaddress.ip_address(bound).is_unspecified else bound

    def _routed_host(self) -> str:
        target = self.store_host or "127.0.0.1"
        try:
            family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing; picks the route
                host = str(probe.getsockname()[0])
        except OSError as error:
            raise RendezvousError(_unreachable("MASTER_ADDR", target, error)) from error
        elsewhere = self.num_local_workers is not None and self.num_local_workers < self.num_workers
        if elsewhere and ipaddress.ip_address(host).is_loopback:
            logger.warning(
                "MASTER_ADDR %s is loopback, so this worker listens on %s: workers on other "
                "machines cannot reach it. Set GOSSIPDP_HOST to an address of this machine if "
                "there are any.",
                target,
                host,
            )
        return host


def _unreachable(name: str, target: str, error: OSError) -> str:
    return f"cannot reach {name} {target!r} ({error}); check the name and the network"


def tls_from(variables: Mapping[str, str]) -> TlsFiles | None:
    """The TLS files that ``variables`` name; raises ValueError where they name only some."""
    return tls_files(
        variables.get("GOSSIPDP_TLS_CERT"),
        variables.get("GOSSIPDP_TLS_KEY"),
        variables.get("GOSSIPDP_TLS_CA"),
    )


def tls_variables(files: TlsFiles) -> dict[str, str]:
    """The variables that :func:`tls_from` reads."""
    return {
        "GOSSIPDP_TLS_CERT": str(files.cert.absolute()),
        "GOSSIPDP_TLS_KEY": str(files.key.absolute()),
        "GOSSIPDP_TLS_CA": str(files.ca.absolute()),
    }


def worker_variables(
    rank: int, num_workers: int, *, host: str, port: int, run_id: str, secret: str
) -> dict[str, str]:
    """The variables of one of ``num_workers`` local workers: what :meth:`Environment.read` reads.

    Those without our name are torchrun's; ``host`` and ``port`` are the store's.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "GOSSIPDP_RUN_ID": run_id,
        "GOSSIPDP_SECRET": secret,
    }


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be a whole number") from None
