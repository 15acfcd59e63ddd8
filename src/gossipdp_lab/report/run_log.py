"""Readers of logs: of one worker's log while it grows, of one whole log, and of all of a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self, TypedDict, TypeVar

import msgspec

from gossipdp.observe.log import (
    FILE_PATTERN,
    BeganRecord,
    ConsolidatingRecord,
    CountsRecord,
    EndRecord,
    NoticeRecord,
    ProcessEndRecord,
    Record,
    StartRecord,
    Value,
    ValuesRecord,
    parsed,
    read_records,
    whole_lines,
)

_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class KnownConfiguration(TypedDict, total=False):
    """The part of a configuration that readers of a log compute with."""

    comm_rate: float | Literal["auto"]
    parameters: int


class RunLogTail:
    """A reader that follows one worker's log while it grows; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read_new(self) -> list[Record]:
        """Return the records that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                lines = whole_lines(file.read())
        except FileNotFoundError:
            return []
        self._position += sum(map(len, lines))
        return parsed(self._path, lines)


@dataclass(frozen=True)
class WorkerLog:
    """The records of one worker, by kind, in the order in which they were written.

    Attributes:
        start, restart: the start records of the first process, and, if there was more than one, of
            the last.
        last_s: time of the last record.
        processes: the times of the first and the last record of each process, the first one first;
            a killed process may have lived a little longer.
        process_ends: the ends of the processes that failed, as far as their launcher wrote them.
        num_restarts: processes that came after another one in the same run.
    """

    start: StartRecord
    counts: tuple[CountsRecord, ...] = ()
    end: EndRecord | None = None
    lives: tuple[BeganRecord, ...] = ()
    notices: tuple[NoticeRecord, ...] = ()
    values: tuple[ValuesRecord, ...] = ()
    consolidating: ConsolidatingRecord | None = None
    last_s: float = 0.0
    restart: StartRecord | None = None
    processes: tuple[tuple[float, float], ...] = ()
    process_ends: tuple[ProcessEndRecord, ...] = ()
    num_restarts: int = 0

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read one log; return None if not even its first line was completed.

        Raises:
            ValueError: as :meth:`RunLog.read`.
        """
        records = read_records(path)
        for number, each in enumerate(records, start=1):
            try:
                if isinstance(each, StartRecord):
                    msgspec.convert(each.configuration, KnownConfiguration)
            except msgspec.ValidationError as error:
                place = f"{path}, line {number}"
                raise ValueError(f"{place} holds an invalid configuration: {error}") from error

        def of(kind: type[_Kind]) -> tuple[_Kind, ...]:
            return tuple(record for record in records if isinstance(record, kind))

        starts, ends, waits = of(StartRecord), of(EndRecord), of(ConsolidatingRecord)
        if not starts:
            return None
        return cls(
            start=starts[0],
            counts=of(CountsRecord),
            end=ends[-1] if ends else None,
            lives=of(BeganRecord),
            notices=of(NoticeRecord),
            values=of(ValuesRecord),
            consolidating=waits[-1] if waits else None,
            last_s=max(each.time_s for each in records),
            restart=starts[-1] if len(starts) > 1 else None,
            processes=_processes(records),
            process_ends=of(ProcessEndRecord),
            num_restarts=sum(one.run_id == other.run_id for one, other in pairwise(starts)),
        )

    @property
    def latest_start(self) -> StartRecord:
        return self.restart or self.start

    @property
    def trained_s(self) -> float:
        """Return the time of the first record with the last gradient step; 0 without a step."""
        all_steps = self.counts[-1].gradient_steps if self.counts else 0
        return next((each.time_s for each in self.counts if each.gradient_steps == all_steps), 0.0)

    def last_values(self) -> dict[str, Value | None]:
        """Return the latest of each value that the script logged."""
        return {name: value for record in self.values for name, value in record.values.items()}


def _processes(records: list[Record]) -> tuple[tuple[float, float], ...]:
    """Return the times of the first and the last record of each process."""
    times: list[tuple[float, float]] = []
    for each in records:
        if isinstance(each, StartRecord):
            times.append((each.time_s, each.time_s))
        else:
            times[-1] = (times[-1][0], max(each.time_s, times[-1][1]))
    return tuple(times)


@dataclass(frozen=True)
class RunLog:
    """The logs of all workers of a run, by rank."""

    workers: dict[int, WorkerLog]

    @property
    def started_at(self) -> float:
        """Return the date of the first worker's start, in seconds since 1970."""
        return min(worker.start.started_at for worker in self.workers.values())

    @property
    def latest_start(self) -> StartRecord:
        """Return the latest start of any process: a resumed run may have another size and graph."""
        starts = (worker.latest_start for worker in self.workers.values())
        return max(starts, key=lambda start: start.started_at)

    @property
    def num_workers(self) -> int:
        """Return the number of workers that the run was last started with."""
        return self.latest_start.num_workers

    @property
    def num_ranks(self) -> int:
        """Return the number of workers in the logs, joiners without a log here included."""
        partners = (rank for pair in self.exchange_counts() for rank in pair)
        return max(self.num_workers, 1 + max(self.workers), 1 + max(partners, default=0))

    def exchange_counts(self) -> dict[tuple[int, int], int]:
        """Return the completed exchanges by (lower rank, higher rank), without zeros.

        Both ends count an exchange, and a log may lack its last line: the larger count is taken.
        """
        counts: dict[tuple[int, int], int] = {}
        for rank, worker in self.workers.items():
            for last in worker.counts[-1:]:
                for peer, count in last.exchanges_by_neighbour.items():
                    pair = (min(rank, peer), max(rank, peer))
                    counts[pair] = max(counts.get(pair, 0), count)
        return {pair: counts[pair] for pair in sorted(counts) if counts[pair]}

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the logs in a directory, without a last line cut short (a worker was killed).

        Raises:
            ValueError: there are none, a line is no record, a configuration is invalid, or another
                version wrote them.
        """
        workers = [WorkerLog.read(path) for path in sorted(directory.glob(FILE_PATTERN))]
        by_rank = {worker.start.rank: worker for worker in workers if worker is not None}
        if not by_rank:
            raise ValueError(
                f"{directory} holds no log of a worker ({FILE_PATTERN}); train with "
                "Monitor(log_dir=...), or with gossipdp run --log-dir"
            )
        return cls(dict(sorted(by_rank.items())))
