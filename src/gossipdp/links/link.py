"""The seam between the gossip thread and the transport of its bytes; when to dial, and to send.

A :class:`Transport` (:mod:`.tcp`) makes links and calls one :class:`LinkHandler`.
The conformance suite in ``tests/unit/links`` checks these guarantees:

- Handler methods are called only from inside ``poll()`` and ``flush()``, one at a time, and never
  from inside a method of a link. So no handler method is ever entered twice.
- For each link: ``link_up`` once, then ``control`` and chunk calls, then ``link_down`` once; after
  :meth:`Link.close` nothing but ``link_down``. At most one link to a peer is up: an old one goes
  down before the new one is up.
- From ``link_down`` on (and from the return of ``close()``) the transport touches neither a
  queued payload nor a landing buffer of that link. (The peer may: see ``Transport.allocate``.)
- Frames arrive in the order in which they were started. Control frames overtake chunks that have
  not been started; chunks keep their order among themselves.
- A handler may call any method of any link, also ``close()`` of the very link that called. An
  exception that it raises leaves ``poll()``; the transport stays usable and loses nothing but the
  rest of that call.
"""

import abc
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, final

from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0
# If two workers want the same link, the lower rank dials at once and the higher one waits this long
# for that dial, or one of two links is wasted. After the loss of a link it waits less: if the peer
# was killed, its address refuses the dial.
GRACE_S = 1.0
GRACE_AFTER_LOSS_S = 0.2
# The least time from one link to the dial for the next. If some message ends every link to a peer,
# the two would otherwise dial each other without a pause.
BETWEEN_LINKS_S = 0.25
# Chunks leave in portions: smaller ones would wake the gossip thread, and the peer's, too often. A
# portion is 10 ms' worth or 32 KiB, whichever is more, but no more than a tenth of a second's or
# 1500 bytes: an exchange that waits longer for one may count as standing still (SHORTEST_GAP_S).
PORTION_S, LONGEST_PORTION_S = 0.01, 0.1
PORTION_BYTES = 32 << 10
LEAST_PORTION_BYTES = 1500
# The portions that may be saved up, so that a thread that wakes late loses little.
MOST_SAVED = 2


class Link(abc.ABC):
    """A two-way connection to one peer that is a member, used from the transport's thread only.

    Attributes:
        peer_identity: the peer's hello.
        closed: True once the link has ended, at either end's wish or by failure.
        bytes_sent, bytes_received: bytes over the network, including headers.
        shared_bytes_sent, shared_bytes_received: bytes of chunks that were read in place instead.
        chunk_bytes_sent, chunk_bytes_received: bytes of chunks' payloads, by type, including the
            chunk under way and those read in place, excluding those received and dropped.
        last_heard_s: the time of the last byte's arrival, by the transport's clock, in seconds.
        is_shared: True if the peer reads exchange chunks in the memory that ``allocate`` gives now.
        is_aging: True if the handler should close the link, and dial again, when nothing is under
            way. If it never does, the link closes itself in the end, even in mid-transfer.
    """

    peer_identity: Identity
    closed = False
    bytes_sent = bytes_received = 0
    shared_bytes_sent = shared_bytes_received = 0
    last_heard_s = 0.0

    def __init__(self) -> None:
        self.chunk_bytes_sent: Counter[FrameType] = Counter()
        self.chunk_bytes_received: Counter[FrameType] = Counter()

    @property
    @final
    def peer(self) -> int:
        return self.peer_identity.rank

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def is_aging(self) -> bool:
        return False

    @property
    @abc.abstractmethod
    def queued_chunks(self) -> int:
        """The number of chunks that have not left wholly, including the one being sent."""

    @property
    @abc.abstractmethod
    def has_unsent(self) -> bool:
        """True if any of what was queued has not been handed to the network yet."""

    @abc.abstractmethod
    def queued_of(self, *frame_types: FrameType) -> int:
        """Return the number of queued chunks that have one of these types."""

    @abc.abstractmethod
    def send_control(self, data: bytes) -> None:
        """Queue a control frame of 1 byte to 1 MiB, ahead of all chunks not yet started.

        On a closed link it does nothing: ``link_down`` is on its way.
        """

    @abc.abstractmethod
    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """Queue a chunk. ``payload`` (contiguous) is not copied. On a closed link it does nothing.

        It must stay unchanged until the chunk has left: ``queued_chunks`` no longer counts it.
        Chunks leave in the order in which they were queued. On a link that ``is_shared``, a payload
        from :meth:`Transport.allocate` has left when the peer has read it there.
        """

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """End the link at once; ``link_down(link, reason)`` follows from ``poll()``.

        Control frames queued before are handed over if that takes no waiting (an ABORT sent just
        before goes out); queued chunks are dropped. A second call does nothing.
        """


