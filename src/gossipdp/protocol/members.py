"""The workers of the run, how much each has trained, and how a worker joins.

There are two tables (:class:`News`). The views of all workers converge, whatever the order and
number of merges:

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
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

MAX_RANK = 2**20 - 1
MAX_INCARNATION = 2**31 - 1
MAX_LEAP = 1000
"""One message raises a known incarnation, or a known epoch, by at most this much."""
MAX_JOINERS = 4096
"""Records of ranks beyond those that the run began with."""
LONGEST_JOIN = 20.0
"""A joiner is remembered so many times as long while it is joining as once it is over."""
MAX_PROCESSES = 65_536

_Key = TypeVar("_Key")
_Record = TypeVar("_Record", "Member", "ProgressEntry")

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
        return self.status >= Status.LEFT


class News(Generic[_Key, _Record]):
    """Records by key, of which others are told what has changed.

    ``version`` rises with every change. A link that has carried everything up to a version needs no
    more than :meth:`news` since that version.
    """

    def __init__(self) -> None:
        self.version = 0
        self._records: dict[_Key, _Record] = {}
        self._changed_at: dict[_Key, int] = {}  # in ascending order of version

    def news(self, since: int = 0, most: int | None = None) -> tuple[tuple[_Record, ...], int]:
        """Return records changed after version ``since``, sorted, and the version they bring up to.

        If there are more than ``most``, these are the oldest changes. The cost is that of the
        records after ``since``, not of all that are known.
        """
        if since == self.version:
            return (), since
        changed_at = self._changed_at
        newer = list(takewhile(lambda key: changed_at[key] > since, reversed(changed_at)))[::-1]
        told = newer[:most]
        brought_to = self.version if len(told) == len(newer) else changed_at[told[-1]]
        return tuple(sorted(self._records[key] for key in told)), brought_to

    def _store(self, key: _Key, record: _Record) -> None:
        self.version += 1
        self._records[key] = record
        self._changed_at.pop(key, None)  # so that it comes last
        self._changed_at[key] = self.version


class Membership(News[int, Member]):
    """One worker's view of all workers, itself included.

    A greater record of this worker's rank means that it was declared dead, or that another process
    has its rank. Either way this worker *outbids* it at once: it takes the next incarnation and
    keeps its status. ``rival`` is then the other process, if it may live.
    The ranks of the ``num_workers`` that the run began with are never forgotten.
    """

    def __init__(self, own: Member, num_workers: int = MAX_RANK + 1) -> None:
        super().__init__()
        self.own = own
        self.rival: Member | None = None
        """The live record of another process of this rank that was outbid last."""
        self.is_exhausted = False
        """True if this worker would have to outbid the greatest incarnation that there is."""
        self.num_workers = num_workers
        self._over_since: dict[int, float] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._addresses_version = 0
        self._store(own.rank, own)

    def get(self, rank: int) -> Member | None:
        return self._records.get(rank)

    def is_live(self, rank: int) -> bool:
        member = self._records.get(rank)
        return member is not None and member.is_live

    def merge(self, member: Member) -> None:
        """Take in another worker's record, if it is a greater one and within bounds."""
        known = self._records.get(member.rank)
        if known is None:
            if not self._has_room_for(member):
                return
        elif member <= known or member.incarnation > known.incarnation + MAX_LEAP:
            return
        if member.rank == self.own.rank:
            member = self._outbid(member)
        self._store(member.rank, member)

    def merge_all(self, members: Iterable[Member]) -> None:
        for member in members:
            self.merge(member)

    def set_status(self, status: Status) -> None:
        """Set that this worker is done or has left; a status that is not higher changes nothing."""
        if status > self.own.status:
            self.own = msgspec.structs.replace(self.own, status=status)
            self.merge(self.own)

    def declare_dead(self, rank: int) -> None:
        """Declare another worker dead, unless it has left."""
        known = self._records.get(rank)
        if known is None or known.is_over:
            return
        if known == self.own:
            raise ValueError(f"worker {rank} cannot declare itself dead")
        self.merge(msgspec.structs.replace(known, status=Status.DEAD))

    def forget(self, now: float, after_s: float) -> list[int]:
        """Forget joiners that have been over for ``after_s``, so that none is dialled; return them.

        One that is joining may take long for its state, and would lose its rank to the next joiner:
        it has ``LONGEST_JOIN`` times as long, and comes back into the view once it lives.
        """
        forgotten = []
        for rank, member in list(self._records.items()):
            if rank < self.num_workers or member.is_live or rank == self.own.rank:
                self._over_since.pop(rank, None)
                continue
            wait_s = after_s * (LONGEST_JOIN if member.status is Status.JOINING else 1.0)
            if now >= self._over_since.setdefault(rank, now) + wait_s:
                self.version += 1
                del self._over_since[rank], self._records[rank], self._changed_at[rank]
                forgotten.append(rank)
        return forgotten

    def members(self) -> tuple[Member, ...]:
        return tuple(self._records[rank] for rank in sorted(self._records))

    def addresses(self) -> Mapping[int, tuple[str, int]]:
        """Return the others' addresses, also of those declared dead, which may come back there."""
        if self._addresses_version != self.version:
            self._addresses_version = self.version
            self._addresses = {
                member.rank: (member.host, member.port)
                for member in self._records.values()
                if member.rank != self.own.rank and member.status is not Status.LEFT
            }
        return self._addresses

    def live(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members() if member.is_live)

    def _has_room_for(self, member: Member) -> bool:
        """Return whether to take in a new record: a joiner must not be over, nor one too many."""
        if member.rank < self.num_workers or member.rank == self.own.rank:
            return True
        num_joiners = sum(rank >= self.num_workers for rank in self._records)
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


