"""Writing the log of one worker: whole lines, ever fewer of them, and no error that ends training.

A pair of step and exchange records is due ``interval_s`` after the last, and from 2000 intervals on
after 1/2000 of the time so far. So T seconds give at most 2000 (1 + ln(T / 2000 interval_s)) pairs:
at 0.2 s 16,700 in a week, of about 1 kB and 10 bytes for each neighbour.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import (
    FORMAT,
    BeganRecord,
    ConsolidatingRecord,
    EndRecord,
    ExchangeRecord,
    NoticeRecord,
    Record,
    StartRecord,
    StepRecord,
    Value,
    ValuesRecord,
    WorkerLog,
    read_worker,
    whole_lines,
)

logger = logging.getLogger("gossipdp")

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

_encoder = msgspec.json.Encoder()


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
