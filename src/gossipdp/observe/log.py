"""The log of a run: one JSON-lines file per worker. Its lines, reading them, and writing them.

A file starts with a ``start`` record. Then come pairs of a ``step`` and an ``exchange`` record,
each with totals up to then. ``began`` is written when a process makes its first gradient step,
``notice`` when the worker notices what befell another, ``values`` when the script logs something,
``consolidating`` when the worker has nothing left to do but to wait for the others, and ``end``
when it has the average. Time (``time_s``) is in seconds since the worker's first start, whose date
is in ``start``. The log of a worker that was started again goes on where it ended, with a ``start``
record of the new process.

A pair of step and exchange records is due ``interval_s`` after the last, and from 2000 intervals on
after 1/2000 of the time so far. So T seconds give at most 2000 (1 + ln(T / 2000 interval_s)) pairs:
at 0.2 s 16,700 in a week, of about 1 kB and 10 bytes for each neighbour.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict, TypeVar

import msgspec

from gossipdp.links.clock import since_boot_s

logger = logging.getLogger("gossipdp")

FILE_PATTERN = "worker-*.jsonl"
FORMAT = 2
"""Written into each start record; a reader refuses others."""

MAX_WORKERS = 4096
"""A reader refuses ranks from here on: figures have a row a worker."""

Value = bool | int | float | str
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_WORKERS)]


def worker_file(directory: Path, rank: int) -> Path:
    """Where a run that logs to ``directory`` keeps the log of worker ``rank``."""
    return directory / f"worker-{rank}.jsonl"


# The records.


class KnownConfiguration(TypedDict, total=False):
    """The part of a configuration that readers of a log compute with."""

    comm_rate: float
    parameters: int
    edges: list[tuple[Rank, Rank]]


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """Training starts now, or goes on in another process.

    run_id: of the run; the log of one that resumes holds the runs before it too.
    started_at: seconds since 1970. started_s: the same moment by ``since_boot_s``, and boot_id: of
    which boot; empty where it is not known. configuration: how the wrapper was called, in words and
    numbers.
    """

    rank: Rank
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
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

    peer: Rank
    initiated: bool
    started_s: float
    duration_s: float


class ExchangeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="exchange"):
    """The exchanges of a worker so far; None: no exchange yet, or not measured.

    recent: the last exchanges since the record before, at most 16, the oldest first.
    idle_s: which workers stand still, as far as this one has heard: the age of their last gradient
        step where it exceeds 5 s; see :func:`~gossipdp.observe.status.idle_seconds`.
    """

    time_s: float
    exchanges_initiated: int
    exchanges_answered: int
    exchanges_failed: int
    exchanges_by_neighbour: dict[Rank, int]
    edge_distance: float | None
    exchange_seconds: float
    waited_seconds: float
    bytes_sent: int
    bytes_received: int
    shared_bytes_sent: int = 0
    shared_bytes_received: int = 0
    recent: tuple[RecentExchange, ...] = ()
    idle_s: dict[Rank, float] = {}

    @property
    def exchanges(self) -> int:
        """Completed exchanges, initiated or answered."""
        return self.exchanges_initiated + self.exchanges_answered

    @property
    def all_bytes_sent(self) -> int:
        """Through sockets and through shared memory."""
        return self.bytes_sent + self.shared_bytes_sent


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

    rank: Rank
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

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


# Reading.


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
                lines = whole_lines(file.read())
        except FileNotFoundError:
            return []
        self._position += sum(map(len, lines))
        return [_decoder.decode(line) for line in lines]


@dataclass(frozen=True)
class WorkerLog:
    """The records of one worker, by kind, in the order in which they were written.

    start: of the first process. last_s: of the last record that has a time. restart: of the last
    process, where there was more than one.
    """

    start: StartRecord
    steps: tuple[StepRecord, ...]
    exchanges: tuple[ExchangeRecord, ...]
    end: EndRecord | None
    lives: tuple[BeganRecord, ...] = ()
    notices: tuple[NoticeRecord, ...] = ()
    values: tuple[ValuesRecord, ...] = ()
    consolidating: ConsolidatingRecord | None = None
    last_s: float = 0.0
    restart: StartRecord | None = None

    @property
    def latest_start(self) -> StartRecord:
        """Of the last process."""
        return self.restart or self.start

    @property
    def trained_s(self) -> float:
        """When its last gradient step was made: the first record that counts it; 0 without one."""
        all_steps = self.steps[-1].gradient_steps if self.steps else 0
        return next((step.time_s for step in self.steps if step.gradient_steps == all_steps), 0.0)

    def pairs(self) -> list[tuple[StepRecord, ExchangeRecord]]:
        """The step and exchange records of one moment; a half whose other half is lost, left out.

        A full disk loses single lines, and so does a kill between the two.
        """
        exchanges = {exchange.time_s: exchange for exchange in self.exchanges}
        return [(step, exchanges[step.time_s]) for step in self.steps if step.time_s in exchanges]

    def last_values(self) -> dict[str, Value | None]:
        """The latest of each value that the script logged."""
        return {name: value for record in self.values for name, value in record.values.items()}


@dataclass(frozen=True)
class RunLog:
    """The logs of all workers of a run, by rank."""

    workers: dict[int, WorkerLog]

    @property
    def started_at(self) -> float:
        """When the first worker started, in seconds since 1970."""
        return min(worker.start.started_at for worker in self.workers.values())

    @property
    def latest_start(self) -> StartRecord:
        """Of the process that started last: a resumed run may have another size and graph."""
        starts = (worker.latest_start for worker in self.workers.values())
        return max(starts, key=lambda start: start.started_at)

    @property
    def num_workers(self) -> int:
        """How many workers the run was last started with."""
        return self.latest_start.num_workers

    @property
    def num_ranks(self) -> int:
        """How many workers the logs mention, joiners whose own logs are not here too."""
        partners = (rank for pair in self.exchange_counts() for rank in pair)
        return max(self.num_workers, 1 + max(self.workers), 1 + max(partners, default=0))

    def exchange_counts(self) -> dict[tuple[int, int], int]:
        """Completed exchanges by (lower rank, higher rank), of those pairs that had any.

        Both ends count an exchange, and a log may lack its last line: the larger count is taken.
        """
        counts: dict[tuple[int, int], int] = {}
        for rank, worker in self.workers.items():
            if worker.exchanges:
                for peer, count in worker.exchanges[-1].exchanges_by_neighbour.items():
                    pair = (min(rank, peer), max(rank, peer))
                    counts[pair] = max(counts.get(pair, 0), count)
        return {pair: counts[pair] for pair in sorted(counts) if counts[pair]}

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the logs in a directory; a last line cut short (a worker was killed) is left out.

        Raises:
            ValueError: there are none, a line is no record, a configuration cannot be, or another
                version wrote them.
        """
        workers = [read_worker(path) for path in sorted(directory.glob(FILE_PATTERN))]
        by_rank = {worker.start.rank: worker for worker in workers if worker is not None}
        if not by_rank:
            raise ValueError(
                f"{directory} holds no log of a worker ({FILE_PATTERN}); train with "
                "Monitor(log_dir=...), or with gossipdp run --log-dir"
            )
        return cls(dict(sorted(by_rank.items())))


