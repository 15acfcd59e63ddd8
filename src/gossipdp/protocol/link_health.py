"""One worker's links: their silence, the heartbeats on them, and the news that they have carried.

What travels with every message is news: the records of membership and progress that this link has
not carried yet, at most ``MAX_NEWS`` of each at a time. A new link has carried none, so whatever
was lost with an old one is said again. A worker's own progress goes with each message, that of
others every ``PROGRESS_INTERVAL_S``: neighbours that exchange at every step know within a step or
two where the budget ends, however fast the steps are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Membership, Progress, ProgressEntry
from gossipdp.protocol.messages import MAX_NEWS, Envelope, Heartbeat, Message

HEARTBEATS_PER_TIMEOUT = 10
# Of the time-out. As long as a worker may itself have stood still without beginning all waits anew,
# so that its own silence makes nobody overdue; and beyond the jitter of bad links.
OVERDUE_AFTER = 0.5
NEWS_INTERVAL_S = 0.05
PROGRESS_INTERVAL_S = 0.25


@dataclass
class _Link:
    """What this worker knows of one link, and what it has told on it."""

    last_heard: float
    last_sent: float = -math.inf
    is_overdue: bool = False
    is_silent: bool = False
    members_told: int = 0
    progress_told: int = 0
    progress_sent: float = -math.inf
    own_told: ProgressEntry | None = None


class LinkHealth:
    """The links that are up, by peer.

    Args:
        membership, progress: where the news is.
        timeout_s: a link on which nothing was heard for this long is silent; after
            ``OVERDUE_AFTER`` of it, overdue.
    """

    def __init__(self, membership: Membership, progress: Progress, timeout_s: float) -> None:
        self._membership = membership
        self._progress = progress
        self._timeout_s = timeout_s
        self._links: dict[int, _Link] = {}
        self._urgent_version = 0  # of membership: to be told at once up to here

    def __contains__(self, peer: int) -> bool:
        return peer in self._links

    @property
    def peers(self) -> frozenset[int]:
        """Who is linked."""
        return frozenset(self._links)

    @property
    def live(self) -> frozenset[int]:
        """Peers whose link is not silent."""
        return frozenset(peer for peer, link in self._links.items() if not link.is_silent)

    @property
    def silent(self) -> frozenset[int]:
        """Peers whose link is silent."""
        return frozenset(peer for peer, link in self._links.items() if link.is_silent)

    def is_prompt(self, peer: int) -> bool:
        """Whether there is a link to ``peer`` that is not even overdue."""
        link = self._links.get(peer)
        return link is not None and not link.is_overdue

    def is_silent(self, peer: int) -> bool:
        """Whether there is a link to ``peer`` that is silent."""
        link = self._links.get(peer)
        return link is not None and link.is_silent

    def last_heard(self, peer: int) -> float:
        """When ``peer`` was heard last; infinite without a link to it."""
        link = self._links.get(peer)
        return math.inf if link is None else link.last_heard

    # --- what happens to them --------------------------------------------------------------

    def up(self, peer: int, now: float) -> None:
        """A link is there; it replaces an older one."""
        self._links[peer] = _Link(last_heard=now)

    def drop(self, peer: int) -> None:
        """Forget a link, if there is one."""
        self._links.pop(peer, None)

    def heard(self, peer: int, now: float) -> bool:
        """Something came from ``peer``; return whether its link was overdue until now."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.last_heard = max(now, link.last_heard)
        was_overdue, link.is_overdue, link.is_silent = link.is_overdue, False, False
        return was_overdue

    def slept(self, now: float) -> None:
        """Begin all waits anew: the worker itself did not run."""
        for link in self._links.values():
            link.last_heard = max(now, link.last_heard)

    def fall_overdue(self, now: float) -> list[int]:
        """Take note of the time; return the peers whose link is overdue from now on."""
        overdue_s = OVERDUE_AFTER * self._timeout_s
        fallen = [
            peer
            for peer, link in self._links.items()
            if not link.is_overdue and now >= link.last_heard + overdue_s
        ]
        for peer in fallen:
            self._links[peer].is_overdue = True
        return fallen

    def fall_silent(self, now: float) -> list[int]:
        """Take note of the time; return the peers whose link is silent from now on."""
        fallen = [
            peer
            for peer, link in self._links.items()
            if not link.is_silent and now >= link.last_heard + self._timeout_s
        ]
        for peer in fallen:
            self._links[peer].is_silent = True
        return fallen

    # --- what is said on them --------------------------------------------------------------

    def say_all_at_once(self) -> None:
        """What is news now waits for no heartbeat: this worker comes or leaves.

        What comes after does wait, or those that leave would echo each other's news.
        """
        self._urgent_version = self._membership.version

    def quiet_until(self) -> float:
        """Until when no link wants a heartbeat or is overdue or silent anew, but for news."""
        until = math.inf
        for link in self._links.values():
            until = min(until, self._heartbeat_at(link))
            if not link.is_silent:
                share = 1.0 if link.is_overdue else OVERDUE_AFTER
                until = min(until, link.last_heard + share * self._timeout_s)
        return until

    def heartbeats(self, now: float) -> list[Send[Envelope]]:
        """The heartbeats that are due."""
        return [
            self.wrap(peer, Heartbeat(), now)
            for peer, link in self._links.items()
            if now >= self._heartbeat_at(link)
        ]

    def wrap(self, peer: int, message: Message, now: float) -> Send[Envelope]:
        """Return the message with the news that the link to ``peer`` has not carried yet.

        Without a link there is none: the first message on a new one brings it.
        """
        link = self._links.get(peer)
        if link is None:
            return Send(peer, Envelope(message))
        members, link.members_told = self._membership.news(link.members_told, MAX_NEWS)
        own = self._progress.own
        progress: tuple[ProgressEntry, ...] = ()
        if own is not None and own is not link.own_told:
            progress = (own,)
        link.own_told = own
        # With news of members always: who hears that a worker is done hears all that it did.
        if members or now >= link.progress_sent + PROGRESS_INTERVAL_S:
            progress, link.progress_told = self._progress.news(link.progress_told, MAX_NEWS)
            link.progress_sent = now
        link.last_sent = now
        return Send(peer, Envelope(message, members, progress))

    def _heartbeat_at(self, link: _Link) -> float:
        interval = self._timeout_s / HEARTBEATS_PER_TIMEOUT
        if link.members_told < self._urgent_version:
            interval = 0.0
        elif link.members_told < self._membership.version:
            interval = min(interval, NEWS_INTERVAL_S)
        return link.last_sent + interval
