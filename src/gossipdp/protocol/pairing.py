"""The pairing of neighbours for exchanges, without a coordinator.

A worker is Idle, Proposing or Exchanging, and has at most one exchange at a time: with A2CiD2,
overlapping exchanges diverge. A tick of its clock is a demand for one exchange; demands that
cannot be served at once wait in a backlog.

- Idle, asked: ACCEPT. Exchanging, asked: BUSY.
- Proposing, asked by a lower rank: that proposal is *parked*; by a higher rank: BUSY. So waits
  only go up in rank and cannot form a cycle. Two proposals that cross merge into the one of the
  lower rank.
- Own proposal accepted: the parked get BUSY. Own proposal refused: the worker accepts the oldest
  parked one, else asks the next neighbour in the policy's order, else keeps the demand.
- Becoming idle: the backlog is served first. With nothing to propose, FREE goes to the peer that
  has waited longest since its BUSY, and to the next only after PASS: FREE to all would start a
  stampede.
- A proposal, or FREE, that is not answered in time (:mod:`~gossipdp.protocol.peers`) is
  withdrawn, and the others are asked. Otherwise one stopped worker would halt its neighbours, and
  those that wait for them. That costs nothing: the worker that accepts too late gets CANCEL, and
  has sent no chunk yet.

Exchange ids name every proposal. An ACCEPT that answers no proposal held now gets CANCEL, and any
other message with a foreign id is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from gossipdp.protocol.actions import Begin, Send, Stop, Withdrawn
from gossipdp.protocol.messages import (
    Abort,
    Accept,
    Busy,
    Cancel,
    ExchangeId,
    ExchangeMessage,
    Free,
    Pass,
    Propose,
    ProtocolError,
)
from gossipdp.protocol.neighbours import NeighbourPolicy

MAX_BACKLOG = 4

PairingAction: TypeAlias = Send[ExchangeMessage] | Begin | Stop | Withdrawn


@dataclass(frozen=True)
class Idle:
    """In no exchange and asking for none."""


@dataclass(frozen=True)
class Proposing:
    """Waiting for ``peer`` to answer ``proposal``; ``untried`` are next, in order."""

    peer: int
    proposal: Propose
    """The peer may accept with a smaller gain than the proposed one, never with a larger."""
    untried: tuple[int, ...]

    @property
    def id(self) -> ExchangeId:
        return self.proposal.id


@dataclass(frozen=True)
class Exchanging:
    """In the exchange ``id`` with ``peer``, which carries the moments of these periods."""

    peer: int
    id: ExchangeId
    moments: tuple[int, ...] = ()


State: TypeAlias = Idle | Proposing | Exchanging


@final
class MomentsDue:
    """The periods of the moments that are due with a worker's next exchange.

    A moment of period k is due with every k-th exchange of a worker, whichever worker asks for it,
    and sooner where exchanges are so rare that ``num_steps`` gradient steps have passed since the
    last one that carried it. So this needs no comm rate, which may be unknown and may change. The
    worker that asks for an exchange chooses, and PROPOSE tells the other one.
    """

    def __init__(self, periods: Collection[int] = (), num_steps: float = math.inf) -> None:
        self._num_steps = num_steps
        self._exchanges = self._steps = 0
        # The counts of exchanges and steps as moments of each period travelled last.
        self._last = dict.fromkeys(sorted(set(periods)), (0, 0))

    def step(self) -> None:
        self._steps += 1

    def exchanged(self, carried: Collection[int]) -> None:
        """Count a complete exchange, with the periods of the moments that it has carried."""
        self._exchanges += 1
        for period in self._last.keys() & set(carried):
            self._last[period] = self._exchanges, self._steps

    def now(self) -> tuple[int, ...]:
        """Return the periods that are due with an exchange that is proposed now."""
        return tuple(
            period
            for period, (exchanges, steps) in self._last.items()
            if self._exchanges + 1 - exchanges >= period or self._steps - steps >= self._num_steps
        )


class Pairing:
    """The pairing state machine of one worker.

    ``alpha_tilde`` is this worker's gain; both ends use the smaller of their two. Links are FIFO
    while they last; the driver reports a lost link with :meth:`lost`, and nothing from that link
    afterwards.
    """

    def __init__(
        self,
        *,
        rank: int,
        incarnation: int,
        policy: NeighbourPolicy,
        alpha_tilde: float,
        moments_due: MomentsDue | None = None,
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.alpha_tilde = alpha_tilde
        self._policy = policy
        self.state: State = Idle()
        self.available: dict[int, float] = {}
        """Neighbours that can exchange now, with their lambda."""
        # The peers that asked in vain, in the order in which they asked.
        self._parked: dict[int, Propose] = {}
        self._refused: dict[int, None] = {}
        self._resting: dict[int, None] = {}  # asked while they rest; refused until they come back
        self.freed: int | None = None
        """The peer that has a FREE to answer."""
        self.backlog = 0
        """Demands not served yet, at most :data:`MAX_BACKLOG`."""
        self._counter = 0
        self.moments_due = moments_due or MomentsDue()
        self._vain_ticks = 0  # since the last exchange
        self.answers = True
        """False once it may exchange no more: see :meth:`close`."""

    @property
    def is_initiating(self) -> bool:
        """Return whether a proposal of this worker is open, or an exchange that it asked for."""
        return not isinstance(self.state, Idle) and self.state.id.initiator == self.rank

    # --- demands and their end -------------------------------------------------------------

    def tick(self) -> list[PairingAction]:
        """Take one demand for an exchange."""
        had_demand = self.backlog > 0
        self.backlog = min(MAX_BACKLOG, self.backlog + 1)
        if not isinstance(self.state, Idle):
            return []
        if had_demand and not self._asks_again():
            return []
        return self._propose_next(self._draw())

    def exchange(self, id: ExchangeId) -> Exchanging | None:
        """Return the exchange ``id``; None if it is over: it may have been stopped meanwhile."""
        state = self.state
        return state if isinstance(state, Exchanging) and state.id == id else None

    def finished(self, id: ExchangeId) -> list[PairingAction]:
        """End the exchange ``id``, which is complete at this end."""
        exchange = self.exchange(id)
        assert exchange is not None, "it is over"
        is_own = id.initiator == self.rank
        self._policy.exchanged(exchange.peer, initiated=is_own)
        self.moments_due.exchanged(exchange.moments)
        if is_own:
            self.backlog = max(0, self.backlog - 1)
        return self._become_idle()

    def abort(self, reason: str) -> list[PairingAction]:
        """Stop the running exchange, if any, and tell its other end."""
        state = self.state
        if not isinstance(state, Exchanging):
            return []
        self._unlink(state.peer)
        return [
            Send(state.peer, Abort(state.id, reason)),
            Stop(state.peer, state.id, reason),
            *self._become_idle(),
        ]

    def stop_asking(self) -> None:
        """Forget all demands: until the next tick this worker only answers.

        A proposal that is open runs its course.
        """
        self.backlog = 0

    def close(self) -> list[PairingAction]:
        """Answer every proposal BUSY and ask no more, until :meth:`open`.

        A proposal that is open is withdrawn, its demand kept; a late ACCEPT gets CANCEL. A
        running exchange goes on.
        """
        self.answers = False
        if not isinstance(self.state, Proposing):
            return []
        self.state = Idle()
        return self._refuse_parked()

    def open(self) -> list[PairingAction]:
        """Exchange again after :meth:`close`."""
        self.answers = True
        return self._become_idle() if isinstance(self.state, Idle) else []

    # --- the neighbourhood -----------------------------------------------------------------

    def set_available(self, weights: Mapping[int, float]) -> list[PairingAction]:
        """Set the neighbours that can exchange now, with their lambda.

        A proposal to one that no longer can is withdrawn; a kept demand tries the new ones. One
        that asked while it rested gets FREE in its turn.
        """
        new = weights.keys() - self.available.keys()
        self.available = dict(weights)
        for peer in [peer for peer in self._resting if peer in weights]:
            del self._resting[peer]
            self._refused.setdefault(peer)
        state = self.state
        if isinstance(state, Proposing) and state.peer not in weights:
            return self._withdrawn(state)
        if isinstance(state, Idle) and new:
            tried = [peer for peer in self._draw() if peer in new]
            return self._propose_next(tried) or self._free_oldest()
        return []

    def lost(self, peer: int) -> list[PairingAction]:
        """Forget the link to ``peer``, which is gone, and all its messages."""
        had_free = self.freed == peer
        self._unlink(peer)
        state = self.state
        if isinstance(state, Exchanging) and state.peer == peer:
            return [Stop(peer, state.id, "the link was lost"), *self._become_idle()]
        return self._without_answer(peer, had_free)

    def unanswered(self, peer: int) -> list[PairingAction]:
        """Go on without the answer of ``peer`` to a proposal or FREE."""
        had_free = self.freed == peer
        if had_free:
            self.freed = None
        self.available.pop(peer, None)
        return self._without_answer(peer, had_free)

    def _without_answer(self, peer: int, had_free: bool) -> list[PairingAction]:
        state = self.state
        if isinstance(state, Proposing) and state.peer == peer:
            return self._withdrawn(state)
        if isinstance(state, Idle):
            return self._propose_next(self._draw()) or (self._free_oldest() if had_free else [])
        return []

    def _unlink(self, peer: int) -> None:
        for table in (self.available, self._parked, self._refused, self._resting):
            table.pop(peer, None)
        if self.freed == peer:
            self.freed = None

    # --- messages --------------------------------------------------------------------------

    def receive(self, peer: int, message: ExchangeMessage) -> list[PairingAction]:
        """Take in a message of ``peer``; raise ProtocolError if it breaks the rules."""
        state = self.state
        match message:
            case Propose():
                return self.asked(peer, message)
            case Accept():
                return self._on_accept(peer, message)
            case Free():
                return self._on_free(peer)
            case Busy(id=id):
                if isinstance(state, Proposing) and (state.peer, state.id) == (peer, id):
                    return self._ask_others(state.untried)
            case Pass() if self.freed == peer:
                self.freed = None
                return self._free_oldest() if isinstance(state, Idle) else []
            case Cancel(id=id) if self._is_in(peer, id) and id.initiator != self.rank:
                return [Withdrawn(peer, id), *self._become_idle()]
            case Abort(id=id, reason=reason) if self._is_in(peer, id):
                self._unlink(peer)
                return [Stop(peer, id, f"the peer aborted: {reason}"), *self._become_idle()]
        return []

    def asked(
        self, peer: int, proposal: Propose, *, is_resting: bool = False
    ) -> list[PairingAction]:
        """Accept, refuse or park the proposal of ``peer``; refuse it as closed if that rests."""
        if proposal.id.initiator != peer:
            return []
        if self.freed == peer:
            self.freed = None
        if is_resting:
            self._resting.setdefault(peer)
            others = self._free_oldest() if isinstance(self.state, Idle) else []
            return [Send(peer, Busy(proposal.id, is_closed=True)), *others]
        state = self.state
        if not self.answers:
            return self.refuse(peer, proposal)
        if isinstance(state, Idle):
            return self.accept(peer, proposal)
        if isinstance(state, Exchanging):
            return self.refuse(peer, proposal)
        if state.peer == peer:
            if self.rank < peer:
                return []  # crossing: the peer will accept ours and forgets this one
            return self.accept(peer, proposal)
        if peer < self.rank:
            self._parked[peer] = proposal
            return []
        return self.refuse(peer, proposal)

    def _on_accept(self, peer: int, accept: Accept) -> list[PairingAction]:
        state = self.state
        if not (isinstance(state, Proposing) and state.peer == peer and state.id == accept.id):
            return [Send(peer, Cancel(accept.id))]
        proposed = state.proposal.alpha_tilde
        if accept.alpha_tilde > proposed:
            raise ProtocolError(
                f"it accepts with a gain of {accept.alpha_tilde:g}, where {proposed:g} was proposed"
            )
        self._refused.pop(peer, None)  # it is served: others have waited longer
        self.state = Exchanging(peer, state.id, state.proposal.moments)
        return [
            # Take the gain of ACCEPT, with which the peer has begun: this worker's own may have
            # changed with a new graph since it proposed.
            Begin(peer, state.id, accept.alpha_tilde, state.proposal.moments),
            *self._refuse_parked(),
        ]

    def _on_free(self, peer: int) -> list[PairingAction]:
        state = self.state
        if isinstance(state, Proposing) and state.peer == peer:
            return []  # it answers FREE already
        if isinstance(state, Idle) and peer in self._draw():
            return self._propose_next([peer])
        return [Send(peer, Pass())]

    def _is_in(self, peer: int, id: ExchangeId) -> bool:
        exchange = self.exchange(id)
        return exchange is not None and exchange.peer == peer

    # --- transitions -----------------------------------------------------------------------

    def _draw(self) -> list[int]:
        if not (self.answers and self.backlog and self.available):
            return []
        return self._policy.draw(self.available)

    def _asks_again(self) -> bool:
        """Return whether an idle worker, refused by all, is to ask all once more.

        FREE follows every BUSY, so asking again is only a safeguard. It comes at the 2nd, 4th, 8th
        ... tick, or saturated links would drown in proposals.
        """
        self._vain_ticks += 1
        return self._vain_ticks > 1 and self._vain_ticks & (self._vain_ticks - 1) == 0

    def _propose_next(self, order: Iterable[int]) -> list[PairingAction]:
        """Ask the first of ``order`` that can exchange; be idle if there is none."""
        untried = [peer for peer in order if peer in self.available]
        if not untried:
            self.state = Idle()
            return []
        peer, *rest = untried
        self._counter += 1
        id = ExchangeId(self.rank, self.incarnation, self._counter)
        proposal = Propose(id, self.alpha_tilde, self.moments_due.now())
        self.state = Proposing(peer, proposal, tuple(rest))
        return [Send(peer, proposal)]

    def _withdrawn(self, state: Proposing) -> list[PairingAction]:
        """Ask others, as after BUSY; with one less available, the policy may name further ones."""
        return self._ask_others(dict.fromkeys([*state.untried, *self._draw()]))

    def _ask_others(self, order: Iterable[int]) -> list[PairingAction]:
        if self._parked:
            peer = next(iter(self._parked))
            return self.accept(peer, self._parked[peer])
        return self._propose_next(order if self.backlog else ()) or self._free_oldest()

    def _become_idle(self) -> list[PairingAction]:
        self.state = Idle()
        self._vain_ticks = 0
        return self._propose_next(self._draw()) or self._free_oldest()

    def _free_oldest(self) -> list[PairingAction]:
        if not self.answers or self.freed is not None or not self._refused:
            return []
        self.freed = next(iter(self._refused))
        del self._refused[self.freed]
        return [Send(self.freed, Free())]

    def accept(self, peer: int, proposal: Propose) -> list[PairingAction]:
        """Accept the proposal of ``peer`` and exchange with it."""
        alpha_tilde = min(proposal.alpha_tilde, self.alpha_tilde)
        self._parked.pop(peer, None)
        self._refused.pop(peer, None)
        self.state = Exchanging(peer, proposal.id, proposal.moments)
        return [
            Send(peer, Accept(proposal.id, alpha_tilde)),
            Begin(peer, proposal.id, alpha_tilde, proposal.moments),
            *self._refuse_parked(),
        ]

    def refuse(self, peer: int, proposal: Propose) -> list[PairingAction]:
        """Say BUSY, and FREE later, when it is the turn of ``peer``."""
        self._refused.setdefault(peer)
        return [Send(peer, Busy(proposal.id, is_closed=not self.answers))]

    def _refuse_parked(self) -> list[PairingAction]:
        refused = list(self._parked.items())
        self._parked.clear()
        return [action for peer, proposal in refused for action in self.refuse(peer, proposal)]
