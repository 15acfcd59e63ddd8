"""The logs of a run as they were written, whole or while they grow."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self, TypedDict

import msgspec

from gossipdp.gossip.counters import decode
from gossipdp.observe.log import (
    FILE_PATTERN,
    CountsRecord,
    ProcessEndRecord,
    Record,
    StartRecord,
    Value,
    check_first,
)
from gossipdp.protocol.actions import Notice


class KnownConfiguration(TypedDict, total=False):
    """The part of a configuration that the page computes with."""

    comm_rate: float | Literal["auto"]
    parameters: int


class LogReader:
    """A reader of one worker's log, also while it grows; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._num_lines = 0

    def read_new(self) -> list[Record]:
        """Return the records that were completed since the last call.

        The first one of all is a start record. A last line that is cut short (its writer was
        killed) or half written is left out.

        Raises:
            ValueError: a line is no record, or another version wrote them.
        """
        records: list[Record] = []
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return records
        num_bytes = content.rfind(b"\n") + 1
        self._position += num_bytes
        for line in content[:num_bytes].splitlines():
            self._num_lines += 1
            try:
                record: Record = decode(line, Record)  # type: ignore[arg-type]
                if isinstance(record, StartRecord):
                    msgspec.convert(record.configuration, KnownConfiguration)
            except (ValueError, msgspec.ValidationError) as error:
                place = f"{self._path}, line {self._num_lines}"
                raise ValueError(f"{place} is no record of a run log: {error}") from error
            if self._num_lines == 1:  # other versions have other records on the next line
                check_first(self._path, record)
            records.append(record)
        return records


@dataclass
class WorkerLog:
    """The records of one worker, by kind, in the order in which they were written.

    Attributes:
        starts: the start record of each process.
        lives: the first record with a step of each process that has made one.
        averaging, end: the first record in that state of the last process.
        last_s: time of the last record.
        processes: the times of the first and the last record of each process, the first one first;
            a killed process may have lived a little longer.
        process_ends: the ends of the processes that failed, as far as their launcher wrote them.
    """

    starts: list[StartRecord] = field(default_factory=list)
    counts: list[CountsRecord] = field(default_factory=list)
    lives: list[CountsRecord] = field(default_factory=list)
    averaging: CountsRecord | None = None
    end: CountsRecord | None = None
    last_s: float = 0.0
    processes: list[tuple[float, float]] = field(default_factory=list)
    process_ends: list[ProcessEndRecord] = field(default_factory=list)
    _steps_before: float = 0  # this process; infinity once it has made one

    def take(self, records: Iterable[Record]) -> None:
        """Take further records."""
        for record in records:
            if isinstance(record, StartRecord):
                self.starts.append(record)
                self.processes.append((record.time_s, record.time_s))
                self.averaging = self.end = None
                self._steps_before = self.counts[-1].gradient_steps if self.counts else 0
            elif isinstance(record, CountsRecord):
                self.counts.append(record)
                if record.gradient_steps > self._steps_before:
                    self.lives.append(record)
                    self._steps_before = math.inf
                if record.state != "training":
                    self.averaging = self.averaging or record
                if record.state == "left":
                    self.end = self.end or record
            else:
                self.process_ends.append(record)
            self.last_s = max(record.time_s, self.last_s)
            started_s, ended_s = self.processes[-1]
            self.processes[-1] = started_s, max(record.time_s, ended_s)

    @property
    def start(self) -> StartRecord:
        return self.starts[0]

    @property
    def latest_start(self) -> StartRecord:
        return self.starts[-1]

    @property
    def num_restarts(self) -> int:
        """Return the number of processes that came after another one in the same run."""
        return sum(one.run_id == other.run_id for one, other in pairwise(self.starts))

    @property
    def noticed(self) -> list[Notice]:
        return [notice for each in self.counts for notice in each.noticed]

    @property
    def trained_s(self) -> float:
        """Return the time of the first record with the last gradient step; 0 without a step."""
        all_steps = self.counts[-1].gradient_steps if self.counts else 0
        return next((each.time_s for each in self.counts if each.gradient_steps == all_steps), 0.0)

    def last_values(self) -> dict[str, Value | None]:
        """Return the latest of each value that the script logged."""
        return {name: value for each in self.counts for name, value in each.logged.items()}


class RunLog:
    """The logs of all workers of a run, by rank, also while they grow."""

    def __init__(self, workers: Mapping[int, WorkerLog] | None = None) -> None:
        self.workers = dict(workers or {})
        self._files: dict[Path, tuple[LogReader, WorkerLog]] = {}

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the logs in a directory, without a last line cut short (a worker was killed).

        Raises:
            ValueError: there are none, a line is no record, or another version wrote them.
        """
        run_log = cls()
        run_log.follow(directory)
        if not run_log.workers:
            raise ValueError(
                f"{directory} holds no log of a worker ({FILE_PATTERN}); train with "
                "Monitor(log_dir=...), or with gossipdp run --log-dir"
            )
        return run_log

    def follow(self, directory: Path) -> None:
        """Take the lines that have been completed since the last call; errors as in ``read``."""
        for path in sorted(directory.glob(FILE_PATTERN)):
            reader, worker = self._files.setdefault(path, (LogReader(path), WorkerLog()))
            worker.take(reader.read_new())
            if worker.starts:
                self.workers[worker.start.rank] = worker
        self.workers = dict(sorted(self.workers.items()))
