"""The arguments of ``GossipDataParallel``, checked where they are made: ValueError if invalid."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from gossipdp.rules import (
    DEFAULT_GRAPH,
    Checked,
    WireFormatName,
    at_least_0,
    at_least_1,
    comm_rate,
    megabits_per_s,
    one_of,
    option,
    port_number,
    positive_number,
    whole_number,
)

PathLike = str | os.PathLike[str]

METHODS = ("a2cid2", "gossip", "none")


def _instance_of(kind: type, name: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}: give gossipdp.{kind.__name__}(...)")
    return value


def _resume(name: str, value: Any) -> PathLike:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(
            f"{name} is 'auto', a directory or None, not {value!r}: 'auto' goes on from the newest "
            "checkpoints in directory=, and starts afresh if there are none"
        )
    return value


def _moments(name: str, given: Any) -> bool | dict[str, int]:
    """Return the periods of moments as Python's own numbers; {} is False."""
    if isinstance(given, bool):
        return given
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
        raise ValueError(
            f"{name} is {given!r}: give True, False, or the names of what the optimizer keeps with "
            "one exchange in how many carries it, such as {'exp_avg_sq': 16}"
        )
    return {each: at_least_1(f"{name}[{each!r}]", n) for each, n in given.items()} or False


def _buffers(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{name} is {given!r}: give names of buffers, such as ['queue'], or ()")
    return tuple(given)


@dataclass(frozen=True)
class Exchange(Checked):
    """What an exchange carries, and how it paces training; ``GossipDataParallel(exchange=)``.

    Args:
        moments: the tensors of the optimizer's state that are averaged too. True: Adam's second
            moment (``exp_avg_sq``; also of AdamW, NAdam, RAdam) with one exchange in 4, or the
            first after a quarter of its memory of 1 / (1 - beta_2) steps; none of other optimizers,
            nor under ``amsgrad=True`` (a maximum keeps one worker's outlier for ever). A mapping
            names such tensors, of their parameter's shape, and their periods in exchanges:
            ``{"exp_avg": 1, "exp_avg_sq": 1}``. Each costs one more float a parameter in memory.
        frozen: exchange frozen parameters too, so that they may be unfrozen later. Without it, a
            frozen base of more than twice the trained size is neither sent nor saved.
        buffers: names of the buffers that are averaged, or patterns of names (``*.scale``); ``()``:
            none. By default the running statistics of BatchNorm and its like, with the names
            ``*.running_mean`` and ``*.running_var``. Every other buffer is its worker's own until
            the end, when all take the lead's.
        pace: ``free`` (training never waits) or ``strict`` (it waits rather than fall more than
            two exchanges behind the comm rate; never for the dead or silent).
    """

    moments: bool | Mapping[str, int] = option(True, _moments)
    frozen: bool = False
    buffers: Collection[str] | None = option(None, _buffers)
    pace: Literal["free", "strict"] = option("free", partial(one_of, ("free", "strict")))


@dataclass(frozen=True)
class Counting(Checked):
    """The way in which samples are counted; ``GossipDataParallel(..., counting=Counting(...))``.

    Args:
        samples_per_step: samples of one gradient step; None counts them in the batches.
        batch_dim: the dimension of a batch's first tensor that counts its samples; 1 where time
            comes first (``batch_first=False``).
    """

    samples_per_step: int | None = option(None, at_least_1)
    batch_dim: int = option(0, at_least_0)


@dataclass(frozen=True)
class Network(Checked):
    """The addresses, secret and time-outs of a worker; ``GossipDataParallel(..., network=...)``.

    Args:
        host: the address where this worker listens; by default chosen, and sent to the others.
        port: the port where it listens; by default any free one.
        secret: shared by all workers of the run; by default the launcher's.
        timeout_s: seconds until a silent neighbour counts as dead or stopped; equal on all workers.
        start_timeout_s: how many seconds to wait for the other workers at the start.
        max_megabits_per_s: what this worker sends at most, over all its links and all processes
            of a sharded replica together, to leave others room on a shared network; None: no
            limit. Training never waits for it. With a limit, nothing goes by shared memory.
        tls: the directory that ``gossipdp tls-init`` made, for TLS on every link; by default the
            one that ``gossipdp run`` was given. Everyone who has its key can take part in the run.
        shared_memory: ``auto``: neighbours on one host read each other's parameters in place where
            the system allows it; ``off``: everything goes through sockets.
    """

    host: str | None = None
    port: int | None = option(None, port_number)
    secret: str | None = field(default=None, repr=False)
    timeout_s: float = option(5.0, positive_number)
    start_timeout_s: float = option(120.0, positive_number)
    max_megabits_per_s: float | None = option(None, megabits_per_s)
    tls: PathLike | None = None
    shared_memory: Literal["auto", "off"] = option("auto", partial(one_of, ("auto", "off")))

    def max_bytes_per_s(self, num_processes: int) -> float | None:
        """Return the part of the limit for one of a worker's processes, which all send at once."""
        limit = self.max_megabits_per_s
        return None if limit is None else limit * 1e6 / 8 / num_processes


@dataclass(frozen=True)
class Checkpoints(Checked):
    """The times and places of checkpoints; ``GossipDataParallel(..., checkpoints=...)``.

    Args:
        directory: where checkpoints go, each worker's to a directory of its own in it.
        every_steps: gradient steps of this worker from one checkpoint to the next. None: only
            ``consolidate()``, SIGTERM and ``model.save_checkpoint()`` save one.
        keep: how many of each worker's checkpoints stay.
        resume: ``"auto"`` goes on from the newest checkpoints in ``directory``, and starts afresh
            if there are none; if all of them are damaged, wrapping raises ValueError. A path goes
            on from those in that directory; None starts afresh. Give all workers the same.
    """

    directory: PathLike | None = None
    every_steps: int | None = option(None, at_least_1)
    keep: int = option(3, at_least_1)
    resume: PathLike | None = option(None, _resume)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directory is None and (self.every_steps or self.resume == "auto"):
            raise ValueError(
                "every_steps and resume='auto' need a directory: Checkpoints(directory, ...)"
            )


@dataclass(frozen=True)
class Monitor(Checked):
    """The log and the status port of a worker; ``GossipDataParallel(..., monitor=...)``.

    Args:
        log_dir: where this worker writes its log, ``worker-RANK.jsonl``, from which ``gossipdp
            report`` makes a page; None: GOSSIPDP_LOG_DIR, and no log without it.
        status_port: worker r shows its status for ``gossipdp top`` and Prometheus on this port + r,
            without a password; 0: on any free one; None: GOSSIPDP_STATUS_PORT, and no status
            without it.
        status_host: the address on which it does; by default GOSSIPDP_STATUS_HOST, else loopback.
    """

    log_dir: PathLike | None = None
    status_port: int | None = option(None, port_number)
    status_host: str | None = None


@dataclass(frozen=True)
class Options(Checked):
    """All arguments of ``GossipDataParallel`` but module and optimizer; see there."""

    graph: Any = DEFAULT_GRAPH
    comm_rate: float | str | None = option(None, comm_rate)
    method: str = option("a2cid2", partial(one_of, METHODS))
    wire_format: str = option("auto", partial(one_of, get_args(WireFormatName)))
    budget_samples: int | None = option(None, at_least_1)
    seed: int = option(0, whole_number)
    mesh: Any = None
    exchange: Exchange = option(Exchange(), partial(_instance_of, Exchange))
    counting: Counting = option(Counting(), partial(_instance_of, Counting))
    network: Network = option(Network(), partial(_instance_of, Network))
    checkpoints: Checkpoints = option(Checkpoints(), partial(_instance_of, Checkpoints))
    monitor: Monitor = option(Monitor(), partial(_instance_of, Monitor))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fixed_comm_rate is None and self.exchange.pace == "strict":
            raise ValueError(
                "pace='strict' waits until exchanges keep up with the comm rate, and "
                "comm_rate='auto' follows what they can keep up with: give a number, or "
                "pace='free'"
            )
        if self.method != "none":
            return
        moments = self.exchange.moments
        for name, given, default in (
            ("wire_format", self.wire_format, "auto"),
            ("moments", moments if isinstance(moments, dict) else True, True),
        ):
            if given != default:
                raise ValueError(
                    f"{name}={given!r} is of the exchanges of gossip, and method={self.method!r} "
                    f"has none: leave it {default!r}"
                )

    @property
    def asked_comm_rate(self) -> float | str:
        """Return the comm rate that was asked for, or the default: 1 where it must be fixed."""
        if self.comm_rate is not None:
            return self.comm_rate
        return "auto" if self.exchange.pace == "free" else 1.0

    @property
    def fixed_comm_rate(self) -> float | None:
        """Return the comm rate that was asked for; None: it sets itself."""
        asked = self.asked_comm_rate
        return None if isinstance(asked, str) else asked


GROUPS = (Exchange, Counting, Network, Checkpoints, Monitor)
