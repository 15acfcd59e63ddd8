"""The failure detector: silence or a refused dial, questions to others, a verdict (after SWIM).

A worker inquires after a *watched* peer that is silent for ``ASK_AFTER`` of the time-out, whose
address refuses connections, or that it cannot reach: it asks up to three other live workers, the
*witnesses*, whether they hear the suspect. A witness says yes when it hears the suspect *again*,
after the question, so an answer is never stale. It says no once its own dial is refused, once it
has not heard the suspect for the time-out, or, without a link to it, when a dial comes to nothing
for ``REACH_FOR`` of the time-out. No answer for ``ANSWER_WITHIN`` counts as no.

Guarantees:

- A peer is found dead only if no witness has heard it, and it refused a dial or was silent here
  for the whole time-out. One bad link, or one firewall, between two healthy workers kills neither:
  all others still hear both.
- A process that ends is found dead as soon as the witnesses have dialled it in vain. A witness may
  stand still itself: if the address refuses this worker and one witness, the others have
  ``CONFIRMED_WITHIN`` to say that they hear the peer.
- A peer that falls silent to all is found dead within max(1, ASK_AFTER + ANSWER_WITHIN) = 1.1
  time-outs of its last sign of life here, whatever the others do; without a witness to ask, after
  the time-out alone. If a witness heard it after the question, the next inquiry begins a back-off
  later (1, 2, 4, at most 8 time-outs): until then its other watchers find it dead.
- Two workers that watch the same peer ask each other: each answers from what it hears itself, never
  from the word of others, so no rumour keeps a dead worker alive.

Source: Das, Gupta, Motivala, *SWIM*, DSN 2002. Departure: SWIM pings a random member in every
period; here heartbeats flow on every link anyway, so silence takes the place of the failed ping.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from gossipdp.protocol.actions import LifeAction, Reach, Send, Unlink
from gossipdp.protocol.members import Membership
from gossipdp.protocol.messages import AskLife, LifeMessage, TellLife
from gossipdp.protocol.peers import Peers

MAX_WITNESSES = 3

# In time-outs. The questions go out before the time-out is over, so that the verdict need not wait
# for the answers after it.
ASK_AFTER = 0.6
ANSWER_WITHIN = 0.5
CONFIRMED_WITHIN = 0.15  # longer than a heartbeat, for which a witness that hears it waits
REACH_FOR = 0.3
FIRST_RETRY = 1.0
LONGEST_RETRY = 8.0


DetectorAction: TypeAlias = Send[LifeMessage] | LifeAction


@dataclass
class _Inquiry:
    """A question to others, open until all have answered or the deadline."""

    counter: int
    deadline: float
    unanswered: set[int]
    is_confirmed: bool = False
    """True once a witness has answered that it does not hear the peer either."""


@dataclass
class _Watch:
    """The state of one watched peer."""

    since: float
    """Its silence counts from then on at the earliest."""
    inquire_at: float = math.inf
    """Latest time of the next inquiry, whatever the silence; inf: the silence decides."""
    not_before: float = -math.inf
    retry_s: float = 0.0
    is_refused: bool = False
    """True if its address refuses connections; then its silence need not last the time-out."""
    inquiry: _Inquiry | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether there is something that a sign of life undoes."""
        return self.inquiry is not None or self.inquire_at < math.inf or self.not_before > -math.inf


@dataclass
class _Question:
    """The questions of others about one peer: counters by asker."""

    deadline: float
    askers: dict[int, int] = field(default_factory=dict)


