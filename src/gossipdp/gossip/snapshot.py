"""The snapshot that the gossip thread gives the other threads of its worker.

The main thread, the log's thread and the status port's threads read :attr:`GossipLoop.snapshot` at
any time. Apart from :attr:`GossipLoop.poisoned`, they read nothing else that the gossip thread
changes. Each turn replaces the snapshot as a whole, so one that a thread holds never changes.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeAlias

from gossipdp.gossip.counters import Counters
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.links.handshake import FIRST_VISITOR_RANK
from gossipdp.links.link import Link
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.worker import WorkerProtocol

RECENT_EXCHANGES = 16
MAX_NOTICES = 1000
LOOK_AT_OTHERS_EVERY_S = 0.2
# A dead worker is found dead within so many time-outs of its last word. If this worker heard it
# longer ago, others heard it since, and the moment of its last word is not known here.
FOUND_DEAD_WITHIN_TIMEOUTS = 3

NoticeKind: TypeAlias = Literal["joined", "silent", "lost", "answered", "restarted", "stopped"]
_Bytes: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True)
class Notice:
    """A change in a worker's life, as this worker noticed it.

    Attributes:
        rank: of the worker concerned.
        kind: ``joined``: it takes part, and was not one of the run's first workers; ``silent``: its
            link has been silent for the time-out, though it is open; ``lost``: no worker, here or
            elsewhere, hears it any more, and the others go on without it; ``answered``: the same
            process answers again after it was silent or lost; ``restarted``: a new process takes
            part under its rank; ``stopped``: this worker itself did not run for the time-out.
        at_s: :func:`~gossipdp.links.clock.since_boot_s`, one clock for all of a machine.
        number: of this worker's notices so far, this one included.
        silent_s: how long nothing had been heard of the worker, or of its former process; if
            ``stopped``, how long this worker did not run. None if it is not known.
    """

    rank: int
    kind: NoticeKind
    at_s: float
    number: int = 0
    silent_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """A worker's run as of the gossip thread's last turn.

    Attributes:
        counters: those that the gossip thread counts; the engine and the checkpoints add theirs.
        num_ticks: of the protocol's clock.
        others_samples: as last heard.
        is_stopped: a worker has ended the run for all, as last heard.
        recent_exchanges: the last completed ones, oldest first.
        noticed: see :class:`Notice`.
        silent: linked peers that have been silent for the time-out.
        neighbours: in the graph of the live workers.
        heard: by peer, when each link that is up was heard last.
        members, progress: all workers; (samples, steps) by rank. At most 0.2 s older than the rest.
        stepped_s: by rank, when this worker last saw the number of its steps grow.
    """

    counters: Counters
    num_ticks: int
    others_samples: int
    is_stopped: bool
    recent_exchanges: tuple[CompletedExchange, ...]
    noticed: tuple[Notice, ...]
    silent: frozenset[int]
    neighbours: frozenset[int]
    heard: Mapping[int, float]
    members: tuple[Member, ...]
    progress: Mapping[int, tuple[int, int]]
    stepped_s: Mapping[int, float]


class Publisher:
    """The maker of :class:`LoopSnapshot`. The gossip thread alone calls it."""

    def __init__(self, protocol: WorkerProtocol, links: Mapping[int, Link]) -> None:
        self._noticed = Noticed(
            protocol.rank, protocol.neighbourhood.num_originals, protocol.timeout_s
        )
        self._protocol = protocol
        self._links = links
        self._by_neighbour: dict[int, int] = {}
        self._recent: deque[CompletedExchange] = deque(maxlen=RECENT_EXCHANGES)
        self._edge_distance = math.nan
        self._exchange_seconds = 0.0
        self._num_chunks = self._num_repeated = self._num_standstills = 0
        self._ended_bytes: _Bytes = (0, 0, 0, 0)  # of links that have ended
        self._others_due_s = -math.inf
        self._version = -1
        self._members: tuple[Member, ...] = ()
        self._progress: dict[int, tuple[int, int]] = {}
        self._stepped_s: dict[int, float] = {}

    def exchanged(self, exchange: CompletedExchange, num_chunks: int, num_repeated: int) -> None:
        """Count an exchange that was completed here."""
        num_before = self._by_neighbour.get(exchange.peer, 0)
        self._by_neighbour = {**self._by_neighbour, exchange.peer: num_before + 1}
        self._recent.append(exchange)
        self._edge_distance = fmean(each.half_squared_distance for each in self._recent)
        self._exchange_seconds += exchange.ended_s - exchange.started_s
        self._num_chunks += num_chunks
        self._num_repeated += num_repeated

    def link_down(self, link: Link) -> None:
        """Keep the bytes of a link that has ended."""
        self._ended_bytes = _summed([self._ended_bytes, _bytes(link)])

    def snapshot(self, now: float) -> LoopSnapshot:
        """Return the state of the run now."""
        protocol, membership = self._protocol, self._protocol.membership
        # A joiner that asks for the members uses a number that is no rank.
        silent = {peer for peer in protocol.peers.silent if peer < FIRST_VISITOR_RANK}
        if self._num_standstills != protocol.num_standstills:
            self._num_standstills = protocol.num_standstills
            self._noticed.note(protocol.rank, "stopped", now, protocol.stood_still_s)
        heard = {
            peer: link.last_heard_s
            for peer, link in self._links.items()
            if peer < FIRST_VISITOR_RANK
        }
        self._noticed.look(membership.version, membership.members, silent, heard, now)
        if membership.version != self._version or now >= self._others_due_s:
            self._version = membership.version
            self._others_due_s = now + LOOK_AT_OTHERS_EVERY_S
            self._members = tuple(membership.members())
            self._progress = protocol.progress.by_rank()
            times = {rank: protocol.progress.stepped_at(rank) for rank in self._progress}
            self._stepped_s = {rank: at_s for rank, at_s in times.items() if at_s is not None}
        sent, received, shared_sent, shared_received = _summed(
            [self._ended_bytes, *map(_bytes, self._links.values())]
        )
        step_seconds, rate = protocol.clock.step_seconds, protocol.exchange_rate
        return LoopSnapshot(
            counters=Counters(
                step_seconds=math.nan if step_seconds is None else step_seconds,
                exchanges_initiated=protocol.exchanges_initiated,
                exchanges_answered=protocol.exchanges_answered,
                exchanges_failed=protocol.exchanges_failed,
                exchanges_by_neighbour=self._by_neighbour,
                aimed_comm_rate=protocol.neighbourhood.graph.comm_rate
                if rate is None
                else rate.rate,
                comm_rate_bound="fixed" if rate is None else rate.bound,
                edge_distance=self._edge_distance,
                exchange_seconds=self._exchange_seconds,
                chunks_exchanged=self._num_chunks,
                chunks_repeated=self._num_repeated,
                bytes_sent=sent,
                bytes_received=received,
                shared_bytes_sent=shared_sent,
                shared_bytes_received=shared_received,
            ),
            num_ticks=protocol.clock.num_ticks,
            others_samples=protocol.progress.others_samples,
            is_stopped=protocol.progress.is_stopped,
            recent_exchanges=tuple(self._recent),
            noticed=self._noticed.notices,
            silent=frozenset(silent),
            neighbours=protocol.neighbours,
            heard=heard,
            members=self._members,
            progress=self._progress,
            stepped_s=self._stepped_s,
        )


def _bytes(link: Link) -> _Bytes:
    """Return the bytes of a link: sent, received, and both by shared memory."""
    shared = link.shared_bytes_sent, link.shared_bytes_received
    return link.bytes_sent, link.bytes_received, *shared


def _summed(counts: Iterable[_Bytes]) -> _Bytes:
    one, two, three, four = map(sum, zip(*counts, strict=True))
    return one, two, three, four


class Noticed:
    """The notices of one worker, at most ``MAX_NOTICES``, oldest first.

    They come from the membership view and the silent links, on which this worker also acts. If
    there are more, the oldest notice that is not the latest about its worker is dropped: so no loss
    is forgotten.
    """

    def __init__(self, rank: int, num_workers: int, timeout_s: float) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._found_dead_within_s = FOUND_DEAD_WITHIN_TIMEOUTS * timeout_s
        self.notices: tuple[Notice, ...] = ()
        self._num_noted = 0
        self._version = -1
        self._known: dict[int, Member] = {}
        # The last process of each rank that took part; 0 if only its address is known.
        self._process: dict[int, int] = {}
        self._silent: frozenset[int] = frozenset()
        self._lost: set[int] = set()
        self._heard: dict[int, float] = {}
        # When each silent or lost worker was heard last; None if it is not known.
        self._since: dict[int, float | None] = {}

    def note(
        self, rank: int, kind: NoticeKind, now_s: float, silent_s: float | None = None
    ) -> None:
        """Add one notice."""
        self._num_noted += 1
        notices = [*self.notices, Notice(rank, kind, now_s, self._num_noted, silent_s)]
        if len(notices) > MAX_NOTICES:
            last = {notice.rank: index for index, notice in enumerate(notices)}
            old = (index for index, notice in enumerate(notices) if last[notice.rank] != index)
            del notices[next(old, 0)]
        self.notices = tuple(notices)

    def look(
        self,
        version: int,
        members: Callable[[], Iterable[Member]],
        silent: Collection[int],
        heard: Mapping[int, float],
        now_s: float,
    ) -> None:
        """Note what has changed since the last look at a view of this ``version``.

        ``heard``: when each linked peer was heard last.
        """
        for rank in sorted(set(silent) - self._silent - self._lost):
            self._since[rank] = heard[rank]
            self.note(rank, "silent", now_s, now_s - heard[rank])
        self._silent = frozenset(silent)
        if version != self._version:
            self._version = version
            for member in members():
                before = self._known.get(member.rank)
                if member is before:
                    continue
                self._known[member.rank] = member
                if member.rank != self._rank:
                    self._compare(before, member, now_s)
        self._heard.update(heard)
        for rank in self._since.keys() - self._silent - self._lost:
            # A link that is closed is no answer.
            if rank in heard:
                self._end_silence(rank, "answered", now_s)

    def _compare(self, before: Member | None, member: Member, now_s: float) -> None:
        rank, process = member.rank, self._process.get(member.rank, 0)
        if member.status is Status.DEAD:
            if before is None or before.status is not Status.DEAD:
                self._lose(member, now_s)
            return
        is_another = member.process_id != process
        if process == 0:
            is_another = rank in self._lost and member.restarts > 0
        if is_another and before is not None and before.is_live:
            # It was started again so soon that this worker hears of the new life before the loss.
            self._lose(before, now_s)
        if is_another:
            self._heard.pop(rank, None)  # the former process's
        if member.status is Status.LEFT:
            self._since.pop(rank, None)
        if not member.is_live:
            return
        self._process[rank] = member.process_id
        if is_another:
            self._end_silence(rank, "restarted", now_s)
        elif rank in self._lost:
            self._end_silence(rank, "answered", now_s)
        elif process == 0 and (before is None or before.status is Status.JOINING):
            if rank >= self._num_workers and member.restarts == 0:
                self.note(rank, "joined", now_s)
            elif before is not None:
                self.note(rank, "restarted", now_s)

    def _lose(self, member: Member, now_s: float) -> None:
        rank = member.rank
        self._process.setdefault(rank, member.process_id)
        self._lost.add(rank)
        since = self._since.get(rank, self._heard.get(rank))
        if since is not None and now_s - since > self._found_dead_within_s:
            since = None
        self._since[rank] = since
        self.note(rank, "lost", now_s, None if since is None else now_s - since)

    def _end_silence(self, rank: int, kind: NoticeKind, now_s: float) -> None:
        self._lost.discard(rank)
        since = self._since.pop(rank, None)
        self.note(rank, kind, now_s, None if since is None else now_s - since)
