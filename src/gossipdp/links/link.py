"""The seam between the gossip thread and whatever carries its bytes; and when to dial whom.

A :class:`Transport` (:mod:`.tcp`) makes links and calls one :class:`LinkHandler`.
Guarantees, which the conformance suite in ``tests/unit/links`` checks:

- Handler methods are called only from inside the transport's ``poll()``, one at a time, and never
  from inside a method of a link. So no handler method is ever entered twice.
- For each link: ``link_up`` once, then ``control`` and chunk calls, then ``link_down`` once, also
  where it was this side that called :meth:`Link.close`; after :meth:`Link.close` nothing but
  ``link_down``. At most one link to a peer is up: an old one goes down before the new one is up.
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
from typing import final

from gossipdp.links.frames import ChunkKey, FrameType
from gossipdp.links.handshake import Identity, Refusal

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0
# Of two workers that want the same link the lower rank dials at once and the higher one waits
# this long for it: dialling from both sides works, but costs a link. After the loss of a link less
# long: if the peer was killed, its address refuses connections, and that is how it is noticed.
GRACE_S = 1.0
GRACE_AFTER_LOSS_S = 0.2


class Link(abc.ABC):
    """A two-way connection to one peer that is a member, used from the transport's thread only.

    Attributes:
        peer_identity: the peer's hello.
        closed: whether the link has ended, at either end's wish or by failure.
        queued_bytes: bytes that have not left, headers of started frames included.
        bytes_sent, bytes_received: over the network, headers included.
        shared_bytes_sent, shared_bytes_received: of chunks that were read in place instead.
        chunk_bytes_sent, chunk_bytes_received: of the payload of chunks, by type, also of the chunk
            under way and of those read in place; nothing of chunks that nobody wants.
        last_heard_s: when the last byte arrived, by the transport's clock, in seconds.
        is_shared: whether the peer reads exchange chunks in what ``allocate`` gives now.
        is_aging: whether it is to be closed, and dialled anew, when nothing is under way. If nobody
            does, it closes itself in the end, whatever is.
    """

    peer_identity: Identity
    closed = False
    queued_bytes = 0
    bytes_sent = bytes_received = 0
    shared_bytes_sent = shared_bytes_received = 0
    last_heard_s = 0.0

    def __init__(self) -> None:
        self.chunk_bytes_sent: Counter[FrameType] = Counter()
        self.chunk_bytes_received: Counter[FrameType] = Counter()

    @property
    @final
    def peer(self) -> int:
        """The peer's rank."""
        return self.peer_identity.rank

    @property
    @final
    def peer_incarnation(self) -> int:
        """The incarnation with which the peer's process began."""
        return self.peer_identity.incarnation

    @property
    def is_shared(self) -> bool:
        return False

    @property
    def is_aging(self) -> bool:
        return False

    @property
    @abc.abstractmethod
    def queued_chunks(self) -> int:
        """Chunks that have not left wholly, the one being sent included."""

    @abc.abstractmethod
    def queued_of(self, *frame_types: FrameType) -> int:
        """Those of them that have one of these types."""

    @final
    def moved_of(self, *frame_types: FrameType) -> int:
        """Return the bytes of such chunks that went either way; they show that something gets on.

        Messages and heartbeats do not count, nor do headers.
        """
        counts = self.chunk_bytes_sent, self.chunk_bytes_received
        return sum(count[frame_type] for count in counts for frame_type in frame_types)

    @abc.abstractmethod
    def send_control(self, data: bytes) -> None:
        """Queue a control frame of 1 byte to 1 MiB, ahead of all chunks not yet started.

        On a closed link it does nothing: ``link_down`` is on its way.
        """

    @abc.abstractmethod
    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """Queue a chunk. ``payload`` (contiguous) is not copied. On a closed link it does nothing.

        It must stay unchanged until the chunk has left, that is, until ``queued_chunks`` no
        longer counts it; chunks leave in the order in which they were queued. One whose payload is
        from :meth:`Transport.allocate`, on a link that ``is_shared``, has left when the peer has
        read it there.
        """

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """End the link at once; ``link_down(link, reason)`` follows from ``poll()``.

        Control frames queued before are handed over where that takes no waiting (an ABORT sent
        just before goes out); queued chunks are dropped. A second call does nothing.
        """


