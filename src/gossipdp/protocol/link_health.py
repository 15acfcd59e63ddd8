"""One worker's links: their silence, the heartbeats on them, and the news that they have carried.

News travels with every message: the records of membership and progress that this link has not
carried yet, at most ``MAX_NEWS`` of each at a time. A new link has carried none, so it repeats the
news that was lost with an old one. A worker's own progress goes with each message, that of others
every ``PROGRESS_INTERVAL_S``: neighbours that exchange at every step know within a step or two
where the budget ends, however fast the steps are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Membership, Progress, ProgressEntry
from gossipdp.protocol.messages import MAX_NEWS, Envelope, Heartbeat, Message

HEARTBEATS_PER_TIMEOUT = 10
# A share of the time-out, beyond the jitter of bad links. A worker that itself stood still for
# longer restarts all its waits, so its own silence makes no peer overdue.
OVERDUE_AFTER = 0.5
NEWS_INTERVAL_S = 0.05
PROGRESS_INTERVAL_S = 0.25


@dataclass
class _Link:
    """The state of one link: when the peer was heard, and the news that it has carried."""

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
        membership, progress: the sources of news.
        timeout_s: a link is silent after this long without a byte, and overdue after
            ``OVERDUE_AFTER`` of it.
    """

    def __init__(self, membership: Membership, progress: Progress, timeout_s: float) -> None:
        self._membership = membership
        self._progress = progress
        self._timeout_s = timeout_s
        self._links: dict[int, _Link] = {}
        self._urgent_version = 0  # of membership: news up to here is sent at once

    def __contains__(self, peer: int) -> bool:
        return peer in self._links

    @property
    def peers(self) -> frozenset[int]:
        """Return the linked peers."""
        return frozenset(self._links)

    @property
    def live(self) -> frozenset[int]:
        """Return the peers whose link is not silent."""
        return frozenset(peer for peer, link in self._links.items() if not link.is_silent)

    @property
    def silent(self) -> frozenset[int]:
        """Return the peers whose link is silent."""
        return frozenset(peer for peer, link in self._links.items() if link.is_silent)

    def is_prompt(self, peer: int) -> bool:
        """Return whether there is a link to ``peer`` that is not even overdue."""
        link = self._links.get(peer)
        return link is not None and not link.is_overdue

    def is_silent(self, peer: int) -> bool:
        """Return whether there is a link to ``peer`` that is silent."""
        link = self._links.get(peer)
        return link is not None and link.is_silent

    def last_heard(self, peer: int) -> float:
        """Return when ``peer`` was heard last; infinity without a link to it."""
        link = self._links.get(peer)
        return math.inf if link is None else link.last_heard

    # --- changes of them -------------------------------------------------------------------

    def up(self, peer: int, now: float) -> None:
        """Add a link, which replaces an older one."""
        self._links[peer] = _Link(last_heard=now)

    def drop(self, peer: int) -> None:
        """Forget a link, if there is one."""
        self._links.pop(peer, None)

    def heard(self, peer: int, now: float) -> bool:
        """Note a sign of life from ``peer``; return whether its link was overdue until now."""
        link = self._links.get(peer)
        if link is None:
            return False
        link.last_heard = max(now, link.last_heard)
        was_overdue, link.is_overdue, link.is_silent = link.is_overdue, False, False
        return was_overdue

    def slept(self, now: float) -> None:
        """Restart all waits: the worker itself did not run."""
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

    # --- messages on them ------------------------------------------------------------------

    def say_all_at_once(self) -> None:
        """Send the present news at once, not with the next heartbeat: this worker comes or leaves.

        Later news waits, or workers that leave together would echo each other's news.
        """
        self._urgent_version = self._membership.version

    def quiet_until(self) -> float:
        """Return when a heartbeat is due, or a link falls overdue or silent; news comes on top."""
        until = math.inf
        for link in self._links.values():
            until = min(until, self._heartbeat_at(link))
            if not link.is_silent:
                share = 1.0 if link.is_overdue else OVERDUE_AFTER
                until = min(until, link.last_heard + share * self._timeout_s)
        return until

    def heartbeats(self, now: float) -> list[Send[Envelope]]:
        """Return the heartbeats that are due."""
        return [
            self.wrap(peer, Heartbeat(), now)
            for peer, link in self._links.items()
            if now >= self._heartbeat_at(link)
        ]

    def wrap(self, peer: int, message: Message, now: float) -> Send[Envelope]:
        """Return the message with the news that the link to ``peer`` has not carried yet.

        Without a link there is no news: the first message on a new link brings it.
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
        # News of members always brings progress: who hears of a peer's end hears all its steps.
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
