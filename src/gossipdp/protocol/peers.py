"""One worker's knowledge of its peers: their links, their silence, and whether they can exchange.

A peer can exchange now if it is linked and heard, answers proposals, has not said that it is
closed, and does not rest. The failure detector decides who is dead.

*News* travels with every message: the records of membership and progress that this link has not
carried yet, at most ``MAX_NEWS`` of each at a time. A new link has carried none, so it repeats the
news that was lost with an old one. A worker's own progress goes with each message, that of others
every ``PROGRESS_INTERVAL_S``: neighbours that exchange at every step know within a step or two
where the budget ends, however fast the steps are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from gossipdp.protocol.actions import Send
from gossipdp.protocol.members import Membership, Progress, ProgressEntry
from gossipdp.protocol.messages import MAX_NEWS, Envelope, ExchangeId, Heartbeat, Message
from gossipdp.protocol.pairing import MAX_BACKLOG

HEARTBEATS_PER_TIMEOUT = 10
NEWS_INTERVAL_S = 0.05
PROGRESS_INTERVAL_S = 0.25

LAST = 9
"""Answers, gaps and durations that count, and proposals whose answers may still come."""
FIRST_WAIT_S = 0.5
SHORTEST_WAIT_S = 0.02
LONGEST_WAIT = 0.5
"""In time-outs."""
USUAL_ANSWERS = 4
LEFT_OUT_WAITS = 4
SHORTEST_GAP_S = 0.25
USUAL_GAPS = 4
LONGEST_REST = 16
"""In time-outs."""
LONG_EXCHANGE = 4
"""An exchange takes long if its duration is more than so many times the median of the last ones."""
IN_A_ROW = 3
"""So many exchanges with a peer must have taken long: by chance alone one is, now and then."""
LOST_SHARE = 0.03


def _last() -> deque[float]:
    return deque(maxlen=LAST)


@dataclass
class _Link:
    """One link: whether the peer is heard and answers, and the news that it has carried."""

    last_sent: float = -math.inf
    is_silent: bool = False
    left_out_until: float | None = None
    """It did not answer, and until then only an answer, not any sign of life, counts; else None."""
    is_closed: bool = False
    """The peer has said that it accepts no proposal for now."""
    proposed: deque[tuple[ExchangeId, float]] = field(default_factory=lambda: deque(maxlen=LAST))
    """The last proposals without an answer, withdrawn ones too, and when each was sent."""
    members_told: int = 0
    progress_told: int = 0
    progress_sent: float = -math.inf
    own_told: ProgressEntry | None = None


@dataclass
class _Partner:
    """One process of a peer, whichever link there is to it: when it was heard, how it exchanges."""

    last_heard: float = -math.inf
    answers_s: deque[float] = field(default_factory=_last)
    num_withdrawn: int = 0
    gaps_s: deque[float] = field(default_factory=_last)
    durations_s: deque[float] = field(default_factory=lambda: deque([0.0] * IN_A_ROW, IN_A_ROW))
    rests_until: float = -math.inf
    rest_s: float = 0.0
    """The last rest after an exchange that stood still; 0 once one has succeeded."""


class Peers:
    """The peers of one worker.

    Args:
        membership, progress: the sources of news.
        timeout_s: a link is silent after this long without a byte.

    Attributes:
        has_changed: whether some peer may have become able to exchange, or unable, or a deadline
            has come nearer, since the worker last settled that.
    """

    def __init__(self, membership: Membership, progress: Progress, timeout_s: float) -> None:
        self._membership = membership
        self._progress = progress
        self._timeout_s = timeout_s
        self._links: dict[int, _Link] = {}
        self._partners: dict[int, _Partner] = {}
        self._durations_s = _last()
        self._answers_s, self._gaps_s = _last(), _last()
        self._awake_since = -math.inf
        self._urgent_version = 0  # of membership: news up to here is sent at once
        self.has_changed = True

    def __contains__(self, peer: int) -> bool:
        return peer in self._links

    def __iter__(self) -> Iterator[int]:
        return iter(self._links)

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self._links) - self.silent

    @property
    def silent(self) -> frozenset[int]:
        return frozenset(peer for peer, link in self._links.items() if link.is_silent)

    def is_silent(self, peer: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_silent

    def last_heard(self, peer: int) -> float:
        """Return when this process of ``peer`` was heard last; minus infinity if never."""
        partner = self._partners.get(peer)
        return -math.inf if partner is None else partner.last_heard

    def waits_since(self, peer: int) -> float:
        """Return when a wait for a sign of life of ``peer`` began: not while this worker slept."""
        return max(self.last_heard(peer), self._awake_since)

    def can_exchange(self, among: Iterable[int], now: float) -> list[int]:
        """Return the peers ``among`` these, which live, that can exchange now."""
        heard = [peer for peer in among if peer in self._links and not self.is_silent(peer)]
        rested = [peer for peer in heard if not self.rests(peer, now)]
        if not rested:  # better exchanges that take long than none
            rested = [peer for peer in heard if self._partner(peer).rest_s == 0.0]
        links = self._links
        return [
            peer
            for peer in rested
            if links[peer].left_out_until is None and not links[peer].is_closed
        ]

    # --- links -----------------------------------------------------------------------------

    def up(self, peer: int, now: float) -> None:
        self._links[peer] = _Link()
        self._partner(peer).last_heard = now
        self.has_changed = True

    def drop(self, peer: int) -> None:
        self._links.pop(peer, None)
        self.forget(peer)
        self.has_changed = True

    def forget(self, peer: int) -> None:
        """Forget how ``peer`` exchanged, if it has no link and is in the membership no more."""
        if peer not in self._links and self._membership.get(peer) is None:
            self._partners.pop(peer, None)

    def heard(self, peer: int, now: float) -> None:
        link = self._links.get(peer)
        if link is not None or self._membership.get(peer) is not None:
            partner = self._partner(peer)
            partner.last_heard = max(now, partner.last_heard)
        if link is None:
            return
        if link.is_silent or (link.left_out_until is not None and now >= link.left_out_until):
            link.is_silent, link.left_out_until = False, None
            self.has_changed = True

    def slept(self, now: float) -> None:
        self._awake_since = now
        for link in self._links.values():
            link.proposed.clear()
        self.has_changed = True

    def restarted(self, peer: int) -> None:
        """Forget how the former process of ``peer`` was heard and exchanged."""
        heard = self.last_heard(peer) if peer in self._links else -math.inf
        self._partners[peer] = _Partner(last_heard=heard)
        self.has_changed = True

    def fall_silent(self, now: float) -> list[int]:
        """Take note of the time; return the peers whose link is silent from now on."""
        fallen = [
            peer
            for peer, link in self._links.items()
            if not link.is_silent and now >= self.waits_since(peer) + self._timeout_s
        ]
        for peer in fallen:
            self._links[peer].is_silent = True
            self.has_changed = True
        return fallen

    # --- answers ---------------------------------------------------------------------------

    def wait_s(self, peer: int) -> float:
        """Return how long a proposal, or FREE, waits for the answer of ``peer``.

        A worker that is asked answers at once, or as soon as its own proposal is answered. So this
        is a few times its usual answer, late answers included. It doubles with each proposal that
        was withdrawn since the last answer in time: a peer 300 ms away among near ones is still
        reached.
        """
        partner = self._partner(peer)
        answers_s = partner.answers_s or self._answers_s  # at first as others
        usual_s = USUAL_ANSWERS * median(answers_s) if answers_s else FIRST_WAIT_S
        wait_s = max(SHORTEST_WAIT_S, usual_s) * 2.0 ** min(partner.num_withdrawn, 10)
        return min(wait_s, LONGEST_WAIT * self._timeout_s)

    def proposed(self, peer: int, id: ExchangeId, now: float) -> None:
        """Note that a proposal leaves for ``peer``."""
        if peer in self._links:
            self._links[peer].proposed.append((id, now))

    def answered(self, peer: int, id: ExchangeId, now: float, *, in_time: bool) -> None:
        """Note the answer to a proposal; ``in_time``: the proposal was not withdrawn before."""
        asked, partner = self._links[peer].proposed, self._partner(peer)
        sent_s = dict(asked).get(id)
        if sent_s is None:
            return
        partner.answers_s.append(now - sent_s)
        self._answers_s.append(now - sent_s)
        if in_time:
            partner.num_withdrawn = 0
        # Links are FIFO: an earlier proposal has no answer if it crossed with one of the peer.
        while asked.popleft()[0] != id:
            pass

    def says(self, peer: int, *, is_closed: bool) -> None:
        """Note that ``peer`` answers, and whether it accepts no proposal for now."""
        link = self._links[peer]
        self.has_changed |= link.is_closed != is_closed or link.left_out_until is not None
        link.is_closed, link.left_out_until = is_closed, None

    def unanswered(self, peer: int, now: float) -> None:
        """Leave out ``peer``, which has not answered a proposal or FREE in time.

        It is left out until it is heard again. If it goes on not to answer, it takes at most a
        fifth of this worker's time.
        """
        self._links[peer].left_out_until = now + LEFT_OUT_WAITS * self.wait_s(peer)
        self._partner(peer).num_withdrawn += 1
        self.has_changed = True

    # --- exchanges -------------------------------------------------------------------------

    def patience_s(self, peer: int) -> float:
        """Return for how long an exchange with ``peer`` may stand still: none of its bytes moves.

        It is several times the longest such gap but one in the last exchanges with that peer.
        """
        partner = self._partner(peer)
        gaps_s = partner.gaps_s or self._gaps_s
        # The second longest: one that stood still says nothing of the others.
        usual_s = sorted(gaps_s)[-2:][0] if gaps_s else math.inf
        if partner.answers_s:  # the first byte of the asked end comes no sooner
            usual_s = max(usual_s, median(partner.answers_s))
        return min(self._timeout_s, max(SHORTEST_GAP_S, USUAL_GAPS * usual_s, partner.rest_s))

    def exchanged(
        self, peer: int, now: float, *, duration_s: float, gap_s: float, demands_per_s: float
    ) -> None:
        """Note an exchange with ``peer`` that ended well.

        One exchange runs at a time. Over a bad link it may last so long that the demands which come
        meanwhile are lost. Once ``IN_A_ROW`` exchanges with a peer have taken far longer than
        others do, it rests after each, so that all its exchanges together cost at most
        ``LOST_SHARE`` of the demands. A single long one says nothing: where the transfers of a
        simulated ring of 16 vary by chance, resting after each costs three quarters of the decay.

        Args:
            peer, now: its other end, and the time.
            duration_s: from its begin, without its longest gap.
            gap_s: the longest time in which none of its bytes moved.
            demands_per_s: how often this worker is to exchange.
        """
        self._durations_s.append(duration_s)
        self._gaps_s.append(gap_s)
        partner = self._partner(peer)
        partner.gaps_s.append(gap_s)
        partner.rest_s = 0.0
        partner.durations_s.append(duration_s)
        long_s = min(partner.durations_s)
        num_lost = long_s * demands_per_s - MAX_BACKLOG
        if long_s > LONG_EXCHANGE * median(self._durations_s) and num_lost > 0.0:
            rest_s = num_lost / (LOST_SHARE * demands_per_s) - long_s
            partner.rests_until = now + min(rest_s, LONGEST_REST * self._timeout_s)
            self.has_changed = True

    def stood_still(self, peer: int, now: float) -> None:
        """Let ``peer`` rest: an exchange with it stood still.

        It rests twice as long each time, until one succeeds. Else a peer that agrees to exchange,
        and then sends only heartbeats, could hold this worker all of its time.
        """
        partner = self._partner(peer)
        rest_s = max(2 * partner.rest_s, self.patience_s(peer))
        partner.rest_s = min(rest_s, LONGEST_REST * self._timeout_s)
        partner.rests_until = now + partner.rest_s
        self.has_changed = True

    def rests(self, peer: int, now: float) -> bool:
        """Return whether there is to be no exchange with ``peer`` yet."""
        partner = self._partners.get(peer)
        return partner is not None and now < partner.rests_until

    def _partner(self, peer: int) -> _Partner:
        return self._partners.setdefault(peer, _Partner())

    # --- messages on links -----------------------------------------------------------------

    def say_all_at_once(self) -> None:
        """Send the present news at once, not with the next heartbeat: this worker comes or leaves.

        Later news waits, or workers that leave together would echo each other's news.
        """
        self._urgent_version = self._membership.version

    def quiet_until(self, now: float) -> float:
        """Return when a heartbeat is due, a link falls silent, or a rest ends; news is on top."""
        until = math.inf
        for peer, link in self._links.items():
            until = min(until, self._heartbeat_at(link))
            if not link.is_silent:
                until = min(until, self.waits_since(peer) + self._timeout_s)
        for partner in self._partners.values():
            if partner.rests_until > now:
                until = min(until, partner.rests_until)
        return until

    def heartbeats(self, now: float) -> list[Send[Envelope]]:
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
