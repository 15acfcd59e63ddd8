"""When to dial whom: pure bookkeeping of wanted links, with back-off."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 10.0
# Of two workers that want the same link the lower rank dials at once and the higher one waits
# this long for it: dialling from both sides works, but costs a link. After the loss of a link less
# long: if the peer was killed, its address refuses connections, and that is how it is noticed.
GRACE_S = 1.0
GRACE_AFTER_LOSS_S = 0.2


@dataclass
class _Wish:
    due_s: float
    retry_s: float = FIRST_RETRY_S
    is_dialling: bool = False


class Dialer:
    """Which peers to dial now.

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
            if at_once:
                wish.due_s = min(wish.due_s, now_s)

    def linked(self, peer: int) -> None:
        """A link to ``peer`` is up."""
        self._linked.add(peer)
        if peer in self._wishes:
            self._wishes[peer] = _Wish(math.inf)

    def unlinked(self, peer: int, now_s: float) -> None:
        """The link to ``peer`` went down."""
        self._linked.discard(peer)
        if peer in self._wishes:
            self._wishes[peer] = _Wish(now_s + (0.0 if self._rank < peer else GRACE_AFTER_LOSS_S))

    def failed(self, peer: int, now_s: float) -> None:
        """A dial came to nothing."""
        wish = self._wishes.get(peer)
        if wish is not None and peer not in self._linked:
            wish.is_dialling = False
            wish.due_s = now_s + wish.retry_s * self._random.uniform(0.8, 1.2)
            wish.retry_s = min(LONGEST_RETRY_S, 2.0 * wish.retry_s)

    def due(self, addresses: Mapping[int, tuple[str, int]], now_s: float) -> list[int]:
        """Return the peers to dial now; each then waits for ``linked`` or ``failed``."""
        due = [peer for peer in self._open(addresses) if self._wishes[peer].due_s <= now_s]
        for peer in due:
            self._wishes[peer].is_dialling = True
        return due

    def next_due_s(self, addresses: Mapping[int, tuple[str, int]]) -> float:
        """When :meth:`due` will next have something to say, if nothing happens before."""
        return min((self._wishes[peer].due_s for peer in self._open(addresses)), default=math.inf)

    def _open(self, addresses: Mapping[int, tuple[str, int]]) -> list[int]:
        return [
            peer
            for peer, wish in self._wishes.items()
            if not wish.is_dialling and peer not in self._linked and peer in addresses
        ]
