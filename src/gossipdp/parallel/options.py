"""The arguments of ``GossipDataParallel``, checked where they are given."""

import contextlib
import logging
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from gossipdp.dynamics.outer import OuterStep

logger = logging.getLogger("gossipdp")

PathLike = str | os.PathLike[str]

METHODS = ("a2cid2", "gossip", "none")
GOSSIP_METHODS = ("a2cid2", "gossip")
PACES = ("free", "strict")
ON_NONFINITE = ("stop", "exit")
SHARED_MEMORY = ("auto", "off")
USUAL_COMM_RATE = 8.0
"""A higher one gets a warning."""


@dataclass(frozen=True)
class Network:
    """How a worker reaches the others; ``GossipDataParallel(..., network=Network(...))``.

    Args:
        host: the address where this worker listens; by default chosen, and told to the others.
        port: the port where it listens; by default any free one.
        secret: shared by all workers of the run; by default the launcher's.
        timeout_s: seconds of silence after which a neighbour is suspect.
        start_timeout_s: how many seconds to wait for the other workers at the start.
        max_bytes_per_s: what each link of this worker sends at most, to leave others room on a
            shared network; None: no cap. Linux only. With a cap, nothing goes by shared memory.
        tls_cert: PEM file with the run's certificate, for TLS on every link (``gossipdp tls-init``
            makes it and its key). By default the files that ``gossipdp run`` was given.
        tls_key: PEM file with its key. Whoever holds the key can take part in the run.
        tls_ca: PEM file of the authority that signed all workers' certificates; by default the
            certificate is its own.
        shared_memory: ``auto``: neighbours on one host read each other's parameters in place where
            the system allows it; ``off``: everything goes through sockets.

    Raises:
        ValueError: a value cannot be meant.
    """

    host: str | None = None
    port: int | None = None
    secret: str | None = field(default=None, repr=False)
    timeout_s: float = 5.0
    start_timeout_s: float = 120.0
    max_bytes_per_s: float | None = None
    tls_cert: PathLike | None = None
    tls_key: PathLike | None = None
    tls_ca: PathLike | None = None
    shared_memory: Literal["auto", "off"] = "auto"

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that cannot be meant."""
        from gossipdp.links.sockets import check_pacing
        from gossipdp.links.tls import tls_files

        _check(self)
        if self.max_bytes_per_s is not None:
            check_pacing(self.max_bytes_per_s)
        tls_files(self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True)
class Checkpoints:
    """When and where a worker saves its state; ``GossipDataParallel(..., checkpoints=...)``.

    Args:
        directory: where checkpoints go, each worker's to a directory of its own in it.
        every_steps: gradient steps of this worker from one checkpoint to the next; None: only
            ``model.save_checkpoint()`` saves one.
        keep: how many of each worker's checkpoints stay.
        resume: ``"auto"`` goes on from the newest checkpoints in ``directory``, and starts afresh
            if there are none; if all of them are damaged, wrapping raises ValueError. A path goes
            on from those in that directory; None starts afresh. Give all workers the same.

    Raises:
        ValueError: a value cannot be meant.
    """

    directory: PathLike | None = None
    every_steps: int | None = None
    keep: int = 3
    resume: PathLike | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that cannot be meant."""
        _check(self)
        if not (self.resume is None or isinstance(self.resume, (str, os.PathLike))):
            raise ValueError(
                f"resume is 'auto', a directory or None, not {self.resume!r}: 'auto' goes on from "
                "the newest checkpoints in directory=, and starts afresh if there are none"
            )
        if self.directory is None and (self.every_steps or self.resume == "auto"):
            raise ValueError(
                "every_steps and resume='auto' need a directory: Checkpoints(directory, ...)"
            )


