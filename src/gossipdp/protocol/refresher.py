"""Taking over another worker's parameters, before exchanging one's own again.

A worker whose own loop stood still for longer than the time-out holds parameters that the others
have left behind; one that is poisoned holds none worth having. Both take z = x + c/2 from a live
worker. A worker that was merely cut off does not: it kept training, and merges by exchanging.

Guarantees: at most one transfer at a time, and each ``Refresh`` is answered, or void, before the
next. A stalled worker whose every candidate fails, or that finds no link for the time-out, goes on
as it is; a poisoned one goes on asking for as long as anybody else lives.

Races:

- All workers stalled together (a laptop's lid): one that needs a refresh itself gives nothing
  (``WorkerProtocol.can_donate``), so all go on as they are instead of copying one another.
- The main thread loads parameters, or copies them for a checkpoint: no search goes on meanwhile
  (``WorkerProtocol.hold``, ``pause``), so that no transfer begins which that thread does not know.
- The run ends meanwhile: consolidation waits until the transfer has ended here, and whoever has
  begun to consolidate gives nothing, since its state is half a sum.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from random import Random

from gossipdp.protocol.actions import Refresh


class Refresher:
    """One worker's search for somebody to take parameters from.

    Args:
        timeout_s: how long to look for a link; also how often a poisoned worker begins anew.
        random: draws whom to ask.
    """

    def __init__(self, timeout_s: float, random: Random) -> None:
        self.timeout_s = timeout_s
        self._random = random
        self._since = math.nan
        self._is_needed = False
        self._insists = False
        self._source: int | None = None
        self._tried: set[int] = set()

    @property
    def is_needed(self) -> bool:
        """Whether this worker must not exchange before it is refreshed."""
        return self._is_needed

    @property
    def source(self) -> int | None:
        """From whom parameters are on their way."""
        return self._source

    def need(self, now: float, *, insists: bool = False) -> None:
        """A refresh is due; ``insists``: this worker cannot go on without one."""
        self._insists = self._insists or insists
        if not self._is_needed:
            self._is_needed = True
            self._since = now
            self._tried.clear()

    def poll(self, now: float, candidates: Collection[int], *, is_alone: bool) -> list[Refresh]:
        """Ask the next candidate, or give up.

        Args:
            now: the time.
            candidates: live workers with a link.
            is_alone: whether nobody else is known to live.
        """
        if not self._is_needed or self._source is not None:
            return []
        untried = sorted(set(candidates) - self._tried)
        if untried:
            self._source = self._random.choice(untried)
            self._tried.add(self._source)
            return [Refresh(self._source)]
        if now >= self._since + self.timeout_s or is_alone:
            self._tried.clear()
            self._since = now
            self._insists = self._insists and not is_alone
            self._is_needed = self._insists
        return []

    def next_deadline(self) -> float:
        """When :meth:`poll` gives up or begins anew."""
        if not self._is_needed or self._source is not None:
            return math.inf
        return self._since + self.timeout_s

    def refreshed(self) -> None:
        """The parameters of the source are this worker's now."""
        if self._source is not None:
            self._source = None
            self._is_needed = self._insists = False

    def void(self) -> None:
        """Parameters came from elsewhere: whatever was due or on its way no longer matters."""
        self._source = None
        self._is_needed = self._insists = False

    def failed(self, peer: int) -> None:
        """Nothing came from ``peer``."""
        if self._source == peer:
            self._source = None
