"""One worker's opinion on which workers are present, from membership, silence and dials.

The membership view says who lives, the failure detector finds out who does not, and the
neighbourhood follows both. :class:`Presence` keeps the three in line. It decides which peers are
watched, and whether this worker itself may go on.

*Two processes of one rank.* Both were started without knowing of each other, or one was believed
dead, replaced, and is awake again. They outbid each other's record and dial each other. The one
with the lower process id, which is that of the earlier life, ends once the other has answered at
its own address: so the record of a process that has died, or never lived, ends no worker. A process
also ends if peers that are linked to a later process of its rank turn it away for a time-out.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from gossipdp.protocol.actions import Reach, Rebuilt, Superseded
from gossipdp.protocol.liveness import DetectorAction, FailureDetector, Verdict
from gossipdp.protocol.members import Member, Membership, Status
from gossipdp.protocol.neighbours import Neighbourhood
from gossipdp.protocol.peers import Peers

FORGET_AFTER = 24.0
"""In time-outs: joiners whose life has been over for this long are forgotten, and not dialled."""


@dataclass(frozen=True)
class CloseIfSilent:
    """Close the link to ``peer`` if it is silent; a link that is not carries the news to it."""

    peer: int
    reason: str


PresenceAction: TypeAlias = DetectorAction | CloseIfSilent | Reach | Rebuilt | Superseded


class Presence:
    """One worker's opinion on who is there.

    Args:
        membership: the view, to which other parts add.
        peers: those that are linked or silent; only read here.
        neighbourhood: rebuilt here, when others come or go.
        detector: gets from here the peers to watch, and those that are gone.
        timeout_s: a peer silent for this long is suspect.
    """

    def __init__(
        self,
        membership: Membership,
        peers: Peers,
        neighbourhood: Neighbourhood,
        detector: FailureDetector,
        timeout_s: float,
    ) -> None:
        self.rank = membership.own.rank
        self._membership = membership
        self._peers = peers
        self._neighbourhood = neighbourhood
        self._detector = detector
        self._timeout_s = timeout_s
        self._rival: Member | None = None
        # Others have turned this process away as an older one since then; inf: they have not.
        self._outdated_since = math.inf
        self._has_given_way = False
        self._unreachable: set[int] = set()
        self._forget_at = -math.inf
        self._reviewed_version = -1  # of membership

    # --- observations ----------------------------------------------------------------------

    def linked(self, peer: int) -> None:
        """Note that a link to ``peer`` is up."""
        self._outdated_since = math.inf
        self._unreachable.discard(peer)

    def dialled_in_vain(self, peer: int) -> bool:
        """Note that a dial to ``peer``, which is not linked, failed; return whether to watch it.

        If others asked about it they watch it themselves, or each witness would ask further ones.
        """
        is_news = self._membership.is_live(peer) and not self._detector.has_question(peer)
        if is_news:
            self._unreachable.add(peer)
        return is_news

    def outdated(self, now: float) -> list[Superseded]:
        """Note that a peer turned us away: it is linked to a later process of this rank."""
        self._outdated_since = min(now, self._outdated_since)
        return self._give_way() if now >= self._outdated_since + self._timeout_s else []

    def reached(self, peer: int) -> list[Superseded]:
        """Note that the address of ``peer`` answered, which may be this rank's other process."""
        own, rival = self._membership.own, self._rival
        if peer == self.rank and rival is not None and rival.process_id > own.process_id:
            return self._give_way()
        return []

    def judge(self, verdict: Verdict) -> list[CloseIfSilent]:
        """Follow the detector's verdict; :meth:`review` does what follows from a death."""
        if not verdict.is_dead:
            return [CloseIfSilent(verdict.peer, "it is silent here, but others hear it")]
        self._unreachable.discard(verdict.peer)
        self._membership.declare_dead(verdict.peer)
        return []

    def witnesses(self, suspect: int) -> tuple[list[int], list[int]]:
        """Return possible witnesses of a suspect: live workers that are linked, and the others."""
        linked, silent = self._peers.live, self._peers.silent
        others = [rank for rank in self._membership.live() if rank not in (self.rank, suspect)]
        return (
            [rank for rank in others if rank in linked],
            [rank for rank in others if rank not in linked and rank not in silent],
        )

    def forget(self, now: float) -> None:
        """Drop the records of joiners that have long been over; done once in a time-out."""
        if now >= self._forget_at:
            self._forget_at = now + self._timeout_s
            self._membership.forget(now, FORGET_AFTER * self._timeout_s)

    # --- consequences ----------------------------------------------------------------------

    def review(self, now: float, closed_for: Collection[str]) -> list[PresenceAction]:
        """Follow the membership view: deaths, neighbours, this worker's own life.

        ``closed_for``: why this worker neither asks nor accepts.
        """
        members = self._membership
        actions: list[PresenceAction] = []
        if self._reviewed_version != members.version:
            self._reviewed_version = members.version
            self._neighbourhood.review(members.members())
            for member in members.members():
                if member.is_over and member.rank != self.rank:
                    self._unreachable.discard(member.rank)
                    actions += self._detector.gone(member.rank)
                    actions.append(CloseIfSilent(member.rank, "it is dead"))
            actions += self._meet_rival()
        if now >= self._neighbourhood.next_deadline():
            has_ended = "consolidation" in closed_for
            rebuilt = self._neighbourhood.rebuild(members.members(), now, has_ended=has_ended)
            if rebuilt is not None:
                actions.append(rebuilt)
        return actions

    def watched(self, *, is_held: bool) -> set[int]:
        """Return the peers whose silence matters: neighbours, linked, or dialled in vain."""
        if self._membership.own.status is Status.LEFT:
            return set()
        candidates = {*self._peers, *self._unreachable}
        if not is_held:  # else no neighbour may have been dialled yet
            candidates |= self._neighbourhood.rates.keys()
        return {peer for peer in candidates if peer != self.rank and self._membership.is_live(peer)}

    def _meet_rival(self) -> list[Reach] | list[Superseded]:
        """Dial another process of this rank, which was outbid: it may live, or have died."""
        members = self._membership
        if members.is_exhausted:
            return self._give_way(f"rank {self.rank} has had all its lives; take another rank")
        rival, self._rival = self._rival, members.rival
        if self._rival is None or self._rival is rival:
            return []
        if members.own.status is Status.JOINING:  # it has given nothing yet: another rank will do
            return self._give_way()
        address = self._rival.host, self._rival.port
        if address == (members.own.host, members.own.port):
            return []  # only this worker listens there
        return [Reach(self.rank, *address)]

    def _give_way(self, reason: str = "") -> list[Superseded]:
        if self._has_given_way:
            return []
        self._has_given_way = True
        return [
            Superseded(
                reason
                or f"another process of rank {self.rank} has taken this worker's place in the run; "
                "start one process a rank"
            )
        ]
