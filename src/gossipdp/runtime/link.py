"""The seam between the gossip thread and whatever carries its bytes.

A transport (:mod:`~gossipdp.runtime.tcp`) makes links and calls one :class:`LinkHandler`.
Guarantees, which the conformance suite in ``tests/unit/runtime`` checks:

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
from typing import final

from gossipdp.runtime.frames import ChunkKey, FrameType
from gossipdp.runtime.identity import Identity, Refusal


class Link(abc.ABC):
    """An authenticated two-way connection to one peer, used from the transport's thread only."""

    peer_identity: Identity

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

    @abc.abstractmethod
    def send_control(self, data: bytes) -> None:
        """Queue a control frame of 1 byte to 1 MiB, ahead of all chunks not yet started.

        On a closed link it does nothing: ``link_down`` is on its way.
        """

    @abc.abstractmethod
    def send_chunk(self, frame_type: FrameType, key: ChunkKey, payload: memoryview) -> None:
        """Queue a chunk. ``payload`` (contiguous) is not copied.

        It must stay unchanged until the chunk has left, that is, until ``queued_chunks`` no
        longer counts it; chunks leave in the order in which they were queued. On a closed link it
        does nothing.

        A payload from :meth:`.Transport.allocate` may be read by the peer where it lies: see
        :attr:`is_shared`. Such a chunk has left when the peer has read it.
        """

    @property
    @abc.abstractmethod
    def queued_chunks(self) -> int:
        """Chunks that have not left wholly, the one being sent included."""

    @property
    @abc.abstractmethod
    def queued_bytes(self) -> int:
        """Bytes that have not left, headers of started frames included."""

    @property
    @abc.abstractmethod
    def bytes_sent(self) -> int:
        """Bytes that have left over the network, headers included."""

    @property
    @abc.abstractmethod
    def bytes_received(self) -> int:
        """Bytes that have arrived over the network, headers included."""

    @property
    def is_shared(self) -> bool:
        """Whether the peer reads exchange chunks in what ``allocate`` gives now, without a copy."""
        return False

    @property
    def shared_bytes_sent(self) -> int:
        """Bytes of chunks that were handed to the peer to be read in place."""
        return 0

    @property
    def shared_bytes_received(self) -> int:
        """Bytes of chunks that the peer handed over to be read in place."""
        return 0

    @property
    @abc.abstractmethod
    def last_heard_s(self) -> float:
        """When the last byte arrived, by the transport's clock, in seconds."""

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether the link has ended, at either end's wish or by failure."""

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """End the link at once; ``link_down(link, reason)`` follows from ``poll()``.

        Control frames queued before are handed over where that takes no waiting (an ABORT sent
        just before goes out); queued chunks are dropped. A second call does nothing.
        """


class LinkHandler(abc.ABC):
    """What a transport tells; see the module for when and in which order."""

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
        is not ``length`` ends the link: the peer's layout is not ours.
        """

    @abc.abstractmethod
    def chunk(
        self, link: Link, frame_type: FrameType, key: ChunkKey, payload: memoryview | None
    ) -> None:
        """A chunk arrived whole: ``payload`` is the buffer from ``chunk_buffer``, now filled.

        None: it was dropped, as ``chunk_buffer`` wished. An exchange chunk may be passed where
        the peer holds it instead. That is valid until this method returns, and a write there
        would end the process.
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