class LinkHandler(abc.ABC):
    """Is told what happens; see the module for when and in which order."""

    @abc.abstractmethod
    def link_up(self, link: Link) -> None:
        """``link`` is authenticated and ready."""

    @abc.abstractmethod
    def link_down(self, link: Link, reason: str) -> None:
        """``link`` has ended."""

    @abc.abstractmethod
    def control(self, link: Link, data: bytes) -> None:
        """A control frame arrived."""

    @abc.abstractmethod
    def chunk_buffer(
        self, link: Link, frame_type: FrameType, key: ChunkKey, length: int
    ) -> memoryview | None:
        """Where to land the ``length`` bytes of the chunk that comes next; None: drop them.

        The buffer belongs to the transport until ``chunk`` or ``link_down``. A buffer whose size
        is not ``length`` ends the link, for the peer's layout is not ours; so does a
        :class:`.FrameError` raised here, for a chunk that no worker sends.
        """

    @abc.abstractmethod
    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """A chunk arrived whole: ``payload`` is the buffer from ``chunk_buffer``, now filled.

        None: it was dropped. An exchange chunk may be passed where the peer holds it instead. That
        is valid until this method returns, and a write there would end the process.
        """

    @abc.abstractmethod
    def writable(self, link: Link) -> None:
        """Chunks have left and ``queued_chunks`` is now under the transport's bound."""

    @abc.abstractmethod
    def refused(self, peer: int | None, refusal: Refusal) -> None:
        """The worker dialled turned us away (or we it): ``str(refusal)`` says why."""

    @abc.abstractmethod
    def dial_failed(
        self, peer: int | None, address: tuple[str, int], refused_connection: bool
    ) -> None:
        """The dial to ``address`` came to nothing; ``refused_connection``: nobody listens there.

        That address, and not one that was to be dialled while this dial was under way.
        """


class Transport(abc.ABC):
    """Makes links and drives one :class:`LinkHandler`; for one thread, except :meth:`wake`."""

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> memoryview:
        """Memory for the slots of one exchange: ``num_bytes`` from the start of a page.

        To be asked for before each exchange and never in the middle of one. It is the same as
        before, unless the peer of a link that broke may still be reading that: then it is fresh,
        and what was given before stays as it is for as long as somebody reads it.

        Where peers can read it in place (``Link.is_shared``) its chunks are not copied.
        """

    @abc.abstractmethod
    def dial(self, peer: int | None, host: str, port: int) -> None:
        """Start a link to ``peer`` (None: to whoever listens there) at a numeric address.

        A second dial to a peer while one is under way does nothing. A dial ends in ``link_up`` of
        a link to that peer (perhaps one that the peer dialled), ``refused`` or ``dial_failed``;
        the last is left out where a link to that peer is up.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float) -> None:
        """One turn: write, wait at most ``timeout_s`` for something to happen, read, write.

        All handler methods are called from here. Their exceptions pass through; call again to go
        on.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """Make ``poll()`` return soon. From any thread and from signal handlers; never blocks."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything, without telling the handler; control frames leave where they can."""


@dataclass
class _Wish:
    due_s: float  # infinite while a dial is under way
    retry_s: float = FIRST_RETRY_S


class Dialer:
    """Which peers to dial now: pure bookkeeping of wanted links.

    A wanted peer without a link is dialled, and dialled again with a back-off that doubles up to
    ``LONGEST_RETRY_S`` (and a jitter, so that many workers do not knock together) for as long as
    it is wanted: partitions heal, and the dead may come back at the same address.
    """

    def __init__(self, rank: int, random: Random) -> None:
        self._rank = rank
        self._random = random
        self._wishes: dict[int, _Wish] = {}
        self._linked: set[int] = set()

    def want(self, peers: Iterable[int], now_s: float, *, at_once: bool = False) -> None:
        """Add peers to those wanted."""
        for peer in peers:
            grace_s = 0.0 if at_once or self._rank < peer else GRACE_S
            wish = self._wishes.setdefault(peer, _Wish(now_s + grace_s))
            if at_once and wish.due_s < math.inf:
                wish.due_s = min(wish.due_s, now_s)

    def linked(self, peer: int) -> None:
        """A link to ``peer`` is up."""
        self._linked.add(peer)

    def unlinked(self, peer: int, now_s: float) -> None:
        """The link to ``peer`` went down."""
        self._linked.discard(peer)
        if peer in self._wishes:
            self._wishes[peer] = _Wish(now_s + (0.0 if self._rank < peer else GRACE_AFTER_LOSS_S))

    def failed(self, peer: int, now_s: float) -> None:
        """A dial came to nothing."""
        wish = self._wishes.get(peer)
        if wish is not None and peer not in self._linked:
            wish.due_s = now_s + wish.retry_s * self._random.uniform(0.8, 1.2)
            wish.retry_s = min(LONGEST_RETRY_S, 2.0 * wish.retry_s)

    def due(self, addresses: Mapping[int, tuple[str, int]], now_s: float) -> list[int]:
        """Return the peers to dial now; each then waits for ``linked`` or ``failed``."""
        due = [peer for peer, wish in self._open(addresses) if wish.due_s <= now_s]
        for peer in due:
            self._wishes[peer].due_s = math.inf
        return due

    def next_due_s(self, addresses: Mapping[int, tuple[str, int]]) -> float:
        """When :meth:`due` will next have something to say, if nothing happens before."""
        return min((wish.due_s for _, wish in self._open(addresses)), default=math.inf)

    def _open(self, addresses: Mapping[int, tuple[str, int]]) -> list[tuple[int, _Wish]]:
        wanted = self._wishes.items()
        return [each for each in wanted if each[0] not in self._linked and each[0] in addresses]
