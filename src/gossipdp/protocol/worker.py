"""One worker's whole protocol: what the runtime and the simulator drive.

:class:`WorkerProtocol` composes pairing, membership, progress, the step clock and consolidation.
Its inputs are what happens to the worker; each returns the actions to perform. It owns what the
parts do not know: links and their silence, heartbeats, and the news that travels with messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

from gossipdp.graph.constants import Constants
from gossipdp.protocol.actions import Begin, Send, Stop
from gossipdp.protocol.clock import StepClock
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.consolidation_actions import (
    ConsolidationAction,
    DataAction,
    Finished,
    Prepare,
)
from gossipdp.protocol.consolidation_messages import ConsolidationMessage, Epoch
from gossipdp.protocol.membership import Member, Membership, Status
from gossipdp.protocol.messages import Envelope, ExchangeId, ExchangeMessage, Heartbeat, Message
from gossipdp.protocol.neighbours import make_policy
from gossipdp.protocol.pairing import Exchanging, Pairing, PairingAction
from gossipdp.protocol.progress import Progress, ProgressEntry

Method: TypeAlias = Literal["a2cid2", "gossip", "none"]
Action: TypeAlias = Send[Envelope] | Begin | Stop | DataAction

HEARTBEATS_PER_TIMEOUT = 10
NEWS_INTERVAL_S = 0.05
PROGRESS_INTERVAL_S = 0.25


@dataclass
class _Link:
    """What this worker knows of one link, and what it has told on it."""

    last_heard: float
    last_sent: float = -math.inf
    is_silent: bool = False
    members_told: int = 0
    progress_told: int = 0
    progress_sent: float = -math.inf


class WorkerProtocol:
    """The protocol of one worker.

    Args:
        rank, incarnation, process_id, host, port: this worker, as others will know it.
        constants: the graph with its rates, at the comm rate asked for.
        method: "a2cid2", "gossip", or "none": no ticks, every proposal is answered BUSY.
        policy_name: one of :data:`~gossipdp.protocol.neighbours.NEIGHBOUR_POLICIES`.
        timeout_s: a peer silent for this long is suspect: not chosen, not waited for.
        random: seeds the clock and the policy.
        num_chunks, num_copied_chunks: what consolidation averages, and what it copies.

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
    ) -> None:
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s}")
        self.rank = rank
        self.timeout_s = timeout_s
        self.membership = Membership(
            Member(rank, incarnation, process_id, Status.ALIVE, host, port)
        )
        self.progress = Progress(rank, incarnation, process_id)
        self.alpha_tilde = constants.alpha_tilde if method == "a2cid2" else 0.5
        ticks_per_step = 0.0 if method == "none" else constants.worker_rate(rank) / 2
        self.clock = StepClock(ticks_per_step, Random(random.getrandbits(64)))
        self.pairing = Pairing(
            rank=rank,
            incarnation=incarnation,
            policy=make_policy(policy_name, Random(random.getrandbits(64))),
            alpha_tilde=self.alpha_tilde,
        )
        self.consolidation = Consolidation(rank, process_id, num_chunks, num_copied_chunks)
        self._reviewed: int | None = None
        self._deferred: list[tuple[int, ConsolidationMessage]] = []
        self.exchanges_initiated = 0
        self.exchanges_answered = 0
        self.exchanges_failed = 0
        self.is_done = False
        self._rates = constants.neighbours(rank)
        self._links: dict[int, _Link] = {}
        # What was worked out from links and membership, and for which version of the latter; -1
        # to have it worked out anew.
        self._available_version = -1
        self._quiet_version = -1
        self._quiet_until = math.inf
        self._last_input = -math.inf
        self._never_exchanges = method == "none"
        if self._never_exchanges:
            self.pairing.close()

    @property
    def neighbours(self) -> frozenset[int]:
        """The workers that the graph lets this one exchange with."""
        return frozenset(self._rates)

    @property
    def incarnation(self) -> int:
        """Which of its lives this worker is in."""
        return self.membership.own.incarnation

    # --- training --------------------------------------------------------------------------

    def step(self, samples: int, now: float) -> list[Action]:
        """One gradient step on ``samples`` samples ended."""
        self.progress.add(samples)
        self.clock.step(now)
        return self._settle(self._ticks(now), now)

    def done(self, now: float) -> list[Action]:
        """Train no more: ask for no exchange, but answer."""
        self.is_done = True
        self.pairing.stop_asking()
        self.clock.pause(now)
        return self._settle([], now)

    def hold(self, now: float) -> list[Action]:
        """Answer BUSY and do not ask until :meth:`release`; a running exchange goes on."""
        self.clock.pause(now)
        return self._settle(self.pairing.close(), now)

    def release(self, now: float) -> list[Action]:
        """Exchange again after :meth:`hold`."""
        if not self.is_done:
            self.clock.resume(now)
        return self._settle([] if self._never_exchanges else self.pairing.open(), now)

    def abort(self, reason: str, now: float) -> list[Action]:
        """Stop the exchange that is running, if any; its link is closed."""
        return self._settle(self.pairing.abort(reason), now)

    def poisoned(self, now: float) -> list[Action]:
        """The parameters are NaN or infinite: abort the exchange and never exchange again."""
        self._never_exchanges = True
        self.clock.pause(now)
        return self._settle(self.pairing.close() + self.pairing.abort("poisoned parameters"), now)

    # --- exchanges and messages ------------------------------------------------------------

    def receive(self, peer: int, envelope: Envelope, now: float) -> list[Action]:
        """``peer`` said ``envelope``; dropped if its link is regarded as closed already."""
        if peer not in self._links:
            return []
        self._note_life(peer, now)
        self.progress.merge_all(envelope.progress)
        self._take_members(envelope.members)
        actions = self._refresh_available()
        message = envelope.message
        if isinstance(message, ExchangeMessage):
            actions += self.pairing.receive(peer, message)
        elif isinstance(message, ConsolidationMessage):
            self._deferred.append((peer, message))
        return self._settle(actions, now)

    def finished(self, id: ExchangeId, now: float) -> list[Action]:
        """The exchange ``id`` is complete at this end: all sent, all received and applied."""
        state = self.pairing.state
        if isinstance(state, Exchanging) and state.id == id:
            self.exchanges_initiated += state.initiator
            self.exchanges_answered += not state.initiator
        return self._settle(self.pairing.finished(id), now)

    def failed(self, id: ExchangeId, now: float) -> list[Action]:
        """The exchange ``id`` broke at this end; the driver closes its link."""
        state = self.pairing.state
        actions: list[PairingAction] = []
        if isinstance(state, Exchanging) and state.id == id:
            self.exchanges_failed += 1
            self._forget_link(state.peer)
            actions = self.pairing.failed(id)
        return self._settle(actions, now)

    # --- consolidation ---------------------------------------------------------------------

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int, now: float) -> list[Action]:
        """A partial sum that consolidation accepted was added."""
        actions = self.consolidation.partial_landed(peer, epoch, chunk)
        return self._settle(self._after_consolidation(actions), now)

    def result_landed(self, peer: int, origin: Epoch, chunk: int, now: float) -> list[Action]:
        """A chunk of the result that consolidation accepted is here."""
        actions = self.consolidation.result_landed(peer, origin, chunk)
        return self._settle(self._after_consolidation(actions), now)

    def distance_measured(self, origin: Epoch, squared: float, now: float) -> list[Action]:
        """The answer to ``MeasureDistance``."""
        actions = self.consolidation.distance_measured(origin, squared)
        return self._settle(self._after_consolidation(actions), now)

    # --- links and time --------------------------------------------------------------------

    def link_up(self, peer: int, now: float) -> list[Action]:
        """A link to ``peer`` is ready; it replaces an older one."""
        actions = self._drop_link(peer) if peer in self._links else []
        self._links[peer] = _Link(last_heard=now)
        self._look_anew()
        return self._settle(actions, now)

    def link_down(self, peer: int, now: float) -> list[Action]:
        """The link to ``peer`` is closed."""
        return self._settle(self._drop_link(peer), now)

    def heard(self, peer: int, now: float) -> list[Action]:
        """Any byte came from ``peer``: a sign of life."""
        self._note_life(peer, now)
        return self._settle([], now)

    def peer_dead(self, peer: int, now: float) -> list[Action]:
        """The address of ``peer`` refuses connections: declare it dead."""
        self.membership.declare_dead(peer)
        return self._settle(self._drop_link(peer), now)

    def poll(self, now: float) -> list[Action]:
        """Time passed; to be called at :meth:`next_deadline`, and harmless at any time."""
        return self._settle(self._notice_silence(now) + self._ticks(now), now)

    def next_deadline(self, now: float) -> float:
        """When :meth:`poll` must be called if nothing else happens before; inf if never."""
        if self._quiet_version != self.membership.version:
            self._find_quiet_time()
        tick = self.clock.next_tick_at(now)
        return self._quiet_until if tick is None else min(tick, self._quiet_until)

    def last_heard(self, peer: int) -> float:
        """When ``peer`` was last known to live; infinite without a link to it."""
        link = self._links.get(peer)
        return math.inf if link is None else link.last_heard

    def suspects(self) -> frozenset[int]:
        """Linked peers that have been silent beyond the time-out."""
        return frozenset(peer for peer, link in self._links.items() if link.is_silent)

    @property
    def live_links(self) -> frozenset[int]:
        """Peers with a link that is up and not silent."""
        return frozenset(peer for peer, link in self._links.items() if not link.is_silent)

    def _note_life(self, peer: int, now: float) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.last_heard = now
            if link.is_silent:
                link.is_silent = False
                self._look_anew()

    def _drop_link(self, peer: int) -> list[PairingAction | ConsolidationAction]:
        self._forget_link(peer)
        return [*self.pairing.lost(peer), *self.consolidation.link_lost(peer)]

    def _forget_link(self, peer: int) -> None:
        self._links.pop(peer, None)
        self._look_anew()

    def _look_anew(self) -> None:
        """A link came, went, fell silent or was heard again."""
        self._available_version = self._quiet_version = -1

    def _notice_silence(self, now: float) -> list[PairingAction]:
        actions: list[PairingAction] = []
        # If it was we who did not run, nobody had the chance to be heard: start the wait anew.
        slept = now - self._last_input > self.timeout_s / 2
        for peer, link in self._links.items():
            if slept:
                link.last_heard = now
            elif not link.is_silent and now >= link.last_heard + self.timeout_s:
                link.is_silent = True
                self._look_anew()
                actions += self.pairing.silent(peer)
        return actions

    def _ticks(self, now: float) -> list[PairingAction]:
        ticks = self.clock.ticks_due(now)
        return [action for _ in range(ticks) for action in self.pairing.tick()]

    # --- what every input ends with --------------------------------------------------------

    def _settle(
        self, actions: Sequence[PairingAction | ConsolidationAction], now: float
    ) -> list[Action]:
        """Bring the parts in line with one another, add what is due, wrap what is sent."""
        self._last_input = now
        for action in actions:
            if isinstance(action, Stop):  # its link is closed: not to be chosen again just now
                self.exchanges_failed += 1
                self._forget_link(action.peer)
        actions = [*actions, *self._refresh_available()]
        self._announce_done()
        outward: list[Action] = []
        for action in [*actions, *self._consolidate()]:
            if isinstance(action, Send):
                outward.append(self.wrap(action.peer, action.message, now))
            else:
                outward.append(action)
        if now >= self._quiet_until or self._quiet_version != self.membership.version:
            for peer, link in self._links.items():
                if now >= self._heartbeat_at(link):
                    outward.append(self.wrap(peer, Heartbeat(), now))
            self._find_quiet_time()
        return outward

    def _find_quiet_time(self) -> None:
        """Until when no link wants a heartbeat or falls silent, but for what is new.

        What is sent and heard meanwhile only defers it: so one look at all links serves for many
        inputs, and may in the end call for a poll at which nothing is due.
        """
        until = math.inf
        for link in self._links.values():
            until = min(until, self._heartbeat_at(link))
            if not link.is_silent:
                until = min(until, link.last_heard + self.timeout_s)
        self._quiet_until = until
        self._quiet_version = self.membership.version

    def _consolidate(self) -> list[PairingAction | ConsolidationAction]:
        """What consolidation makes of new membership and messages; not while an exchange runs.

        All are done before it begins, so no exchange is asked for any more. But the end that was
        asked for the last one may hear of the beginning before the last chunks.
        """
        if isinstance(self.pairing.state, Exchanging):
            return []
        actions: list[PairingAction | ConsolidationAction] = []
        if self._reviewed != self.membership.version:
            self._reviewed = self.membership.version
            actions += self.consolidation.review(self.membership.members())
        for peer, message in self._deferred:
            actions += self.consolidation.receive(peer, message)
        self._deferred.clear()
        return self._after_consolidation(actions) if actions else []

    def _after_consolidation(
        self, actions: Sequence[PairingAction | ConsolidationAction]
    ) -> list[PairingAction | ConsolidationAction]:
        if any(isinstance(action, Prepare) for action in actions):
            self._never_exchanges = True
            actions = [*self.pairing.close(), *actions]
        if any(isinstance(action, Finished) for action in actions):
            self.membership.set_status(Status.LEFT)
        return list(actions)

    def _refresh_available(self) -> list[PairingAction]:
        """Tell the pairing who can exchange now. Links and membership alone decide that."""
        if self._available_version == self.membership.version:
            return []
        self._available_version = self.membership.version
        weights = {peer: rate for peer, rate in self._rates.items() if self._can_exchange(peer)}
        return [] if weights == self.pairing.available else self.pairing.set_available(weights)

    def _can_exchange(self, peer: int) -> bool:
        link = self._links.get(peer)
        if link is None or link.is_silent:
            return False
        member = self.membership.get(peer)
        return member is None or member.is_live

    def _announce_done(self) -> None:
        # Not while an exchange that it asked for is open: once all are done, none can begin.
        if self.is_done and not self.pairing.is_initiating:
            self.membership.set_status(Status.DONE)

    def _take_members(self, members: Iterable[Member]) -> None:
        before = self.incarnation
        self.membership.merge_all(members)
        if self.incarnation != before:  # declared dead by mistake: live on under a new one
            self.progress.renew(self.incarnation)
            self.pairing.incarnation = self.incarnation

    def _heartbeat_at(self, link: _Link) -> float:
        interval = self.timeout_s / HEARTBEATS_PER_TIMEOUT
        if link.members_told < self.membership.version:
            # Who has finished closes its links next: that it has left must be on its way before.
            interval = 0.0 if self.consolidation.is_finished else min(interval, NEWS_INTERVAL_S)
        return link.last_sent + interval

    def wrap(self, peer: int, message: Message, now: float) -> Send[Envelope]:
        """The message with the news that this link has not carried yet."""
        link = self._links.get(peer) or _Link(last_heard=now)
        members, link.members_told = self.membership.news(link.members_told)
        progress: tuple[ProgressEntry, ...] = ()
        # With news of members always: who hears that a worker is done hears all that it did.
        if members or now >= link.progress_sent + PROGRESS_INTERVAL_S:
            progress, link.progress_told = self.progress.news(link.progress_told)
            link.progress_sent = now
        link.last_sent = now
        return Send(peer, Envelope(message, members, progress))
