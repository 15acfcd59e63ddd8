"""Termination: all live workers end with the same bits, the mean over all of them.

**One epoch.** Once every live worker is done, the lowest of them, the leader, sends the member list
down the tree of a sum over the members (:mod:`~gossipdp.protocol.reduction`), and to all that are
linked to it: no other worker can begin an epoch in its name there. The root's results go down the
same tree, while later chunks are still on their way up. Members that hold all of the result sum
their squared distances to it up the tree, so the root knows when all hold it. It commits; COMMIT
goes down, its acknowledgement up, RELEASE down. The parameters are written after that: until then
x + pending + c/2 is this worker's input.

**Failures.** A worker that believes itself to be the lowest live one leads, with a new epoch
whenever its view of the live workers changes. A worker follows the one that it believes to lead,
into each epoch above those it was in; it drops messages of lower ones and tells a leader that is
behind. Every request is repeated when its link is lost, and every message may arrive twice. Once
views agree, one worker leads, hears of every higher epoch, goes above it, and all follow; so all
ends once failures cease. :mod:`~gossipdp.protocol.participants` says which worker is left out or
passed over because it stalls.

**One result only.** A member that holds all of a result refuses to join an epoch that would replace
it (``Held``), and the leader restarts with that result, fetched from the member. Between two such
results a committed one survives, then the one computed in the later epoch.

*Claim.* If all members of an epoch e hold the result v that e computed, as they do before anyone
commits to it, then no later epoch that shares a process with e computes a result.
*Proof.* Let w be in both e and the later epoch f. Once in f it would have dropped e's messages, so
it held v before. Then it refuses to take part in f, and f computes nothing without its partial sum,
unless w has let v go since. That takes a result that is committed or was computed after e. Take the
first result for which any member of e does so. Either it was computed by an epoch after e with no
process of e in it, since up to then all of them refuse; or before e, and committed by workers none
of which was in e, since e computes only if none of its members holds a result. Both need workers
that were not members of e though they were live at the time.

So while only dead workers are declared dead, and none is left out, all live workers commit the same
bits: every live worker is a member of every epoch, and the one that first commits is a member of
all that follow for as long as it lives. No worker leaves before all live workers have committed: so
if the only worker that had committed dies, its user never saw its result.

*Limits.* A worker declared dead by mistake is covered once it holds the result of the others or
they hold its own. Two groups that each declare the other dead before that each compute their own
mean. If they meet before they leave, one of the two survives on both sides; if not,
``Commit.num_members`` gives the number of workers that were averaged. A worker that is cut off
until all others have left likewise consolidates by itself. If members die after a result was
complete, the mean includes the dead, and the consensus distance is over the survivors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from gossipdp.protocol.actions import Commit, Finished, Forget, Send, SendResult
from gossipdp.protocol.members import MAX_LEAP, Member
from gossipdp.protocol.messages import (
    MAX_DISTANCE2,
    Average,
    BeginEpoch,
    CommitEpoch,
    Committed,
    ConsolidationMessage,
    Distance,
    Epoch,
    Held,
    LeftOut,
    NewerEpoch,
    Process,
    Progressed,
    ProtocolError,
    PullPartials,
    PullResults,
    ReductionMessage,
    Release,
    Stalled,
)
from gossipdp.protocol.participants import Participants
from gossipdp.protocol.reduction import (
    REPEAT_AFTER,
    STALLED_AFTER,
    WINDOW,
    Blame,
    Reduction,
    ReductionAction,
    tree,
)

Actions: TypeAlias = list[ReductionAction]

MAX_ACKNOWLEDGED = 16
"""Epochs for which a RELEASE may still come; for one before them the leader restarts."""


def _parents(begin: BeginEpoch) -> dict[int, int | None]:
    return tree([rank for rank, _ in begin.members], has_suspects=begin.has_suspects)


@dataclass
class _Attempt:
    """One epoch as one of its members sees it."""

    begin: BeginEpoch
    average: Average
    """The result that this epoch spreads, or will have computed."""
    sum: Reduction
    source: int | None
    """The sender of results; None if they are computed or held here."""
    is_refused: bool = False
    has_parent_joined: bool = False
    """True once the parent is known to have joined, so that it drops no words of this member."""
    distances: dict[int, float] = field(default_factory=dict)
    """The children that hold the result, with all below them, and their squared distances."""
    committed: set[int] = field(default_factory=set)
    """The children that have committed, with all below them."""
    distance_sent: float | None = None
    is_committed: bool = False

    @property
    def epoch(self) -> Epoch:
        return self.begin.epoch

    @property
    def parent(self) -> int | None:
        return self.sum.parent


@dataclass
class _Pull:
    """The chunks of the result for which a peer has asked, in one of its epochs."""

    epoch: Epoch
    start: int
    """The first chunk that it lacks, by its latest word."""
    next: int
    stop: int


class Consolidation:
    """One worker's part in termination, from the first membership view to ``Finished``.

    Args:
        num_chunks: float chunks 0 .. num_chunks - 1, which are averaged.
        num_copied_chunks: integer chunks, numbered on from there, which the members take from
            the leader.
        is_linked: returns whether there is a link to a rank.

    Control messages may go to any rank: the driver dials if there is no link, and reports a refused
    dial through membership. It reports a lost link before anything that arrives on a new one.

    Attributes:
        participants: who is to be averaged, and for whom all wait.
        has_begun: whether this worker has been in an epoch.
        waits_for_all: whether to average nothing before all live workers are done. It ends for all
            members with the leader's wait: one that waited longer would be left out.
    """

    def __init__(
        self,
        rank: int,
        process_id: int,
        num_chunks: int,
        num_copied_chunks: int = 0,
        is_linked: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.rank = rank
        self.process_id = process_id
        self.num_chunks = num_chunks
        self._is_linked = is_linked
        self.total_chunks = num_chunks + num_copied_chunks
        self.is_finished = False
        self.waits_for_all = True
        self._actions: Actions = []
        self.participants = Participants(rank, process_id)
        self._blame = Blame(rank)
        self._attempt: _Attempt | None = None
        self.highest: Epoch | None = None
        """The highest known epoch."""
        self._offered: dict[Process, BeginEpoch] = {}  # the last of each leader
        self._found: tuple[int, Average] | None = None
        self._told: tuple[Process, Epoch] | None = None
        self.origin: Epoch | None = None
        """The epoch whose sums and results are here."""
        self._num_results = 0  # chunks of it that are here
        self._squared_distance = 0.0  # of this worker's input to them
        self._held: Average | None = None
        self._committed: Epoch | None = None
        self._holders: set[int] = set()  # of the result, over all epochs that committed it
        self._pulled: dict[int, _Pull] = {}
        self._acknowledged: dict[Epoch, BeginEpoch] = {}
        self._vain_ticks = 0  # since anything landed here
        self._source_quiet_ticks = 0

    # --- inputs ----------------------------------------------------------------------------

    @property
    def left_out(self) -> dict[int, str]:
        """Return the workers that live and are done, but gave nothing for too long; and why."""
        own = {rank: reason for (rank, _), reason in self.participants.left_out.items()}
        begin = None if self._attempt is None else self._attempt.begin
        told = {} if begin is None else {each.process[0]: each.reason for each in begin.left_out}
        return dict(sorted((told | own).items()))

    @property
    def lead(self) -> int:
        """Return the lowest rank of those that hold the result and were not lost since."""
        held = (rank for rank in self._holders if not self.participants.is_lost(rank))
        return min(held, default=self.rank)

    @property
    def has_begun(self) -> bool:
        return self._attempt is not None

    def sum_of(self, epoch: Epoch) -> Reduction | None:
        attempt = self._attempt
        if attempt is None or attempt.is_refused or attempt.epoch != epoch:
            return None
        return attempt.sum

    def review(self, members: Iterable[Member]) -> Actions:
        """Take over the membership view, which changed: this worker itself may be done now."""
        self.participants.review(members)
        return self._settle()

    def receive(self, peer: int, message: ConsolidationMessage | ReductionMessage) -> Actions:
        """Take in a message from ``peer``; raise ProtocolError if it breaks the rules."""
        if self.participants.is_left_out(peer):
            return []
        if isinstance(message, BeginEpoch | NewerEpoch):
            known = 0 if self.highest is None else self.highest.number
            if message.epoch.number > known + MAX_LEAP:
                raise ProtocolError(f"epoch {message.epoch.number} follows none, after {known}")
            if self._hear_of(message.epoch) and self._is_leading:
                self.participants.restarted_by(peer)
        if self._is_taking_part:
            attempt = self._attempt
            match message:
                case BeginEpoch():
                    self._take_offer(peer, message)
                case PullResults(origin=origin):
                    if origin == self.origin:
                        self._pulled_by(peer, message)
                case Release():
                    self._take_release(message.epoch)
                case _ if attempt is not None and self.sum_of(message.epoch) is not None:
                    self._receive_in_epoch(attempt, peer, message)
        return self._settle()

    def link_lost(self, peer: int) -> Actions:
        """Repeat to ``peer`` all that its link, which is gone, may have lost."""
        self._pulled.pop(peer, None)
        if self._told is not None and self._told[0][0] == peer:
            self._told = None
        if self._is_taking_part and self._attempt is not None:
            self._attempt.sum.link_lost(peer)
            self._repeat(self._attempt, peer)
        return self._settle()

    def tick(self, heard: Collection[int], moving: Mapping[Epoch, Collection[int]]) -> Actions:
        """Count a quarter of a time-out.

        If nothing has come for long, all requests and words are repeated. Every message may be
        repeated: a worker that has had it does nothing, or sends a chunk, which is dropped if it is
        not the next one.

        Args:
            heard: the peers whose links show life.
            moving: the peers with which payload moved since the last tick, by sum or result.
        """
        self._vain_ticks += 1
        if self._is_taking_part:
            own = () if self._attempt is None else (self._attempt.epoch, self.origin)
            self._watch(heard, {peer for epoch in own if epoch for peer in moving.get(epoch, ())})
        return self._settle()

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int) -> Actions:
        reduction = self.sum_of(epoch)
        if reduction is not None and reduction.landed(peer, chunk):
            self._vain_ticks = 0
        return self._settle()

    def chunk_finished(self, epoch: Epoch, chunk: int, squared_distance: float) -> Actions:
        reduction = self.sum_of(epoch)
        if reduction is not None and reduction.num_finished == chunk:
            self._count_result(squared_distance)
            reduction.finished(chunk)
        return self._settle()

    def cannot_give(self, epoch: Epoch, rank: int, reason: str) -> Actions:
        """Go on without the useless values of ``rank``: a child, this worker or the source."""
        reduction = self.sum_of(epoch)
        if reduction is not None:
            reduction.accuse(rank, reason)
        elif epoch == self.origin and rank != self.rank:
            self.participants.leave_out(rank, reason)
        return self._settle()

    def accepts_result(self, peer: int, origin: Epoch, chunk: int) -> bool:
        """Return whether this Result frame is the next one expected from ``peer``."""
        attempt = self._attempt
        return (
            attempt is not None
            and attempt.source == peer
            and self.origin == origin
            and self._num_results == chunk < self.total_chunks
        )

    def result_landed(
        self, peer: int, origin: Epoch, chunk: int, squared_distance: float
    ) -> Actions:
        attempt = self._attempt
        if attempt is not None and self.accepts_result(peer, origin, chunk):
            self._count_result(squared_distance)
            self._source_quiet_ticks = 0
            attempt.sum.moved(peer)
            self._pull_results(attempt)
        return self._settle()

    def _count_result(self, squared_distance: float) -> None:
        self._num_results += 1
        self._squared_distance += squared_distance
        self._vain_ticks = 0

    # --- leading ---------------------------------------------------------------------------

    @property
    def _is_taking_part(self) -> bool:
        return self.participants.includes_self and not self.is_finished

    @property
    def _is_leading(self) -> bool:
        return self._attempt is not None and self._attempt.parent is None

    def _settle(self) -> Actions:
        """End an input: lead if this worker is the leader, then do all that has become due."""
        if self._is_taking_part:
            self._lead()
            if self._attempt is not None and not self._attempt.is_refused:
                self._advance(self._attempt)
            self._send_results()
        actions = self._actions[:]
        self._actions.clear()  # the sums add to this very list
        return actions

    def _lacks_some(self, waits_for_all: bool) -> bool:
        """Return whether some still train: a mean is over all. A result at hand waits for none."""
        return self._held is None and waits_for_all and bool(self.participants.missing())

    def _say(self, peer: int, message: ConsolidationMessage) -> None:
        self._actions.append(Send(peer, message))

    def _lead(self) -> None:
        members, attempt = self.participants.done(), self._attempt
        lowest = members[0]
        offer = self._offered.get(lowest)
        self.waits_for_all &= offer is None or offer.waits_for_all
        if self._lacks_some(self.waits_for_all):
            return
        if lowest[0] == self.rank:
            if (
                attempt is None
                or set(attempt.begin.members) != set(members)
                or attempt.epoch != self.highest
                or self._found is not None
                or self._lacks_some(attempt.begin.waits_for_all)  # all hear that the wait is over
            ):
                self._begin(members)
            return
        if lowest in self._offered:
            self._join(self._offered.pop(lowest), None)
            attempt = self._attempt
        if (
            attempt is not None
            and attempt.epoch.leader != lowest[0]
            and self._told != (lowest, attempt.epoch)
        ):
            self._told = (lowest, attempt.epoch)
            self._say(lowest[0], NewerEpoch(attempt.epoch))

    def _begin(self, members: tuple[Process, ...]) -> None:
        """Lead a new epoch; suspects come last, as leaves of its tree."""
        number = 1 if self.highest is None else self.highest.number + 1
        epoch = Epoch(number, self.rank, self.process_id % 2**32)
        average, source = self._held, None
        if self._found is not None:
            holder, found = self._found
            is_greater = average is None or found.order > average.order
            if is_greater and holder in (rank for rank, _ in members):
                average, source = found, holder
        processes = dict(members)
        others, has_suspects = self._blame.begin(processes.keys() - {self.rank})
        begin = BeginEpoch(
            epoch,
            tuple((rank, processes[rank]) for rank in (self.rank, *others)),
            average,
            has_suspects,
            left_out=tuple(
                LeftOut(process, reason)
                for process, reason in sorted(self.participants.left_out.items())
            ),
            waits_for_all=self.waits_for_all,
        )
        self._join(begin, source)

    def _hear_of(self, epoch: Epoch) -> bool:
        is_higher = self.highest is None or epoch.order > self.highest.order
        if is_higher:
            self.highest = epoch
        return is_higher

    # --- joining an epoch ------------------------------------------------------------------

    def _take_offer(self, peer: int, begin: BeginEpoch) -> None:
        """Keep the offer to join an epoch, to be followed once its leader is the lowest.

        An epoch begins at its leader's word. A parent's word is enough only if there is no link to
        the leader, since any worker could make up an epoch. So a parent and its child join at
        different times, and the later one may have dropped the other's words: both repeat them
        once.
        """
        attempt = self._attempt
        if attempt is not None and attempt.epoch == begin.epoch:
            if peer == attempt.parent and not attempt.has_parent_joined:
                attempt.has_parent_joined = True
                self._repeat(attempt, peer)
            return
        leader = begin.epoch.leader
        is_relayed = _parents(begin).get(self.rank) == peer and not self._is_linked(leader)
        if (peer == leader or is_relayed) and begin.members[0] in self.participants.done():
            self._offered[begin.members[0]] = begin

    def _join(self, begin: BeginEpoch, source: int | None) -> None:
        epoch = begin.epoch
        if (self.rank, self.process_id) not in begin.members:
            return
        current = self._attempt.epoch if self._attempt is not None else None
        if current is not None and epoch.order <= current.order:
            if epoch != current:
                self._say(epoch.leader, NewerEpoch(current))
            return
        self._hear_of(epoch)
        self._found = None
        self._vain_ticks = self._source_quiet_ticks = 0
        average = begin.average or Average(epoch, len(begin.members), None)
        parents = _parents(begin)
        parent = parents[self.rank]
        reduction = Reduction(
            epoch,
            self.rank,
            parents,
            self.num_chunks if begin.average is None else 0,
            self._actions,
            blame=self._blame if parent is None else None,
            divisor=len(begin.members),
        )
        attempt = _Attempt(begin, average, reduction, source if parent is None else parent)
        self._attempt = attempt
        if self.refuses(begin):
            attempt.is_refused = True
            self._say_held(attempt)
            return
        if self.origin != average.origin:
            self._begin_origin(average.origin)
        for rank in self._hearers(attempt):
            self._say(rank, begin)
        reduction.advance()
        self._pull_results(attempt)

    def _hearers(self, attempt: _Attempt) -> list[int]:
        """Return the members to which this worker passes on that the epoch has begun."""
        return [
            rank
            for rank in attempt.sum.parents
            if rank in attempt.sum.children
            or (attempt.parent is None and rank != self.rank and self._is_linked(rank))
        ]

    def refuses(self, begin: BeginEpoch) -> bool:
        """Return whether this worker holds a result that the epoch would replace."""
        held, average = self._held, begin.average
        if held is None:
            return False
        if average is None:
            return True
        if held.origin == average.origin:
            return held.is_committed and not average.is_committed
        return held.order > average.order

    def _begin_origin(self, origin: Epoch) -> None:
        """Begin with no chunk of a result; let those of another result go."""
        if self.origin is not None:
            self._actions.append(Forget(self.origin))
        self.origin = origin
        self._num_results = 0
        self._squared_distance = 0.0
        self._held = None
        self._holders.clear()
        self._pulled.clear()

    # --- asking, and asking again ----------------------------------------------------------

    def _say_held(self, attempt: _Attempt) -> None:
        assert self._held is not None
        self._say(attempt.epoch.leader, Held(attempt.epoch, self._held))

    def _pull_results(self, attempt: _Attempt) -> None:
        """Ask for as many chunks as fit here; a parent also learns that this worker has joined."""
        start = self._num_results
        if attempt.source is not None and start < self.total_chunks:
            stop = min(start + WINDOW, self.total_chunks)
            origin = attempt.average.origin
            self._say(attempt.source, PullResults(attempt.epoch, origin, start, stop))

    def _pulled_by(self, peer: int, message: PullResults) -> None:
        """Note the chunks for which ``peer`` has room, and that were not sent in its epoch."""
        attempt, start = self._attempt, message.start
        pull = self._pulled.get(peer)
        if pull is None or pull.epoch != message.epoch:
            pull = self._pulled[peer] = _Pull(message.epoch, start, start, start)
            if attempt is not None:
                attempt.sum.repeat(peer)  # it may have joined after the request
        elif start > pull.start and attempt is not None:
            attempt.sum.moved(peer)
        pull.start = start
        pull.next = max(pull.next, start)
        pull.stop = max(pull.stop, min(message.stop, start + WINDOW, self.total_chunks))

    def _repeat(self, attempt: _Attempt, peer: int) -> None:
        if attempt.is_refused:
            if peer == attempt.epoch.leader:
                self._say_held(attempt)
            return
        if peer in attempt.sum.children or (self._is_leading and peer in attempt.sum.parents):
            self._say(peer, attempt.begin)  # a leader's own word may have been lost on its way
        attempt.sum.repeat(peer)
        if peer in attempt.sum.children and attempt.is_committed:
            assert self._held is not None
            assert self._held.consensus_distance is not None
            self._say(peer, CommitEpoch(attempt.epoch, self._held.consensus_distance))
        if peer == attempt.source:
            self._pull_results(attempt)
        if peer == attempt.parent:
            if attempt.distance_sent is not None:
                self._say(peer, Distance(attempt.epoch, attempt.distance_sent))
            if attempt.epoch in self._acknowledged:
                self._say(peer, Committed(attempt.epoch))

    # --- at each tick ----------------------------------------------------------------------

    def _watch(self, heard: Collection[int], moving: Collection[int]) -> None:
        """Leave out workers that stall; repeat words that may have been lost."""
        participants, attempt = self.participants, self._attempt
        if attempt is None or self._lacks_some(attempt.begin.waits_for_all):
            # It began before this worker had heard of one: whoever has heard gives nothing.
            participants.watch_leader(None, gets_on=bool(moving))
            return
        gets_on = False
        if not attempt.is_refused:
            awaited = [rank for rank in attempt.sum.children if self._awaits(attempt, rank)]
            gets_on = attempt.sum.tick(moving, awaited, heard)
        participants.watch_leader(attempt.epoch, gets_on=gets_on)
        if self._is_leading and not attempt.is_refused:
            source = attempt.source
            if source is not None and self._num_results < self.total_chunks:
                self._source_quiet_ticks = 0 if source in moving else self._source_quiet_ticks + 1
                if self._source_quiet_ticks >= STALLED_AFTER:
                    participants.leave_out(source, "it holds the result and does not send it")
            left_out = self._blame.tick()
            if left_out is not None:
                for rank, reason in left_out.items():
                    participants.leave_out(rank, reason)
                self._begin(participants.done())
                return
        if self._vain_ticks % REPEAT_AFTER == 0:
            peers = {*attempt.sum.children, attempt.parent, attempt.source, attempt.epoch.leader}
            if self._is_leading:
                peers.update(self._hearers(attempt))
            for peer in sorted(peer for peer in peers if peer not in (None, self.rank)):
                self._repeat(attempt, peer)

    def _awaits(self, attempt: _Attempt, rank: int) -> bool:
        """Return whether it is the turn of the child ``rank`` to say or send something."""
        if attempt.is_committed:
            return rank not in attempt.committed
        if self._held is not None:
            return rank not in attempt.distances
        return attempt.sum.awaits(rank)

    # --- within an epoch -------------------------------------------------------------------

    def _receive_in_epoch(
        self, attempt: _Attempt, peer: int, message: ConsolidationMessage | ReductionMessage
    ) -> None:
        is_child = peer in attempt.sum.children
        match message:
            case Held(average=average) if attempt.parent is None:
                if self._found is None or average.order > self._found[1].order:
                    self._found = (peer, average)
                    self.participants.restarted_by(peer)
            case Stalled() | Progressed() | PullPartials():
                attempt.sum.receive(peer, message)
            case CommitEpoch(consensus_distance=value) if peer == attempt.parent:
                self._commit(attempt, value)
            case Distance(squared_distance=value) if is_child:
                attempt.distances[peer] = value
                attempt.sum.moved(peer)
            case Committed() if is_child:
                attempt.committed.add(peer)
                attempt.sum.moved(peer)
            case _:  # it says no more, or is at another place in this worker's tree
                pass

    def _advance(self, attempt: _Attempt) -> None:
        """Do all that has become possible in this epoch."""
        computes_here = attempt.parent is None and attempt.begin.average is None
        if computes_here and attempt.sum.num_finished == self.num_chunks:
            self._num_results = self.total_chunks  # its own copied chunks are the result
        if self._num_results < self.total_chunks:
            return
        if self._held is None:
            self._held = attempt.average
        self._advance_distance(attempt, self._held)
        if attempt.is_committed and attempt.committed >= attempt.sum.children.keys():
            if attempt.parent is None:
                if set(self.participants.done()) <= set(attempt.begin.members):
                    self._release(attempt.begin)
            elif attempt.epoch not in self._acknowledged:
                self._acknowledged[attempt.epoch] = attempt.begin
                if len(self._acknowledged) > MAX_ACKNOWLEDGED:
                    del self._acknowledged[next(iter(self._acknowledged))]
                self._say(attempt.parent, Committed(attempt.epoch))

    def _advance_distance(self, attempt: _Attempt, held: Average) -> None:
        children = attempt.sum.children
        if attempt.distance_sent is not None or len(attempt.distances) < len(children):
            return
        # A committed result has its consensus distance already.
        distance = 0.0 if held.is_committed else self._squared_distance
        for child in children:
            distance += attempt.distances[child]
        # If parameters are huge, though finite, it is infinite in float32.
        distance = min(distance, MAX_DISTANCE2)
        attempt.distance_sent = distance
        if attempt.parent is not None:
            self._say(attempt.parent, Distance(attempt.epoch, distance))
        elif attempt.average.consensus_distance is not None:
            self._commit(attempt, attempt.average.consensus_distance)
        else:
            self._commit(attempt, distance / len(attempt.begin.members))

    def _send_results(self) -> None:
        for peer, pull in self._pulled.items():
            assert self.origin is not None
            stop = min(pull.stop, self._num_results)
            for chunk in range(pull.next, stop):
                self._actions.append(SendResult(peer, self.origin, chunk))
            pull.next = max(pull.next, stop)

    # --- the end ---------------------------------------------------------------------------

    def _commit(self, attempt: _Attempt, consensus_distance: float) -> None:
        held = self._held
        if held is None or attempt.is_committed:
            return
        attempt.is_committed = True
        self._holders.update(attempt.sum.parents)
        self._held = msgspec.structs.replace(held, consensus_distance=consensus_distance)
        if self._committed != held.origin:
            self._committed = held.origin
            self._actions.append(Commit(held.origin, consensus_distance, held.num_members))
        for child in attempt.sum.children:
            self._say(child, CommitEpoch(attempt.epoch, consensus_distance))

    def _take_release(self, epoch: Epoch) -> None:
        """Leave, unless a worker outside the released epoch may still need the result.

        A RELEASE stays true in later epochs: all members of its epoch have committed.
        """
        begin = self._acknowledged.get(epoch)
        if begin is None:
            return
        left_out = (each.process for each in begin.left_out)
        if {*begin.members, *left_out}.issuperset(self.participants.done()):
            self._release(begin)

    def _release(self, begin: BeginEpoch) -> None:
        for child, above in _parents(begin).items():
            if above == self.rank:
                self._say(child, Release(begin.epoch))
        self.is_finished = True
        self._actions.append(Finished())
