"""Termination: all live workers end with the same bits, the mean over all of them.

**One epoch**, when nothing fails. Once every live worker is done the lowest of them, the leader,
fixes the member list and sends it down a binary tree over the members (:func:`tree`), and to each
of them itself: where there is a link to it, nobody else can begin an epoch in its name. Per chunk,
partial sums go up (own + left + right, in that order: a right child is asked for a chunk once the
left one's has landed), the root divides, and results go down, while later chunks are still on
their way up. Members that hold every chunk of the result sum their squared distances to it up the
tree, so that the root knows when all hold it. It commits; COMMIT goes down, its acknowledgement
up, RELEASE down.

**Failures.** Whoever believes to be the lowest live worker leads; when its view of the live
workers changes it starts a new epoch. Epochs are totally ordered (:class:`Epoch`). A worker follows
the one that it believes to lead, and of its epochs each that is higher than those it was in; it
drops messages of lower ones and tells a leader that is behind. Everything asked for is asked for
again when the link it was asked on is lost, and every message may arrive twice. Once views agree,
one worker leads, it hears of every higher epoch, goes above it, and all follow; so all ends once
failures cease.

**Who stalls** is left out of the epochs that follow, or passed over where it leads:
:mod:`~gossipdp.protocol.stalling` says who, and when.

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

So while only dead workers are declared dead, and nobody is left out, all live workers commit the
same bits: every live worker is a member of every epoch, and the one that first commits is a member
of all that follow for as long as it lives. Nobody leaves before all live workers have committed, so
what died with a worker that alone had committed was never seen by its user.

*Where it ends.* A worker declared dead by mistake is covered as well once it holds the result of
the others or they hold its own. But two groups that each declare the other dead before they hold
a result in common each compute their own mean. If they meet before they leave, one of the two
survives on both sides; if not, ``Commit.num_members`` says how many were averaged. A worker cut
off until all others have left likewise consolidates what it knows by itself. Where members die
after a result was complete, it is kept: the mean then includes the dead, and the consensus
distance is over the survivors, who can still compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
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
from gossipdp.protocol.members import MAX_LEAP, Member
from gossipdp.protocol.messages import (
    MAX_DISTANCE2,
    Accuse,
    Average,
    BeginEpoch,
    CommitEpoch,
    Committed,
    ConsolidationMessage,
    Distance,
    Epoch,
    Held,
    NewerEpoch,
    Process,
    ProtocolError,
    PullPartials,
    PullResults,
    Release,
)
from gossipdp.protocol.stalling import REPEAT_AFTER, Participants

ConsolidationAction: TypeAlias = Send[ConsolidationMessage] | DataAction
Actions: TypeAlias = list[ConsolidationAction]

MAX_REWINDS = 8
MAX_ACKNOWLEDGED = 16
"""Epochs of which a RELEASE may still come; of those before them the leader begins anew."""


def tree(begin: BeginEpoch) -> dict[int, int | None]:
    """Parent of each member of an epoch, in the order of its tree; None for the leader.

    The binary heap over the members in their order. Where some of them are suspect the leader has
    one child, with the heap below it, so that there is a way round any bad link.

    Example:
        >>> tree(BeginEpoch(Epoch(1, 0, 0), tuple((rank, 0) for rank in range(4)), None))
        {0: None, 1: 0, 2: 0, 3: 1}
    """
    ranks = [rank for rank, _ in begin.members]
    parents: dict[int, int | None] = {ranks[0]: None}
    if begin.has_suspects and len(ranks) > 1:
        leader = ranks.pop(0)
        parents[ranks[0]] = leader
    return parents | {rank: ranks[i // 2] for i, rank in enumerate(ranks[1:])}


@dataclass
class _Child:
    """What a member of an epoch has from one of its children in the tree."""

    landed: int = 0
    """Chunks of its partial sums that have been added."""
    distance: float | None = None
    has_committed: bool = False


@dataclass
class _Attempt:
    """One epoch as one of its members sees it."""

    begin: BeginEpoch
    average: Average
    """What this epoch spreads; in an epoch that computes, what it will be."""
    parent: int | None
    children: dict[int, _Child]
    source: int | None
    """Who sends the results; None where they are computed or held."""
    is_refused: bool = False
    has_parent_joined: bool = False
    """Whether what was said to it may not have come too early."""
    next_partial: int | None = None
    """The next chunk to send to the parent; None until it asked on this link."""
    stop_partial: int = 0
    results_told: int = 0
    """How many chunks of the result the source knows to be here."""
    distance_sent: float | None = None
    is_committed: bool = False
    is_acknowledged: bool = False

    @property
    def epoch(self) -> Epoch:
        return self.begin.epoch

    @property
    def computes(self) -> bool:
        return self.begin.average is None


@dataclass
class _Pull:
    """What a peer has asked for of the result."""

    start: int
    """The first chunk that it lacks, as it said last."""
    next: int
    num_rewinds: int = 0


class Consolidation:
    """One worker's part in termination, from the first membership view to ``Finished``.

    Args:
        rank, process_id: this worker.
        num_chunks: float chunks 0 .. num_chunks - 1, which are averaged.
        num_copied_chunks: integer chunks, numbered on from there, which the members take from
            the leader; kept apart until COMMIT.
        is_linked: whether there is a link to a rank.

    Every input returns the actions to perform, in order. Control messages may go to any rank: the
    driver dials where there is no link, and reports a refused dial through membership. It
    reports a lost link before anything that arrives on a new one.

    Attributes:
        waits_for_all: whether nothing is averaged before all live workers are done.
        wait_ticks: how long all wait for those that are not.
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
        self.wait_ticks = math.inf
        self._actions: Actions = []
        self._participants = Participants(rank, process_id)
        self._attempt: _Attempt | None = None
        self.highest: Epoch | None = None
        """The highest epoch that was heard of."""
        self._offered: dict[Process, BeginEpoch] = {}  # the last of each leader
        self._found: tuple[int, Average] | None = None
        self._told: tuple[Process, Epoch] | None = None
        self._origin: Epoch | None = None  # of what the buffer of sums and results is for
        self._num_results = 0  # chunks of it that are here
        self._held: Average | None = None
        self._committed: Epoch | None = None
        self._squared_distance: float | None = None
        self._is_measuring = False
        self._pulled: dict[int, _Pull] = {}
        self._acknowledged: dict[Epoch, BeginEpoch] = {}
        self._vain_ticks = 0  # since anything landed here

    # --- inputs ----------------------------------------------------------------------------

    def missing(self) -> tuple[int, ...]:
        """The live workers that are not done yet: who is waited for before anything begins."""
        return self._participants.missing()

    @property
    def left_out(self) -> tuple[int, ...]:
        """The workers that live and are done, and gave this one nothing for too long."""
        return tuple(sorted(rank for rank, _ in self._participants.left_out))

    def review(self, members: Iterable[Member]) -> Actions:
        """The membership view changed, be it that this worker itself is done now."""
        self._participants.review(members)
        done = self._participants.done()
        self._offered = {
            process: begin for process, begin in self._offered.items() if process in done
        }
        return self._settle()

    def receive(self, peer: int, message: ConsolidationMessage) -> Actions:
        """A message arrived from ``peer``.

        Raises:
            ProtocolError: it breaks the rules.
        """
        if self._participants.is_left_out(peer):
            return []
        if isinstance(message, BeginEpoch | NewerEpoch):
            known = 0 if self.highest is None else self.highest.number
            if message.epoch.number > known + MAX_LEAP:
                raise ProtocolError(f"epoch {message.epoch.number} follows none, after {known}")
            if self._hear_of(message.epoch) and self._is_leading:
                self._participants.restarted_by(peer)
        if self._is_taking_part:
            attempt = self._attempt
            match message:
                case BeginEpoch():
                    self._take_offer(peer, message)
                case NewerEpoch():
                    pass
                case PullResults(origin=origin, start=start):
                    if origin == self._origin:
                        self._pulled_by(peer, start)
                case Release():
                    self._take_release(message.epoch)
                case _ if attempt is not None and attempt.epoch == message.epoch:
                    self._receive_in_epoch(attempt, peer, message)
        return self._settle()

    def link_lost(self, peer: int) -> Actions:
        """The link to ``peer`` is gone, and what was on its way: ask and say again."""
        self._pulled.pop(peer, None)
        if self._told is not None and self._told[0][0] == peer:
            self._told = None
        attempt = self._attempt
        if self._is_taking_part and attempt is not None:
            if peer == attempt.parent:
                attempt.next_partial = None  # what was under way to it is lost
            self._repeat(attempt, peer)
        return self._settle()

    def tick(self, heard: Collection[int], moving: Collection[int] = ()) -> Actions:
        """A quarter of the time-out has passed.

        Where nothing has come for long everything is asked for and said again. Every message may
        be repeated: who has heard it does nothing, or sends a chunk that is dropped where it is
        not the next one.

        Args:
            heard: the peers whose links show life.
            moving: those whose links have carried more than words since the last tick.
        """
        self._vain_ticks += 1
        self._participants.tick()
        if self._is_taking_part:
            self._watch(heard, moving)
        return self._settle()

    def accepts_partial(self, peer: int, epoch: Epoch, chunk: int) -> bool:
        """Whether this Partial frame is the next one expected from ``peer``.

        To be asked before the payload is read, and again before it is added: the epoch may have
        changed in between.
        """
        attempt = self._attempt
        if attempt is None or attempt.epoch != epoch or not attempt.computes:
            return False
        child = attempt.children.get(peer)
        return child is not None and child.landed == chunk < self._granted(attempt, peer)

    def partial_landed(self, peer: int, epoch: Epoch, chunk: int) -> Actions:
        """An accepted partial sum was added to the chunk's sum here."""
        attempt = self._attempt
        if attempt is not None and self.accepts_partial(peer, epoch, chunk):
            attempt.children[peer].landed += 1
            self._vain_ticks = 0
            self._participants.got_on(peer)
            left, *right = attempt.children
            if right and peer == left:
                self._pull_partials(attempt, right[0])
        return self._settle()

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
        attempt = self._attempt
        if attempt is not None and self.accepts_result(peer, origin, chunk):
            self._num_results += 1
            self._vain_ticks = 0
            self._participants.source_got_on()
        return self._settle()

    def distance_measured(self, origin: Epoch, squared_distance: float) -> Actions:
        """The answer to :class:`MeasureDistance`."""
        if origin == self._origin and self._is_measuring:
            self._squared_distance = squared_distance
        return self._settle()

    # --- who leads -------------------------------------------------------------------------

    @property
    def _is_taking_part(self) -> bool:
        return self._participants.includes_self and not self.is_finished

    @property
    def _is_leading(self) -> bool:
        """Whether this worker leads the epoch that it is in."""
        return self._attempt is not None and self._attempt.parent is None

    def _settle(self) -> Actions:
        """What every input ends with: lead if it is ours to lead, then do what has become due."""
        if self._is_taking_part:
            self._lead()
            if self._attempt is not None and not self._attempt.is_refused:
                self._advance(self._attempt)
            self._send_results()
        actions, self._actions = self._actions, []
        return actions

    def _say(self, peer: int, message: ConsolidationMessage) -> None:
        self._actions.append(Send(peer, message))

    def _lead(self) -> None:
        if self._held is None and self.waits_for_all and self.missing():
            return  # a mean is computed over all; a result at hand waits for nobody
        members, attempt = self._participants.done(), self._attempt
        lowest = members[0]
        if lowest[0] == self.rank:
            if (
                attempt is None
                or set(attempt.begin.members) != set(members)
                or attempt.epoch != self.highest
                or self._found is not None
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
        """Lead a new epoch; whoever is suspect comes last, to be a leaf of its tree."""
        number = 1 if self.highest is None else self.highest.number + 1
        epoch = Epoch(number, self.rank, self.process_id % 2**32)
        average, source = self._held, None
        if self._found is not None:
            holder, found = self._found
            is_greater = average is None or found.order > average.order
            if is_greater and holder in (rank for rank, _ in members):
                average, source = found, holder
        self._found = None
        own, *others = members
        suspicion = self._participants.suspicion
        others.sort(key=lambda process: (suspicion(process[0]), process))
        begin = BeginEpoch(
            epoch,
            (own, *others),
            average,
            has_suspects=any(suspicion(rank) for rank, _ in others),
            left_out=tuple(sorted(self._participants.left_out)),
        )
        self._join(begin, source)

    def _hear_of(self, epoch: Epoch) -> bool:
        """Return whether ``epoch`` is higher than all others."""
        is_higher = self.highest is None or epoch.order > self.highest.order
        if is_higher:
            self.highest = epoch
        return is_higher

    # --- joining an epoch ------------------------------------------------------------------

    def _take_offer(self, peer: int, begin: BeginEpoch) -> None:
        """``peer`` asks this worker to join: to be followed once its leader is the lowest.

        An epoch is begun by the word of its leader. That of a parent in its tree is taken for it
        only where there is no link to the leader, for anybody could make up an epoch. So whoever
        has joined first may have said things that the other has dropped: both say them once more.
        """
        attempt = self._attempt
        if attempt is not None and attempt.epoch == begin.epoch:
            if peer == attempt.parent and not attempt.has_parent_joined:
                attempt.has_parent_joined = True
                self._repeat(attempt, peer)
            return
        leader = begin.epoch.leader
        is_relayed = tree(begin).get(self.rank) == peer and not self._is_linked(leader)
        if (peer == leader or is_relayed) and begin.members[0] in self._participants.done():
            self._offered[begin.members[0]] = begin

    def _join(self, begin: BeginEpoch, source: int | None) -> None:
        epoch = begin.epoch
        own, leader = (self.rank, self.process_id), begin.members[0]
        if own not in begin.members or leader in self._participants.left_out:
            return
        current = self._attempt.epoch if self._attempt is not None else None
        if current is not None and epoch.order <= current.order:
            if epoch != current:
                self._say(epoch.leader, NewerEpoch(current))
            return
        self._hear_of(epoch)
        self._found = None
        self._vain_ticks = 0
        average = begin.average or Average(epoch, len(begin.members), None)
        parents = tree(begin)
        parent = parents[self.rank]
        children = {rank: _Child() for rank, above in parents.items() if above == self.rank}
        attempt = _Attempt(begin, average, parent, children, source if parent is None else parent)
        self._attempt = attempt
        self._participants.joined(begin.members, parents)
        if self.refuses(begin):
            attempt.is_refused = True
            self._say_held(attempt)
            return
        if self._origin != average.origin:
            self._start_buffer(average.origin)
        for rank in parents:
            if rank in children or (parent is None and rank != self.rank):
                self._say(rank, begin)
            if rank in children:
                self._pull_partials(attempt, rank)
        self._pull_results(attempt)

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

    def _start_buffer(self, origin: Epoch) -> None:
        self._origin = origin
        self._num_results = 0
        self._held = None
        self._squared_distance = None
        self._is_measuring = False
        self._pulled.clear()
        self._actions.append(Prepare())

    # --- asking, and asking again ----------------------------------------------------------

    def _say_held(self, attempt: _Attempt) -> None:
        assert self._held is not None
        self._say(attempt.epoch.leader, Held(attempt.epoch, self._held))

    def _granted(self, attempt: _Attempt, child: int) -> int:
        """How many chunks this child may send: a right one as many as the left one has sent."""
        left = next(iter(attempt.children))
        return self.num_chunks if child == left else attempt.children[left].landed

    def _pull_partials(self, attempt: _Attempt, child: int) -> None:
        start, stop = attempt.children[child].landed, self._granted(attempt, child)
        if attempt.computes and start < stop:
            self._say(child, PullPartials(attempt.epoch, start, stop))

    def _pull_results(self, attempt: _Attempt) -> None:
        attempt.results_told = self._num_results
        if attempt.source is not None and self._num_results < self.total_chunks:
            self._say(attempt.source, PullResults(attempt.average.origin, self._num_results))

    def _pulled_by(self, peer: int, start: int) -> None:
        """``peer`` lacks the chunks from ``start`` on: send them, unless they are on their way.

        They are if more has arrived there than when it asked last. Else it asks in vain, but
        every time anew would fill the queue to one that reads nothing.
        """
        attempt = self._attempt
        if peer not in self._pulled and attempt is not None and peer in attempt.children:
            self._pull_partials(attempt, peer)
        pull = self._pulled.setdefault(peer, _Pull(start, start))
        if attempt is not None and peer in attempt.children and start > pull.start:
            self._participants.got_on(peer)
        if start > pull.start:
            pull.start, pull.next = start, max(start, pull.next)
        elif start < pull.next and pull.num_rewinds < MAX_REWINDS:
            pull.start = pull.next = start
            pull.num_rewinds += 1

    def _repeat(self, attempt: _Attempt, peer: int) -> None:
        """Say to ``peer`` again all that it may have missed."""
        if attempt.is_refused:
            if peer == attempt.epoch.leader:
                self._say_held(attempt)
            return
        if peer in attempt.children or attempt.parent is None:
            self._say(peer, attempt.begin)  # a leader's own word may have been lost on its way
        if peer in attempt.children:
            self._pull_partials(attempt, peer)
            if attempt.is_committed:
                assert self._held is not None
                assert self._held.consensus_distance is not None
                self._say(peer, CommitEpoch(attempt.epoch, self._held.consensus_distance))
        if peer == attempt.source:
            self._pull_results(attempt)
        if peer == attempt.parent:
            if attempt.distance_sent is not None:
                self._say(peer, Distance(attempt.epoch, attempt.distance_sent))
            if attempt.is_acknowledged:
                self._say(peer, Committed(attempt.epoch))

    # --- at each tick ----------------------------------------------------------------------

    def _watch(self, heard: Collection[int], moving: Collection[int]) -> None:
        """See to whoever stalls; say again what may have been lost."""
        participants, attempt = self._participants, self._attempt
        if attempt is None:
            participants.watch_leader(None, 0, is_moving=False, wait_ticks=self.wait_ticks)
            return
        participants.watch_leader(
            attempt.epoch,
            self._num_results + sum(child.landed for child in attempt.children.values()),
            is_moving=not {*attempt.children, attempt.parent, attempt.source}.isdisjoint(moving),
            wait_ticks=self.wait_ticks,
        )
        if not attempt.is_refused:
            if attempt.results_told < self._num_results:
                self._pull_results(attempt)
            awaited = {rank for rank in attempt.children if self._awaits(attempt, rank)}
            for child, is_heard in participants.watch_children(awaited, heard, moving):
                self._say(attempt.epoch.leader, Accuse(attempt.epoch, child, is_heard))
            if attempt.parent is None:
                if attempt.source is not None and self._num_results < self.total_chunks:
                    participants.watch_source(attempt.source, moving)
                if participants.gives_up():
                    self._begin(participants.done())
                    return
        if self._vain_ticks % REPEAT_AFTER == 0:
            others = {*attempt.children, attempt.parent, attempt.source, attempt.epoch.leader}
            if attempt.parent is None:
                others.update(rank for rank, _ in attempt.begin.members)
            for peer in sorted(others - {None, self.rank}, key=str):
                assert peer is not None
                self._repeat(attempt, peer)

    def _awaits(self, attempt: _Attempt, rank: int) -> bool:
        """Whether it is the turn of the child ``rank`` to say or send something."""
        child = attempt.children[rank]
        if attempt.is_committed:
            return not child.has_committed
        if self._held is not None:
            return child.distance is None
        return attempt.computes and child.landed < self._granted(attempt, rank)

    # --- within an epoch -------------------------------------------------------------------

    def _receive_in_epoch(
        self,
        attempt: _Attempt,
        peer: int,
        message: Held | Accuse | PullPartials | Distance | CommitEpoch | Committed,
    ) -> None:
        child = attempt.children.get(peer)
        match message:
            case Held(average=average) if attempt.parent is None:
                if self._found is None or average.order > self._found[1].order:
                    self._found = (peer, average)
                    self._participants.restarted_by(peer)
            case Accuse(child=accused, is_heard=is_heard) if attempt.parent is None:
                self._participants.accused_by(peer, accused, is_heard)
            case PullPartials(start=start, stop=stop) if peer == attempt.parent:
                if attempt.next_partial is None:
                    attempt.next_partial = start
                attempt.stop_partial = max(attempt.stop_partial, stop)
            case CommitEpoch(consensus_distance=value) if peer == attempt.parent:
                self._commit(attempt, value)
            case Distance(squared_distance=value) if child is not None:
                child.distance = value
                self._participants.got_on(peer)
            case Committed() if child is not None:
                child.has_committed = True
                self._participants.got_on(peer)
            case _:  # from someone who is not where this worker's tree has it
                pass

    def _advance(self, attempt: _Attempt) -> None:
        """Do whatever has become possible in this epoch."""
        if attempt.computes:
            self._advance_sums(attempt)
        if self._num_results < self.total_chunks:
            return
        if self._held is None:
            self._held = attempt.average
        self._advance_distance(attempt, self._held)
        if attempt.is_committed and all(each.has_committed for each in attempt.children.values()):
            if attempt.parent is None:
                if set(self._participants.done()) <= set(attempt.begin.members):
                    self._release(attempt.begin)
            elif not attempt.is_acknowledged:
                attempt.is_acknowledged = True
                self._acknowledged[attempt.epoch] = attempt.begin
                if len(self._acknowledged) > MAX_ACKNOWLEDGED:
                    del self._acknowledged[next(iter(self._acknowledged))]
                self._say(attempt.parent, Committed(attempt.epoch))

    def _advance_sums(self, attempt: _Attempt) -> None:
        # A right child never gets ahead of a left one: the last child's count is that of sums.
        num_sums = min((c.landed for c in attempt.children.values()), default=self.num_chunks)
        if attempt.parent is not None:
            while attempt.next_partial is not None and attempt.next_partial < min(
                num_sums, attempt.stop_partial
            ):
                self._actions.append(
                    SendPartial(attempt.parent, attempt.epoch, attempt.next_partial)
                )
                attempt.next_partial += 1
            return
        while self._num_results < num_sums:
            self._actions.append(FinishChunk(self._num_results, attempt.average.num_members))
            self._num_results += 1
        if self._num_results == self.num_chunks:  # the leader's own copied chunks are the result
            self._num_results = self.total_chunks

    def _advance_distance(self, attempt: _Attempt, held: Average) -> None:
        if attempt.distance_sent is not None:
            return
        distance = 0.0  # a committed result has its consensus distance already
        if not held.is_committed:
            if self._squared_distance is None:
                if not self._is_measuring:
                    self._is_measuring = True
                    self._actions.append(MeasureDistance(held.origin))
                return
            distance = self._squared_distance
        for child in attempt.children.values():
            if child.distance is None:
                return
            distance += child.distance
        # Of parameters that are huge and still finite it is infinite, in float32.
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
            assert self._origin is not None
            for chunk in range(pull.next, self._num_results):
                self._actions.append(SendResult(peer, self._origin, chunk))
            pull.next = max(pull.next, self._num_results)

    # --- the end ---------------------------------------------------------------------------

    def _commit(self, attempt: _Attempt, consensus_distance: float) -> None:
        held = self._held
        if held is None or attempt.is_committed:
            return
        attempt.is_committed = True
        self._held = msgspec.structs.replace(held, consensus_distance=consensus_distance)
        if self._committed != held.origin:
            self._committed = held.origin
            self._actions.append(Commit(held.origin, consensus_distance, held.num_members))
        for child in attempt.children:
            self._say(child, CommitEpoch(attempt.epoch, consensus_distance))

    def _take_release(self, epoch: Epoch) -> None:
        """Leave, unless a worker outside the released epoch may still need the result.

        A RELEASE stays true in later epochs: all members of its epoch have committed.
        """
        begin = self._acknowledged.get(epoch)
        done = self._participants.done()
        if begin is not None and {*begin.members, *begin.left_out}.issuperset(done):
            self._release(begin)

    def _release(self, begin: BeginEpoch) -> None:
        for child, above in tree(begin).items():
            if above == self.rank:
                self._say(child, Release(begin.epoch))
        self.is_finished = True
        self._actions.append(Finished())
