"""The log of a run: one JSON-lines file per worker. Its lines, how to read and to write them.

A file starts with a ``start`` record. ``counts`` records follow, each with totals up to then.
``began`` is written when a process makes its first gradient step, ``notice`` when the worker
notices a change in a worker's life, ``values`` when the script logs something, ``consolidating``
when the worker has nothing left to do but to wait for the others, and ``end`` when it has the
average. If the worker's process fails, its launcher appends ``process_end``.

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
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gossipdp.gossip.counters import MAX_WORKERS, Counters, Rank, decode, metrics_of
from gossipdp.links.clock import boot_id, since_boot_s

logger = logging.getLogger("gossipdp")

FILE_PATTERN = "worker-*.jsonl"
FORMAT = 4
"""Written into each start record; a reader refuses others."""

Value = bool | int | float | str


def worker_file(directory: Path, rank: int) -> Path:
    return directory / f"worker-{rank}.jsonl"


# The records.


class StartRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="start"):
    """The start of a process that trains.

    Attributes:
        started_at, started_s: the same moment in seconds since 1970, and by ``since_boot_s``.
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


class RecentExchange(msgspec.Struct, frozen=True, array_like=True):
    """An exchange that ended since the record before; ``started_s`` counts like ``time_s``."""

    peer: Rank
    initiated: bool
    started_s: float
    duration_s: float


class CountsRecord(Counters, frozen=True, tag_field="kind", tag="counts"):
    """The counters of a worker so far, over all its processes.

    Attributes:
        loss, samples_per_second: means since the record before; NaN if no loss was logged.
        recent: the last exchanges since the record before, at most 16, the oldest first.
    """

    time_s: float
    loss: float = math.nan
    samples_per_second: float = 0.0
    recent: tuple[RecentExchange, ...] = ()


class ValuesRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="values"):
    """The values that the script logged by name, the latest of each since the record before."""

    time_s: float
    gradient_steps: int
    values: dict[str, Value | None]


class ConsolidatingRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="consolidating"):
    """The call of ``consolidate()``: from here on the worker waits for the others."""

    time_s: float


class EndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="end"):
    """The end of the run: the distance of ``num_averaged`` workers just before the average."""

    time_s: float
    gradient_steps: int
    samples: int
    consensus_distance: float | None = None
    num_averaged: int | None = None


class BeganRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="began"):
    """The first gradient step of a process of this worker; ``at_s`` is by ``since_boot_s``."""

    process_id: int
    at_s: float
    time_s: float = 0.0


class NoticeRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="notice"):
    """A notice about worker ``rank``; see :class:`gossipdp.protocol.actions.Notice`."""

    rank: Rank
    what: str
    at_s: float
    time_s: float = 0.0
    silent_s: float | None = None


class ProcessEndRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="process_end"):
    """The end of the process that wrote the log until here; its launcher writes it.

    ``reason`` completes "its process ...", such as "died of signal 9 (SIGKILL)".
    """

    time_s: float
    reason: str


_Of_training = CountsRecord | ValuesRecord | ConsolidatingRecord | EndRecord
_Of_lives = BeganRecord | NoticeRecord | ProcessEndRecord
Record = StartRecord | _Of_training | _Of_lives


# Reading.


def read_records(path: Path) -> list[Record]:
    """Return the records of one worker's log, without a last line cut short (it was killed).

    The first is a start record. If not even its line is whole, there are none.

    Raises:
        ValueError: a line is no record, or another version wrote them.
    """
    lines = whole_lines(path.read_bytes())
    # The first line alone: other versions have other records after it.
    for start in parsed(path, lines[:1]):
        if not isinstance(start, StartRecord):
            raise ValueError(f"{path} does not begin with a start record, but with {start!r}")
        if start.format != FORMAT:
            raise ValueError(
                f"{path} is a log of format {start.format}, and this version of gossipdp reads "
                f"format {FORMAT} only: read it with the version that wrote it, or run again"
            )
    return parsed(path, lines)


def whole_lines(content: bytes) -> list[bytes]:
    """Return the lines, without a last one that is half written or whose writer was killed."""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)


def parsed(path: Path, lines: list[bytes]) -> list[Record]:
    """Return the records in these lines of a log; raise ValueError for a line that is none."""
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line, Record))  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no record of a run log: {error}") from error
    return records


# Writing.

GROWTH = 1 / 2000
MAX_NOTICES = 10_000


