"""The workers of the run, how much each has trained, and how a worker joins.

There are two tables. The views of all workers converge, whatever the order and number of merges:

- :class:`Membership` holds one record a rank. Records are totally ordered: the higher incarnation
  wins, then the higher process id, then (the same life of the same process) the higher status.
- :class:`Progress` counts samples and steps of every process, named by (rank, process id). Only
  that process raises its count; views merge by maximum. A count stays, whatever becomes of the
  worker: the totals are sums over the processes that live and over those that have ended.

A worker joins a run that is under way in three steps. It asks any live worker (``AskMembers``),
which answers with all records (``Members``). It takes the next life of its rank
(:func:`first_incarnation`) and is known as *joining*: neither in the graph nor waited for. It takes
parameters from a live worker and says :meth:`WorkerProtocol.release`: from then on it is alive, and
every graph is rebuilt with it. So no worker exchanges with, or waits for, one without parameters,
and one that dies while joining is not missed.

Records from other workers are bounded. Every number still fits its field after 1 is added; a record
that raises a known incarnation by more than ``MAX_LEAP`` is dropped; both tables have a largest
size.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

MAX_RANK = 2**20 - 1
MAX_INCARNATION = 2**31 - 1
MAX_LEAP = 1000
"""One message raises a known incarnation, or a known epoch, by at most this much."""
MAX_JOINERS = 4096
"""Records of ranks beyond those that the run began with."""
MAX_PROCESSES = 65_536

_Record = TypeVar("_Record")

Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Incarnation = Annotated[int, Meta(ge=0, le=MAX_INCARNATION)]
ProcessId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Host = Annotated[str, Meta(max_length=255)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class Status(enum.IntEnum):
    """The state of a worker's life; within one life it only goes up."""

    JOINING = 0
    """Started in mid-run, without parameters yet: no worker exchanges with it or waits for it."""
    ALIVE = 1
    """Training."""
    DONE = 2
    """No longer training, but still answering: it waits for the others in consolidate."""
    LEFT = 3
    """Gone after consolidating: not a failure."""
    DEAD = 4
    """Declared dead. A worker that finds itself declared dead raises its incarnation."""


