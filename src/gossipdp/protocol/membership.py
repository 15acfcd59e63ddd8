"""Who takes part in the run: a table of workers that all views of it converge to.

One record a rank. Records are totally ordered: the higher incarnation wins, then the higher
process id, then (the same life of the same process) the higher status. A merge keeps the greater
record, so the order and the number of merges do not matter.

Two processes may claim the same rank and incarnation when each was started without knowledge of
the other; the process id, drawn at random, breaks that tie the same way everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
Host = Annotated[str, msgspec.Meta(max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Status(enum.IntEnum):
    """What is known of a worker's life; within one life it only goes up."""

    JOINING = 0
    """Started in mid-run, and without parameters yet: neither exchanged with nor waited for."""
    ALIVE = 1
    """Training."""
    DONE = 2
    """Training no more, but still answering: it waits for the others in consolidate."""
    LEFT = 3
    """Gone after consolidating: not a failure."""
    DEAD = 4
    """Declared dead; a worker that finds itself so declared raises its incarnation."""


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker as the network knows it.

    ``host`` and ``port``: where it listens for links; ``status_host`` and ``status_port``: where
    it shows its status to people (port 0: nowhere), which nothing here makes use of.
    """

    rank: Natural
    incarnation: Natural
    process_id: Natural
    status: Status = Status.ALIVE
    host: Host = ""
    port: Port = 0
    status_host: Host = ""
    status_port: Port = 0

    @property
    def is_live(self) -> bool:
        """Whether the worker takes part in the run: training or done."""
        return self.status is Status.ALIVE or self.status is Status.DONE

    @property
    def is_over(self) -> bool:
        """Whether this life has ended."""
        return self.status >= Status.LEFT

    def supersedes(self, other: Member) -> bool:
        """Whether this record is the greater of two of the same rank."""
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int, str, int, str, int]:
        return (
            self.incarnation,
            self.process_id,
            self.status,
            self.host,
            self.port,
            self.status_host,
            self.status_port,
        )


class Membership:
    """One worker's view of all workers, itself included.

    ``version`` rises with every change; ``news(since)`` gives the records that changed after a
    version, which is all that a link needs that was told everything up to then.

    A record of this worker that is greater than its own comes from one of three causes. It was
    declared dead by mistake, or another process of the same rank is dead or gone: this worker
    takes the next incarnation, and keeps its status. Or another process of the same rank lives
    and won the tie: ``is_superseded`` turns true. It turns false again if that process proves to
    be dead, which may not have been known yet; if it stays true for longer than the time-out, the
    driver must stop this worker.
    """

    def __init__(self, own: Member) -> None:
        self.version = 0
        self.own = own
        self.is_superseded = False
        self._members: dict[int, Member] = {}
        self._changed_at: dict[int, int] = {}
        self._addresses: dict[int, tuple[str, int]] | None = None
        self._store(own)

    def get(self, rank: int) -> Member | None:
        """The record of one worker, None where nothing is known of it."""
        return self._members.get(rank)

    def merge(self, member: Member) -> bool:
        """Take in what another worker knows; return whether this view changed."""
        known = self._members.get(member.rank)
        if known is not None and not member.supersedes(known):
            return False
        if member.rank == self.own.rank:
            member = self._answer(member)
        self._store(member)
        return True

    def merge_all(self, members: Iterable[Member]) -> bool:
        """Take in several records; return whether any changed this view."""
        before = self.version
        known = self._members
        for member in members:
            if known.get(member.rank) is not member:
                self.merge(member)
        return self.version > before

    def set_status(self, status: Status) -> bool:
        """Say of this worker that it is done or has left; a status below its own says nothing."""
        if status <= self.own.status:
            return False
        self.own = msgspec.structs.replace(self.own, status=status)
        return self.merge(self.own)

    def declare_dead(self, rank: int) -> bool:
        """Declare another worker dead; return whether that is news. Who has left is not dead."""
        known = self._members.get(rank)
        if known is None or known.is_over:
            return False
        if known == self.own:
            raise ValueError(f"worker {rank} cannot declare itself dead")
        return self.merge(msgspec.structs.replace(known, status=Status.DEAD))

    def members(self) -> tuple[Member, ...]:
        """Every record known, by rank."""
        return tuple(self._members[rank] for rank in sorted(self._members))

    def addresses(self) -> Mapping[int, tuple[str, int]]:
        """Where the others listen, those declared dead included: they may come back there."""
        if self._addresses is None:
            self._addresses = {
                member.rank: (member.host, member.port)
                for member in self._members.values()
                if member.rank != self.own.rank and member.status is not Status.LEFT
            }
        return self._addresses

    def live(self) -> tuple[int, ...]:
        """The ranks that are there to answer, in ascending order."""
        return tuple(member.rank for member in self.members() if member.is_live)

    def lowest_live(self) -> int | None:
        """The lowest rank that is there to answer; None once all have left or died."""
        return min(self.live(), default=None)

    def news(self, since: int = 0) -> tuple[tuple[Member, ...], int]:
        """The records changed after version ``since``, and the version that they bring up to."""
        if since == self.version:
            return (), since
        changed = (rank for rank, version in self._changed_at.items() if version > since)
        return tuple(self._members[rank] for rank in sorted(changed)), self.version

    def _answer(self, member: Member) -> Member:
        """The record that stands after a greater one of this worker's own rank arrived."""
        if member == self.own or self.own.status is Status.LEFT:
            return member
        if member.process_id != self.own.process_id and not member.is_over:
            self.is_superseded = True
            return member
        self.own = msgspec.structs.replace(self.own, incarnation=member.incarnation + 1)
        self.is_superseded = False
        return self.own

    def _store(self, member: Member) -> None:
        self.version += 1
        self._addresses = None
        self._members[member.rank] = member
        self._changed_at[member.rank] = self.version
