"""The lines of a run's log: one JSON-lines file per worker, each line one of these records.

A file starts with a ``start`` record. Then come pairs of a ``step`` and an ``exchange`` record,
each with totals up to then. ``began`` stands where a process made its first gradient step,
``notice`` where a worker noticed what befell another, ``values`` where the script logged something,
``consolidating`` where the worker had nothing left to do but to wait for the others; ``end`` where
it had the average. Time (``time_s``) is in seconds since the worker's first start, whose date is in
``start``. The log of a worker that was started again goes on where it ended, with a ``start``
record of the new process.
"""

from pathlib import Path
from typing import Any, TypedDict

import msgspec

FILE_PATTERN = "worker-*.jsonl"
FORMAT = 2
"""Written into each start record; a reader refuses others."""

Value = bool | int | float | str


def worker_file(directory: Path, rank: int) -> Path:
    """Where a run that logs to ``directory`` keeps the log of worker ``rank``."""
    return directory / f"worker-{rank}.jsonl"


class KnownConfiguration(TypedDict, total=False):
    """What readers of a log compute with, of all that a configuration may hold."""

    comm_rate: float
    parameters: int
    edges: list[tuple[int, int]]


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """Training starts now, or goes on in another process.

    run_id: of the run; the log of one that resumes holds the runs before it too.
    started_at: seconds since 1970. started_s: the same moment by ``since_boot_s``, and boot_id: of
    which boot; empty where it is not known. configuration: how the wrapper was called, in words and
    numbers.
    """

    rank: int
    num_workers: int
    process_id: int
    started_at: float
    configuration: dict[str, Any]
    started_s: float = 0.0
    format: int = 1  # the first one did not say
    boot_id: str = ""
    run_id: str = ""


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """Gradient steps and samples so far; loss and speed are means since the record before."""

    time_s: float
    gradient_steps: int
    samples: int
    loss: float | None
    samples_per_second: float


class RecentExchange(msgspec.Struct, frozen=True, array_like=True):
    """One exchange that ended since the record before; time as ``time_s``."""

    peer: int
    initiated: bool
    started_s: float
    duration_s: float


class ExchangeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="exchange"):
    """What the exchanges of a worker came to so far; None: no exchange yet, or not measured.

    recent: the last exchanges since the record before, at most 16, the oldest first.
    """

    time_s: float
    exchanges_initiated: int
    exchanges_answered: int
    exchanges_failed: int
    exchanges_by_neighbour: dict[int, int]
    edge_distance: float | None
    exchange_seconds: float
    waited_seconds: float
    bytes_sent: int
    bytes_received: int
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    recent: tuple[RecentExchange, ...] = ()


class ValuesRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="values"):
    """What the script logged by name, the latest of each since the record before."""

    time_s: float
    gradient_steps: int
    values: dict[str, Value | None]


class ConsolidatingRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="consolidating"):
    """The worker has called ``consolidate()``: from here on it waits for the others."""

    time_s: float


class EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The run is consolidated; how far apart all were just before, over how many."""

    time_s: float
    gradient_steps: int
    samples: int
    consensus_distance: float | None
    num_averaged: int | None = None


class BeganRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="began"):
    """A process of this worker made its first gradient step; at_s: by ``since_boot_s``."""

    process_id: int
    at_s: float
    time_s: float = 0.0


class NoticeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="notice"):
    """What this worker noticed of worker ``rank``, such as "dead"; at_s: by ``since_boot_s``."""

    rank: int
    what: str
    at_s: float
    time_s: float = 0.0


Record = (
    StartRecord
    | StepRecord
    | ExchangeRecord
    | ValuesRecord
    | ConsolidatingRecord
    | EndRecord
    | BeganRecord
    | NoticeRecord
)
