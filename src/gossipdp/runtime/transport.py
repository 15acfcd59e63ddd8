"""What the gossip thread asks of whatever makes its links."""

import abc


class Transport(abc.ABC):
    """Makes links and drives one :class:`~gossipdp.runtime.link.LinkHandler`.

    Used from one thread, except :meth:`wake`.
    """

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> memoryview:
        """Memory for the slots of one exchange: ``num_bytes`` from the start of a page.

        To be asked for before each exchange and never in the middle of one. It is the same as
        before, unless the peer of a link that broke may still be reading that: then it is fresh,
        and what was given before stays as it is for as long as somebody reads it.

        Where peers can read it in place (:attr:`.Link.is_shared`) its chunks are not copied.
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