@dataclass(frozen=True)
class Monitor:
    """What a worker shows and writes about its run; ``GossipDataParallel(..., monitor=...)``.

    Args:
        log_dir: where this worker writes its log, ``worker-RANK.jsonl``, from which ``gossipdp
            report`` makes a page; None: GOSSIPDP_LOG_DIR, and no log without it.
        status_port: worker r shows its status for ``gossipdp top`` and Prometheus on this port + r,
            without a password; 0: on any free one; None: GOSSIPDP_STATUS_PORT, and no status
            without it.
        status_host: the address on which it does; by default GOSSIPDP_STATUS_HOST, else loopback.

    Raises:
        ValueError: a value cannot be meant.
    """

    log_dir: PathLike | None = None
    status_port: int | None = None
    status_host: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that cannot be meant."""
        _check(self)


@dataclass(frozen=True)
class Options:
    """All arguments of ``GossipDataParallel`` but the model; see there.

    Numbers become Python's own, which logs and status pages can hold, also those of NumPy.
    """

    graph: Any = "ring"
    comm_rate: float = 1.0
    method: str = "a2cid2"
    outer: OuterStep | None = None
    budget_samples: int | None = None
    pace: str = "free"
    seed: int = 0
    samples_per_step: int | None = None
    batch_dim: int = 0
    exchange_frozen: bool = False
    exchange_moments: bool | Mapping[str, int] = True
    wire_format: str = "full"
    on_nonfinite: str = "stop"
    neighbour_policy: str = "fresh"
    mesh: Any = None
    network: Network = field(default_factory=Network)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    monitor: Monitor = field(default_factory=Monitor)

    def __post_init__(self) -> None:
        """Raise ValueError for the first value that cannot be meant."""
        from gossipdp.gossip.codec import WIRE_FORMATS
        from gossipdp.protocol.neighbours import NEIGHBOUR_POLICIES

        policies = tuple(NEIGHBOUR_POLICIES)
        _check(self, wire_format=WIRE_FORMATS, neighbour_policy=policies)
        self._check_moments()
        if self.comm_rate > USUAL_COMM_RATE:
            logger.warning(
                "comm_rate=%g asks for %g exchanges in every gradient step. 1 is usual, and more "
                "than a few seldom help. For one exchange in 100 steps give 0.01",
                self.comm_rate,
                self.comm_rate,
            )
        if self.method not in GOSSIP_METHODS:
            for name, default in (("outer", None), ("wire_format", "full")):
                if (given := getattr(self, name)) != default:
                    raise ValueError(
                        f"{name}={given!r} is of the exchanges of gossip, and "
                        f"method={self.method!r} has none: leave it {default!r}"
                    )

    @property
    def exchange_method(self) -> str:
        """What an exchange does, for workers to compare: the method, and its outer step."""
        return self.method if self.outer is None else f"{self.method} with {self.outer}"

    def _check_moments(self) -> None:
        """Keep the periods of moments as Python's own numbers; {} is False."""
        given = self.exchange_moments
        if isinstance(given, bool):
            return
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ValueError(
                f"exchange_moments is {given!r}: give True, False, or the names of what the "
                "optimizer keeps with one exchange in how many carries it, such as "
                "{'exp_avg_sq': 16}"
            )
        if given and self.method not in GOSSIP_METHODS:
            raise ValueError(
                f"exchange_moments={dict(given)} is of the exchanges of gossip, and "
                f"method={self.method!r} has none: leave it True"
            )
        periods = {
            name: _whole(f"exchange_moments[{name!r}]", n, 1, math.inf) for name, n in given.items()
        }
        object.__setattr__(self, "exchange_moments", periods or False)


# What an option may be: one of these texts, a whole number from .. to, a positive number (float),
# or an object of a class.
_RULES: dict[str, Any] = {
    "method": METHODS,
    "pace": PACES,
    "on_nonfinite": ON_NONFINITE,
    "shared_memory": SHARED_MEMORY,
    "comm_rate": float,
    "timeout_s": float,
    "start_timeout_s": float,
    "max_bytes_per_s": float,
    "budget_samples": (1, math.inf),
    "samples_per_step": (1, math.inf),
    "batch_dim": (0, math.inf),
    "seed": (-math.inf, math.inf),
    "every_steps": (1, math.inf),
    "keep": (1, math.inf),
    "port": (0, 65535),
    "status_port": (0, 65535),
    "network": Network,
    "checkpoints": Checkpoints,
    "monitor": Monitor,
    "outer": OuterStep,
}


def _check(options: Network | Checkpoints | Monitor | Options, **more_rules: Any) -> None:
    """Raise ValueError for the first value that cannot be meant; keep numbers as Python's own.

    None passes where it is the default.
    """
    rules = _RULES | more_rules
    for option in fields(options):
        name, value = option.name, getattr(options, option.name)
        if name in rules and not (value is None and option.default is None):
            object.__setattr__(options, name, _checked(name, value, rules[name]))


def _checked(name: str, value: Any, rule: Any) -> Any:
    match rule:
        case (int() | float(), int() | float()):
            return _whole(name, value, *rule)
        case tuple():
            if value not in rule:
                raise ValueError(f"unknown {name} {value!r}; choose one of: {', '.join(rule)}")
        case _ if rule is float:
            with contextlib.suppress(TypeError, ValueError):
                if math.isfinite(number := float(_no_bool(value))) and number > 0:
                    return number
            raise ValueError(f"{name} must be a positive number, not {value!r}")
        case _ if not isinstance(value, rule):
            raise ValueError(f"{name} is {value!r}: give gossipdp.{rule.__name__}(...)")
    return value


def _no_bool(value: Any) -> Any:
    """Return it; raise TypeError for True and False, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise TypeError
    return value


def _whole(name: str, value: Any, least: float, most: float) -> int:
    """Return a whole number, such as 1e6, as an ``int``."""
    try:
        is_whole = isinstance(value, float) and value.is_integer()
        number = int(value) if is_whole else operator.index(_no_bool(value))
    except TypeError:
        raise ValueError(f"{name} must be a whole number, not {value!r}: pass an int") from None
    if number < least or number > most:
        bounds = f"at least {least}" if most == math.inf else f"in {least}..{most}"
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number
