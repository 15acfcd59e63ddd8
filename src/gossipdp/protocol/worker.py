"""One worker's whole protocol, which the runtime and the simulator drive.

:class:`WorkerProtocol` composes the peers, membership, progress, the step clock, the failure
detector, presence, pairing and sums. An input reports something that happened to the worker, and
returns the actions to perform. The class itself knows only why this worker does not exchange now,
its own silence, and when its waits end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from random import Random
from typing import Concatenate, Literal, ParamSpec, TypeAlias

from gossipdp.graph.constants import LiveGraph
from gossipdp.protocol.actions import (
    Begin,
    DataAction,
    Finished,
    LifeAction,
    Rebuilt,
    Send,
    Stop,
    Unlink,
    Withdrawn,
)
from gossipdp.protocol.averages import FIRST_NUMBER, LiveAverages
from gossipdp.protocol.consolidate import Consolidation
from gossipdp.protocol.exchange_rate import ExchangeRate
from gossipdp.protocol.liveness import DetectorAction, FailureDetector
from gossipdp.protocol.members import Member, Membership, Progress, Status
from gossipdp.protocol.messages import (
    MAX_RECORDS,
    Accept,
    AskMembers,
    AverageMessage,
    BeginEpoch,
    Busy,
    ConsolidationMessage,
    Envelope,
    Epoch,
    ExchangeId,
    ExchangeMessage,
    Free,
    LifeMessage,
    Members,
    Message,
    Propose,
    ProtocolError,
    ReductionMessage,
)
from gossipdp.protocol.neighbours import Fresh, Neighbourhood, NeighbourPolicy, WorkOut, at_once
from gossipdp.protocol.pairing import Exchanging, MomentsDue, Pairing, PairingAction, Proposing
from gossipdp.protocol.peers import Peers
from gossipdp.protocol.presence import Presence
from gossipdp.protocol.reduction import TICKS_PER_TIMEOUT, Reduction, ReductionAction
from gossipdp.protocol.step_clock import StepClock
from gossipdp.rules import positive_number

Method: TypeAlias = Literal["a2cid2", "gossip", "none"]
Action: TypeAlias = Send[Envelope] | Begin | Stop | Withdrawn | LifeAction | DataAction
_Inner: TypeAlias = PairingAction | ReductionAction | DetectorAction | Send[Members]
"""The parts' actions, before messages are wrapped."""
_Given = ParamSpec("_Given")

OWED, MOST_OWED, MOST_AHEAD = 6.0, 12.0, 12.0
"""A tick is two demands if a worker has had so many exchanges less than are due by its steps."""
MAX_DEFERRED = 256
"""Consolidation messages that wait for the end of an exchange; dropped ones are repeated."""