def read_worker(path: Path) -> WorkerLog | None:
    """The log of one worker; None when not even its first line was completed.

    Raises:
        ValueError: as :meth:`RunLog.read`.
    """
    lines = whole_lines(path.read_bytes())
    if not lines:
        return None
    start = next(iter(_decode(path, lines[:1])))
    if not isinstance(start, StartRecord):
        raise ValueError(f"{path} does not begin with a start record, but with {start!r}")
    if start.format != FORMAT:
        raise ValueError(
            f"{path} is a log of format {start.format}, and this version of gossipdp reads format "
            f"{FORMAT} only: read it with the version that wrote it, or run again"
        )
    records = list(_decode(path, lines))

    def of(kind: type[_Kind]) -> tuple[_Kind, ...]:
        return tuple(record for record in records if isinstance(record, kind))

    starts, ends, waits = of(StartRecord), of(EndRecord), of(ConsolidatingRecord)
    for each in starts:
        try:
            msgspec.convert(each.configuration, KnownConfiguration)
        except msgspec.ValidationError as error:
            line = records.index(each) + 1
            raise ValueError(
                f"{path}, line {line} holds a configuration that cannot be: {error}"
            ) from error
    return WorkerLog(
        start=start,
        steps=of(StepRecord),
        exchanges=of(ExchangeRecord),
        end=ends[-1] if ends else None,
        lives=of(BeganRecord),
        notices=of(NoticeRecord),
        values=of(ValuesRecord),
        consolidating=waits[-1] if waits else None,
        last_s=max(0.0 if isinstance(each, StartRecord) else each.time_s for each in records),
        restart=starts[-1] if len(starts) > 1 else None,
    )


