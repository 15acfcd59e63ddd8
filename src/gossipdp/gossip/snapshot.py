"""The snapshot that the gossip thread gives the other threads of its worker.

The main thread, the log's thread and the status port's threads read :attr:`GossipLoop.snapshot` at
any time. Apart from single values that are replaced, such as :attr:`GossipLoop.poisoned`, they
read nothing else that the gossip thread changes. It is replaced as a whole, so one that a thread
holds never changes.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from gossipdp.gossip.counters import Counters
from gossipdp.gossip.exchange import CompletedExchange
from gossipdp.links.handshake import FIRST_VISITOR_RANK
from gossipdp.links.link import Link
from gossipdp.protocol.actions import Notice
from gossipdp.protocol.members import Member
from gossipdp.protocol.worker import WorkerProtocol

RECENT_EXCHANGES = 16
MAX_NOTICES = 1000
PUBLISH_EVERY_S = 0.05
"""An exchange takes several turns, and to make a snapshot costs a tenth of a turn's Python."""
LOOK_AT_OTHERS_EVERY_S = 0.2
_BYTES = "bytes_sent", "bytes_received", "shared_bytes_sent", "shared_bytes_received"
"""The names of these counts in :class:`.Counters` and :class:`.Link`."""


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """A worker's run, as of a turn of the gossip thread that ended at most 50 ms before the last.

    Attributes:
        counters: those that the gossip thread counts; the worker adds its own. They hold at most
            ``MAX_NOTICES`` notices, and the last of each worker in any case.
        is_stopped: a worker has ended the run for all, as last heard.
        recent_exchanges: the last completed ones, oldest first.
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
    silent: frozenset[int]
    neighbours: frozenset[int]
    heard: Mapping[int, float]
    members: tuple[Member, ...]
    progress: Mapping[int, tuple[int, int]]
    stepped_s: Mapping[int, float]


class Publisher:
    """The maker of :class:`LoopSnapshot`. The gossip thread alone calls it."""

    def __init__(self, protocol: WorkerProtocol, links: Mapping[int, Link]) -> None:
        self._protocol, self._links = protocol, links
        self._counters = Counters()  # as the last completed exchange, or notice, left them
        self._recent: deque[CompletedExchange] = deque(maxlen=RECENT_EXCHANGES)
        self._ended_bytes: Counter[str] = Counter()  # of links that have ended
        self._others_due_s = -math.inf
        self._version = -1
        self._members: tuple[Member, ...] = ()
        self._progress: dict[int, tuple[int, int]] = {}
        self._stepped_s: dict[int, float] = {}

    def exchanged(self, exchange: CompletedExchange, num_chunks: int, num_repeated: int) -> None:
        before, peer = self._counters, exchange.peer
        num_before = before.exchanges_by_neighbour.get(peer, 0)
        self._recent.append(exchange)
        self._counters = replace(
            before,
            exchanges_by_neighbour={**before.exchanges_by_neighbour, peer: num_before + 1},
            wire_formats={**before.wire_formats, peer: exchange.wire_format},
            edge_distance=fmean(each.half_squared_distance for each in self._recent),
            exchange_seconds=before.exchange_seconds + (exchange.ended_s - exchange.started_s),
            chunks_exchanged=before.chunks_exchanged + num_chunks,
            chunks_repeated=before.chunks_repeated + num_repeated,
        )

    def noticed(self, notice: Notice) -> None:
        """Keep a notice; of too many, drop the oldest that is not the last of its worker."""
        notices = [*self._counters.noticed, notice]
        if len(notices) > MAX_NOTICES:
            last = {notice.rank: index for index, notice in enumerate(notices)}
            old = (index for index, notice in enumerate(notices) if last[notice.rank] != index)
            del notices[next(old, 0)]
        self._counters = replace(self._counters, noticed=tuple(notices))

    def link_down(self, link: Link) -> None:
        self._ended_bytes.update({name: getattr(link, name) for name in _BYTES})

    def snapshot(self, now: float) -> LoopSnapshot:
        protocol, membership = self._protocol, self._protocol.membership
        # A joiner that asks for the members uses a number that is no rank.
        silent = frozenset(peer for peer in protocol.peers.silent if peer < FIRST_VISITOR_RANK)
        heard = {
            peer: link.last_heard_s
            for peer, link in self._links.items()
            if peer < FIRST_VISITOR_RANK
        }
        if membership.version != self._version or now >= self._others_due_s:
            self._version = membership.version
            self._others_due_s = now + LOOK_AT_OTHERS_EVERY_S
            self._members = membership.members()
            self._progress = protocol.progress.by_rank()
            self._stepped_s = dict(protocol.progress.stepped_at)
        links, graph = self._links.values(), protocol.neighbourhood.graph
        step_seconds, rate = protocol.clock.step_seconds, protocol.exchange_rate
        return LoopSnapshot(
            counters=replace(
                self._counters,
                step_seconds=math.nan if step_seconds is None else step_seconds,
                exchanges_initiated=protocol.exchanges_initiated,
                exchanges_answered=protocol.exchanges_answered,
                exchanges_failed=protocol.exchanges_failed,
                aimed_comm_rate=graph.comm_rate if rate is None else rate.rate,
                comm_rate_bound="fixed" if rate is None else rate.bound,
                **{
                    name: self._ended_bytes[name] + sum(getattr(link, name) for link in links)
                    for name in _BYTES
                },
            ),
            num_ticks=protocol.clock.num_ticks,
            others_samples=protocol.progress.others_samples,
            is_stopped=protocol.progress.is_stopped,
            recent_exchanges=tuple(self._recent),
            silent=silent,
            neighbours=protocol.neighbours,
            heard=heard,
            members=self._members,
            progress=self._progress,
            stepped_s=self._stepped_s,
        )