def first_incarnation(
    members: Iterable[Member], rank: int | None, progress: Iterable[ProgressEntry] = ()
) -> tuple[int, int]:
    """Choose the rank and incarnation of a worker that is about to join.

    It is the given rank, or else the one after the highest known; and the incarnation after the
    highest known one of it, 0 for a new rank. A joiner that was forgotten has left its progress,
    whose process id begins with its incarnation: a second life under that number would have the
    seed of the first, and so its data. Two workers that join without a rank may take the
    same one: the one whose record loses gets ``Superseded`` and starts again with another.

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
    most = known.get(rank, MAX_INCARNATION) + MAX_LEAP  # others drop a known rank's record above it
    lives = (entry.process_id >> 32 for entry in progress if entry.rank == rank)
    incarnation = max([known.get(rank, -1), *(life for life in lives if life < most)]) + 1
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


class Progress(News[tuple[int, int], ProgressEntry]):
    """The progress of all processes as one worker knows it, its own counter included."""

    def __init__(self, rank: int, process_id: int) -> None:
        super().__init__()
        self.total_samples = 0
        self.total_steps = 0
        self.is_stopped = False
        """True once a process has ended the run, for good."""
        self.own: ProgressEntry | None = None
        """This worker's own count; None before its first step."""
        self._own = (rank, process_id)
        self.stepped_at: dict[int, float] = {}
        """By rank, when its steps last grew in this view."""

    def add(
        self, samples: int, steps: int = 1, now: float = 0.0, *, is_stopped: bool = False
    ) -> None:
        """Count this worker's own work; with ``is_stopped``, end the run for all too."""
        known, before = self.own, self.own or ProgressEntry(*self._own, 0, 0)
        self.own = ProgressEntry(
            *self._own,
            samples + before.samples,
            steps + before.steps,
            is_stopped or before.is_stopped,
        )
        self._count(self.own, known, now)

    @property
    def others_samples(self) -> int:
        return self.total_samples - (self.own.samples if self.own else 0)

    def merge_all(self, entries: Iterable[ProgressEntry], now: float) -> None:
        """Take in others' entries; that of this very process is dropped, as it counts itself."""
        for entry in entries:
            process = (entry.rank, entry.process_id)
            known = self._records.get(process)
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
            elif len(self._records) >= MAX_PROCESSES:
                continue
            if process != self._own:
                self._count(entry, known, now)

    def by_rank(self) -> dict[int, tuple[int, int]]:
        """Return samples and gradient steps of every rank over all its processes.

        Any thread may call it: the entries are copied in one step, and none ever changes.
        """
        totals: dict[int, tuple[int, int]] = {}
        for entry in list(self._records.values()):
            samples, steps = totals.get(entry.rank, (0, 0))
            totals[entry.rank] = (samples + entry.samples, steps + entry.steps)
        return totals

    def _count(self, entry: ProgressEntry, known: ProgressEntry | None, now: float) -> None:
        self.total_samples += entry.samples
        self.total_steps += entry.steps
        self.is_stopped |= entry.is_stopped
        if known is not None:
            self.total_samples -= known.samples
            self.total_steps -= known.steps
        if known is None or entry.steps > known.steps:
            self.stepped_at[entry.rank] = now
        self._store((entry.rank, entry.process_id), entry)