class RunLogWriter:
    """The writer of one worker's log.

    Only the constructor raises errors of the disk. Later a line that cannot be written is left out,
    and the next one is tried again; the first of such lines in a row brings a warning.

    Args:
        path: the file, replaced if it exists; every line is flushed, so that a reader can follow.
        interval_s: least time between two ``counts`` records.
        clock: monotonic, in seconds.
        date: the time of day, in seconds since 1970.
        boot_id: of the boot since which ``clock`` counts; empty if it is not known.
        run_id: of the run.
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
        boot_id: str = "",
        run_id: str = "",
        goes_on: bool = False,
        resumes: bool = False,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _log_before(path) if goes_on or resumes else []
        starts = [each for each in before if isinstance(each, StartRecord)]
        if not (resumes or (starts and starts[-1].run_id == run_id)):
            before, starts = [], []
        self._first = starts[0] if starts else None
        self._last_s = max((each.time_s for each in before), default=0.0)
        self._path = path
        self._file = path.open("ab", buffering=0)
        kept = whole_lines(path.read_bytes()) if before else []
        self._file.truncate(sum(map(len, kept)))
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
        totals = [each for each in before if isinstance(each, CountsRecord)]
        self._totals_before = self._totals = totals[-1] if totals else Counters()

    def wait_s(self) -> float:
        """Return the time until a ``counts`` record is due; not positive if it is due."""
        interval_s = max(self._interval_s, GROWTH * (self._recorded_s - self.started_s))
        return self._recorded_s + interval_s - self._clock()

    def start(self, *, rank: int, num_workers: int, configuration: Mapping[str, Any]) -> None:
        """Write a start record; time counts from here, or from the first process's start."""
        now_s, date_s = self._clock(), self._date()
        self.started_s = self._recorded_s = now_s
        if self._first is not None:
            self.started_s -= _elapsed_s(self._first, self._last_s, now_s, date_s, self._boot_id)
        process = (rank, num_workers, os.getpid(), date_s, dict(configuration), now_s)
        at = self._boot_id, self._run_id, self._time(now_s)
        self._write(StartRecord(*process, FORMAT, *at))

    def began(self, at_s: float | None = None) -> None:
        """Write that this process has made its first gradient step, now or at ``at_s``."""
        at_s = self._clock() if at_s is None else at_s
        self._write(BeganRecord(os.getpid(), at_s, self._time(at_s)))

    def notice(self, rank: int, what: str, at_s: float, silent_s: float | None = None) -> None:
        """Write a notice about a worker; beyond 10,000 nothing more."""
        self._num_notices += 1
        if self._num_notices <= MAX_NOTICES:
            silent_s = None if silent_s is None else round(silent_s, 3)
            self._write(NoticeRecord(rank, what, at_s, self._time(at_s), silent_s))

    def counts(
        self,
        counters: Counters,
        *,
        loss: float = math.nan,
        recent: tuple[RecentExchange, ...] = (),
    ) -> None:
        """Write the counters of this process, added to those of the processes before it.

        ``loss`` is the mean since the record before.
        """
        now_s, samples_before = self._clock(), self._totals.samples
        self._totals = _sum(self._totals_before, counters)
        speed = (self._totals.samples - samples_before) / max(now_s - self._recorded_s, 1e-9)
        self._recorded_s = now_s
        totals = {name: getattr(self._totals, name) for name in metrics_of(Counters)}
        since = (loss, round(speed, 3), recent)
        self._write(CountsRecord(self._time(now_s), *since, **totals))

    def values(self, values: Mapping[str, Value]) -> None:
        self._write(ValuesRecord(self._time(), self._totals.gradient_steps, dict(values)))

    def consolidating(self) -> None:
        self._write(ConsolidatingRecord(self._time()))

    def end(self, *, consensus_distance: float, num_averaged: int | None = None) -> None:
        steps, samples = self._totals.gradient_steps, self._totals.samples
        self._write(EndRecord(self._time(), steps, samples, consensus_distance, num_averaged))

    def close(self) -> None:
        """Close the file; a second call does nothing. A later record opens it again."""
        self._file.close()

    def _time(self, at_s: float | None = None) -> float:
        return round((self._clock() if at_s is None else at_s) - self.started_s, 4)

    def _write(self, record: Record) -> None:
        # One write call a line: a reader sees a line whole or not yet.
        line = msgspec.json.encode(record) + b"\n"
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
                text = "cannot write the log %s (%s): training goes on, and lines are missing"
                logger.warning(text, self._path, error)


def write_process_end(path: Path, process_id: int, reason: str) -> None:
    """Write into a worker's log, as its launcher, that its process has failed.

    If there is no log of this process, nothing is written. If the disk is full, the line is lost.
    """
    try:
        records = read_records(path) if path.exists() else []
        starts = [each for each in records if isinstance(each, StartRecord)]
        if not starts or starts[-1].process_id != process_id:
            return
        now = since_boot_s(), time.time(), boot_id()
        time_s = _elapsed_s(starts[0], max(each.time_s for each in records), *now)
        lines = whole_lines(path.read_bytes())
        with path.open("r+b", buffering=0) as file:
            file.truncate(sum(map(len, lines)))  # the process may have died in mid-line
            file.seek(0, os.SEEK_END)
            line = msgspec.json.encode(ProcessEndRecord(round(time_s, 4), reason))
            file.write(line + b"\n")
    except (OSError, ValueError) as error:
        logger.warning("cannot write the end of a worker's process into %s (%s)", path, error)


def _elapsed_s(
    first: StartRecord, last_s: float, now_s: float, date_s: float, boot_id: str
) -> float:
    """Return the time since the worker's first start, at the end of its log so far or later.

    Dates count only if the machine was started again since then, or if that is not known. The date
    may have been set back, so the time is never before the last record's.
    """
    is_same_boot = boot_id and boot_id == first.boot_id
    elapsed_s = now_s - first.started_s if is_same_boot else date_s - first.started_at
    return max(elapsed_s, last_s)


def _log_before(path: Path) -> list[Record]:
    """Return the records of an earlier process; move a file that is damaged out of the way."""
    try:
        return read_records(path) if path.exists() else []
    except ValueError as error:
        aside = path.with_suffix(f".{time.time_ns()}.damaged")
        path.rename(aside)
        logger.warning("a new log is begun, and the old one is kept as %s: %s", aside.name, error)
        return []


def _sum(before: Counters, counters: Counters) -> Counters:
    """Return the totals over all processes of a worker; gauges are the last process's."""
    totals: dict[str, Any] = {}
    for name, metric in metrics_of(Counters).items():
        then, now = getattr(before, name), getattr(counters, name)
        if metric.kind != "counter":
            totals[name] = now
        elif metric.label:
            keys = sorted(then.keys() | now.keys())
            totals[name] = {key: then.get(key, 0) + now.get(key, 0) for key in keys}
        else:
            totals[name] = then + now
    return Counters(**totals)