class Member(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """One worker as the network knows it. The greater of two records of one rank counts.

    It listens for links at ``host`` and ``port``. It shows its status to people at ``status_host``
    and ``status_port`` (port 0: nowhere), and ``restarts`` counts the processes of this rank before
    this one; nothing here uses those. The incarnation also rises when the same process goes on
    after others have given it up.
    """

    rank: Rank
    incarnation: Incarnation
    process_id: ProcessId
    status: Status = Status.ALIVE
    host: Host = ""
    port: Port = 0
    status_host: Host = ""
    status_port: Port = 0
    restarts: Incarnation = 0

    @property
    def is_live(self) -> bool:
        """Return whether the worker takes part in the run: training or done."""
        return self.status is Status.ALIVE or self.status is Status.DONE

    @property
    def is_over(self) -> bool:
        """Return whether this life has ended."""
        return self.status >= Status.LEFT


class Membership:
    """One worker's view of all workers, itself included.

    ``version`` rises with every change; ``news(since)`` gives the records that changed after a
    version. A link that has carried everything up to that version needs no more.

    A greater record of this worker's rank means that it was declared dead, or that another process
    has its rank. Either way this worker *outbids* it at once: it takes the next incarnation and
    keeps its status. ``rival`` is then the other process, if it may live.

    Args:
        own: this worker's record.
        num_workers: workers that the run began with; their ranks are never forgotten.
    """

    def __init__(self, own: Member, num_workers: int = MAX_RANK + 1) -> None:
        self.version = 0
        self.own = own
        self.rival: Member | None = None
        """The live record of another process of this rank that was outbid last."""
        self.is_exhausted = False
        """True if this worker would have to outbid the greatest incarnation that there is."""
        self._num_workers = num_workers
        self._members: dict[int, Member] = {}
        self._changed_at: dict[int, int] = {}
        self._by_version: dict[int, Member] = {}  # in ascending order of version
        self._over_since: dict[int, float] = {}
        self._addresses: dict[int, tuple[str, int]] | None = None
        self._store(own)

    def get(self, rank: int) -> Member | None:
        """Return the record of one worker; None if it is unknown."""
        return self._members.get(rank)

    def is_live(self, rank: int) -> bool:
        """Return whether ``rank`` is known to take part."""
        member = self._members.get(rank)
        return member is not None and member.is_live

    def merge(self, member: Member) -> bool:
        """Take in another worker's record; return whether this view changed."""
        known = self._members.get(member.rank)
        if known is None:
            if not self._has_room_for(member):
                return False
        elif member <= known or member.incarnation > known.incarnation + MAX_LEAP:
            return False
        if member.rank == self.own.rank:
            member = self._outbid(member)
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
        """Set that this worker is done or has left; a status that is not higher changes nothing."""
        if status <= self.own.status:
            return False
        self.own = msgspec.structs.replace(self.own, status=status)
        return self.merge(self.own)

    def declare_dead(self, rank: int) -> bool:
        """Declare another worker dead, unless it has left; return whether that is news."""
        known = self._members.get(rank)
        if known is None or known.is_over:
            return False
        if known == self.own:
            raise ValueError(f"worker {rank} cannot declare itself dead")
        return self.merge(msgspec.structs.replace(known, status=Status.DEAD))

    def forget(self, now: float, after_s: float) -> None:
        """Forget joiners that have been over, or joining, for ``after_s``, so that none is dialled.

        One that takes longer to join comes back into the view once it lives.
        """
        for rank, member in list(self._members.items()):
            if rank < self._num_workers or member.is_live or rank == self.own.rank:
                self._over_since.pop(rank, None)
            elif now >= self._over_since.setdefault(rank, now) + after_s:
                del self._by_version[self._changed_at.pop(rank)]
                del self._members[rank], self._over_since[rank]
                self.version += 1
                self._addresses = None

    def members(self) -> tuple[Member, ...]:
        """Return every known record, by rank."""
        return tuple(self._members[rank] for rank in sorted(self._members))

    def addresses(self) -> Mapping[int, tuple[str, int]]:
        """Return the others' addresses, also of those declared dead, which may come back there."""
        if self._addresses is None:
            self._addresses = {
                member.rank: (member.host, member.port)
                for member in self._members.values()
                if member.rank != self.own.rank and member.status is not Status.LEFT
            }
        return self._addresses

    def live(self) -> tuple[int, ...]:
        """Return the live ranks, in ascending order."""
        return tuple(member.rank for member in self.members() if member.is_live)

    def news(self, since: int = 0, most: int | None = None) -> tuple[tuple[Member, ...], int]:
        """Return at most ``most`` records changed after version ``since``, the oldest change first.

        Returns:
            The records by rank, and the version that they bring up to.
        """
        if since == self.version:
            return (), since
        told, brought_to = _newest(self._by_version, since, self.version, most)
        return tuple(sorted(told)), brought_to

    def _has_room_for(self, member: Member) -> bool:
        """Return whether to take in a new record: a joiner must not be over, nor one too many."""
        if member.rank < self._num_workers or member.rank == self.own.rank:
            return True
        num_joiners = sum(rank >= self._num_workers for rank in self._members)
        return not member.is_over and num_joiners < MAX_JOINERS

    def _outbid(self, member: Member) -> Member:
        """Return the record to store after a greater one of this worker's own rank arrived."""
        if member == self.own or self.own.status is Status.LEFT:
            return member
        is_rival = member.process_id != self.own.process_id and not member.is_over
        self.rival = member if is_rival else None
        if member.incarnation >= MAX_INCARNATION:
            self.is_exhausted = True
            return member
        self.own = msgspec.structs.replace(self.own, incarnation=member.incarnation + 1)
        return self.own

    def _store(self, member: Member) -> None:
        self.version += 1
        self._addresses = None
        self._by_version.pop(self._changed_at.get(member.rank, 0), None)
        self._members[member.rank] = self._by_version[self.version] = member
        self._changed_at[member.rank] = self.version


def _newest(
    by_version: dict[int, _Record], since: int, version: int, most: int | None
) -> tuple[list[_Record], int]:
    """Return at most ``most`` records after ``since``, the oldest first, and their last version.

    The cost is that of the records after ``since``, not of all that are known.
    """
    newer = list(takewhile(lambda each: each > since, reversed(by_version)))[::-1]
    told = newer[:most]
    return [by_version[each] for each in told], version if len(told) == len(newer) else told[-1]


def first_incarnation(members: Iterable[Member], rank: int | None) -> tuple[int, int]:
    """Choose the rank and incarnation of a worker that is about to join.

    Two workers that join without a rank may take the same one. One's record wins; the other gets
    ``Superseded`` and starts again with another rank.

    Args:
        members: the records of a live worker.
        rank: the rank to take, or None for the one after the highest known.

    Returns:
        The rank, and the incarnation after the highest known one of it; 0 for a new rank.

    Raises:
        ValueError: there are no records, or the rank or its incarnation is out of bounds.
    """
    known = {member.rank: member.incarnation for member in members}
    if not known:
        raise ValueError("no member of the run is known: ask a live worker of it")
    if rank is None:
        rank = max(known) + 1
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank {rank} is not in 0..{MAX_RANK}: give another, or none")
    incarnation = known.get(rank, -1) + 1
    if incarnation > MAX_INCARNATION:
        raise ValueError(f"rank {rank} has had all its {MAX_INCARNATION} lives: give another rank")
    return rank, incarnation


class ProgressEntry(
    msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True
):
    """The samples and gradient steps of one process of a rank.

    ``is_stopped``: it has ended the run for all, before its budget.
    """

    rank: Rank
    process_id: ProcessId
    samples: Count
    steps: Count
    is_stopped: bool = False


class Progress:
    """The progress of all workers as one of them knows it, its own counter included.

    ``version`` rises with every change; ``news(since)`` gives the entries that changed after a
    version, as :class:`Membership` does.
    """

    def __init__(self, rank: int, process_id: int) -> None:
        self.version = 0
        self.total_samples = 0
        self.total_steps = 0
        self.is_stopped = False
        """True once a process has ended the run, for good."""
        self.own: ProgressEntry | None = None
        """This worker's own count; None before its first step."""
        self._own = (rank, process_id)
        self._entries: dict[tuple[int, int], ProgressEntry] = {}
        self._changed_at: dict[tuple[int, int], int] = {}
        self._by_version: dict[int, ProgressEntry] = {}  # in ascending order of version
        self.stepped_at: dict[int, float] = {}
        """By rank, when its steps last grew in this view."""

    def add(
        self, samples: int, steps: int = 1, now: float = 0.0, *, is_stopped: bool = False
    ) -> None:
        """Count this worker's own work; with ``is_stopped``, end the run for all too."""
        if samples < 0 or steps < 0:
            raise ValueError(f"progress only grows: got samples={samples}, steps={steps}")
        known, before = self.own, self.own or ProgressEntry(*self._own, 0, 0)
        self.own = ProgressEntry(
            *self._own,
            samples + before.samples,
            steps + before.steps,
            is_stopped or before.is_stopped,
        )
        self._store(self.own, known, now)

    @property
    def others_samples(self) -> int:
        """Return the samples of all processes but this one."""
        return self.total_samples - (self.own.samples if self.own else 0)

    def merge_all(self, entries: Iterable[ProgressEntry], now: float = 0.0) -> bool:
        """Take in others' entries; return whether any of them changed this view.

        Their entry of this very process is dropped: it counts itself.
        """
        before = self.version
        for entry in entries:
            process = (entry.rank, entry.process_id)
            known = self._entries.get(process)
            if known is not None:
                # The usual case where workers share memory, as in the simulator.
                if known is entry:
                    continue
                samples = max(known.samples, entry.samples)
                steps = max(known.steps, entry.steps)
                is_stopped = known.is_stopped or entry.is_stopped
                merged = ProgressEntry(*process, samples, steps, is_stopped)
                if merged == known:
                    continue
                entry = entry if merged == entry else merged  # so that views share it
            elif len(self._entries) >= MAX_PROCESSES:
                continue
            if process != self._own:
                self._store(entry, known, now)
        return self.version > before

    def news(
        self, since: int = 0, most: int | None = None
    ) -> tuple[tuple[ProgressEntry, ...], int]:
        """Return at most ``most`` entries changed after version ``since``, the oldest change first.

        Returns:
            The sorted entries, and the version that they bring up to.
        """
        told, brought_to = _newest(self._by_version, since, self.version, most)
        return tuple(sorted(told)), brought_to

    def by_rank(self) -> dict[int, tuple[int, int]]:
        """Return samples and gradient steps of every rank over all its processes.

        Any thread may call it: the entries are copied in one step, and none ever changes.
        """
        totals: dict[int, tuple[int, int]] = {}
        for entry in list(self._entries.values()):
            samples, steps = totals.get(entry.rank, (0, 0))
            totals[entry.rank] = (samples + entry.samples, steps + entry.steps)
        return totals

    def _store(self, entry: ProgressEntry, known: ProgressEntry | None, now: float) -> None:
        process = (entry.rank, entry.process_id)
        self.total_samples += entry.samples
        self.total_steps += entry.steps
        self.is_stopped |= entry.is_stopped
        if known is not None:
            self.total_samples -= known.samples
            self.total_steps -= known.steps
            del self._by_version[self._changed_at[process]]
        if known is None or entry.steps > known.steps:
            self.stepped_at[entry.rank] = now
        self.version += 1
        self._entries[process] = self._by_version[self.version] = entry
        self._changed_at[process] = self.version