class LinkHandler(abc.ABC):
    """The receiver of a transport's events, in the module's order; by default it takes no chunk."""

    @abc.abstractmethod
    def link_up(self, link: Link) -> None:
        """Take note that ``link`` is authenticated and ready."""

    @abc.abstractmethod
    def link_down(self, link: Link, reason: str) -> None:
        """Take note that ``link`` has ended."""

    @abc.abstractmethod
    def control(self, link: Link, data: bytes) -> None:
        """Take a control frame that arrived."""

    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        """Return a buffer for the ``length`` bytes of the chunk that comes next; None: drop them.

        The buffer belongs to the transport until ``chunk`` or ``link_down``. If its size is not
        ``length``, the link ends, for the peer's layout is not ours. To end the link for a chunk
        that no worker sends, raise :class:`.FrameError`.
        """
        return None

    def chunk(  # noqa: B027
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """Take a chunk that arrived whole: ``payload`` is the buffer from ``chunk_buffer``, filled.

        None: it was dropped. The payload of an exchange chunk may be the peer's own memory instead.
        That is valid until this method returns, and a write there would end the process.
        """

    def writable(self, link: Link) -> None:  # noqa: B027
        """Take note that chunks left and ``queued_chunks`` is under the transport's bound."""

    @abc.abstractmethod
    def refused(self, peer: int | None, refusal: Refusal) -> None:
        """Note that a worker that we dialled refuses us, or we refuse it; ``str(refusal)``: why."""

    @abc.abstractmethod
    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        """Take note that the dial to ``address`` failed.

        ``refused_connection``: no process listens at that address. The address is the one that was
        dialled, even if another one was asked for while this dial was under way.
        """

    def pin(self, memory: memoryview, *, is_peers: bool) -> object:
        """Prepare memory in which exchange chunks leave or arrive; hold the result beside it.

        A write to memory that ``is_peers`` would end the process.
        """
        return None


class Transport(abc.ABC):
    """A maker of links that drives one :class:`LinkHandler`; for one thread, except ``wake``."""

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> memoryview:
        """Return memory for the slots of one exchange: ``num_bytes`` from the start of a page.

        Call it before each exchange and never in the middle of one. The memory is the same as
        before, unless the peer of a broken link may still be reading it: then it is fresh, and the
        old memory stays unchanged for as long as a peer reads it.

        If peers can read it in place (``Link.is_shared``), its chunks are not copied.
        """

    @abc.abstractmethod
    def dial(self, peer: int | None, host: str, port: int) -> None:
        """Start a link to ``peer`` (None: any worker that listens there) at a numeric address.

        A second dial to a peer while one is under way does nothing. A dial ends in ``link_up`` of
        a link to that peer (perhaps one that the peer dialled), ``refused`` or ``dial_failed``;
        the last is left out if a link to that peer is up.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Write what waits; a caller of ``poll`` that does so first knows how long it may wait."""

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> None:
        """Do one turn: write, wait at most ``timeout_s`` for an event, read, write.

        It and ``flush`` call all handler methods. Their exceptions pass through; call again.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """Make ``poll()`` return soon. From any thread and from signal handlers; never blocks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything without a call to the handler; control frames leave if they can."""


@dataclass
class _Wish:
    due_s: float  # infinite while a dial is under way
    retry_s: float = FIRST_RETRY_S
    not_before_s: float = -math.inf  # by its last link


class Dialer:
    """The bookkeeping of wanted links: which peers to dial now.

    A wanted peer without a link is dialled, and dialled again with a back-off that doubles up to
    ``LONGEST_RETRY_S`` (and a jitter, so that many workers do not knock together) for as long as
    it is wanted: partitions heal, and the dead may come back at the same address. ``links`` is the
    owner's table of links that are up, by peer.
    """

    def __init__(self, rank: int, random: Random, links: Mapping[int, Link]) -> None:
        self._rank, self._random, self._links = rank, random, links
        self._wishes: dict[int, _Wish] = {}

    def want(self, peers: Iterable[int], now_s: float, *, at_once: bool = False) -> None:
        for peer in peers:
            grace_s = 0.0 if at_once or self._rank < peer else GRACE_S
            wish = self._wishes.setdefault(peer, _Wish(now_s + grace_s))
            if at_once and wish.due_s < math.inf:
                wish.due_s = min(wish.due_s, max(now_s, wish.not_before_s))

    def linked(self, peer: int, now_s: float) -> None:
        if peer in self._wishes:
            self._wishes[peer].not_before_s = now_s + BETWEEN_LINKS_S

    def unlinked(self, peer: int, now_s: float) -> None:
        wish = self._wishes.get(peer)
        if wish is not None:
            grace_s = 0.0 if self._rank < peer else GRACE_AFTER_LOSS_S
            due_s = max(now_s, wish.not_before_s) + grace_s
            self._wishes[peer] = _Wish(due_s, not_before_s=wish.not_before_s)

    def failed(self, peer: int, now_s: float) -> None:
        wish = self._wishes.get(peer)
        if wish is not None and peer not in self._links:
            wish.due_s = now_s + wish.retry_s * self._random.uniform(0.8, 1.2)
            wish.retry_s = min(LONGEST_RETRY_S, 2.0 * wish.retry_s)

    def due(self, addresses: Mapping[int, tuple[str, int]], now_s: float) -> list[int]:
        """Return the peers to dial now; each then waits for a link or for ``failed``."""
        due = [peer for peer, wish in self._open(addresses) if wish.due_s <= now_s]
        for peer in due:
            self._wishes[peer].due_s = math.inf
        return due

    def next_due_s(self, addresses: Mapping[int, tuple[str, int]]) -> float:
        """Return the time at which :meth:`due` next returns a peer, if nothing happens before."""
        return min((wish.due_s for _, wish in self._open(addresses)), default=math.inf)

    def _open(self, addresses: Mapping[int, tuple[str, int]]) -> list[tuple[int, _Wish]]:
        wanted = self._wishes.items()
        return [each for each in wanted if each[0] not in self._links and each[0] in addresses]


def portion_of(bytes_per_s: float) -> float:
    """Return the least number of bytes that leave at a time."""
    small = min(PORTION_BYTES, LONGEST_PORTION_S * bytes_per_s)
    return max(small, PORTION_S * bytes_per_s, LEAST_PORTION_BYTES)


@final
class SendLimit:
    """Bytes that may be sent: they come in at a steady rate, and a few portions can be saved.

    Chunks take what is there. Other frames always leave, and chunks then wait longer.

    Attributes:
        held: links whose chunk waits for a portion; who has waited longest comes first.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._portion = portion_of(bytes_per_s)
        self._saved = MOST_SAVED * self._portion
        self._at_s = -math.inf
        self.held: dict[Any, None] = {}

    def take(self, most: int, now_s: float) -> int:
        """Take up to ``most`` bytes and return their number; 0 if less than a portion is there."""
        if self.opens_at(now_s) > now_s and self._saved < most:
            return 0
        taken = min(most, int(self._saved))
        self._saved -= taken
        return taken

    def spend(self, num_bytes: int) -> None:
        """Note bytes that left without asking."""
        self._saved -= num_bytes

    def next_held(self, now_s: float) -> Any | None:
        """Return, and hold no longer, the link that has waited longest, if a portion is there."""
        if not self.held or self.opens_at(now_s) > now_s:
            return None
        link = next(iter(self.held))
        del self.held[link]
        return link

    def opens_at(self, now_s: float) -> float:
        """Return when a portion is there: now, or later."""
        if now_s > self._at_s:
            earned = (now_s - self._at_s) * self._bytes_per_s
            self._saved = min(MOST_SAVED * self._portion, self._saved + earned)
            self._at_s = now_s
        missing = self._portion - self._saved
        return now_s if missing < 1.0 else now_s + missing / self._bytes_per_s
