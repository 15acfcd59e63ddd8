"""The log of a run: one JSON-lines file per worker, written as it trains, read by all reports.

A file starts with one ``start`` record; then come ``step`` and ``exchange`` records, at most one
pair every ``interval_s``, each with totals up to then; a worker that ended in order closes it with
an ``end`` record. Time is in seconds since the worker's own start, whose date is in ``start``. A
``began`` record stands where a process made its first gradient step, a ``notice`` where a worker
noticed what befell another. The log of a worker that was started again goes on where it ended.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat

import msgspec

from gossipdp.runtime.clock import since_boot_s

FILE_PATTERN = "worker-*.jsonl"


def worker_file(directory: Path, rank: int) -> Path:
    """Where a run that logs to ``directory`` keeps the log of worker ``rank``."""
    return directory / f"worker-{rank}.jsonl"


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """Training starts now; started_at: seconds since 1970."""

    rank: int
    num_workers: int
    process_id: int
    started_at: float
    configuration: dict[str, Any]


class StepRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """Gradient steps and samples so far; loss and speed are means since the record before."""

    time_s: float
    gradient_steps: int
    samples: int
    loss: float | None
    samples_per_second: float


class ExchangeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="exchange"):
    """What the exchanges of a worker came to so far; None: no exchange yet, or not measured."""

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


class EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The worker's own model just before the final averaging, and how far apart all were."""

    time_s: float
    gradient_steps: int
    samples: int
    metric_name: str
    metric_before_average: float
    consensus_distance: float | None
    num_averaged: int | None = None
    average_digest: str = ""


class BeganRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="began"):
    """A process of this worker made its first gradient step; at_s: by ``since_boot_s``."""

    process_id: int
    at_s: float


class NoticeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="notice"):
    """What this worker noticed of worker ``rank``, such as "dead"; at_s: by ``since_boot_s``."""

    rank: int
    what: str
    at_s: float


Record = StartRecord | StepRecord | ExchangeRecord | EndRecord | BeganRecord | NoticeRecord

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


class RunLogWriter:
    """Writes the log of one worker; cheap enough to be called at every gradient step.

    path: the file, replaced if it exists; every line is flushed, so that a reader can follow.
    interval_s: least time between two pairs of step and exchange records.
    clock: monotonic, in seconds.
    goes_on: a former process of this worker wrote the log; go on with its totals.

    >>> with RunLogWriter(path) as log:  # doctest: +SKIP
    ...     log.start(rank=0, num_workers=1, configuration={})
    ...     for batch in batches:
    ...         ...
    ...         log.step(loss.detach(), samples=len(batch), exchanges=count_exchanges)
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float = 0.2,
        clock: Callable[[], float] = since_boot_s,
        goes_on: bool = False,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._before = _read_worker(path) if goes_on and path.exists() else None
        if self._before is not None:
            _drop_cut_line(path)
        self._file = path.open("wb" if self._before is None else "ab", buffering=0)
        self._interval_s = interval_s
        self._clock = clock
        self._started = self._recorded = clock()
        self._losses: list[SupportsFloat] = []
        self._new_samples = 0
        last = self._before.steps[-1] if self._before and self._before.steps else None
        self.gradient_steps = last.gradient_steps if last else 0
        self.samples = last.samples if last else 0

    @property
    def first_began_s(self) -> float | None:
        """When the first process of this worker made its first gradient step."""
        lives = self._before.lives if self._before else ()
        return lives[0].at_s if lives else None

    def start(self, *, rank: int, num_workers: int, configuration: dict[str, Any]) -> None:
        """Write the start record; time counts from here, or from the first process's start."""
        self._started = self._recorded = self._clock()
        if self._before is not None:
            self._started -= time.time() - self._before.start.started_at
            return
        self._write(StartRecord(rank, num_workers, os.getpid(), time.time(), configuration))

    def began(self) -> float:
        """Write that this process has made its first gradient step; when that was."""
        now = self._clock()
        self._write(BeganRecord(os.getpid(), now))
        return now

    def notice(self, rank: int, what: str, at_s: float) -> None:
        """Write what this worker has noticed of another."""
        self._write(NoticeRecord(rank, what, at_s))

    def step(
        self,
        loss: SupportsFloat,
        *,
        samples: int,
        exchanges: Callable[[float], ExchangeRecord],
    ) -> None:
        """Count one gradient step, and write records when they are due.

        loss: of this step; a detached tensor is converted only when a record is written, so that
            a device is not waited for at every step.
        samples: of this step.
        exchanges: makes the exchange record, given ``time_s``; called only when one is written.
        """
        self.gradient_steps += 1
        self.samples += samples
        self._new_samples += samples
        self._losses.append(loss)
        if self._clock() - self._recorded >= self._interval_s:
            self.flush(exchanges)

    def flush(self, exchanges: Callable[[float], ExchangeRecord]) -> None:
        """Write a pair of records now, if a step was counted since the last."""
        if not self._losses:
            return
        now = self._clock()
        loss = sum(float(loss) for loss in self._losses) / len(self._losses)
        elapsed_s = max(now - self._recorded, 1e-9)
        self._write(
            StepRecord(
                now - self._started,
                self.gradient_steps,
                self.samples,
                loss,
                self._new_samples / elapsed_s,
            )
        )
        record = exchanges(now - self._started)
        if self._before is not None and self._before.exchanges:
            record = _sum(self._before.exchanges[-1], record)
        self._write(record)
        self._recorded = now
        self._losses.clear()
        self._new_samples = 0

    def end(
        self,
        *,
        metric_name: str,
        metric_before_average: float,
        consensus_distance: float,
        num_averaged: int | None = None,
        average_digest: str = "",
    ) -> None:
        """Write the end record."""
        self._write(
            EndRecord(
                self._clock() - self._started,
                self.gradient_steps,
                self.samples,
                metric_name,
                metric_before_average,
                consensus_distance,
                num_averaged,
                average_digest,
            )
        )

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, record: Record) -> None:
        # One write call a line: a reader sees a line whole or not yet.
        self._file.write(_encoder.encode(record) + b"\n")


