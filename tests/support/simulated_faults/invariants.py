"""Invariants of simulated runs, checked as they go on.

Every input of every worker is followed by :meth:`ProtocolChecks.check`, on every simulated network
with faults; and in a run of :mod:`simulated_faults.run` by :meth:`Invariants.after` too. What
becomes of parameters is checked by :class:`~simulated_faults.ledger.Ledger` at every exchange. What
holds only in the end (:meth:`Invariants.is_well`) is asked for now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import ge
from typing import TYPE_CHECKING, final

import torch

from gossipdp.graph.constants import LiveGraph
from gossipdp.protocol.actions import Begin, Stop, Withdrawn
from gossipdp.protocol.exchange_rate import BURST, CEILING
from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.pairing import MAX_BACKLOG, Exchanging, Idle, Proposing
from gossipdp.protocol.worker import MOST_AHEAD, MOST_OWED, Action, WorkerProtocol
from simulated_faults.ledger import InvariantBroken, Ledger

if TYPE_CHECKING:
    from simulated_faults.averaged_rows import AveragedRows
    from simulated_faults.network import FaultyNetwork

ONE_AT_A_TIME, NO_DEADLOCK = "one exchange at a time", "no deadlock"
ACCOUNT_EVERY = 32
"""Inputs between two looks at the sum over all rows."""
MANY_DEMANDS = 12.0
"""None of so many expected exchanges comes by chance in one case of 160,000."""


@final
class ProtocolChecks:
    """What must hold in a worker's protocol after each of its inputs, whoever the others are."""

    def __init__(self) -> None:
        self._counts: dict[WorkerProtocol, tuple[int, ...]] = {}

    def check(self, worker: WorkerProtocol) -> None:
        pairing, rate, progress = worker.pairing, worker.exchange_rate, worker.progress
        state, parked, clock = pairing.state, pairing._parked, worker.clock
        peers = {*pairing.available, *parked, *pairing._refused, *pairing._resting}
        peers |= {pairing.freed} - {None}
        peers |= set() if isinstance(state, Idle) else {state.peer}
        is_free = isinstance(state, Idle) and pairing.answers and pairing.freed is None
        asked = worker.peers._links.get(state.peer) if isinstance(state, Proposing) else None
        has_slept = worker.peers._awake_since > -math.inf  # and forgot when it had asked
        is_timed = asked is None or has_slept or state.id in dict(asked.proposed)
        counts = (
            *(progress.version, progress.total_samples, progress.total_steps),
            *(worker.membership.version, worker.incarnation),
            *(clock.steps, clock.num_ticks, worker.proposals_unanswered),
            *(worker.exchanges_initiated, worker.exchanges_answered, worker.exchanges_failed),
        )
        before = self._counts.get(worker, counts)
        self._counts[worker] = counts
        for invariant, holds in (
            (
                "waits only go up in rank",
                not parked or (isinstance(state, Proposing) and max(parked) < worker.rank),
            ),
            ("who is free forgets no waiter", not (is_free and pairing._refused)),
            ("who has no reason to be closed is open", pairing.answers == (not worker._closed_for)),
            ("nothing is kept of a lost link", all(peer in worker.peers for peer in peers)),
            ("the available can exchange", all(map(partial(_can, worker), pairing.available))),
            ("counts never fall", all(map(ge, counts, before))),
            ("demands are bounded", 0 <= pairing.backlog <= MAX_BACKLOG),
            ("an answer is timed", is_timed),
            ("a clock ticks as its worker wants", clock._rate == worker._wanted_rate / 2),
            ("what is owed is bounded", -MOST_AHEAD <= worker._owed <= MOST_OWED),
            ("a rate follows the steps", rate is None or rate._step_s == clock.step_seconds),
            ("a rate is bounded", rate is None or 0.0 < rate.rate <= CEILING),
            ("tokens are bounded", rate is None or 0.0 <= rate._tokens <= BURST),
        ):
            if not holds:
                details = f"rank {worker.rank} is {state}; {peers}; counts {counts}, were {before}"
                raise InvariantBroken(invariant, details)


def _can(worker: WorkerProtocol, peer: int) -> bool:
    """Return whether this peer is heard, has not said that it is closed, and is not known dead."""
    link, member = worker.peers._links.get(peer), worker.membership.get(peer)
    is_open = link is not None and not link.is_silent and not link.is_closed
    return is_open and (member is None or member.is_live)


@dataclass
class _Seen:
    """The last look at one process."""

    members_version: int = -1
    members: dict[int, Member] = field(default_factory=dict)
    num_exchanges: int = 0
    exchanged_s: float = 0.0  # or when it began to live
    hungry_since_s: float = math.inf
    """Since when it has had a demand, somebody to exchange with, and no exchange."""
    steps_before: int = 0  # of older processes of its rank


