"""The log of a run: one JSON-lines file per worker. Its lines, and how to write them.

A file starts with a ``start`` record. ``counts`` records follow: totals up to then, and since the
one before the notices of others' lives and the values that the script logged. The first one of a
process comes with its first gradient step. If the worker's process fails, its launcher appends
``process_end``.

Time (``time_s``) is in seconds since the worker's first start, whose date is in ``start``. The log
of a worker that was started again goes on where it ended, with a ``start`` record of the new
process.

A ``counts`` record is due ``interval_s`` after the last. Once 2000 intervals have passed, it is due
after 1/2000 of the time so far. So T seconds give at most 2000 (1 + ln(T / 2000 interval_s)) of
them: with an interval of 0.2 s, 16,700 in a week. One takes about 1 kB, and 10 bytes for each
neighbour.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from gossipdp.gossip.counters import MAX_WORKERS, Counters, Rank, decode, metrics_of
from gossipdp.links.clock import boot_id, since_boot_s

logger = logging.getLogger("gossipdp")

FILE_PATTERN = "worker-*.jsonl"
FORMAT = 5
"""Written into each start record; a reader refuses others."""

Value = bool | int | float | str


def worker_file(directory: Path, rank: int) -> Path:
    return directory / f"worker-{rank}.jsonl"


# The records.


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """The start of a process that trains.

    Attributes:
        started_at, started_s: one moment in seconds since 1970, and by ``since_boot_s``.
        configuration: of the wrapper, in words and numbers.
        boot_id: of the boot since which ``started_s`` counts; empty if it is not known.
        run_id: of the run; the log of one that resumes holds the runs before it too.
        time_s: 0 for the first process of the worker.
    """

    rank: Rank
    num_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    process_id: int
    started_at: float
    configuration: dict[str, Any]
    started_s: float = 0.0
    format: int = 1  # the first one had no such field
    boot_id: str = ""
    run_id: str = ""
    time_s: float = 0.0


class CountsRecord(Counters, frozen=True, omit_defaults=True, tag_field="kind", tag="counts"):
    """The counters of a worker so far, over all its processes.

    The file lacks fields that have their default.

    Attributes:
        noticed: since the record before.
        loss: mean since the record before; NaN if none was logged.
        logged: the latest of each value that the script logged by name since the record before.
        recent: the peer and the seconds of the last exchanges since the record before, at most 16,
            the oldest first.
        state: ``averaging`` from the call of ``consolidate()`` on: the worker waits for the others;
            ``left`` once it has the average.
        consensus_distance: of ``num_averaged`` workers just before the average; NaN before the end.
    """

    time_s: float
    loss: float = math.nan
    logged: dict[str, Value | None] = msgspec.field(default_factory=dict)
    recent: tuple[tuple[Rank, float], ...] = ()
    state: Literal["training", "averaging", "left"] = "training"
    consensus_distance: float = math.nan
    num_averaged: int = 0


class ProcessEndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="process_end"):
    """The end of the process that wrote the log until here; its launcher writes it.

    ``reason`` completes "its process ...", such as "died of signal 9 (SIGKILL)".
    """

    time_s: float
    reason: str


Record = StartRecord | CountsRecord | ProcessEndRecord

_START, _COUNTS, _ = _KINDS = tuple(
    msgspec.json.encode({"kind": each.__struct_config__.tag})[:-1]
    for each in (StartRecord, CountsRecord, ProcessEndRecord)
)
"""How a line begins."""


# What was written before.


def check_first(path: Path, start: Record) -> StartRecord:
    """Return the first record of a log; raise ValueError if another version wrote it."""
    if not isinstance(start, StartRecord):
        raise ValueError(f"{path} does not begin with a start record, but with {start!r}")
    if start.format != FORMAT:
        raise ValueError(
            f"{path} is a log of format {start.format}, and this version of gossipdp "
            f"reads format {FORMAT} only: read it with the version that wrote it, or run again"
        )
    return start


def is_of_run(path: Path, run_id: str) -> bool:
    """Return whether a log was begun in this run, or has no whole line yet."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        line = file.readline()
        return not line.endswith(b"\n") or decode(line, StartRecord).run_id == run_id
    return False


class _Before(NamedTuple):
    """The part of a log that counts for its next writer; ``num_bytes``: of the whole lines."""

    first: StartRecord
    latest: StartRecord
    last_s: float
    totals: Counters
    num_bytes: int


def _read_before(path: Path) -> _Before | None:
    """Read a log, line by line, since it may be long; None: there is none, or no whole line."""
    last: dict[bytes, bytes] = {}  # the last line of each kind
    first = line = b""
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for each in file:
                if not each.endswith(b"\n"):  # half written
                    break
                kind = each.partition(b",")[0]
                if kind not in _KINDS:
                    raise ValueError(f"{path}, byte {num_bytes}: this is no record of a run log")
                first, line = first or each, each
                last[kind] = line
                num_bytes += len(line)
    except FileNotFoundError:
        return None
    if not first:
        return None
    start = check_first(path, decode(first, Record))  # type: ignore[arg-type]
    ended: Record = decode(line, Record)  # type: ignore[arg-type]
    counts = last.get(_COUNTS)
    return _Before(
        first=start,
        latest=decode(last[_START], StartRecord),
        last_s=ended.time_s,
        totals=Counters() if counts is None else decode(counts, CountsRecord),
        num_bytes=num_bytes,
    )


