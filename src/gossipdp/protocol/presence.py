"""One worker's opinion on which workers are present, from membership, silence and dials.

The membership view says who lives, the failure detector finds out who does not, and the
neighbourhood follows both. :class:`Presence` keeps the three in line. It hands on every sign of
life, decides which peers are watched, notices what happens to them, and decides whether this worker
itself may go on.

*Two processes of one rank.* Both were started without knowing of each other, or one was believed
dead, replaced, and is awake again. They outbid each other's record and dial each other. The one
with the lower process id, which is that of the earlier life, ends once the other has answered at
its own address: so the record of a process that has died, or never lived, ends no worker. A process
also ends if peers that are linked to a later process of its rank turn it away for a time-out.

*A worker left behind.* Others find one dead that they have not heard for a time-out, so one that
stood still for eight tenths of it may have been left out: a live one speaks each tenth, and words
need time on the way. If it is awake again and finds nobody, it ends: it must not train on alone,
nor call itself the run. What comes in its first tenth of a time-out may have been sent before. A
last survivor that stood still for less goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gossipdp.protocol.actions import LeftBehind, Notice, NoticeKind, Reach, Superseded, Unlink
from gossipdp.protocol.liveness import DetectorAction, FailureDetector
from gossipdp.protocol.members import Member, Membership, Status
from gossipdp.protocol.neighbours import Neighbourhood
from gossipdp.protocol.peers import HEARTBEATS_PER_TIMEOUT, Peers

FORGET_AFTER = 24.0
"""In time-outs: joiners whose life has been over for this long are forgotten, and not dialled."""
FOUND_DEAD_WITHIN = 3.0
"""In time-outs: a dead worker is found dead so soon after its last word. If this worker heard it
longer ago, others heard it since, and the moment of its last word is not known here."""
BUFFERED_FOR = 1 / HEARTBEATS_PER_TIMEOUT
"""In time-outs: a live peer says something so often."""


@dataclass
class _Life:
    """A record of what has been noticed of another worker."""

    member: Member | None = None
    """Its record at the last review."""
    process_id: int = 0
    """The id of its last process that took part; 0 if only its address is known."""
    away: Literal["silent", "lost"] | None = None
    since: float | None = None
    """When it was heard last before it was away; None if that is not known."""


class Presence:
    """One worker's opinion on who is there. A new process of a rank is a new peer."""

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
        # When it woke, if nobody was heard since then, and how long it had slept.
        self._woken_at: float | None = None
        self._slept_s = 0.0
        self._unreachable: set[int] = set()
        self._lives: dict[int, _Life] = {}
        self._notices: list[Notice] = []  # since the last review
        self._num_notices = 0
        self._forget_at = -math.inf

    # --- observations ----------------------------------------------------------------------

    def linked(self, peer: int, now: float) -> list[DetectorAction]:
        self._peers.up(peer, now)
        self._outdated_since = math.inf
        self._unreachable.discard(peer)
        return [*self.heard(peer, now), *self._detector.link_up(peer)]

    def heard(self, peer: int, now: float) -> list[DetectorAction]:
        """Note a sign of life from ``peer``; without a link, it is no answer yet."""
        self._peers.heard(peer, now)
        woken_at = self._woken_at
        if woken_at is not None and now > woken_at + BUFFERED_FOR * self._timeout_s:
            self._woken_at = None
        life = self._lives.get(peer)
        if life is not None and life.away == "silent" and peer in self._peers:
            self._end_silence(peer, life, "answered", now)
        return self._detector.heard(peer, now)

    def look(self, now: float) -> list[Unlink]:
        """Note the linked peers that have been silent for the time-out."""
        if now >= self._forget_at:
            self._forget_at = now + self._timeout_s
            for rank in self._membership.forget(now, FORGET_AFTER * self._timeout_s):
                self._lives.pop(rank, None)
                self._peers.forget(rank)
        fallen = self._peers.fall_silent(now)
        for peer in fallen:
            if self._membership.get(peer) is None:  # a visitor
                continue
            life = self._lives.setdefault(peer, _Life())
            if life.away is None:
                life.away, life.since = "silent", self._peers.last_heard(peer)
                self._note(peer, "silent", now, life.since)
        return [unlink for peer in fallen for unlink in self._unlink_dead(peer)]

    def _unlink_dead(self, peer: int) -> list[Unlink]:
        """Close a silent link to a worker that is over; one that is not carries the news to it."""
        member = self._membership.get(peer)
        is_over = member is not None and member.is_over
        return [Unlink(peer, "it is dead")] if is_over and self._peers.is_silent(peer) else []

    def slept(self, since: float, now: float) -> None:
        """Restart all waits: this worker did not run. It counts as stopped after a time-out."""
        if now - since >= self._timeout_s:
            self._note(self.rank, "stopped", now, since)
        if self._has_others and now - since >= (1 - 2 * BUFFERED_FOR) * self._timeout_s:
            self._woken_at, self._slept_s = now, now - since
        self._peers.slept(now)
        self._detector.slept(now)

    def dialled_in_vain(self, peer: int, now: float, *, is_refused: bool) -> list[DetectorAction]:
        if peer in self._peers or peer == self.rank:
            return []
        # Not if it was dialled for another's question: else each witness would ask further ones.
        if self._membership.is_live(peer) and not self._detector.has_question(peer):
            self._unreachable.add(peer)
            self._detector.watch({*self._detector.watched, peer}, now)
        return self._detector.dial_failed(peer, now, is_refused=is_refused)

    def outdated(self, now: float) -> list[Superseded]:
        self._outdated_since = min(now, self._outdated_since)
        return self._give_way() if now >= self._outdated_since + self._timeout_s else []

    def reached(self, peer: int) -> list[Superseded]:
        """Note that the address of ``peer`` answered, which may be this rank's other process."""
        own, rival = self._membership.own, self._rival
        if peer == self.rank and rival is not None and rival.process_id > own.process_id:
            return self._give_way()
        return []

    # --- consequences ----------------------------------------------------------------------

    def review(self, now: float, *, has_changed: bool) -> list[DetectorAction]:
        """Follow the membership view, if it ``has_changed``: deaths, neighbours, own life."""
        members = self._membership
        actions: list[DetectorAction] = []
        if has_changed:
            self._neighbourhood.review(members.members())
            for member in members.members():
                if member.rank == self.rank:
                    continue
                life = self._lives.setdefault(member.rank, _Life())
                if member is not life.member:
                    self._compare(life, member, now)
                    life.member = member
                if member.is_over:
                    self._unreachable.discard(member.rank)
                    actions += self._detector.gone(member.rank)
                    actions += self._unlink_dead(member.rank)
            actions += self._meet_rival()
        actions += self._notices
        self._notices.clear()
        if self._woken_at is not None and not self._has_others and not self._has_left:
            self._woken_at = None
            actions.append(LeftBehind(self._slept_s))
        if now >= self._neighbourhood.next_deadline():
            rebuilt = self._neighbourhood.rebuild(members.members(), now)
            if rebuilt is not None:
                actions.append(rebuilt)
        return actions

    def watch(self, now: float, *, is_held: bool) -> None:
        """Watch the peers whose silence matters: neighbours, linked, or dialled in vain."""
        candidates = {*self._peers, *self._unreachable}
        if not is_held:  # else no neighbour may have been dialled yet
            candidates |= self._neighbourhood.place.rates.keys()
        live = [peer for peer in candidates if peer != self.rank and self._membership.is_live(peer)]
        self._detector.watch([] if self._has_left else live, now)

    @property
    def _has_left(self) -> bool:
        return self._membership.own.status is Status.LEFT

    @property
    def _has_others(self) -> bool:
        return any(rank != self.rank for rank in self._membership.live())

    # --- notices ---------------------------------------------------------------------------

    def _compare(self, life: _Life, member: Member, now: float) -> None:
        before, rank = life.member, member.rank
        if member.status is Status.DEAD:
            if before is None or before.status is not Status.DEAD:
                self._lose(life, member, now)
            return
        is_another = member.process_id != life.process_id
        if life.process_id == 0:
            is_another = life.away == "lost" and member.restarts > 0
        if is_another:
            if before is not None and before.is_live:
                # It was started again so soon that its new life is heard of before the loss.
                self._lose(life, before, now)
            self._peers.restarted(rank)
        if member.status is Status.LEFT:
            life.away, life.since = "lost" if life.away == "lost" else None, None
        if not member.is_live:
            return
        is_first, life.process_id = life.process_id == 0, member.process_id
        if is_another or life.away == "lost":
            self._end_silence(rank, life, "restarted" if is_another else "answered", now)
        elif is_first and (before is None or before.status is Status.JOINING):
            if rank >= self._membership.num_workers and member.restarts == 0:
                self._note(rank, "joined", now, None)
            elif before is not None:
                self._note(rank, "restarted", now, None)

    def _lose(self, life: _Life, member: Member, now: float) -> None:
        life.process_id = life.process_id or member.process_id
        if life.away is None:
            life.since = self._peers.last_heard(member.rank)
        if life.since is not None and now - life.since > FOUND_DEAD_WITHIN * self._timeout_s:
            life.since = None
        life.away = "lost"
        self._note(member.rank, "lost", now, life.since)

    def _end_silence(self, rank: int, life: _Life, kind: NoticeKind, now: float) -> None:
        self._note(rank, kind, now, life.since)
        life.away = life.since = None

    def _note(self, rank: int, kind: NoticeKind, now: float, since: float | None) -> None:
        self._num_notices += 1
        silent_s = None if since is None else now - since
        self._notices.append(Notice(rank, kind, now, self._num_notices, silent_s))

    # --- this worker's own life ------------------------------------------------------------

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
