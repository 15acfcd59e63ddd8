"""Termination: all live workers end with the same bits, the mean over all of them.

**One epoch**, when nothing fails. Once every live worker is done the lowest of them, the leader,
fixes the member list and sends it down a binary tree over the members (:func:`tree`). Per chunk,
partial sums go up (own + left + right, in that order: a right child is asked for a chunk once the
left one's has landed), the root divides, and results go down, while later chunks are still on
their way up. Members that hold every chunk of the result sum their squared distances to it up the
tree, so that the root knows when all hold it. It commits; COMMIT goes down, its acknowledgement
up, RELEASE down.

**Failures.** Whoever believes to be the lowest live worker leads; when its view of the live
workers changes it starts a new epoch. Epochs are totally ordered (:class:`Epoch`); a worker
follows the highest that it was asked to join, drops messages of lower ones and tells a leader
that is behind. Everything asked for is asked for again when the link it was asked on is lost, and
every message may arrive twice. Once views agree, one worker leads, it hears of every higher
epoch, goes above it, and all follow; so all ends once failures cease.

**One result only.** A new epoch does not always compute a new mean. A member that holds every
chunk of a result refuses to join an epoch that would replace it (``Held``), and the leader begins
anew with that result, fetched from the member. Between two such results a committed one survives,
then the one computed in the later epoch.

*Claim.* If all members of an epoch e hold the result v that e computed, as they do before anyone
commits to it, then no later epoch that shares a process with e computes a result.
*Proof.* Let w be in both e and the later epoch f. Having joined f it would have dropped e's
messages, so it held v before. Then it refuses to take part in f, and nothing is computed without
its partial sum, unless it has let v go since, which takes a result that is committed or was
computed after e. Take the first result for which any member of e does so: it was computed by an
epoch after e with no process of e in it, since up to then all of them refuse; or before e, and
committed by workers of whom none was in e, since e computes only if none of its members holds a
result. Either way by workers who were not members of e though they were live at the time.

So while only dead workers are declared dead, all live workers commit the same bits: every live
worker is a member of every epoch, and the one that first commits is a member of all that follow
for as long as it lives. Nobody leaves before all live workers have committed, so what died with
a worker that alone had committed was never seen by its user.

*Where it ends.* A worker declared dead by mistake is covered as well once it holds the result of
the others or they hold its own. But two groups that each declare the other dead before they hold
a result in common each compute their own mean. If they meet before they leave, one of the two
survives on both sides; if not, ``Commit.num_members`` says how many were averaged. A worker cut
off until all others have left likewise consolidates what it knows by itself. Where members die
after a result was complete, it is kept: the mean then includes the dead, and the consensus
distance is over the survivors, who can still compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

import msgspec

from gossipdp.protocol.actions import (
    Commit,
    DataAction,
    FinishChunk,
    Finished,
    MeasureDistance,
    Prepare,
    Send,
    SendPartial,
    SendResult,
)
from gossipdp.protocol.members import MAX_LEAP, Member, Status
from gossipdp.protocol.messages import (
    Average,
    BeginEpoch,
    CommitEpoch,
    Committed,
    ConsolidationMessage,
    Distance,
    Epoch,
    Held,
    Mute,
    NewerEpoch,
    Process,
    ProtocolError,
    PullPartials,
    PullResults,
    Release,
)

ConsolidationAction: TypeAlias = Send[ConsolidationMessage] | DataAction
Actions: TypeAlias = list[ConsolidationAction]

MAX_ACKNOWLEDGED = 16
"""Epochs of which a RELEASE may still come; of those before them the leader begins anew."""
PATIENCE, LONGEST_PATIENCE = 4, 64
"""Calls of :meth:`Consolidation.repeat` in vain; in each later epoch twice as many."""
NUM_TREES = 32
MAX_MUTE = 1024


def tree(begin: BeginEpoch) -> dict[int, int | None]:
    """Parent of each member of an epoch, in the order of its tree; None for the leader.

    In the first epoch the binary heap over the sorted members. Each later one has a binary tree of
    its own, which follows from its number, so that no two members are neighbours in all of them.

    Example:
        >>> tree(BeginEpoch(Epoch(1, 0, 0), tuple((rank, 0) for rank in range(4)), None))
        {0: None, 1: 0, 2: 0, 3: 1}
    """
    number = begin.epoch.number
    leader, *others = (rank for rank, _ in begin.members)
    parents: dict[int, int | None] = {leader: None}
    if number == 1:
        ranks = [leader, *others]
        return parents | {rank: ranks[i // 2] for i, rank in enumerate(others)}
    random = Random(number).random  # the same numbers in every version of Python
    free = [leader, leader]  # places under members that are in the tree
    for rank in sorted(others, key=lambda rank: random()):
        parents[rank] = free.pop(int(random() * len(free)))
        free += [rank, rank]
    return parents


@dataclass
class _Attempt:
    """One epoch as one of its members sees it."""

    begin: BeginEpoch
    average: Average
    """What this epoch spreads; in an epoch that computes, what it will be."""
    parent: int | None
    children: tuple[int, ...]
    source: int | None
    """Who sends the results; None where they are computed or held."""
    is_refused: bool = False
    landed: dict[int, int] = field(default_factory=dict)
    """How many chunks of each child's partial sums have been added."""
    next_partial: int | None = None
    """The next chunk to send to the parent; None until it asked on this link."""
    stop_partial: int = 0
    distances: dict[int, float] = field(default_factory=dict)
    distance_sent: float | None = None
    is_committed: bool = False
    acknowledged: set[int] = field(default_factory=set)
    is_acknowledged: bool = False

    @property
    def epoch(self) -> Epoch:
        return self.begin.epoch

    @property
    def computes(self) -> bool:
        return self.begin.average is None


