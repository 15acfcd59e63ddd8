"""What the gossip thread tells the other threads of its worker: one value, replaced whole.

The main thread, the log's and the status port's read :attr:`GossipLoop.published` at any time, and
nothing else of what the gossip thread changes. A value that they hold stays as it is.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.gossip.noticed import Notice, Noticed
from gossipdp.links.link import Link
from gossipdp.protocol.members import Member
from gossipdp.protocol.worker import WorkerProtocol

RECENT_EXCHANGES = 16
LOOK_AT_OTHERS_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class LinkCounts:
    """One link that is up; names as of :class:`~gossipdp.links.link.Link`."""

    peer: int
    last_heard_s: float
    bytes_sent: int
    bytes_received: int
    shared_bytes_sent: int
    shared_bytes_received: int


@dataclass(frozen=True, slots=True)
class Published:
    """A worker's run as of the gossip thread's last turn.

    Attributes:
        others_samples: as last heard.
        exchanges_initiated, exchanges_answered, exchanges_failed, num_ticks, step_seconds: of the
            protocol.
        bytes_sent, bytes_received, shared_bytes_sent, shared_bytes_received: on all links, those
            that have ended included.
        exchanges_by_neighbour, exchange_seconds, chunks_exchanged, chunks_repeated,
            recent_exchanges: completed exchanges.
        noticed: see :class:`~gossipdp.gossip.noticed.Noticed`.
        silent: linked peers that have been silent for the time-out.
        neighbours: in the graph of the live workers.
        links: those that are up.
        members, progress: all workers; (samples, steps) by rank. At most 0.2 s older than the rest.
        stepped_s: by rank, when this worker saw the number of its steps grow last.
    """

    others_samples: int
    exchanges_initiated: int
    exchanges_answered: int
    exchanges_failed: int
    num_ticks: int
    step_seconds: float | None
    bytes_sent: int
    bytes_received: int
    shared_bytes_sent: int
    shared_bytes_received: int
    exchanges_by_neighbour: Mapping[int, int]
    exchange_seconds: float
    chunks_exchanged: int
    chunks_repeated: int
    recent_exchanges: tuple[CompletedExchange, ...]
    noticed: tuple[Notice, ...]
    silent: frozenset[int]
    neighbours: frozenset[int]
    links: tuple[LinkCounts, ...]
    members: tuple[Member, ...]
    progress: Mapping[int, tuple[int, int]]
    stepped_s: Mapping[int, float]


class Publisher:
    """Counts what the loop reports, and makes :class:`Published` of it. The gossip thread's alone.

    Args:
        protocol: of this worker.
        links: by peer; the loop's own table.
    """

    def __init__(self, protocol: WorkerProtocol, links: Mapping[int, Link]) -> None:
        self.noticed = Noticed(protocol.rank, protocol.neighbourhood.num_originals)
        self._protocol = protocol
        self._links = links
        self._by_neighbour: dict[int, int] = {}
        self._recent: deque[CompletedExchange] = deque(maxlen=RECENT_EXCHANGES)
        self._exchange_seconds = 0.0
        self._num_chunks = self._num_repeated = 0
        self._ended = [0, 0, 0, 0]  # bytes of links that have ended, in the order of Published
        self._others_due_s = -math.inf
        self._version = -1
        self._members: tuple[Member, ...] = ()
        self._progress: dict[int, tuple[int, int]] = {}
        self._stepped_s: dict[int, float] = {}

    def exchanged(self, exchange: CompletedExchange, num_chunks: int, num_repeated: int) -> None:
        """An exchange was completed here."""
        self._by_neighbour = {
            **self._by_neighbour,
            exchange.peer: self._by_neighbour.get(exchange.peer, 0) + 1,
        }
        self._recent.append(exchange)
        self._exchange_seconds += exchange.ended_s - exchange.started_s
        self._num_chunks += num_chunks
        self._num_repeated += num_repeated

    def link_down(self, link: Link) -> None:
        """A link has ended: its counts stay in the sums."""
        for index, count in enumerate(_bytes(link)):
            self._ended[index] += count

    def publish(self, now: float) -> Published:
        """Return what there is to tell now."""
        protocol, membership = self._protocol, self._protocol.membership
        silent = protocol.suspects()
        self.noticed.look(membership.version, membership.members, silent, now)
        if membership.version != self._version or now >= self._others_due_s:
            self._version = membership.version
            self._others_due_s = now + LOOK_AT_OTHERS_EVERY_S
            self._members = tuple(membership.members())
            self._progress = protocol.progress.by_rank()
            times = {rank: protocol.progress.stepped_at(rank) for rank in self._progress}
            self._stepped_s = {rank: at_s for rank, at_s in times.items() if at_s is not None}
        links = tuple(
            LinkCounts(link.peer, link.last_heard_s, *_bytes(link)) for link in self._links.values()
        )
        return Published(
            others_samples=protocol.progress.others_samples,
            exchanges_initiated=protocol.exchanges_initiated,
            exchanges_answered=protocol.exchanges_answered,
            exchanges_failed=protocol.exchanges_failed,
            num_ticks=protocol.clock.num_ticks,
            step_seconds=protocol.clock.step_seconds,
            bytes_sent=self._ended[0] + sum(link.bytes_sent for link in links),
            bytes_received=self._ended[1] + sum(link.bytes_received for link in links),
            shared_bytes_sent=self._ended[2] + sum(link.shared_bytes_sent for link in links),
            shared_bytes_received=self._ended[3]
            + sum(link.shared_bytes_received for link in links),
            exchanges_by_neighbour=self._by_neighbour,
            exchange_seconds=self._exchange_seconds,
            chunks_exchanged=self._num_chunks,
            chunks_repeated=self._num_repeated,
            recent_exchanges=tuple(self._recent),
            noticed=self.noticed.notices,
            silent=silent,
            neighbours=protocol.neighbours,
            links=links,
            members=self._members,
            progress=self._progress,
            stepped_s=self._stepped_s,
        )


def _bytes(link: Link) -> tuple[int, int, int, int]:
    return (
        link.bytes_sent,
        link.bytes_received,
        link.shared_bytes_sent,
        link.shared_bytes_received,
    )
