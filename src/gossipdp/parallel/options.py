"""The arguments of ``GossipDataParallel`` that reach its engine, checked."""

import math
import operator
import os
from dataclasses import dataclass
from typing import Any

METHODS = ("a2cid2", "gossip", "allreduce", "none")
PACES = ("free", "strict")
ON_POISON = ("stop", "refresh", "exit")
SHARED_MEMORY = ("auto", "off")
WHOLE_NUMBERS = ("max_lag", "seed", "port", "checkpoint_every", "keep_checkpoints", "status_port")
RATES_AND_TIMES = ("comm_rate", "timeout_s", "start_timeout_s", "max_bytes_per_s")
NO_TLS = (
    "TLS protects the links of gossip, and method='allreduce' has none: torch.distributed would "
    "send everything in the clear. Give no tls_cert, tls_key, tls_ca"
)


@dataclass(frozen=True)
class GossipOptions:
    """See ``GossipDataParallel``; construction checks what needs no other worker.

    Numbers become Python's own, which logs and status pages can hold, whoever's they were.
    """

    graph: Any
    comm_rate: float
    method: str
    neighbour_policy: str
    pace: str
    max_lag: int
    timeout_s: float
    start_timeout_s: float
    seed: int
    exchange_frozen: bool
    host: str | None
    port: int | None
    secret: str | None
    max_bytes_per_s: float | None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    tls_ca: str | os.PathLike[str] | None = None
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    keep_checkpoints: int = 3
    resume: str | os.PathLike[str] | None = None
    on_poison: str = "stop"
    wire_format: str = "parameters"
    shared_memory: str = "auto"
    status_port: int | None = None
    status_host: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that cannot be meant."""
        from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES
        from gossipdp.runtime.tcp_sockets import check_pacing
        from gossipdp.runtime.tls import tls_files
        from gossipdp.runtime.wire_formats import WIRE_FORMATS

        for name, value, known in (
            ("method", self.method, METHODS),
            ("pace", self.pace, PACES),
            ("on_poison", self.on_poison, ON_POISON),
            ("wire_format", self.wire_format, WIRE_FORMATS),
            ("shared_memory", self.shared_memory, SHARED_MEMORY),
            ("neighbour_policy", self.neighbour_policy, tuple(NEIGHBOUR_POLICIES)),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(known)}")
        for name in WHOLE_NUMBERS:
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in RATES_AND_TIMES:
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("comm_rate", "timeout_s", "start_timeout_s"):
            number = getattr(self, name)
            if number is None or not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} must be a positive number, not {number}")
        if not 1 <= self.max_lag <= 3:
            raise ValueError(
                f"max_lag is 1 to 3 demands (a worker keeps at most 4), not {self.max_lag}"
            )
        if self.port is not None and not 0 <= self.port < 65536:
            raise ValueError(f"port must be in 0..65535, not {self.port}")
        if self.status_port is not None and not 0 <= self.status_port < 65536:
            raise ValueError(
                f"status_port must be in 0..65535, or None to show no status, not "
                f"{self.status_port}"
            )
        if self.max_bytes_per_s is not None:
            if self.method == "allreduce":
                raise ValueError(
                    "max_bytes_per_s caps the links of gossip, and method='allreduce' has none: "
                    "leave it None"
                )
            check_pacing(self.max_bytes_per_s)
        if self.wire_format != "parameters" and self.method == "allreduce":
            raise ValueError(
                f"wire_format {self.wire_format!r} is of the exchanges of gossip, and "
                "method='allreduce' has none: leave it 'parameters'"
            )
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ValueError(
                f"checkpoint_every is at least 1 gradient step, or None, not "
                f"{self.checkpoint_every}"
            )
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints is at least 1, not {self.keep_checkpoints}")
        if self.checkpoint_dir is None and (self.checkpoint_every or self.resume == "auto"):
            raise ValueError("checkpoint_every and resume='auto' need checkpoint_dir=")
        if tls_files(self.tls_cert, self.tls_key, self.tls_ca) and self.method == "allreduce":
            raise ValueError(NO_TLS)


def whole_number(name: str, value: Any) -> int | None:
    """Return the argument of that name as an ``int``, such as 1e6, and None as it is.

    Raises:
        ValueError: it is something else than a whole number.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}: pass an int") from None


def _number(name: str, value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r}") from None