class FailureDetector:
    """One worker's opinion on whether others live; ``membership`` is told who is dead."""

    def __init__(
        self, membership: Membership, peers: Peers, timeout_s: float, random: Random
    ) -> None:
        self.rank = membership.own.rank
        self.timeout_s = timeout_s
        self._membership = membership
        self._peers = peers
        self._random = random
        self._watches: dict[int, _Watch] = {}
        self._questions: dict[int, _Question] = {}
        self._counter = 0
        # Nothing is due before this time; None: not worked out. A sign of life only defers it.
        self._quiet_until: float | None = None

    # --- inputs ----------------------------------------------------------------------------

    @property
    def watched(self) -> Collection[int]:
        return self._watches.keys()

    def watch(self, peers: Collection[int], now: float) -> None:
        """Watch exactly these peers from now on. The time-out of a new one begins now."""
        if self._watches.keys() == set(peers):
            return
        self._quiet_until = None
        for peer in self._watches.keys() - set(peers):
            del self._watches[peer]
        for peer in sorted(set(peers) - self._watches.keys()):
            self._watches[peer] = self._fresh_watch(now)

    def heard(self, peer: int, now: float) -> list[DetectorAction]:
        """Drop an inquiry after ``peer``, of whose sign of life :class:`Peers` knows already."""
        watch = self._watches.get(peer)
        if watch is not None and watch.is_busy:
            self._watches[peer] = self._fresh_watch(now)
            self._quiet_until = None
        return self._answer(peer, is_heard=True) if self._questions else []

    def dial_failed(self, peer: int, now: float, *, is_refused: bool) -> list[DetectorAction]:
        """Inquire after ``peer``, to which a dial failed; suspect it if its address refuses.

        Then inquiries of which it is a witness expect no answer from it either.
        """
        watch = self._watches.get(peer)
        if is_refused:
            self._expect_no_answer(peer)
        if watch is not None:
            watch.is_refused |= is_refused
            if watch.inquiry is None:
                watch.inquire_at = now
                self._quiet_until = None
        return self._answer(peer, is_heard=False)

    def has_question(self, suspect: int) -> bool:
        """Return whether others wait for an answer about ``suspect``."""
        return suspect in self._questions

    def link_lost(self, peer: int, now: float) -> list[DetectorAction]:
        """Dial ``peer``, whose link is gone, if others ask about it: the dial is the answer."""
        question = self._questions.get(peer)
        if question is None:
            return []
        question.deadline = min(question.deadline, now + REACH_FOR * self.timeout_s)
        self._quiet_until = None
        return self._reach(peer)

    def gone(self, peer: int) -> list[DetectorAction]:
        """End all that concerns ``peer``, which is known to be dead or gone."""
        self._watches.pop(peer, None)
        self._expect_no_answer(peer)
        return self._answer(peer, is_heard=False)

    def link_up(self, peer: int) -> list[DetectorAction]:
        """Repeat to ``peer`` the questions that were put on an older link: one may be lost."""
        return [
            Send(peer, AskLife(suspect, watch.inquiry.counter))
            for suspect, watch in self._watches.items()
            if watch.inquiry is not None and peer in watch.inquiry.unanswered
        ]

    def slept(self, now: float) -> None:
        self._quiet_until = None
        for peer in self._watches:
            self._watches[peer] = self._fresh_watch(now)
        self._questions.clear()

    def receive(self, peer: int, message: LifeMessage, now: float) -> list[DetectorAction]:
        """Take a question or an answer of ``peer``."""
        self._quiet_until = None
        match message:
            case AskLife(suspect=suspect, counter=counter):
                return self._on_question(peer, suspect, counter, now)
            case TellLife(suspect=suspect, counter=counter, is_heard=is_heard):
                watch = self._watches.get(suspect)
                inquiry = None if watch is None else watch.inquiry
                if watch is None or inquiry is None or inquiry.counter != counter:
                    return []
                if is_heard and peer in inquiry.unanswered:
                    watch.inquiry = None
                    watch.inquire_at = math.inf
                    watch.is_refused = False
                    watch.not_before = now + watch.retry_s
                    watch.retry_s = min(2 * watch.retry_s, LONGEST_RETRY * self.timeout_s)
                    if not self._peers.is_silent(suspect):
                        return []
                    return [Unlink(suspect, "it is silent here, but others hear it")]
                if peer in inquiry.unanswered:
                    inquiry.unanswered.discard(peer)
                    inquiry.is_confirmed = True
        return []

    def poll(self, now: float) -> list[DetectorAction]:
        """Do what is due: begin inquiries, end them, declare workers dead, answer questions."""
        if now < self.next_deadline():
            return []
        self._quiet_until = None
        actions: list[DetectorAction] = []
        for suspect, question in list(self._questions.items()):
            if now >= question.deadline:
                actions += self._answer(suspect, is_heard=False)
        for peer, watch in list(self._watches.items()):
            if now < self._due_at(peer, watch):
                continue
            if watch.inquiry is None:
                actions += self._inquire(peer, watch, now)
            if watch.inquiry is not None and now >= self._due_at(peer, watch):
                del self._watches[peer]
                self._membership.declare_dead(peer)
        return actions

    def next_deadline(self) -> float:
        """Return when :meth:`poll` has something to do; signs of life only defer it."""
        if self._quiet_until is None:
            dues = [question.deadline for question in self._questions.values()]
            dues += [self._due_at(peer, watch) for peer, watch in self._watches.items()]
            self._quiet_until = min(dues, default=math.inf)
        return self._quiet_until

    # --- one inquiry, one answer -----------------------------------------------------------

    def _expect_no_answer(self, peer: int) -> None:
        self._quiet_until = None
        for watch in self._watches.values():
            if watch.inquiry is not None:
                watch.inquiry.unanswered.discard(peer)

    def _fresh_watch(self, now: float) -> _Watch:
        return _Watch(since=now, retry_s=FIRST_RETRY * self.timeout_s)

    def _due_at(self, peer: int, watch: _Watch) -> float:
        heard_at, inquiry = max(watch.since, self._peers.waits_since(peer)), watch.inquiry
        if inquiry is None:
            due_at = min(watch.inquire_at, heard_at + ASK_AFTER * self.timeout_s)
            return max(due_at, watch.not_before)
        answered_at = inquiry.deadline if inquiry.unanswered else -math.inf
        if not watch.is_refused:
            return max(heard_at + self.timeout_s, answered_at)
        if inquiry.is_confirmed:
            answered_at -= (ANSWER_WITHIN - CONFIRMED_WITHIN) * self.timeout_s
        return answered_at

    def _inquire(self, peer: int, watch: _Watch, now: float) -> list[DetectorAction]:
        heard = self._peers.live
        live = [rank for rank in self._membership.live() if rank not in (self.rank, peer)]
        linked = [rank for rank in live if rank in heard]
        others = [rank for rank in live if rank not in self._peers]
        # Drawn at random, or one that lies might be asked every time.
        asked = self._random.sample(linked, min(len(linked), MAX_WITNESSES))
        asked += self._random.sample(others, min(len(others), MAX_WITNESSES - len(asked)))
        self._counter += 1
        deadline = now + ANSWER_WITHIN * self.timeout_s
        watch.inquiry = _Inquiry(self._counter, deadline, set(asked))
        return [Send(witness, AskLife(peer, self._counter)) for witness in asked]

    def _on_question(
        self, asker: int, suspect: int, counter: int, now: float
    ) -> list[DetectorAction]:
        if suspect == self.rank:
            return [Send(asker, TellLife(suspect, counter, is_heard=True))]
        is_linked = suspect in self._peers
        if is_linked:
            deadline = self._peers.waits_since(suspect) + self.timeout_s
        else:
            deadline = now + REACH_FOR * self.timeout_s
        if now >= deadline or not self._membership.is_live(suspect):
            return [Send(asker, TellLife(suspect, counter, is_heard=False))]
        question = self._questions.setdefault(suspect, _Question(deadline))
        question.askers[asker] = counter
        # Another worker's question may have caused a dial already; a second one then does nothing.
        return [] if is_linked else self._reach(suspect)

    def _reach(self, suspect: int) -> list[DetectorAction]:
        member = self._membership.get(suspect)
        return [] if member is None else [Reach(suspect, member.host, member.port)]

    def _answer(self, suspect: int, *, is_heard: bool) -> list[DetectorAction]:
        question = self._questions.pop(suspect, None)
        if question is None:
            return []
        return [
            Send(asker, TellLife(suspect, counter, is_heard))
            for asker, counter in question.askers.items()
        ]
