"""The logs of a run as they were written, whole or while they grow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

from gossipdp.observe.log import (
    FILE_PATTERN,
    CountsRecord,
    LogReader,
    ProcessEndRecord,
    Record,
    StartRecord,
    Value,
)
from gossipdp.protocol.actions import Notice


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