class Consolidation:
    """One worker's part in termination, from the first membership view to ``Finished``.

    Args:
        rank, process_id: this worker.
        num_chunks: float chunks 0 .. num_chunks - 1, which are averaged.
        num_copied_chunks: integer chunks, numbered on from there, which the members take from
            the leader; kept apart until COMMIT.

    Every input returns the actions to perform, in order. Control messages may go to any rank: the
    driver dials where there is no link, and reports a refused dial through membership. It
    reports a lost link before anything that arrives on a new one.
    """

    def __init__(
        self, rank: int, process_id: int, num_chunks: int, num_copied_chunks: int = 0
    ) -> None:
        self.rank = rank
        self.process_id = process_id
        self.num_chunks = num_chunks
        self.total_chunks = num_chunks + num_copied_chunks
        self.is_finished = False
        self.waits_for_all = True
        """Whether nothing is averaged before all live workers are done."""
        self._view: dict[int, Member] = {}
        self._attempt: _Attempt | None = None
        self._highest: Epoch | None = None
        self._found: tuple[int, Average] | None = None
        self._told: tuple[Process, Epoch] | None = None
        self._origin: Epoch | None = None  # of what the buffer of sums and results is for
        self._num_results = 0  # chunks of it that are here
        self._held: Average | None = None
        self._committed: Epoch | None = None
        self._squared_distance: float | None = None
        self._is_measuring = False
        self._mute: set[tuple[int | None, int | None]] = set()  # edges of trees
        self._num_vain = 0
        self._patience = PATIENCE
        self._pulled: dict[int, int] = {}  # peer -> next chunk of the result to send to it
        self._acknowledged: dict[Epoch, BeginEpoch] = {}

    # --- inputs ----------------------------------------------------------------------------

    @property
    def is_committed(self) -> bool:
        """Whether a result stands in the place of the input."""
        return self._committed is not None

    def missing(self) -> tuple[int, ...]:
        """The live workers that are not done yet: who is waited for before anything begins."""
        return tuple(member.rank for member in self._view.values() if member.status is Status.ALIVE)

    def review(self, members: Iterable[Member]) -> Actions:
        """The membership view changed, be it that this worker itself is done now."""
        self._view = {member.rank: member for member in members}
        return self._settle([])

    def receive(self, peer: int, message: ConsolidationMessage) -> Actions:
        """A message arrived from ``peer``.

        Raises:
            ProtocolError: it breaks the rules.
        """
        actions: Actions = []
        if isinstance(message, BeginEpoch | NewerEpoch):
            known = 0 if self._highest is None else self._highest.number
            if message.epoch.number > known + MAX_LEAP:
                raise ProtocolError(f"epoch {message.epoch.number} follows none, after {known}")
            self._hear_of(message.epoch)
        if self._is_taking_part:
            match message:
                case BeginEpoch():
                    self._join(message, None, actions)
                case NewerEpoch():
                    pass
                case PullResults(origin=origin, start=start):
                    if origin == self._origin:
                        self._pulled[peer] = start
                case Release():
                    self._take_release(message.epoch, actions)
                case _:
                    attempt = self._attempt
                    if attempt is not None and attempt.epoch == message.epoch:
                        self._receive_in_epoch(attempt, peer, message, actions)
        return self._settle(actions)

    def link_lost(self, peer: int) -> Actions:
        """The link to ``peer`` is gone, and what was on its way: ask and say again."""
        actions: Actions = []
        self._pulled.pop(peer, None)
        if self._told is not None and self._told[0][0] == peer:
            self._told = None
        attempt = self._attempt
        if self._is_taking_part and attempt is not None:
            if peer == attempt.parent:
                attempt.next_partial = None  # what was under way to it is lost
            self._repeat(attempt, peer, actions)
        return self._settle(actions)

    def repeat(self) -> Actions:
        """Nothing has come for long: ask everybody and say everything again.

        Every message may be repeated: who has heard it does nothing, or sends a chunk that is
        dropped where it is not the next one. A member that has called often enough in vain tells
        the leader from which child nothing came. Then the leader begins anew, with a tree without
        that edge: there may be no way between the two.
        """
        actions: Actions = []
        attempt = self._attempt
        self._num_vain += 1
        if self._is_taking_part and attempt is not None:
            if self._num_vain >= self._patience and attempt.computes:
                for child, landed in attempt.landed.items():
                    if landed == 0 < self._granted(attempt, child):
                        self._note_mute(attempt, child, actions)
            begin, is_patient = attempt.begin, 2 * self._num_vain < self._patience
            is_leader = begin.epoch.leader == self.rank
            if is_leader and not is_patient and self._num_mute_edges(tree(begin)):
                self._begin(begin.members, actions)
                return self._settle(actions)
            peers = {*attempt.children, attempt.parent, attempt.source, attempt.epoch.leader}
            for peer in sorted(peers - {None, self.rank}, key=str):
                assert peer is not None
                self._repeat(attempt, peer, actions)
        return self._settle(actions)

    def accepts_partial(self, peer: int, epoch: Epoch, chunk: int) -> bool:
        """Whether this Partial frame is the next one expected from ``peer``.

        To be asked before the payload is read, and again before it is added: the epoch may have
        changed in between.
        """
        attempt = self._attempt
        if attempt is None or attempt.epoch != epoch or not attempt.computes:
            return False
        return attempt.landed.get(peer) == chunk < self._granted(attempt, peer)

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int) -> Actions:
        """An accepted partial sum was added to the chunk's sum here."""
        actions: Actions = []
        attempt = self._attempt
        if attempt is not None and self.accepts_partial(peer, epoch, chunk):
            attempt.landed[peer] += 1
            self._num_vain = 0
            if len(attempt.children) == 2 and peer == attempt.children[0]:
                self._pull_partials(attempt, attempt.children[1], actions)
        return self._settle(actions)

    def accepts_result(self, peer: int, origin: Epoch, chunk: int) -> bool:
        """Whether this Result frame is the next one expected from ``peer``."""
        attempt = self._attempt
        return (
            attempt is not None
            and attempt.source == peer
            and self._origin == origin
            and self._num_results == chunk < self.total_chunks
        )

    def result_landed(self, peer: int, origin: Epoch, chunk: int) -> Actions:
        """An accepted chunk of the result is here."""
        if self.accepts_result(peer, origin, chunk):
            self._num_results += 1
            self._num_vain = 0
        return self._settle([])

    def distance_measured(self, origin: Epoch, squared_distance: float) -> Actions:
        """The answer to :class:`MeasureDistance`."""
        if origin == self._origin and self._is_measuring:
            self._squared_distance = squared_distance
        return self._settle([])

    # --- who leads -------------------------------------------------------------------------

    @property
    def _is_taking_part(self) -> bool:
        own = self._view.get(self.rank)
        return (
            not self.is_finished
            and own is not None
            and own.process_id == self.process_id
            and own.status is Status.DONE
        )

    def _done(self) -> tuple[Process, ...]:
        return tuple(
            (member.rank, member.process_id)
            for member in sorted(self._view.values(), key=lambda member: member.rank)
            if member.status is Status.DONE
        )

    def _settle(self, actions: Actions) -> Actions:
        """What every input ends with: lead if it is ours to lead, then do what has become due."""
        if self._is_taking_part:
            self._lead(actions)
            if self._attempt is not None and not self._attempt.is_refused:
                self._advance(self._attempt, actions)
            self._send_results(actions)
        return actions

    def _lead(self, actions: Actions) -> None:
        if self._held is None and self.waits_for_all and self.missing():
            return  # a mean is computed over all; a result at hand waits for nobody
        members, attempt = self._done(), self._attempt
        lowest = members[0]
        if lowest[0] == self.rank:
            if (
                attempt is None
                or attempt.begin.members != members
                or attempt.epoch != self._highest
                or self._found is not None
            ):
                self._begin(members, actions)
        elif (
            attempt is not None
            and attempt.epoch.leader != lowest[0]
            and self._told != (lowest, attempt.epoch)
        ):
            self._told = (lowest, attempt.epoch)
            actions.append(Send(lowest[0], NewerEpoch(attempt.epoch)))

    def _begin(self, members: tuple[Process, ...], actions: Actions) -> None:
        """Lead a new epoch; its tree has as few as can be of the edges on which nothing came."""
        number = 1 if self._highest is None else self._highest.number + 1
        if self._mute:
            begins = (
                BeginEpoch(Epoch(later, self.rank, 0), members, None)
                for later in range(number, number + NUM_TREES)
            )
            best = min(begins, key=lambda begin: self._num_mute_edges(tree(begin)))
            number = best.epoch.number
        epoch = Epoch(number, self.rank, self.process_id % 2**32)
        average, source = self._held, None
        if self._found is not None:
            holder, found = self._found
            is_greater = average is None or found.order > average.order
            if is_greater and holder in (rank for rank, _ in members):
                average, source = found, holder
        self._found = None
        self._join(BeginEpoch(epoch, members, average), source, actions)

    def _num_mute_edges(self, parents: Mapping[int, int | None]) -> int:
        return sum(not self._mute.isdisjoint((edge, edge[::-1])) for edge in parents.items())

    def _hear_of(self, epoch: Epoch) -> None:
        if self._highest is None or epoch.order > self._highest.order:
            self._highest = epoch

    # --- joining an epoch ------------------------------------------------------------------

    def _join(self, begin: BeginEpoch, source: int | None, actions: Actions) -> None:
        epoch = begin.epoch
        own = (self.rank, self.process_id)
        if own not in begin.members:
            return
        current = self._attempt.epoch if self._attempt is not None else None
        if current is not None and epoch.order <= current.order:
            if epoch != current:
                actions.append(Send(epoch.leader, NewerEpoch(current)))
            return
        self._hear_of(epoch)
        self._found = None
        self._num_vain = 0
        if current is not None:
            self._patience = min(2 * self._patience, LONGEST_PATIENCE)
        average = begin.average or Average(epoch, len(begin.members), None)
        parents = tree(begin)
        parent = parents[self.rank]
        children = tuple(rank for rank, above in parents.items() if above == self.rank)
        attempt = _Attempt(begin, average, parent, children, source if parent is None else parent)
        attempt.landed = dict.fromkeys(children, 0)
        self._attempt = attempt
        if self.refuses(begin):
            attempt.is_refused = True
            self._say_held(attempt, actions)
            return
        if self._origin != average.origin:
            self._start_buffer(average.origin, actions)
        for child in children:
            actions.append(Send(child, begin))
            self._pull_partials(attempt, child, actions)
        self._pull_results(attempt, actions)

    def refuses(self, begin: BeginEpoch) -> bool:
        """Whether this worker holds a result that the epoch would replace."""
        held, average = self._held, begin.average
        if held is None:
            return False
        if average is None:
            return True
        if held.origin == average.origin:
            return held.is_committed and not average.is_committed
        return held.order > average.order

    def _start_buffer(self, origin: Epoch, actions: Actions) -> None:
        self._origin = origin
        self._num_results = 0
        self._held = None
        self._squared_distance = None
        self._is_measuring = False
        self._pulled.clear()
        actions.append(Prepare())

    # --- asking, and asking again ----------------------------------------------------------

    def _note_mute(self, attempt: _Attempt, child: int, actions: Actions) -> None:
        if attempt.epoch.leader == self.rank:
            self._mute.add((self.rank, child))
        else:
            actions.append(Send(attempt.epoch.leader, Mute(attempt.epoch, child)))

    def _say_held(self, attempt: _Attempt, actions: Actions) -> None:
        assert self._held is not None
        actions.append(Send(attempt.epoch.leader, Held(attempt.epoch, self._held)))

    def _granted(self, attempt: _Attempt, child: int) -> int:
        """How many chunks this child may send: a right one as many as the left one has sent."""
        left = attempt.children[0]
        return self.num_chunks if child == left else attempt.landed[left]

    def _pull_partials(self, attempt: _Attempt, child: int, actions: Actions) -> None:
        start, stop = attempt.landed[child], self._granted(attempt, child)
        if attempt.computes and start < stop:
            actions.append(Send(child, PullPartials(attempt.epoch, start, stop)))

    def _pull_results(self, attempt: _Attempt, actions: Actions) -> None:
        if attempt.source is not None and self._num_results < self.total_chunks:
            pull = PullResults(attempt.average.origin, self._num_results)
            actions.append(Send(attempt.source, pull))

    def _repeat(self, attempt: _Attempt, peer: int, actions: Actions) -> None:
        """Say to ``peer`` again all that it may have missed."""
        if attempt.is_refused:
            if peer == attempt.epoch.leader:
                self._say_held(attempt, actions)
            return
        if peer in attempt.children:
            actions.append(Send(peer, attempt.begin))
            self._pull_partials(attempt, peer, actions)
            if attempt.is_committed:
                assert self._held is not None
                assert self._held.consensus_distance is not None
                commit = CommitEpoch(attempt.epoch, self._held.consensus_distance)
                actions.append(Send(peer, commit))
        if peer == attempt.source:
            self._pull_results(attempt, actions)
        if peer == attempt.parent:
            if attempt.distance_sent is not None:
                actions.append(Send(peer, Distance(attempt.epoch, attempt.distance_sent)))
            if attempt.is_acknowledged:
                actions.append(Send(peer, Committed(attempt.epoch)))

    # --- within an epoch -------------------------------------------------------------------

    def _receive_in_epoch(
        self,
        attempt: _Attempt,
        peer: int,
        message: Held | Mute | PullPartials | Distance | CommitEpoch | Committed,
        actions: Actions,
    ) -> None:
        match message:
            case Held(average=average) if attempt.epoch.leader == self.rank:
                if self._found is None or average.order > self._found[1].order:
                    self._found = (peer, average)
            case Mute(child=child) if attempt.epoch.leader == self.rank:
                if len(self._mute) < MAX_MUTE:
                    self._mute.add((peer, child))
            case PullPartials(start=start, stop=stop) if peer == attempt.parent:
                if attempt.next_partial is None:
                    attempt.next_partial = start
                attempt.stop_partial = max(attempt.stop_partial, stop)
            case Distance(squared_distance=value) if peer in attempt.children:
                attempt.distances[peer] = value
            case CommitEpoch(consensus_distance=value) if peer == attempt.parent:
                self._commit(attempt, value, actions)
            case Committed() if peer in attempt.children:
                attempt.acknowledged.add(peer)
            case _:  # from someone who is not where this worker's tree has it
                pass

    def _advance(self, attempt: _Attempt, actions: Actions) -> None:
        """Do whatever has become possible in this epoch."""
        if attempt.computes:
            self._advance_sums(attempt, actions)
        if self._num_results < self.total_chunks:
            return
        if self._held is None:
            self._held = attempt.average
        self._advance_distance(attempt, self._held, actions)
        if attempt.is_committed and attempt.acknowledged.issuperset(attempt.children):
            if attempt.parent is None:
                if set(self._done()) <= set(attempt.begin.members):
                    self._release(attempt.begin, actions)
            elif not attempt.is_acknowledged:
                attempt.is_acknowledged = True
                self._acknowledged[attempt.epoch] = attempt.begin
                if len(self._acknowledged) > MAX_ACKNOWLEDGED:
                    del self._acknowledged[next(iter(self._acknowledged))]
                actions.append(Send(attempt.parent, Committed(attempt.epoch)))

    def _advance_sums(self, attempt: _Attempt, actions: Actions) -> None:
        # A right child never gets ahead of a left one: the last child's count is that of sums.
        children = attempt.children
        num_sums = attempt.landed[children[-1]] if children else self.num_chunks
        if attempt.parent is not None:
            while attempt.next_partial is not None and attempt.next_partial < min(
                num_sums, attempt.stop_partial
            ):
                actions.append(SendPartial(attempt.parent, attempt.epoch, attempt.next_partial))
                attempt.next_partial += 1
            return
        while self._num_results < num_sums:
            actions.append(FinishChunk(self._num_results, attempt.average.num_members))
            self._num_results += 1
        if self._num_results == self.num_chunks:  # the leader's own copied chunks are the result
            self._num_results = self.total_chunks

    def _advance_distance(self, attempt: _Attempt, held: Average, actions: Actions) -> None:
        if attempt.distance_sent is not None:
            return
        distance = 0.0  # a committed result has its consensus distance already
        if not held.is_committed:
            if self._squared_distance is None:
                if not self._is_measuring:
                    self._is_measuring = True
                    actions.append(MeasureDistance(held.origin))
                return
            distance = self._squared_distance
        if not attempt.distances.keys() >= set(attempt.children):
            return
        for child in attempt.children:
            distance += attempt.distances[child]
        attempt.distance_sent = distance
        if attempt.parent is not None:
            actions.append(Send(attempt.parent, Distance(attempt.epoch, distance)))
        elif attempt.average.consensus_distance is not None:
            self._commit(attempt, attempt.average.consensus_distance, actions)
        else:
            self._commit(attempt, distance / len(attempt.begin.members), actions)

    def _send_results(self, actions: Actions) -> None:
        for peer, start in self._pulled.items():
            assert self._origin is not None
            for chunk in range(start, self._num_results):
                actions.append(SendResult(peer, self._origin, chunk))
            self._pulled[peer] = max(start, self._num_results)

    # --- the end ---------------------------------------------------------------------------

    def _commit(self, attempt: _Attempt, consensus_distance: float, actions: Actions) -> None:
        held = self._held
        if held is None or attempt.is_committed:
            return
        attempt.is_committed = True
        self._held = msgspec.structs.replace(held, consensus_distance=consensus_distance)
        if self._committed != held.origin:
            self._committed = held.origin
            actions.append(Commit(held.origin, consensus_distance, held.num_members))
        for child in attempt.children:
            actions.append(Send(child, CommitEpoch(attempt.epoch, consensus_distance)))

    def _take_release(self, epoch: Epoch, actions: Actions) -> None:
        """Leave, unless a worker outside the released epoch may still need the result.

        A RELEASE stays true in later epochs: all members of its epoch have committed.
        """
        begin, attempt = self._acknowledged.get(epoch), self._attempt
        if begin is None or attempt is None:
            return
        if set(begin.members).issuperset((*attempt.begin.members, *self._done())):
            self._release(begin, actions)

    def _release(self, begin: BeginEpoch, actions: Actions) -> None:
        for child, above in tree(begin).items():
            if above == self.rank:
                actions.append(Send(child, Release(begin.epoch)))
        self.is_finished = True
        actions.append(Finished())