def _input(
    method: Callable[Concatenate[WorkerProtocol, _Given], Sequence[_Inner]],
) -> Callable[Concatenate[WorkerProtocol, _Given], list[Action]]:
    """Frame an input: look at the clock first, and settle the parts last."""
    place = list(signature(method).parameters).index("now") - 1

    @wraps(method)
    def framed(
        self: WorkerProtocol, /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> list[Action]:
        now = kwargs["now"] if "now" in kwargs else args[place]
        assert isinstance(now, float | int)
        self._look_at_clock(now)
        return self._settle(method(self, *args, **kwargs), now)

    return framed


class WorkerProtocol:
    """The protocol of one worker.

    Args:
        own: this worker, as others will know it. If it is joining, it comes late, held, without
            parameters: see :meth:`release`.
        graph: the graph with its rates, at the wanted comm rate; at 1 with ``exchange_rate``.
            Workers of one process share its cache.
        exchange_rate, moments_due: what the worker can afford, if the comm rate sets itself, and
            when the optimizer's moments travel.
        method: "a2cid2", "gossip", or "none": no ticks, and BUSY to every proposal.
        timeout_s: a peer that is silent for this long is suspect: this worker waits for nothing
            from it. How long an exchange waits for a peer: see :mod:`~gossipdp.protocol.peers`.
        num_chunks, num_copied_chunks: chunks that consolidation averages, and that it copies.
        work_out: works out the graph over the live workers, at once or elsewhere.

    If the driver performs every action in order, keeps links FIFO, and reports nothing from a link
    after its :meth:`link_down`, this is guaranteed: there is at most one exchange at a time; each
    ``Begin`` ends in exactly one of :meth:`finished` or an action ``Stop`` or ``Withdrawn``. On
    ``Stop`` the driver closes the link to that peer.
    """

    def __init__(
        self,
        *,
        own: Member,
        graph: LiveGraph,
        method: Method,
        timeout_s: float,
        random: Random,
        policy_type: type[NeighbourPolicy] = Fresh,
        num_chunks: int = 0,
        num_copied_chunks: int = 0,
        work_out: WorkOut = at_once,
        exchange_rate: ExchangeRate | None = None,
        moments_due: MomentsDue | None = None,
    ) -> None:
        self.rank = rank = own.rank
        self.timeout_s = positive_number("timeout_s", timeout_s)
        self.exchange_rate = exchange_rate
        self.membership = Membership(own, len(graph.original.workers))
        self.progress = Progress(rank, own.process_id)
        self.peers = Peers(self.membership, self.progress, timeout_s)
        self.neighbourhood = Neighbourhood(
            rank, graph, has_momentum=method == "a2cid2", work_out=work_out
        )
        self.clock = StepClock(0.0, Random(random.getrandbits(64)))
        self.pairing = Pairing(
            rank=rank,
            incarnation=own.incarnation,
            policy=policy_type(Random(random.getrandbits(64))),
            alpha_tilde=self.neighbourhood.place.alpha_tilde,
            moments_due=moments_due,
        )
        self.consolidation = Consolidation(
            rank, own.process_id, num_chunks, num_copied_chunks, self.peers.__contains__
        )
        # Two lives of a rank use different numbers for requests, which no consolidation uses.
        number = FIRST_NUMBER + random.getrandbits(60)
        self.averages = LiveAverages(
            rank, own.process_id, number, num_chunks, lambda: self.can_donate
        )
        self._detector = FailureDetector(
            self.membership, self.peers, timeout_s, Random(random.getrandbits(64))
        )
        self._presence = Presence(
            self.membership, self.peers, self.neighbourhood, self._detector, timeout_s
        )
        self._reviewed: int | None = None
        self._tick_at = -math.inf  # of sums; a worker looks at its clock then, too
        self._waits, self._waits_until = True, math.inf  # for those that still train
        self._moving: dict[Epoch, set[int]] = {}
        self._deferred: deque[tuple[int, ConsolidationMessage | ReductionMessage]] = deque(
            maxlen=MAX_DEFERRED
        )
        # When the last byte of the running exchange came or left, and the longest gap so far.
        self._progressed_at = -math.inf
        self._longest_gap_s = 0.0
        self._began_at = -math.inf
        # When the wait for an answer to the open proposal, and to FREE, ends.
        self._proposal_due = self._free_due = math.inf
        # Exchanges that are due by its own steps, less those that it has had.
        self._owed = 0.0
        self.exchanges_initiated = 0
        self.exchanges_answered = 0
        self.exchanges_failed = 0
        self.proposals_unanswered = 0
        self.is_done = False
        self._seen_version = -1  # of membership, for which `_quiet_until` holds
        self._quiet_until = self._last_input = -math.inf
        # The reasons why this worker neither asks nor accepts; empty: it does.
        self._closed_for: set[str] = set()
        if own.status is Status.JOINING:
            self.pairing.close()
            self._closed_for.add("hold")
        if method == "none":
            self.pairing.close()
            self._closed_for.add("method none")
        self._set_clock_rate()

    @property
    def neighbours(self) -> frozenset[int]:
        """Return the workers with which the graph lets this one exchange."""
        return frozenset(self.neighbourhood.place.rates)

    @property
    def incarnation(self) -> int:
        """Return the number of this worker's life."""
        return self.membership.own.incarnation

    # --- training --------------------------------------------------------------------------

    @_input
    def step(self, samples: int, now: float, ended_s: float | None = None) -> Sequence[_Inner]:
        """Count a gradient step on ``samples`` samples, which ended at ``ended_s``, or just now."""
        ended_s = now if ended_s is None else ended_s
        self.progress.add(samples, now=ended_s)
        self.clock.step(ended_s)
        rate = self.exchange_rate
        self.pairing.moments_due.step()
        if rate is not None and rate.stepped(self.clock.step_seconds):
            self._set_clock_rate()
        if self.clock.step_seconds is not None and not self.clock.is_paused:
            self._owed = min(MOST_OWED, self._owed + self._wanted_rate)
        return self._ticks(now)

    @_input
    def done(self, now: float, wait_s: float = math.inf) -> Sequence[_Inner]:
        """End training: ask for no exchange, but answer, until all live workers are done.

        If this worker leads the average, it goes on after ``wait_s`` without those that still
        train, even if their links live: a training loop may hang. They are not dead, and get the
        result if they are done before the others have left.
        """
        self.is_done = True
        self._waits_until = now + wait_s
        self.consolidation.participants.wait_ticks = TICKS_PER_TIMEOUT * wait_s / self.timeout_s
        self.pairing.stop_asking()
        self.clock.pause(now)
        return []

    @_input
    def hold(self, now: float) -> Sequence[_Inner]:
        """Answer BUSY, do not ask, and give no state until :meth:`release`.

        The worker has no parameters yet, or they are being loaded. A running exchange goes on,
        unless the driver calls :meth:`abort`.
        """
        return self._close("hold", now)

    @_input
    def release(self, now: float) -> Sequence[_Inner]:
        """Take part from now on: this worker has its parameters. One that was joining is alive.

        Linked peers hear that at once, and wait for this worker at the end: before the next
        heartbeat they might have ended the run by themselves.
        """
        if self.membership.own.status is Status.JOINING:
            self.membership.set_status(Status.ALIVE)
            self.peers.say_all_at_once()
        return self._open("hold", now)

    @_input
    def abort(self, reason: str, now: float) -> Sequence[_Inner]:
        """Stop the exchange that is running, if any; its link is closed."""
        return self.pairing.abort(reason)

    @_input
    def poisoned(self, now: float) -> Sequence[_Inner]:
        """Abort the exchange and never exchange again: the parameters are NaN or infinite."""
        closing = self._close("poisoned parameters", now)
        return [*closing, *self.pairing.abort("poisoned parameters")]

    # --- joining ---------------------------------------------------------------------------

    @property
    def can_donate(self) -> bool:
        """Return whether other workers may take over this worker's parameters."""
        return self._closed_for.isdisjoint(("hold", "poisoned parameters", "consolidation"))

    def answer_joiner(self) -> Members:
        """Return the answer to ``AskMembers``, from a worker that is about to join."""
        members = sorted(self.membership.members(), key=lambda each: (not each.is_live, -each.rank))
        is_training = any(member.status is Status.ALIVE for member in members)
        progress = sorted(self.progress.news()[0], key=lambda each: -(each.process_id >> 32))
        return Members(
            num_workers=self.membership.num_workers,
            is_ending="consolidation" in self._closed_for or not is_training,
            members=tuple(sorted(members[:MAX_RECORDS], key=lambda each: each.rank)),
            progress=tuple(progress[:MAX_RECORDS]),
        )

    # --- exchanges and messages ------------------------------------------------------------

    @_input
    def receive(self, peer: int, envelope: Envelope, now: float) -> Sequence[_Inner]:
        """Take in ``envelope`` of ``peer``; drop it if its link already counts as closed."""
        if peer not in self.peers:
            return []
        actions: list[_Inner] = [*self._presence.heard(peer, now)]
        self.progress.merge_all(envelope.progress, now)
        self.membership.merge_all(envelope.members)
        message = envelope.message
        if isinstance(message, Accept | Busy):
            state = self.pairing.state
            in_time = isinstance(state, Proposing) and state.id == message.id
            self.peers.answered(peer, message.id, now, in_time=in_time)
        if isinstance(message, Propose | Free | Busy):
            self.peers.says(peer, is_closed=isinstance(message, Busy) and message.is_closed)
        actions += [*self._review_members(now), *self._set_available(now)]
        try:
            actions += self._take(peer, message, now)
        except ProtocolError as error:
            return [*actions, *self._unlinked([Unlink(peer, str(error))])]
        if isinstance(message, Accept):  # not before: CANCEL goes before a new proposal
            self.peers.says(peer, is_closed=False)
        return actions

    def _take(self, peer: int, message: Message, now: float) -> Sequence[_Inner]:
        if isinstance(message, Propose):
            rests = self.peers.rests(peer, now) and peer not in self.pairing.available
            return self.pairing.asked(peer, message, is_resting=rests)
        if isinstance(message, ExchangeMessage):
            return self.pairing.receive(peer, message)
        if isinstance(message, AverageMessage) or (
            isinstance(message, ReductionMessage) and message.epoch.number >= FIRST_NUMBER
        ):
            return self.averages.receive(peer, message)
        if isinstance(message, ConsolidationMessage | ReductionMessage):
            self._deferred.append((peer, message))
            if isinstance(message, BeginEpoch) and not message.waits_for_all:
                return self._leave_training()
        elif isinstance(message, LifeMessage):
            return self._unlinked(self._detector.receive(peer, message, now))
        elif isinstance(message, AskMembers):
            return [Send(peer, self.answer_joiner())]
        return []

    def _leave_training(self) -> list[PairingAction]:
        """Abort an exchange with one that still trains: the average goes on without that one.

        Consolidation gets nothing while an exchange runs, so a long one would keep this worker out.
        """
        state = self.pairing.state
        peer = self.membership.get(state.peer) if isinstance(state, Exchanging) else None
        trains = self.is_done and peer is not None and peer.status is Status.ALIVE
        return self.pairing.abort("the average goes on without its peer") if trains else []

    def progressed(self, now: float) -> None:
        """Restart the deadline of the running exchange: a byte of it came or left."""
        self._look_at_clock(now)
        self._longest_gap_s = max(self._longest_gap_s, now - self._progressed_at)
        self._progressed_at = max(now, self._progressed_at)

    @_input
    def finished(self, id: ExchangeId, now: float) -> Sequence[_Inner]:
        """End the exchange ``id``, complete at this end: all sent, all received and applied."""
        exchange = self.pairing.exchange(id)
        if exchange is None:
            return []
        is_own = id.initiator == self.rank
        self.exchanges_initiated += is_own
        self.exchanges_answered += not is_own
        self.progressed(now)
        self._owed = max(-MOST_AHEAD, self._owed - 1.0)
        step_s, duration_s = self.clock.step_seconds, now - self._began_at
        self.peers.exchanged(
            exchange.peer,
            now,
            duration_s=duration_s - self._longest_gap_s,
            gap_s=self._longest_gap_s,
            demands_per_s=0.0 if step_s is None else self._wanted_rate / step_s,
        )
        if self.exchange_rate is not None:
            self.exchange_rate.exchanged(duration_s)
        return self.pairing.finished(id)

    # --- sums over a tree ------------------------------------------------------------------

    @_input
    def average(self, now: float) -> Sequence[_Inner]:
        """Average all live workers while they train on; ``AverageEnded`` hands over the outcome.

        Workers that are silent now are left out.
        """
        return self.averages.ask(self.membership.live(), self.peers.silent)

    def sum_of(self, epoch: Epoch) -> Reduction | None:
        """Return the sum of this name, if this worker takes part in it."""
        return self._sums(epoch).sum_of(epoch)

    def _sums(self, epoch: Epoch) -> Consolidation | LiveAverages:
        return self.averages if epoch.number >= FIRST_NUMBER else self.consolidation

    def moved(self, peer: int, epoch: Epoch) -> None:
        """Note that payload of this sum or result came from ``peer`` or left for it."""
        self._moving.setdefault(epoch, set()).add(peer)

    @_input
    def partial_landed(self, peer: int, epoch: Epoch, chunk: int, now: float) -> Sequence[_Inner]:
        """Count a partial sum that was accepted and added."""
        return self._sums(epoch).partial_landed(peer, epoch, chunk)

    @_input
    def chunk_finished(
        self, epoch: Epoch, chunk: int, squared_distance: float, now: float
    ) -> Sequence[_Inner]:
        """Take the answer to ``FinishChunk``: |input - result|² of this worker's chunk."""
        return self._sums(epoch).chunk_finished(epoch, chunk, squared_distance)

    @_input
    def result_landed(
        self, peer: int, origin: Epoch, chunk: int, squared_distance: float, now: float
    ) -> Sequence[_Inner]:
        """Count a chunk of the result that consolidation accepted, and its squared distance."""
        return self.consolidation.result_landed(peer, origin, chunk, squared_distance)

    @_input
    def cannot_give(self, epoch: Epoch, rank: int, reason: str, now: float) -> Sequence[_Inner]:
        """Say that the values of ``rank``, a child or this worker, are of no use to a sum."""
        return self._sums(epoch).cannot_give(epoch, rank, reason)

    # --- links and time --------------------------------------------------------------------

    @_input
    def link_up(self, peer: int, now: float) -> Sequence[_Inner]:
        """Add a link to ``peer``, which is ready and replaces an older one."""
        dropped = self._drop_link(peer) if peer in self.peers else []
        return [*dropped, *self._presence.linked(peer, now)]

    @_input
    def link_down(self, peer: int, now: float) -> Sequence[_Inner]:
        """Drop the link to ``peer``, which is closed."""
        return [*self._drop_link(peer), *self._detector.link_lost(peer, now)]

    @_input
    def heard(self, peer: int, now: float) -> Sequence[_Inner]:
        """Take any byte from ``peer`` as a sign of life."""
        return self._presence.heard(peer, now)

    @_input
    def outdated(self, peer: int, now: float) -> Sequence[_Inner]:
        """Note that ``peer`` turned us away: it is linked to a later process of this rank."""
        return [*self._presence.heard(peer, now), *self._presence.outdated(now)]

    @_input
    def reached(self, peer: int, now: float) -> Sequence[_Inner]:
        """Note that the address of ``peer`` answered, though without a link: it lives."""
        return [*self._presence.heard(peer, now), *self._presence.reached(peer)]

    @_input
    def dial_failed(
        self, peer: int, now: float, address: tuple[str, int] | None = None, *, is_refused: bool
    ) -> Sequence[_Inner]:
        """Ask others about ``peer``, to which a dial failed; suspect it if its address refuses.

        Do nothing if ``peer`` is now known at another address than ``address``: it was restarted.
        """
        member = self.membership.get(peer)
        if member is not None and address not in (None, (member.host, member.port)):
            return []
        return self._presence.dialled_in_vain(peer, now, is_refused=is_refused)

    @_input
    def poll(self, now: float) -> Sequence[_Inner]:
        """Do what is due; call it at :meth:`next_deadline`, and at any other time as you like."""
        actions = [*self._unlinked(self._presence.look(now)), *self._end_waits(now)]
        if self._affords_another_at(now) <= now:
            actions += self._open("spent", now)
        actions += [*self._ticks(now), *self._detector.poll(now)]
        if now >= self._tick_at:
            self._tick_at = now + self.timeout_s / TICKS_PER_TIMEOUT
            actions += self.averages.tick(self.peers.live, self._moving)
            if self.is_done:
                actions += self.consolidation.tick(self.peers.live, self._moving)
            self._moving.clear()
        if now >= self._waits_until:
            self._waits, self._waits_until, self._reviewed = False, math.inf, None
            actions += self._leave_training()
        return actions

    def next_deadline(self) -> float:
        """Return when :meth:`poll` must be called if nothing else happens before; perhaps now."""
        return min(
            self._quiet_until,
            self._tick_at,
            self._detector.next_deadline(),
            self.neighbourhood.next_deadline(),
            self._waits_end_at(),
            self._waits_until,
            self._affords_another_at(self._last_input) if "spent" in self._closed_for else math.inf,
            self.clock.next_tick_at,
        )

    def _drop_link(self, peer: int) -> list[PairingAction | ReductionAction]:
        self.peers.drop(peer)
        return [
            *self.pairing.lost(peer),
            *self.consolidation.link_lost(peer),
            *self.averages.link_lost(peer),
        ]

    def _unlinked(self, actions: Iterable[_Inner]) -> list[_Inner]:
        """Drop the links that these actions close; return them with what follows from that."""
        followed: list[_Inner] = []
        for action in actions:
            if isinstance(action, Unlink):
                followed += self._drop_link(action.peer)
            followed.append(action)
        return followed

    def _waits_end_at(self) -> float:
        """Return when the next wait for an answer, or for a byte of the exchange, ends."""
        match self.pairing.state:
            case Proposing():
                due = self._proposal_due
            case Exchanging(peer=peer):
                due = self._progressed_at + self.peers.patience_s(peer)
            case _:
                due = math.inf
        return due if self.pairing.freed is None else min(due, self._free_due)

    def _end_waits(self, now: float) -> list[PairingAction]:
        """Go on without peers that do not answer, and end an exchange that stands still."""
        actions: list[PairingAction] = []
        freed, state = self.pairing.freed, self.pairing.state
        if freed is not None and now >= self._free_due:
            self.peers.unanswered(freed, now)
            actions += self.pairing.unanswered(freed)
        if isinstance(state, Proposing) and now >= self._proposal_due:
            self.proposals_unanswered += 1
            self.peers.unanswered(state.peer, now)
            actions += self.pairing.unanswered(state.peer)
        if isinstance(state, Exchanging) and now >= self._waits_end_at():
            waited_s = self.peers.patience_s(state.peer)
            self.peers.stood_still(state.peer, now)
            actions += self.pairing.abort(f"nothing of it came or left for {waited_s:.3g} s")
        return actions

    def _look_at_clock(self, now: float) -> None:
        """Restart all waits for others if this worker itself did not run for half a time-out.

        Every input comes here first: :meth:`next_deadline` is never further ahead than a quarter of
        the time-out, so a longer gap between two inputs means that the worker itself did not run.
        It keeps its parameters, however long it was silent: exchanges merge them.
        """
        since, self._last_input = self._last_input, max(now, self._last_input)
        slept_s = now - since
        if not self.timeout_s / 2 < slept_s < math.inf:
            return
        self._presence.slept(since, now)
        self._progressed_at = now
        self._tick_at += slept_s
        self._began_at += slept_s
        self._waits_until += slept_s
        self._proposal_due = self._free_due = now + self.timeout_s

    def _ticks(self, now: float) -> list[PairingAction]:
        """Take the demands that are due: one a tick, or two while others ask less than their half.

        A worker asks for half of its exchanges, and answers the other half. If a neighbour steps
        slowly, or does not step at all, it does not ask, and this worker would exchange less. Not
        at a step: workers in step would ask at the same moments, and find each other busy.
        """
        demands = self.clock.ticks_due(now) * (2 if self._owed > OWED else 1)
        return [action for _ in range(demands) for action in self.pairing.tick()]

    # --- the end of every input ------------------------------------------------------------

    def _settle(self, actions: Sequence[_Inner], now: float) -> list[Action]:
        """Bring the parts in line with one another, add due actions, wrap messages."""
        for action in actions:
            if isinstance(action, Stop):  # its link is closed, so do not choose it again now
                self.peers.drop(action.peer)
        settled = [*actions, *self._review_members(now), *self._set_available(now)]
        # Wait while its own proposal or exchange is open: once all are done, no exchange can begin.
        if self.is_done and not self.pairing.is_initiating:
            self.membership.set_status(Status.DONE)
        outward: list[Action] = []
        for action in [*settled, *self._consolidate(now)]:
            match action:
                case Begin():
                    self._begin(now)
                case Stop():
                    self.exchanges_failed += 1
                case Withdrawn() if self.exchange_rate is not None:
                    self.exchange_rate.withdrawn()
                case Send(peer=peer, message=Propose(id=id)):
                    self.peers.proposed(peer, id, now)
                    self._proposal_due = now + self.peers.wait_s(peer)
                case Send(peer=peer, message=Free()):
                    self._free_due = now + self.peers.wait_s(peer)
                case Finished():
                    self.membership.set_status(Status.LEFT)
                    self.peers.say_all_at_once()
            if isinstance(action, Send):
                outward.append(self.peers.wrap(action.peer, action.message, now))
            else:
                outward.append(action)
        if now >= self._quiet_until or self._seen_version != self.membership.version:
            outward += self.peers.heartbeats(now)
            # Traffic only defers this time: one look at all links serves for many inputs.
            self._quiet_until = self.peers.quiet_until(now)
        return outward

    def _review_members(self, now: float) -> list[_Inner]:
        """Follow the membership view: deaths, neighbours, this worker's own life."""
        has_changed = self._seen_version != self.membership.version
        actions = self._unlinked(self._presence.review(now, has_changed=has_changed))
        if any(isinstance(action, Rebuilt) for action in actions):
            self.pairing.alpha_tilde = self.neighbourhood.place.alpha_tilde
            self._set_clock_rate()
            self.peers.has_changed = True
        if has_changed:
            self._seen_version = self.membership.version
            self.peers.has_changed = True
            self.pairing.incarnation = self.incarnation  # higher, where it was outbid
            actions += self.averages.review(self.membership.live())
        return actions

    def _set_clock_rate(self) -> None:
        self.clock.set_rate(self._wanted_rate / 2)

    @property
    def _wanted_rate(self) -> float:
        """The exchanges a gradient step, asked for and answered, that this worker aims at."""
        rate = 0.0 if "method none" in self._closed_for else self.neighbourhood.place.worker_rate
        return rate if self.exchange_rate is None else rate * self.exchange_rate.rate

    def _begin(self, now: float) -> None:
        """Note that an exchange begins; if it was the last affordable one, close after it."""
        self._progressed_at = self._began_at = now
        self._longest_gap_s = 0.0
        if self.exchange_rate is not None:
            self.exchange_rate.began(now)
        if self._affords_another_at(now) > now:
            self._closed_for.add("spent")  # though its own demands go on: its clock runs
            self.pairing.close()  # that sends nothing: none is parked just after a begin

    def _affords_another_at(self, now: float) -> float:
        return now if self.exchange_rate is None else self.exchange_rate.opens_at(now)

    # --- times without exchanges -----------------------------------------------------------

    def _close(self, reason: str, now: float) -> list[PairingAction]:
        """Answer BUSY and do not ask, until every reason to do so is gone."""
        if reason in self._closed_for:
            return []
        self._closed_for.add(reason)
        self.peers.has_changed = True
        self.clock.pause(now)
        return self.pairing.close()

    def _open(self, reason: str, now: float) -> list[PairingAction]:
        if reason not in self._closed_for:
            return []
        self._closed_for.discard(reason)
        self.peers.has_changed = True
        if not self.is_done and self._closed_for <= {"spent"}:
            self.clock.resume(now)
        return [] if self._closed_for else self.pairing.open()

    def _consolidate(self, now: float) -> list[_Inner]:
        """Pass new membership and deferred messages to consolidation.

        Consolidation gets nothing while an exchange runs. All workers are done before consolidation
        begins, so no new exchange can begin then. But the worker that answers the last exchange may
        get BEGIN, or wait no longer for others, before the last chunks.
        """
        actions: list[_Inner] = []
        if isinstance(self.pairing.state, Exchanging):
            return actions
        self.consolidation.waits_for_all &= self._waits
        if self._reviewed != self.membership.version:
            self._reviewed = self.membership.version
            actions += self.consolidation.review(self.membership.members())
        for peer, message in self._deferred:
            try:
                actions += self.consolidation.receive(peer, message)
            except ProtocolError as error:
                actions += self._unlinked([Unlink(peer, str(error))])
        self._deferred.clear()
        if self.consolidation.has_begun:
            actions = [*self._close("consolidation", now), *actions]
        return actions

    def _set_available(self, now: float) -> list[PairingAction]:
        """Tell the pairing which peers can exchange now, by links, membership and graph."""
        if not self.peers.has_changed and now < self._quiet_until:
            return []
        self.peers.has_changed, self._quiet_until = False, -math.inf
        self._presence.watch(now, is_held="hold" in self._closed_for)
        rates = self.neighbourhood.place.rates
        known = {peer: self.membership.get(peer) for peer in rates}
        live = [peer for peer, member in known.items() if member is None or member.is_live]
        weights = {peer: rates[peer] for peer in self.peers.can_exchange(live, now)}
        return [] if weights == self.pairing.available else self.pairing.set_available(weights)
