"""Workers that wait for each other for ever, each at the end of another model."""

from collections.abc import Iterable, Mapping

from gossipdp.protocol.members import Status


class Crossing:
    """Notices that two workers consolidate two models in opposite orders.

    This worker waits in the first model's ``consolidate()`` for a peer that is not done there. The
    peer is done with the second model, of which this worker is not: so it is within that model's
    ``consolidate()``, which ends when this worker has called it too, and that is never. Such a peer
    cannot be merely slow, since it trains no more.

    The two models' news come over different links, and of one that has ended the first a peer's
    news may be missing. So this must have been so for ``limit_s`` on end, by when a death or a
    departure is known. If the peer leaves in the second half of that time, it has seen the same and
    was a little faster.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._peers: set[int] = set()

    def look(
        self, here: Mapping[int, Status], elsewhere: Iterable[Mapping[int, Status]], now_s: float
    ) -> list[int]:
        """Return the peers with which this worker waits in a circle; empty: none, or not for long.

        Args:
            here: the peers of the model whose end is waited for.
            elsewhere: those of each other model of this process that has not come to its end.
            now_s: on any clock.
        """
        done = {rank for of in elsewhere for rank, status in of.items() if status is Status.DONE}
        peers = {rank for rank, status in here.items() if status is Status.ALIVE} & done
        if peers:
            self._since_s = now_s if self._since_s is None else self._since_s
            self._peers = peers
            return sorted(peers) if now_s - self._since_s >= self._limit_s else []
        since_s, self._since_s = self._since_s, None
        if since_s is None or now_s - since_s < self._limit_s / 2:
            return []
        return sorted(rank for rank in self._peers if here.get(rank, Status.DEAD) >= Status.LEFT)