class RunLogTail:
    """Follows the log of one worker while it is written; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read_new(self) -> list[Record]:
        """The records that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        return [_decoder.decode(line) for line in complete.splitlines()]


@dataclass(frozen=True)
class WorkerLog:
    """The records of one worker, by kind, in the order in which they were written."""

    start: StartRecord
    steps: tuple[StepRecord, ...]
    exchanges: tuple[ExchangeRecord, ...]
    end: EndRecord | None
    lives: tuple[BeganRecord, ...] = ()
    notices: tuple[NoticeRecord, ...] = ()


@dataclass(frozen=True)
class RunLog:
    """The logs of all workers of a run, by rank."""

    workers: dict[int, WorkerLog]

    @property
    def started_at(self) -> float:
        """When the first worker started, in seconds since 1970."""
        return min(worker.start.started_at for worker in self.workers.values())

    @property
    def num_workers(self) -> int:
        """How many workers the run was started with."""
        return max(worker.start.num_workers for worker in self.workers.values())

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the logs in a directory; a last line cut short (a worker was killed) is left out.

        Raises ValueError when there are none, and for a line that is no record.
        """
        paths = sorted(directory.glob(FILE_PATTERN))
        workers = [_read_worker(path) for path in paths]
        by_rank = {worker.start.rank: worker for worker in workers if worker is not None}
        if not by_rank:
            raise ValueError(f"{directory} holds no log of a worker ({FILE_PATTERN})")
        return cls(dict(sorted(by_rank.items())))


def _read_worker(path: Path) -> WorkerLog | None:
    """The log of one worker; None when not even its first line was completed."""
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    records = list(_decode(path, lines))
    if not records:
        return None
    start = records[0]
    if not isinstance(start, StartRecord):
        raise ValueError(f"{path} does not begin with a start record, but with {start!r}")
    ends = [record for record in records if isinstance(record, EndRecord)]
    return WorkerLog(
        start,
        tuple(record for record in records if isinstance(record, StepRecord)),
        tuple(record for record in records if isinstance(record, ExchangeRecord)),
        ends[-1] if ends else None,
        tuple(record for record in records if isinstance(record, BeganRecord)),
        tuple(record for record in records if isinstance(record, NoticeRecord)),
    )


def _drop_cut_line(path: Path) -> None:
    """Cut the file after its last whole line: its writer was killed."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _sum(before: ExchangeRecord, record: ExchangeRecord) -> ExchangeRecord:
    """Totals over all processes of a worker."""
    neighbours = before.exchanges_by_neighbour.keys() | record.exchanges_by_neighbour.keys()
    return msgspec.structs.replace(
        record,
        exchanges_by_neighbour={
            rank: before.exchanges_by_neighbour.get(rank, 0)
            + record.exchanges_by_neighbour.get(rank, 0)
            for rank in sorted(neighbours)
        },
        **{
            name: getattr(before, name) + getattr(record, name)
            for name in (
                "exchanges_initiated",
                "exchanges_answered",
                "exchanges_failed",
                "exchange_seconds",
                "waited_seconds",
                "bytes_sent",
                "bytes_received",
            )
        },
    )


def _decode(path: Path, lines: list[bytes]) -> Iterable[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number} is no record of a run log: {error}") from error
