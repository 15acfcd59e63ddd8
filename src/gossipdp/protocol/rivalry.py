"""Two processes of one rank: which of them must end.

Both were started without knowing of each other (or one was believed dead, replaced, and woke up).
Membership orders their records, the same everywhere; the one whose record loses is *superseded*.
But the record that won may be a ghost: of a process that has died since, unnoticed.

Guarantees: a worker gives way only to a process that has shown to live, at its own address, and
only after the time-out, within which a ghost is usually found out. A rival that cannot be reached
for the time-out is declared dead, and this worker takes the next incarnation.

A worker that was replaced while its machine slept may never hear so: whoever has a link to its
successor refuses the older process, before any news passes. Such a refusal is as good a sign of
life; a second one, after the time-out and with no link in between, makes it give way.

Races: both processes live but are cut off from each other. Then each outbids the other whenever
it hears of it, once per time-out, until they can reach one another; incarnations rise meanwhile,
and nothing else happens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from gossipdp.protocol.actions import Superseded
from gossipdp.protocol.failure_detector import Seek, Verdict
from gossipdp.protocol.membership import Member, Status

RivalryAction: TypeAlias = Seek | Verdict | Superseded


@dataclass
class _Rival:
    process_id: int
    since: float
    has_answered: bool = False


class Rivalry:
    """What one worker does about another process of its rank.

    Args:
        timeout_s: how long the rival has to prove that it lives.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._rival: _Rival | None = None
        self._refused_since = math.inf
        self._has_given_way = False

    def review(self, own: Member, known: Member, now: float) -> list[RivalryAction]:
        """``known`` is the record that stands for this worker's rank; ``own`` is its own."""
        if known.process_id == own.process_id or known.is_over:
            self._rival = None
            return []
        if self._rival is not None and self._rival.process_id == known.process_id:
            return []
        if own.status is Status.JOINING:  # it has given nothing yet, and may take another rank
            return self._give_way()
        self._rival = _Rival(known.process_id, now)
        if (known.host, known.port) == (own.host, own.port):
            return [Verdict(own.rank, is_dead=True)]  # nobody but this worker listens there
        return [Seek(own.rank)]

    def reached(self) -> None:
        """The rival's address answered: it lives."""
        if self._rival is not None:
            self._rival.has_answered = True

    def refused(self, now: float) -> list[RivalryAction]:
        """A worker linked to a later process of this rank turned this one away."""
        self._refused_since = min(now, self._refused_since)
        return self._give_way() if now >= self._refused_since + self.timeout_s else []

    def linked(self) -> None:
        """Somebody let this process in: what is to be known of its rank will be heard."""
        self._refused_since = math.inf

    def poll(self, rank: int, now: float) -> list[RivalryAction]:
        """Decide, once the time-out is over."""
        rival = self._rival
        if rival is None or self._has_given_way or now < rival.since + self.timeout_s:
            return []
        if rival.has_answered:
            return self._give_way()
        return [Verdict(rank, is_dead=True)]

    def next_deadline(self) -> float:
        """When :meth:`poll` has something to do."""
        if self._rival is None or self._has_given_way:
            return math.inf
        return self._rival.since + self.timeout_s

    def _give_way(self) -> list[RivalryAction]:
        if self._has_given_way:
            return []
        self._has_given_way = True
        return [Superseded()]
