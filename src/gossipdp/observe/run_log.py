"""Reading the log of a run: whole, or while it is written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from gossipdp.observe.run_log_records import (
    FILE_PATTERN,
    FORMAT,
    BeganRecord,
    ConsolidatingRecord,
    EndRecord,
    ExchangeRecord,
    KnownConfiguration,
    NoticeRecord,
    Record,
    StartRecord,
    StepRecord,
    Value,
    ValuesRecord,
)

_decoder = msgspec.json.Decoder(Record)


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
    """Of the first process."""
    steps: tuple[StepRecord, ...]
    exchanges: tuple[ExchangeRecord, ...]
    end: EndRecord | None
    lives: tuple[BeganRecord, ...] = ()
    notices: tuple[NoticeRecord, ...] = ()
    values: tuple[ValuesRecord, ...] = ()
    consolidating: ConsolidatingRecord | None = None
    last_s: float = field(default=0.0)
    """Of the last record that has a time."""
    run_id: str = ""
    """Of the run that the last process took part in."""

    def pairs(self) -> list[tuple[StepRecord, ExchangeRecord]]:
        """The step and exchange records of one moment; a half whose other half is lost, left out.

        A full disk loses single lines, and so does a kill between the two.
        """
        exchanges = {exchange.time_s: exchange for exchange in self.exchanges}
        return [(step, exchanges[step.time_s]) for step in self.steps if step.time_s in exchanges]

    def last_values(self) -> dict[str, Value | None]:
        """The latest of each value that the script logged."""
        latest: dict[str, Value | None] = {}
        for record in self.values:
            latest |= record.values
        return latest


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

    @property
    def num_ranks(self) -> int:
        """How many workers the logs tell of, joiners too, be their own logs here or not."""
        partners = (
            rank
            for worker in self.workers.values()
            if worker.exchanges
            for rank in worker.exchanges[-1].exchanges_by_neighbour
        )
        return max(self.num_workers, 1 + max(self.workers), 1 + max(partners, default=0))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the logs in a directory; a last line cut short (a worker was killed) is left out.

        Raises:
            ValueError: there are none, a line is no record, a configuration cannot be, or another
                version wrote them.
        """
        paths = sorted(directory.glob(FILE_PATTERN))
        workers = [read_worker(path) for path in paths]
        by_rank = {worker.start.rank: worker for worker in workers if worker is not None}
        if not by_rank:
            raise ValueError(
                f"{directory} holds no log of a worker ({FILE_PATTERN}); train with log_dir=, or "
                "with gossipdp run --log-dir"
            )
        return cls(dict(sorted(by_rank.items())))


def read_worker(path: Path) -> WorkerLog | None:
    """The log of one worker; None when not even its first line was completed.

    Raises:
        ValueError: as :meth:`RunLog.read`.
    """
    content = path.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines()
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
    try:
        msgspec.convert(start.configuration, KnownConfiguration)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}, line 1 holds a configuration that cannot be: {error}") from error
    records = list(_decode(path, lines))
    starts = [record for record in records if isinstance(record, StartRecord)]
    ends = [record for record in records if isinstance(record, EndRecord)]
    waits = [record for record in records if isinstance(record, ConsolidatingRecord)]
    return WorkerLog(
        start,
        tuple(record for record in records if isinstance(record, StepRecord)),
        tuple(record for record in records if isinstance(record, ExchangeRecord)),
        ends[-1] if ends else None,
        tuple(record for record in records if isinstance(record, BeganRecord)),
        tuple(record for record in records if isinstance(record, NoticeRecord)),
        tuple(record for record in records if isinstance(record, ValuesRecord)),
        waits[-1] if waits else None,
        max(0.0 if isinstance(record, StartRecord) else record.time_s for record in records),
        starts[-1].run_id,
    )


def _decode(path: Path, lines: list[bytes]) -> Iterable[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is no record of a run log: {error}") from error