@final
class Invariants:
    """Watches a network.

    ``longest_hunger_s``: how long a demand may go unserved while somebody could serve it.
    """

    def __init__(
        self,
        network: FaultyNetwork,
        ledger: Ledger,
        live_graph: LiveGraph,
        *,
        step_s: float,
        longest_hunger_s: float,
    ) -> None:
        self.num_inputs = 0
        self._step_s = step_s
        self._longest_hunger_s = longest_hunger_s
        self._network = network
        self._ledger = ledger
        self._live_graph = live_graph
        self._seen: dict[WorkerProtocol, _Seen] = {}
        self._polls: dict[int, tuple[float, int]] = {}  # the time of the last, how many then

    # --- at every input --------------------------------------------------------------------

    def before(self, rank: int, actions: Sequence[Action]) -> None:
        """``rank`` is about to perform ``actions``, the answer to one input."""
        network, worker = self._network, self._network.workers[rank]
        running = network.running(rank)
        for action in actions:
            match action:
                case Stop(id=id) | Withdrawn(id=id):
                    if running != id:
                        raise self._broken(ONE_AT_A_TIME, rank, f"stops {id} in {running}")
                    running = None
                case Begin(id=id, peer=peer):
                    if running is not None:
                        raise self._broken(ONE_AT_A_TIME, rank, f"begins {id} while in {running}")
                    running = id
                    is_known = worker.membership.get(peer) is not None
                    is_known &= id.initiator in (rank, peer)
                    self._expect(is_known, "both ends are known", rank, f"{id} with {peer}")
                    # Its own alone: what is applied was sent when the other end began.
                    has_state = worker.membership.own.status is not Status.JOINING
                    self._expect(has_state, "nobody exchanges without parameters", rank, f"{id}")

    def after(self, rank: int) -> None:
        """``rank`` has performed what an input asked for."""
        network, worker = self._network, self._network.workers[rank]
        if worker.consolidation.has_begun and network.running(rank) is not None:
            raise self._broken(ONE_AT_A_TIME, rank, "consolidates in one")
        seen = self._seen.get(worker)
        if seen is None:
            seen = self._seen[worker] = _Seen(
                exchanged_s=network.engine.now, steps_before=self._ledger.steps[rank]
            )
        known, taken = worker.progress.total_steps, self._ledger.total_steps
        told = f"{known} steps are known, {taken} were taken"
        self._expect(known <= taken, "progress never exceeds the truth", rank, told)
        self._check_hunger(rank, worker, seen)
        state, running = worker.pairing.state, network.running(rank)
        id = state.id if isinstance(state, Exchanging) else None
        if running is not None and running != id:  # it may have ended here before it is said so
            parted = f"the protocol is in {id}, its driver in {running}"
            raise self._broken(ONE_AT_A_TIME, rank, parted)
        if worker.membership.version != seen.members_version:
            seen.members_version = worker.membership.version
            for member in worker.membership.members():
                before = seen.members.get(member.rank, member)
                if before is not member and before > member:
                    raise self._broken("views only grow", rank, f"{before} became {member}")
                seen.members[member.rank] = member
        self.num_inputs += 1
        if self.num_inputs % ACCOUNT_EVERY == 0:
            self._ledger.check_sum(network.engine.now)

    def polled(self, rank: int) -> None:
        """``rank`` has done what was due, so its next deadline lies ahead, and is not too late.

        It polls again at once after a death, which may have been a witness that others wait for,
        and where a new graph brought its tick nearer: no more often than there are workers.
        """
        worker, now = self._network.workers[rank], self._network.engine.now
        due_s, of_links_s = worker.next_deadline(), worker.peers.quiet_until(now)
        before_s, num_polls = self._polls.get(rank, (now, 0))
        self._polls[rank] = now, num_polls + 1 if before_s == now else 1
        is_ahead = due_s > now or self._polls[rank][1] <= len(self._network.workers)
        self._expect(is_ahead, "deadlines lie ahead", rank, f"it polls again at {due_s}")
        late = f"it polls at {due_s}; news, a heartbeat or a silence is due at {of_links_s}"
        self._expect(due_s <= of_links_s, "deadlines are not too late", rank, late)

    def _check_hunger(self, rank: int, worker: WorkerProtocol, seen: _Seen) -> None:
        now, pairing = self._network.engine.now, worker.pairing
        num_exchanges = worker.exchanges_initiated + worker.exchanges_answered
        has_eaten = num_exchanges > seen.num_exchanges
        if has_eaten:
            seen.num_exchanges, seen.exchanged_s = num_exchanges, now
        if (
            has_eaten
            or pairing.backlog <= 0
            or not pairing.answers
            or not pairing.available
            or isinstance(pairing.state, Exchanging)
        ):
            seen.hungry_since_s = math.inf
            return
        seen.hungry_since_s = min(seen.hungry_since_s, now)
        if (hungry_s := now - seen.hungry_since_s) > self._longest_hunger_s:
            state = f"it is {pairing.state}, open to {sorted(pairing.available)}"
            details = f"a demand unserved for {hungry_s:.3f} s; {state}"
            raise self._broken(NO_DEADLOCK, rank, details)

    # --- in the end ------------------------------------------------------------------------

    def live(self) -> list[int]:
        """Return the ranks whose process truly lives and has parameters."""
        network = self._network
        return [
            rank
            for rank, worker in sorted(network.workers.items())
            if rank not in network.crashed
            and worker.membership.own.status in (Status.ALIVE, Status.DONE)
        ]

    def is_well(self, since_s: float, within_s: float) -> InvariantBroken | None:
        """Return what is still amiss, if anything, when nothing has gone wrong since ``since_s``.

        All views are the truth; all follow the graph over the live workers; nobody waits for
        parameters; each that has a neighbour has exchanged since. Of a worker that exchanges so
        rarely that it may by chance not do so in ``within_s`` (a leaf of a large star) only that
        its demands are served is asked, which every input checks.
        """
        live = self.live()
        graph = self._live_graph.constants(live) if live else None
        try:
            for rank in live:
                worker = self._network.workers[rank]
                view = worker.membership.live()
                self._expect(view == tuple(live), "views converge", rank, f"{view}, not {live}")
                follows = worker.neighbourhood.place.rates == graph.neighbours(rank)
                details = f"neighbours {sorted(worker.neighbours)}"
                self._expect(follows, "all follow one graph", rank, details)
                seen = self._seen[worker]
                demands = worker.neighbourhood.place.worker_rate * within_s / self._step_s
                pairing = worker.pairing
                has_eaten = len(live) == 1 or seen.exchanged_s > since_s or demands < MANY_DEMANDS
                state = f"it is {pairing.state}, open to {sorted(pairing.available)}"
                details = f"no exchange since {seen.exchanged_s}; {state}"
                self._expect(has_eaten, NO_DEADLOCK, rank, details)
        except InvariantBroken as broken:
            return broken
        return None

    def check_end(self, averaged: AveragedRows) -> None:
        network, live = self._network, sorted(self._network.left)
        self._ledger.check_sum(network.engine.now)
        for rank in live:
            worker = network.workers[rank]
            committed = averaged.committed.get(rank)
            if committed is None:
                raise self._broken("all hold the same bits", rank, "it left without a result")
            first = averaged.committed[live[0]]
            one, other = committed.outcome, first.outcome
            numbers = one.num_workers, one.consensus_distance
            same = numbers == (other.num_workers, other.consensus_distance)
            same &= torch.equal(committed.result, first.result)
            self._expect(same, "all hold the same bits", rank, f"{committed} is not {first}")
            entries, _ = worker.progress.news()
            for number in live:
                peer = network.workers[number]
                process_id = peer.membership.own.process_id
                known = sum(each.steps for each in entries if each.process_id == process_id)
                true = self._ledger.steps[number] - self._seen[peer].steps_before
                details = f"{known} steps are known of rank {number}, which took {true}"
                self._expect(known == true, "progress is whole at the end", rank, details)
        ended = [averaged.committed[rank] for rank in live]
        if ended[0].outcome.num_workers == len(live):  # none of those that it is over has died
            mean = torch.stack([each.given for each in ended]).mean(dim=0)
            distance = sum(float((each.given - mean).square().sum()) for each in ended) / len(live)
            self._expect(
                torch.allclose(ended[0].result.double(), mean, rtol=1e-12, atol=1e-12)
                and math.isclose(ended[0].outcome.consensus_distance, distance, rel_tol=1e-9),
                "it is the mean",
                live[0],
                f"{ended[0]} is not {mean}, {distance} from all",
            )

    def _expect(self, holds: bool, invariant: str, rank: int, details: str) -> None:
        if not holds:
            raise self._broken(invariant, rank, details)

    def _broken(self, invariant: str, rank: int, details: str) -> InvariantBroken:
        where = f"rank {rank} at {self._network.engine.now:.6f} s"
        return InvariantBroken(invariant, f"{where}: {details}")
