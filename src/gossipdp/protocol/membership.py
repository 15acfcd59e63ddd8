"""Who takes part in the run: a table of workers that all views of it converge to.

One record a rank. Records are totally ordered: the higher incarnation wins, then the higher
process id, then (the same life of the same process) the higher status. A merge keeps the greater
record, so the order and the number of merges do not matter.

Two processes may claim the same rank and incarnation when each was started without knowledge of
the other; the process id, drawn at random, breaks that tie the same way everywhere.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Status(enum.IntEnum):
    """What is known of a worker's life; within one life it only goes up."""

    ALIVE = 0
    """Training."""
    DONE = 1
    """Training no more, but still answering: it waits for the others in consolidate."""
    LEFT = 2
    """Gone after consolidating: not a failure."""
    DEAD = 3
    """Declared dead; a worker that finds itself so declared raises its incarnation."""


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One worker as the network knows it."""

    rank: Count
    incarnation: Count
    process_id: Count
    status: Status
    host: str
    port: Port

    @property
    def is_live(self) -> bool:
        """Whether the worker is there to answer: training or done."""
        return self.status in (Status.ALIVE, Status.DONE)

    def supersedes(self, other: Member) -> bool:
        """Whether this record is greater than another of the same rank."""
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int, str, int]:
        return (self.incarnation, self.process_id, self.status, self.host, self.port)
