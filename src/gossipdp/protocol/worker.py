"""One worker's whole protocol: what the runtime and the simulator drive.

:class:`WorkerProtocol` composes pairing, membership, progress, the step clock, consolidation and
what keeps the run alive through failures: the detector, the neighbourhood, refresh and rivalry.
Its inputs are what happens to the worker; each returns the actions to perform. It owns what the
parts do not know: links and their silence, heartbeats, and the news that travels with messages.

The worker's own silence. Every input is also a look at the clock: :meth:`next_deadline` never lies
further ahead than a quarter of the time-out, so a longer gap between two inputs means that the
worker itself did not run. After half a time-out all waits for others begin anew, whatever input
comes first; after the whole time-out the worker takes another's parameters before it exchanges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Literal, TypeAlias

from gossipdp.graph.constants import Constants
from gossipdp.graph.live import LiveGraph
from gossipdp.protocol.actions import Begin, LifeAction, Reach, Send, Stop, Unlink
from gossipdp.protocol.clock import StepClock
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.consolidation_actions import (
    ConsolidationAction,
    DataAction,
    Finished,
    Prepare,
)
from gossipdp.protocol.consolidation_messages import ConsolidationMessage, Epoch
from gossipdp.protocol.failure_detector import DetectorAction, FailureDetector, Seek, Verdict
from gossipdp.protocol.links import Links
from gossipdp.protocol.membership import Member, Membership, Status
from gossipdp.protocol.messages import (
    AskMembers,
    Envelope,
    ExchangeId,
    ExchangeMessage,
    LifeMessage,
    Members,
    Message,
)
from gossipdp.protocol.neighbourhood import Neighbourhood
from gossipdp.protocol.neighbours import make_policy
from gossipdp.protocol.pairing import Exchanging, Pairing, PairingAction
from gossipdp.protocol.progress import Progress
from gossipdp.protocol.refresher import Refresher
from gossipdp.protocol.rivalry import Rivalry

Method: TypeAlias = Literal["a2cid2", "gossip", "none"]
Action: TypeAlias = Send[Envelope] | Begin | Stop | LifeAction | DataAction
_Inner: TypeAlias = (
    PairingAction | ConsolidationAction | DetectorAction | LifeAction | Send[Members]
)
"""What the parts ask for, before messages are wrapped and verdicts carried out."""

LOOKS_PER_TIMEOUT = 4


class WorkerProtocol:
    """The protocol of one worker.

    Args:
        rank, incarnation, process_id, host, port, status_address: this worker, as others will
            know it; the last says where it shows its status.
        constants: the graph with its rates, at the comm rate asked for.
        method: "a2cid2", "gossip", or "none": no ticks, every proposal is answered BUSY.
        policy_name: one of :data:`~gossipdp.protocol.neighbours.NEIGHBOUR_POLICIES`.
        timeout_s: a peer silent for this long is suspect: nothing is waited for from it. After
            half of it a peer is overdue: not chosen, and no proposal waits for it.
        random: seeds the clock and the policy.
        num_chunks, num_copied_chunks: what consolidation averages, and what it copies.
        is_joining: start as one that has no parameters yet; see :meth:`joined`.
        live_graph: made of ``constants``, for workers of one process to share its cache.

    Guarantees, as long as the driver performs every action in order, keeps links FIFO, and
    reports nothing from a link after its :meth:`link_down`: at most one exchange at a time; each
    ``Begin`` ends in exactly one of :meth:`finished`, :meth:`failed` or an action ``Stop``.
    On ``Stop`` and after :meth:`failed` the driver closes the link to that peer.
    """

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        process_id: int,
        host: str,
        port: int,
        constants: Constants,
        method: Method,
        policy_name: str,
        timeout_s: float,
        random: Random,
        num_chunks: int = 0,
        num_copied_chunks: int = 0,
        is_joining: bool = False,
        live_graph: LiveGraph | None = None,
        status_address: tuple[str, int] = ("", 0),
    ) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
        self.rank = rank
        self.timeout_s = timeout_s
        status = Status.JOINING if is_joining else Status.ALIVE
        self.membership = Membership(
            Member(rank, incarnation, process_id, status, host, port, *status_address)
        )
        self.progress = Progress(rank, incarnation, process_id)
        graph = live_graph or LiveGraph(constants)
        self.neighbourhood = Neighbourhood(rank, graph, has_momentum=method == "a2cid2")
        self.clock = StepClock(0.0, Random(random.getrandbits(64)))
        self.pairing = Pairing(
            rank=rank,
            incarnation=incarnation,
            policy=make_policy(policy_name, Random(random.getrandbits(64))),
            alpha_tilde=self.alpha_tilde,
        )
        self.consolidation = Consolidation(rank, process_id, num_chunks, num_copied_chunks)
        self.detector = FailureDetector(rank, timeout_s, Random(random.getrandbits(64)))
        self.refresher = Refresher(timeout_s, Random(random.getrandbits(64)))
        self.rivalry = Rivalry(timeout_s)
        self._reviewed: int | None = None
        # When consolidation last got on: it does not rely on every message arriving.
        self._averaged_at = math.inf
        self._deferred: list[tuple[int, ConsolidationMessage]] = []
        self.exchanges_initiated = 0
        self.exchanges_answered = 0
        self.exchanges_failed = 0
        self.is_done = False
        self._has_method = method != "none"
        self._links = Links(self.membership, self.progress, timeout_s)
        self._unreachable: set[int] = set()
        # What was worked out from links and membership, and for which version of the latter; -1
        # to have it worked out anew.
        self._members_version = -1
        self._available_version = -1
        self._quiet_version = -1
        self._quiet_until = math.inf
        self._last_input = -math.inf
        # Why this worker neither asks nor accepts; empty: it does.
        self._closed_for: set[str] = set()
        if is_joining:
            self.pairing.close()
            self._closed_for.add("joining")
        if not self._has_method:
            self.pairing.close()
            self._closed_for.add("method none")
        self._set_clock_rate()

    @property
    def neighbours(self) -> frozenset[int]:
        """The workers that the graph lets this one exchange with."""
        return frozenset(self.neighbourhood.rates)

    @property
    def alpha_tilde(self) -> float:
        """The gain of an exchange on the momentum copy, on the graph over the live workers."""
        return self.neighbourhood.alpha_tilde

    @property
    def incarnation(self) -> int:
        """Which of its lives this worker is in."""
        return self.membership.own.incarnation

    # --- training --------------------------------------------------------------------------

    def step(self, samples: int, now: float) -> list[Action]:
        """One gradient step on ``samples`` samples ended."""
        actions = self._look_at_clock(now)
        self.progress.add(samples)
        self.clock.step(now)
        return self._settle([*actions, *self._ticks(now)], now)

    def done(self, now: float) -> list[Action]:
        """Train no more: ask for no exchange, but answer."""
        actions = self._look_at_clock(now)
        self.is_done = True
        self.pairing.stop_asking()
        self.clock.pause(now)
        return self._settle([*actions, *self._open("pause", now)], now)

    def hold(self, now: float) -> list[Action]:
        """The parameters are being loaded: answer BUSY and do not ask until :meth:`release`.

        A running exchange goes on. The driver gives up a ``Refresh`` that is under way, and none
        begins: what is loaded is as good, so that with the release none is due any more.
        """
        actions = self._look_at_clock(now)
        return self._settle([*actions, *self._close("hold", now)], now)

    def pause(self, now: float) -> list[Action]:
        """The parameters are to be copied: answer BUSY and do not ask until :meth:`release`.

        A running exchange or ``Refresh`` goes on, and no other begins: one that is due waits for
        the release. :meth:`done` and :meth:`refresh` release too, for then the main thread only
        waits.
        """
        actions = self._look_at_clock(now)
        return self._settle([*actions, *self._close("pause", now)], now)

    def release(self, now: float) -> list[Action]:
        """Exchange again after :meth:`hold` or :meth:`pause`."""
        actions = self._look_at_clock(now)
        if "hold" in self._closed_for:
            self.refresher.void()
            actions += self._open("refresh", now)
        actions += [*self._open("hold", now), *self._open("pause", now)]
        return self._settle(actions, now)

    def abort(self, reason: str, now: float) -> list[Action]:
        """Stop the exchange that is running, if any; its link is closed."""
        actions = self._look_at_clock(now)
        return self._settle([*actions, *self.pairing.abort(reason)], now)

    def poisoned(self, now: float) -> list[Action]:
        """The parameters are NaN or infinite: abort the exchange and do not exchange again.

        Only :meth:`refresh` and what comes of it end that.
        """
        actions = [*self._look_at_clock(now), *self._close("poisoned parameters", now)]
        return self._settle([*actions, *self.pairing.abort("poisoned parameters")], now)

    # --- joining and refreshing ------------------------------------------------------------

    def joined(self, now: float) -> list[Action]:
        """A worker that was joining has its parameters: it is alive from now on."""
        actions = self._look_at_clock(now)
        self.membership.set_status(Status.ALIVE)
        return self._settle([*actions, *self._open("joining", now)], now)

    def refresh(self, now: float) -> list[Action]:
        """Take another worker's parameters before exchanging again, and instead of nothing.

        By choice, after :meth:`poisoned`: nothing else makes this worker exchange again.
        """
        actions = [*self._look_at_clock(now), *self._need_refresh(now, insists=True)]
        return self._settle([*actions, *self._open("pause", now)], now)

    def refreshed(self, now: float) -> list[Action]:
        """The answer to ``Refresh``: this worker's parameters are its peer's, and c = 0."""
        actions = self._look_at_clock(now)
        self.refresher.refreshed()
        if not self.refresher.is_needed:
            actions += self._open("poisoned parameters", now)
        return self._settle(actions, now)

    def refresh_failed(self, peer: int, now: float) -> list[Action]:
        """The answer to ``Refresh``: nothing came from ``peer``, and nothing was changed."""
        actions = self._look_at_clock(now)
        self.refresher.failed(peer)
        return self._settle(actions, now)

    @property
    def can_donate(self) -> bool:
        """Whether this worker's parameters are worth another's taking them over."""
        return (
            self._closed_for.isdisjoint(("joining", "poisoned parameters", "consolidation"))
            and not self.refresher.is_needed
        )

    def answer_joiner(self, counter: int) -> Members:
        """What one who is about to join must know; the answer to ``AskMembers``."""
        members = self.membership.members()
        return Members(
            counter,
            num_workers=self.neighbourhood.num_originals,
            is_ending=not any(member.status is Status.ALIVE for member in members),
            members=members,
            progress=self.progress.news()[0],
        )

    # --- exchanges and messages ------------------------------------------------------------

    def receive(self, peer: int, envelope: Envelope, now: float) -> list[Action]:
        """``peer`` said ``envelope``; dropped if its link is regarded as closed already."""
        if peer not in self._links:
            return []
        actions = [*self._look_at_clock(now), *self._note_life(peer, now)]
        self.progress.merge_all(envelope.progress)
        self.membership.merge_all(envelope.members)
        actions += [*self._review_members(now), *self._set_available()]
        message = envelope.message
        if isinstance(message, ExchangeMessage):
            actions += self.pairing.receive(peer, message)
        elif isinstance(message, ConsolidationMessage):
            self._deferred.append((peer, message))
        elif isinstance(message, LifeMessage):
            is_linked = message.suspect in self._links
            actions += self.detector.receive(peer, message, now, is_linked=is_linked)
            self._look_anew()
        elif isinstance(message, AskMembers):
            actions.append(Send(peer, self.answer_joiner(message.counter)))
        return self._settle(actions, now)

    def finished(self, id: ExchangeId, now: float) -> list[Action]:
        """The exchange ``id`` is complete at this end: all sent, all received and applied."""
        state = self.pairing.state
        if isinstance(state, Exchanging) and state.id == id:
            self.exchanges_initiated += state.initiator
            self.exchanges_answered += not state.initiator
        actions = self.pairing.finished(id)
        # The clock last: a stall must not stop an exchange that is complete.
        return self._settle([*actions, *self._look_at_clock(now)], now)

    def failed(self, id: ExchangeId, now: float) -> list[Action]:
        """The exchange ``id`` broke at this end; the driver closes its link."""
        state = self.pairing.state
        actions: list[_Inner] = []
        if isinstance(state, Exchanging) and state.id == id:
            self.exchanges_failed += 1
            self._forget_link(state.peer)
            actions += self.pairing.failed(id)
        return self._settle([*actions, *self._look_at_clock(now)], now)

    # --- consolidation ---------------------------------------------------------------------

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int, now: float) -> list[Action]:
        """A partial sum that consolidation accepted was added."""
        actions = self._look_at_clock(now)
        self._averaged_at = now
        landed = self.consolidation.partial_landed(peer, epoch, chunk)
        return self._settle([*actions, *self._after_consolidation(landed, now)], now)

    def result_landed(self, peer: int, origin: Epoch, chunk: int, now: float) -> list[Action]:
        """A chunk of the result that consolidation accepted is here."""
        actions = self._look_at_clock(now)
        self._averaged_at = now
        landed = self.consolidation.result_landed(peer, origin, chunk)
        return self._settle([*actions, *self._after_consolidation(landed, now)], now)

    def distance_measured(self, origin: Epoch, squared: float, now: float) -> list[Action]:
        """The answer to ``MeasureDistance``."""
        actions = self._look_at_clock(now)
        measured = self.consolidation.distance_measured(origin, squared)
        return self._settle([*actions, *self._after_consolidation(measured, now)], now)

    # --- links and time --------------------------------------------------------------------

    def link_up(self, peer: int, now: float) -> list[Action]:
        """A link to ``peer`` is ready; it replaces an older one."""
        actions = self._look_at_clock(now)
        if peer in self._links:
            actions += self._drop_link(peer)
        self._links.up(peer, now)
        self.rivalry.linked()
        self._unreachable.discard(peer)
        self._look_anew()
        actions += self.detector.heard(peer, now)
        return self._settle([*actions, *self.detector.link_up(peer)], now)

    def link_down(self, peer: int, now: float) -> list[Action]:
        """The link to ``peer`` is closed."""
        actions = self._look_at_clock(now)
        return self._settle([*actions, *self._drop_link(peer)], now)

    def heard(self, peer: int, now: float) -> list[Action]:
        """Any byte came from ``peer``: a sign of life."""
        return self._settle([*self._look_at_clock(now), *self._note_life(peer, now)], now)

    def outdated(self, peer: int, now: float) -> list[Action]:
        """``peer`` turned us away: it is linked to a later process of this worker's rank."""
        actions = [*self._look_at_clock(now), *self._note_life(peer, now)]
        return self._settle([*actions, *self.rivalry.refused(now)], now)

    def reached(self, peer: int, now: float) -> list[Action]:
        """The address of ``peer`` answered, though it did not come to a link: it lives."""
        actions = [*self._look_at_clock(now), *self._note_life(peer, now)]
        if peer == self.rank:
            self.rivalry.reached()
        return self._settle(actions, now)

    def peer_dead(
        self, peer: int, now: float, address: tuple[str, int] | None = None
    ) -> list[Action]:
        """An address of ``peer`` refuses connections: declare it dead.

        Unless it is known to listen at another than ``address`` by now: it was started anew.
        """
        actions = self._look_at_clock(now)
        member = self.membership.get(peer)
        is_outdated = (
            member is not None and address is not None and (member.host, member.port) != address
        )
        if is_outdated or member == self.membership.own:
            return self._settle(actions, now)
        self.membership.declare_dead(peer)
        return self._settle([*actions, *self._drop_link(peer)], now)

    def peer_unreachable(self, peer: int, now: float) -> list[Action]:
        """A dial to ``peer`` came to nothing, but its address did not refuse: ask others."""
        actions = self._look_at_clock(now)
        if peer not in self._links:
            if peer != self.rank and self._is_live(peer):
                self._unreachable.add(peer)
                self._look_anew()
                actions += self._review_members(now)
            actions += self.detector.unreachable(peer, now)
        return self._settle(actions, now)

    def poll(self, now: float) -> list[Action]:
        """Time passed; to be called at :meth:`next_deadline`, and harmless at any time."""
        actions = self._look_at_clock(now)
        actions += [*self._notice_silence(now), *self._ticks(now)]
        actions += self.detector.poll(now, self._witnesses)
        actions += self.rivalry.poll(self.rank, now)
        if now >= self._averaged_at + self.timeout_s and not self.refresher.is_needed:
            self._averaged_at = now
            actions += self._after_consolidation(self.consolidation.repeat(), now)
        return self._settle(actions, now)

    def next_deadline(self, now: float) -> float:
        """When :meth:`poll` must be called if nothing else happens before."""
        if self._quiet_version != self.membership.version:
            self._find_quiet_time()
        tick = self.clock.next_tick_at(now)
        return self._quiet_until if tick is None else min(tick, self._quiet_until)

    def last_heard(self, peer: int) -> float:
        """When ``peer`` was last known to live; infinite without a link to it."""
        return self._links.last_heard(peer)

    def suspects(self) -> frozenset[int]:
        """Linked peers that have been silent beyond the time-out."""
        return self._links.silent

    @property
    def live_links(self) -> frozenset[int]:
        """Peers with a link that is up and not silent."""
        return self._links.live

    def wrap(self, peer: int, message: Message, now: float) -> Send[Envelope]:
        """The message with the news that the link to ``peer`` has not carried yet."""
        return self._links.wrap(peer, message, now)

    def _note_life(self, peer: int, now: float) -> list[DetectorAction]:
        if self._links.heard(peer, now):
            self._look_anew()
        return self.detector.heard(peer, now)

    def _drop_link(self, peer: int) -> list[PairingAction | ConsolidationAction]:
        self._forget_link(peer)
        return [*self.pairing.lost(peer), *self.consolidation.link_lost(peer)]

    def _forget_link(self, peer: int) -> None:
        self._links.drop(peer)
        self._look_anew()

    def _shed(self, peer: int, reason: str) -> list[_Inner]:
        """Close the link to ``peer`` if it is silent; one that is not carries the news to it."""
        if not self._links.is_silent(peer):
            return []
        return [*self._drop_link(peer), Unlink(peer, reason)]

    def _look_anew(self) -> None:
        """A link came, went, fell overdue or was heard again; or there is a new deadline."""
        self._available_version = self._quiet_version = -1

    def _look_at_clock(self, now: float) -> list[_Inner]:
        """What every input begins with: whether this worker itself was silent until now."""
        slept_s = now - self._last_input
        if not self.timeout_s / 2 < slept_s < math.inf:
            return []
        self._links.slept(now)
        self.detector.slept(now)
        self._look_anew()
        # A checkpoint that was under way when it stood still makes its parameters no fresher.
        is_exchanging = self._closed_for <= {"pause"}
        if slept_s > self.timeout_s and is_exchanging and not self._is_alone:
            return self._need_refresh(now, insists=False)
        return []

    def _notice_silence(self, now: float) -> list[_Inner]:
        actions: list[_Inner] = []
        if overdue := self._links.fall_overdue(now):
            self._look_anew()
            actions += self.pairing.overdue(overdue)
        for peer in self._links.fall_silent(now):
            self._look_anew()
            actions += self.pairing.silent(peer)
            if self._is_over(peer):
                actions += self._shed(peer, "it is dead")
        return actions

    def _ticks(self, now: float) -> list[PairingAction]:
        ticks = self.clock.ticks_due(now)
        return [action for _ in range(ticks) for action in self.pairing.tick()]

    def _witnesses(self, suspect: int) -> tuple[list[int], list[int]]:
        """Whom to ask about a suspect: the linked, then its own neighbours, who are linked to it.

        The others follow in ascending distance of rank: which ones matters little.
        """
        linked = self.live_links
        others = [
            member.rank
            for member in self.membership.members()
            if member.is_live and member.rank not in (self.rank, suspect)
        ]
        silent = self.suspects()
        near = sorted(
            (rank for rank in others if rank not in linked and rank not in silent),
            key=lambda rank: (abs(rank - suspect), rank),
        )
        return [rank for rank in others if rank in linked], near

    # --- what every input ends with --------------------------------------------------------

    def _settle(self, actions: Sequence[_Inner], now: float) -> list[Action]:
        """Bring the parts in line with one another, add what is due, wrap what is sent."""
        self._last_input = max(now, self._last_input)
        settled: list[_Inner] = []
        for action in actions:
            match action:
                case Stop():  # its link is closed: not to be chosen again just now
                    self.exchanges_failed += 1
                    self._forget_link(action.peer)
                    settled.append(action)
                case Verdict():
                    settled += self._judge(action)
                case _:
                    settled.append(action)
        settled += self._review_members(now)
        settled += self._take_parameters(now)
        settled += self._set_available()
        self._announce_done()
        outward: list[Action] = []
        for action in [*settled, *self._consolidate(now)]:
            match action:
                case Send():
                    outward.append(self._links.wrap(action.peer, action.message, now))
                case Seek():
                    outward += self._reach(action.peer)
                case Verdict():
                    raise AssertionError("verdicts are carried out above")
                case _:
                    outward.append(action)
        if now >= self._quiet_until or self._quiet_version != self.membership.version:
            is_leaving = self.consolidation.is_finished
            outward += self._links.heartbeats(now, is_leaving=is_leaving)
            self._find_quiet_time()
        return outward

    def _judge(self, verdict: Verdict) -> list[_Inner]:
        peer = verdict.peer
        if not verdict.is_dead:
            return self._shed(peer, "it is silent here, but others hear it")
        self._unreachable.discard(peer)
        self.membership.declare_dead(peer)  # what follows from that is for the review
        return []

    def _reach(self, peer: int) -> list[Reach]:
        member = self.membership.get(peer)
        return [] if member is None else [Reach(peer, member.host, member.port)]

    def _review_members(self, now: float) -> list[_Inner]:
        """Follow the membership view: who is dead, who is a neighbour, which life is this."""
        members = self.membership
        actions: list[_Inner] = []
        while self._members_version != members.version:
            self._members_version = members.version
            self._available_version = -1
            self.neighbourhood.review(members.members())
            for member in members.members():
                if member.is_over and member.rank != self.rank:
                    self._unreachable.discard(member.rank)
                    actions += self.detector.gone(member.rank)
                    actions += self._shed(member.rank, "it is dead")
            known = members.get(self.rank)
            assert known is not None
            for action in self.rivalry.review(members.own, known, now):
                if isinstance(action, Verdict):
                    members.declare_dead(self.rank)
                else:
                    actions.append(action)
            actions += (
                self._close("superseded", now)
                if members.is_superseded
                else self._open("superseded", now)
            )
            if self.incarnation != self.pairing.incarnation:
                # Declared dead by mistake, or after another of its rank: it goes on as a new life.
                self.progress.renew(self.incarnation)
                self.pairing.incarnation = self.incarnation
        if now >= self.neighbourhood.next_deadline():
            has_ended = "consolidation" in self._closed_for
            rebuilt = self.neighbourhood.rebuild(members.members(), now, has_ended=has_ended)
            self.pairing.alpha_tilde = self.alpha_tilde
            self._set_clock_rate()
            self._look_anew()
            actions.append(rebuilt)
        if self._available_version != members.version:
            self.detector.watch(self._watched(), now)
        return actions

    def _watched(self) -> set[int]:
        """Whose silence matters: neighbours, and whoever is linked or was dialled in vain."""
        if self.consolidation.is_finished:
            return set()
        candidates = self._links.peers | self._unreachable
        if "hold" not in self._closed_for:  # else they may not have been dialled yet
            candidates |= self.neighbourhood.rates.keys()
        return {
            peer
            for peer in candidates
            if peer != self.rank
            and (member := self.membership.get(peer)) is not None
            and member.is_live
        }

    @property
    def _is_alone(self) -> bool:
        return not any(rank != self.rank for rank in self.membership.live())

    def _is_over(self, peer: int) -> bool:
        member = self.membership.get(peer)
        return member is not None and member.is_over

    def _set_clock_rate(self) -> None:
        self.clock.set_rate(self.neighbourhood.worker_rate / 2 if self._has_method else 0.0)

    # --- when this worker does not exchange ------------------------------------------------

    def _close(self, reason: str, now: float) -> list[PairingAction]:
        """Answer BUSY and do not ask, until every reason for it is gone."""
        if reason in self._closed_for:
            return []
        self._closed_for.add(reason)
        self._look_anew()
        self.clock.pause(now)
        return self.pairing.close()

    def _open(self, reason: str, now: float) -> list[PairingAction]:
        if reason not in self._closed_for:
            return []
        self._closed_for.discard(reason)
        self._look_anew()
        if self._closed_for:
            return []
        if not self.is_done:
            self.clock.resume(now)
        return self.pairing.open()

    def _need_refresh(self, now: float, *, insists: bool) -> list[_Inner]:
        """Take parameters from another before the next exchange; the present one is void."""
        if not self._closed_for.isdisjoint(("joining", "consolidation")):
            return []
        self.refresher.need(now, insists=insists)
        self._look_anew()
        closing = self._close("refresh", now)
        return [*closing, *self.pairing.abort("this worker stood still")]

    def _take_parameters(self, now: float) -> list[_Inner]:
        """Go on with the search for parameters, or with exchanging once it is over.

        Not while the main thread reads or writes them: a transfer that began then, unknown to it,
        would write between its passes over the chunks, and into what it has just loaded.
        """
        if "refresh" not in self._closed_for or self._is_held:
            return []
        candidates = {peer for peer in self.live_links if self._is_live(peer)}
        actions: list[_Inner] = list(self.refresher.poll(now, candidates, is_alone=self._is_alone))
        self._look_anew()
        if not self.refresher.is_needed:
            actions += self._open("refresh", now)
        return actions

    @property
    def _is_held(self) -> bool:
        """Whether the main thread reads or writes all of the parameters, or is about to."""
        return not self._closed_for.isdisjoint(("hold", "pause"))

    def _is_live(self, peer: int) -> bool:
        member = self.membership.get(peer)
        return member is not None and member.is_live

    def _find_quiet_time(self) -> None:
        """Until when no link wants a heartbeat or is late, but for what is new.

        What is sent and heard meanwhile only defers it: so one look at all links serves for many
        inputs, and may in the end call for a poll at which nothing is due.
        """
        self._quiet_until = min(
            self._links.quiet_until(is_leaving=self.consolidation.is_finished),
            self._last_input + self.timeout_s / LOOKS_PER_TIMEOUT,
            self.detector.next_deadline(),
            self.neighbourhood.next_deadline(),
            math.inf if self._is_held else self.refresher.next_deadline(),
            self.rivalry.next_deadline(),
        )
        self._quiet_version = self.membership.version

    def _consolidate(self, now: float) -> list[PairingAction | ConsolidationAction]:
        """What consolidation makes of new membership and messages.

        Not while an exchange runs: all are done before it begins, so none is asked for any more,
        but the end that was asked for the last one may hear of the beginning before the last
        chunks. And not while another's parameters are on their way here.
        """
        if isinstance(self.pairing.state, Exchanging) or self.refresher.is_needed:
            return []
        actions: list[PairingAction | ConsolidationAction] = []
        if self._reviewed != self.membership.version:
            self._reviewed = self.membership.version
            actions += self.consolidation.review(self.membership.members())
        for peer, message in self._deferred:
            actions += self.consolidation.receive(peer, message)
        self._deferred.clear()
        return self._after_consolidation(actions, now) if actions else []

    def _after_consolidation(
        self, actions: Sequence[PairingAction | ConsolidationAction], now: float
    ) -> list[PairingAction | ConsolidationAction]:
        if any(isinstance(action, Prepare) for action in actions):
            self._averaged_at = now
            actions = [*self._close("consolidation", now), *actions]
        if any(isinstance(action, Finished) for action in actions):
            self.membership.set_status(Status.LEFT)
        return list(actions)

    def _set_available(self) -> list[PairingAction]:
        """Tell the pairing who can exchange now. Links, membership and graph decide that."""
        if self._available_version == self.membership.version:
            return []
        self._available_version = self.membership.version
        rates = self.neighbourhood.rates
        weights = {peer: rate for peer, rate in rates.items() if self._can_exchange(peer)}
        return [] if weights == self.pairing.available else self.pairing.set_available(weights)

    def _can_exchange(self, peer: int) -> bool:
        member = self.membership.get(peer)
        return self._links.is_prompt(peer) and (member is None or member.is_live)

    def _announce_done(self) -> None:
        # Not while an exchange that it asked for is open: once all are done, none can begin.
        if self.is_done and not self.pairing.is_initiating and not self.refresher.is_needed:
            self.membership.set_status(Status.DONE)