# Writing.

GROWTH = 1 / 2000


class RunLogWriter:
    """The writer of one worker's log.

    Only the constructor raises errors of the disk. Later a line that cannot be written is left out,
    and the next one is tried again; the first of such lines in a row brings a warning.

    Args:
        path: the file, replaced if it exists; every line is flushed, so that a reader can follow.
        interval_s: least time between two ``counts`` records.
        clock, date: monotonic, and the time of day since 1970, in seconds.
        goes_on: an earlier process of this worker may have written the log: if it took part in the
            same run, go on with its totals.
        resumes: go on also if that was another run, which this one resumes.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float = 0.2,
        clock: Callable[[], float] = since_boot_s,
        date: Callable[[], float] = time.time,
        run_id: str = "",
        goes_on: bool = False,
        resumes: bool = False,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _log_before(path) if goes_on or resumes else None
        if before is not None and not (resumes or before.latest.run_id == run_id):
            before = None
        self._before = before
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._file.truncate(before.num_bytes if before is not None else 0)
        self._position = self._file.seek(0, os.SEEK_END)
        self._interval_s, self._clock, self._date = interval_s, clock, date
        self._run_id, self._is_failing = run_id, False

    def wait_s(self) -> float:
        """Return the time until a ``counts`` record is due; not positive if it is due."""
        interval_s = max(self._interval_s, GROWTH * (self._recorded_s - self.started_s))
        return self._recorded_s + interval_s - self._clock()

    def start(self, *, rank: int, num_workers: int, configuration: Mapping[str, Any]) -> None:
        """Write a start record; time counts from here, or from the first process's start."""
        now_s, date_s = self._clock(), self._date()
        self.started_s = self._recorded_s = now_s
        if self._before is not None:
            self.started_s -= _elapsed_s(self._before, now_s, date_s)
        process = (rank, num_workers, os.getpid(), date_s, dict(configuration), now_s)
        at = boot_id(), self._run_id, round(now_s - self.started_s, 4)
        self._write(StartRecord(*process, FORMAT, *at))

    def counts(self, counters: Counters, **news: Any) -> None:
        """Write the counters of this process, added to those of the processes before it.

        ``news`` are the other fields of :class:`CountsRecord`.
        """
        self._recorded_s = self._clock()
        totals = counters if self._before is None else _sum(self._before.totals, counters)
        fields = {name: getattr(totals, name) for name in Counters.__struct_fields__}
        self._write(CountsRecord(round(self._recorded_s - self.started_s, 4), **fields, **news))

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        self._file.close()

    def _write(self, record: Record) -> None:
        # One write call a line: a reader sees a line whole or not yet.
        line = msgspec.json.encode(record) + b"\n"
        try:
            if self._file.closed:
                with self.path.open("ab", buffering=0) as file:
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
                text = "cannot write the log %s (%s): training goes on, and lines are missing"
                logger.warning(text, self.path, error)


def write_process_end(path: Path, process_id: int, reason: str) -> None:
    """Write into a worker's log, as its launcher, that its process has failed.

    If there is no log of this process, nothing is written. If the disk is full, the line is lost.
    """
    try:
        before = _read_before(path)
        if before is None or before.latest.process_id != process_id:
            return
        time_s = _elapsed_s(before, since_boot_s(), time.time())
        with path.open("r+b", buffering=0) as file:
            file.truncate(before.num_bytes)  # the process may have died in mid-line
            file.seek(0, os.SEEK_END)
            line = msgspec.json.encode(ProcessEndRecord(round(time_s, 4), reason))
            file.write(line + b"\n")
    except (OSError, ValueError) as error:
        logger.warning("cannot write the end of a worker's process into %s (%s)", path, error)


def _elapsed_s(before: _Before, now_s: float, date_s: float) -> float:
    """Return the time since the worker's first start, at the end of its log so far or later.

    Dates count only if the machine was started again since then, or if that is not known. The date
    may have been set back, so the time is never before the last record's.
    """
    first = before.first
    is_same_boot = first.boot_id and first.boot_id == boot_id()
    elapsed_s = now_s - first.started_s if is_same_boot else date_s - first.started_at
    return max(elapsed_s, before.last_s)


def _log_before(path: Path) -> _Before | None:
    """Return what counts of an earlier process's log; move a damaged file out of the way."""
    try:
        return _read_before(path)
    except ValueError as error:
        aside = path.with_suffix(f".{time.time_ns()}.damaged")
        path.rename(aside)
        logger.warning("a new log is begun, and the old one is kept as %s: %s", aside.name, error)
        return None


def _sum(before: Counters, counters: Counters) -> Counters:
    """Return the totals over all processes of a worker; gauges are the last process's."""
    totals: dict[str, Any] = {}
    for name, metric in metrics_of(Counters).items():
        then, now = getattr(before, name), getattr(counters, name)
        if metric.kind == "counter" and metric.label:
            keys = sorted(then.keys() | now.keys())
            totals[name] = {key: then.get(key, 0) + now.get(key, 0) for key in keys}
        elif metric.kind == "counter":
            totals[name] = then + now
    return msgspec.structs.replace(counters, **totals)