def whole_lines(content: bytes) -> list[bytes]:
    """Without a last one that is still being written, or whose writer was killed."""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def _decode(path: Path, lines: list[bytes]) -> Iterable[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no record of a run log: {error}") from error


# Writing.

GROWTH = 1 / 2000
MAX_NOTICES = 10_000
# Counted from a process's start, and so to be added to what its forerunners counted.
COUNTED = (
    "exchanges_initiated",
    "exchanges_answered",
    "exchanges_failed",
    "exchange_seconds",
    "waited_seconds",
    "bytes_sent",
    "bytes_received",
    "shared_bytes_sent",
    "shared_bytes_received",
)


class RunLogWriter:
    """Writes the log of one worker.

    Only construction raises for the disk. Later a line that cannot be written is left out, the
    first time with a warning, and the next one is tried again.

    Args:
        path: the file, replaced if it exists; every line is flushed, so that a reader can follow.
        interval_s: least time between two pairs of step and exchange records.
        clock: monotonic, in seconds.
        date: the time of day, in seconds since 1970.
        boot_id: of the boot since which ``clock`` counts; empty: not known.
        run_id: of the run.
        goes_on: a former process of this worker may have written the log: where it took part in
            the same run, go on with its totals.
        resumes: go on also where that was another run, which this one resumes.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float = 0.2,
        clock: Callable[[], float] = since_boot_s,
        date: Callable[[], float] = time.time,
        boot_id: str = "",
        run_id: str = "",
        goes_on: bool = False,
        resumes: bool = False,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _log_before(path) if goes_on or resumes else None
        is_same_run = before is not None and before.latest_start.run_id == run_id
        self._before = before if resumes or is_same_run else None
        if self._before is not None:
            os.truncate(path, sum(map(len, whole_lines(path.read_bytes()))))
        else:
            path.write_bytes(b"")
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._position = self._file.seek(0, os.SEEK_END)
        self._interval_s = interval_s
        self._clock = clock
        self._date = date
        self._boot_id = boot_id
        self._run_id = run_id
        self.started_s = self._recorded_s = clock()
        """The worker's first start, by ``clock``: the zero of all times in the records."""
        self._num_notices = 0
        self._is_failing = False
        last = self._before.steps[-1] if self._before and self._before.steps else None
        self._steps_before = self._steps = last.gradient_steps if last else 0
        self._samples_before = self._samples = last.samples if last else 0

    def wait_s(self) -> float:
        """How long until a pair of records is due; not positive where it is."""
        interval_s = max(self._interval_s, GROWTH * (self._recorded_s - self.started_s))
        return self._recorded_s + interval_s - self._clock()

    def start(self, *, rank: int, num_workers: int, configuration: Mapping[str, Any]) -> None:
        """Write a start record; time counts from here, or from the first process's start."""
        now_s, date_s = self._clock(), self._date()
        self.started_s = self._recorded_s = now_s
        if self._before is not None:
            first = self._before.start
            # By the date only where the machine was started since. It may have been set back: time
            # goes on from the last record at least.
            is_same_boot = self._boot_id and self._boot_id == first.boot_id
            elapsed_s = now_s - first.started_s if is_same_boot else date_s - first.started_at
            self.started_s -= max(elapsed_s, self._before.last_s)
        self._write(
            StartRecord(
                rank,
                num_workers,
                os.getpid(),
                date_s,
                dict(configuration),
                now_s,
                FORMAT,
                self._boot_id,
                self._run_id,
            )
        )

    def began(self, at_s: float | None = None) -> None:
        """Write that this process has made its first gradient step, now or at ``at_s``."""
        at_s = self._clock() if at_s is None else at_s
        self._write(BeganRecord(os.getpid(), at_s, self._time(at_s)))

    def notice(self, rank: int, what: str, at_s: float) -> None:
        """Write what this worker has noticed of another; beyond 10,000 nothing more."""
        self._num_notices += 1
        if self._num_notices <= MAX_NOTICES:
            self._write(NoticeRecord(rank, what, at_s, self._time(at_s)))

    def record(
        self, *, gradient_steps: int, samples: int, loss: float | None, exchanges: ExchangeRecord
    ) -> None:
        """Write a pair of records.

        Args:
            gradient_steps, samples: of this process so far.
            loss: mean since the record before; None where it is not known.
            exchanges: of this process so far; its ``time_s`` is set here.
        """
        now_s = self._clock()
        total = self._samples_before + samples
        speed = (total - self._samples) / max(now_s - self._recorded_s, 1e-9)
        self._steps, self._samples = self._steps_before + gradient_steps, total
        self._recorded_s, time_s = now_s, self._time(now_s)
        self._write(StepRecord(time_s, self._steps, total, _finite(loss), round(speed, 3)))
        if self._before is not None and self._before.exchanges:
            exchanges = _sum(self._before.exchanges[-1], exchanges)
        self._write(msgspec.structs.replace(exchanges, time_s=time_s))

    def values(self, values: Mapping[str, Value]) -> None:
        """Write what the script logged."""
        finite = {
            name: _finite(value) if isinstance(value, float) else value
            for name, value in values.items()
        }
        self._write(ValuesRecord(self._time(), self._steps, finite))

    def consolidating(self) -> None:
        """Write that the worker waits for the others from here on."""
        self._write(ConsolidatingRecord(self._time()))

    def end(self, *, consensus_distance: float, num_averaged: int | None = None) -> None:
        """Write the end record."""
        distance = _finite(consensus_distance)
        self._write(EndRecord(self._time(), self._steps, self._samples, distance, num_averaged))

    def close(self) -> None:
        """Close the file; a second call does nothing. What is written later opens it again."""
        self._file.close()

    def _time(self, at_s: float | None = None) -> float:
        return round((self._clock() if at_s is None else at_s) - self.started_s, 4)

    def _write(self, record: Record) -> None:
        # One write call a line: a reader sees a line whole or not yet.
        line = _encoder.encode(record) + b"\n"
        try:
            if self._file.closed:
                with self._path.open("ab", buffering=0) as file:
                    file.write(line)
                return
            written = self._file.write(line)
            if written != len(line):
                os.truncate(self._file.fileno(), self._position)
                raise OSError(f"{written} of {len(line)} bytes fitted")
            self._position += len(line)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning(
                    "the log %s cannot be written (%s): training goes on, and lines are missing "
                    "until it can",
                    self._path,
                    error,
                )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _log_before(path: Path) -> WorkerLog | None:
    """What a former process of this worker wrote; a file that cannot be read is set aside."""
    if not path.exists():
        return None
    try:
        return read_worker(path)
    except ValueError as error:
        aside = path.with_suffix(f".{time.time_ns()}.damaged")
        path.rename(aside)
        logger.warning("a new log is begun, and the old one is kept as %s: %s", aside.name, error)
        return None


def _sum(before: ExchangeRecord, record: ExchangeRecord) -> ExchangeRecord:
    """Totals over all processes of a worker."""
    then, now = before.exchanges_by_neighbour, record.exchanges_by_neighbour
    ranks = sorted(then.keys() | now.keys())
    by_neighbour = {rank: then.get(rank, 0) + now.get(rank, 0) for rank in ranks}
    counts = {name: getattr(before, name) + getattr(record, name) for name in COUNTED}
    return msgspec.structs.replace(record, exchanges_by_neighbour=by_neighbour, **counts)
