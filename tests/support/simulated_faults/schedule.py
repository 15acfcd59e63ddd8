"""The faults of a simulated run and their times, declared in advance.

A :class:`FaultSchedule` is everything that a run under faults depends on. It is frozen, and the
same schedule gives the same run to the last bit. A fault that cannot happen when its time has come,
since its worker has crashed meanwhile, is left out.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from gossipdp.protocol.worker import Method


@dataclass(frozen=True)
class Crash:
    """The process of ``rank`` is gone (kill -9)."""

    at_s: float
    rank: int


@dataclass(frozen=True)
class Restart:
    """A new process of ``rank`` starts, if that rank has none; it asks live worker no. ``asked``.

    ``asked`` counts through the live workers in order of rank, and wraps round.
    """

    at_s: float
    rank: int
    asked: int


@dataclass(frozen=True)
class Join:
    """A worker beyond all known ranks joins; it asks live worker no. ``asked``."""

    at_s: float
    asked: int


@dataclass(frozen=True)
class Stall:
    """The process of ``rank`` stands still for ``duration_s`` (SIGSTOP, then SIGCONT)."""

    at_s: float
    rank: int
    duration_s: float


@dataclass(frozen=True)
class Partition:
    """For ``duration_s`` nothing passes between two of the ``groups``."""

    at_s: float
    duration_s: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Cut:
    """The link between two workers is lost."""

    at_s: float
    first: int
    second: int


Fault: TypeAlias = Crash | Restart | Join | Stall | Partition | Cut


@dataclass(frozen=True)
class BrokenExchange:
    """The link of an exchange is lost ``delay_s`` after one of its ends began.

    ``begin`` counts the beginnings of both ends of all exchanges, from 0.
    """

    begin: int
    delay_s: float


EndingKind: TypeAlias = Literal["cut", "sender crashes", "receiver crashes"]


@dataclass(frozen=True)
class EndingFault:
    """Something happens as consolidation sends its frame no. ``frame``, control messages included.

    Frames are counted over all workers from 0. ``kind``: the frame's link is lost with it, or its
    sender or its receiver crashes.
    """

    frame: int
    kind: EndingKind


@dataclass(frozen=True)
class FaultSchedule:
    """One run under faults.

    Training lasts for ``faulty_s`` while things go wrong, then until all is well again (that is
    checked), then every worker is done, and they consolidate while ``ending`` happens.

    Args:
        latency_s, latency_jitter_s: a message travels for the first, plus up to the second.
        step_s, transfer_s: mean durations of a gradient step and of the data of an exchange.
        lost_at_messages: numbers of control messages at whose sending their link is lost.
        done_within_s: over how long the workers end their training.
    """

    seed: int
    graph: str = "ring"
    num_workers: int = 8
    comm_rate: float | Literal["auto"] = 1.0
    method: Method = "a2cid2"
    policy: str = "fresh"
    timeout_s: float = 1.0
    step_s: float = 0.25
    latency_s: float = 0.005
    latency_jitter_s: float = 0.0
    transfer_s: float = 0.03
    faulty_s: float = 8.0
    faults: tuple[Fault, ...] = ()
    lost_at_messages: tuple[int, ...] = ()
    broken_exchanges: tuple[BrokenExchange, ...] = ()
    ending: tuple[EndingFault, ...] = ()
    done_within_s: float = 1.0

    @property
    def num_joins(self) -> int:
        """Workers that try to join beyond the first ones."""
        return sum(isinstance(fault, Join) for fault in self.faults)
