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

**Who stalls.** A live worker may be done, beat, and bring consolidation no further. Only progress
of an epoch counts: its next chunk, distance or acknowledgement, and bytes on the link that carries
them, since on a slow link one chunk may take longer than the time-out. A member tells the leader of
a child that made none for two time-outs for each level of the tree that its next word has to come
up through. The leader then begins anew with both of them as leaves: it may be the child, the one
who accuses it, or the link between them. A suspect leaf that stalls again is *left out*: the epochs
that follow are without it. A leader under whom nothing moved here for six time-outs and two for
each level of the tree is passed over: left out by whoever waits for it, so that the next lowest
leads. A worker that was left out by mistake consolidates by itself once the others have left.

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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
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

ConsolidationAction: TypeAlias = Send[ConsolidationMessage] | DataAction
Actions: TypeAlias = list[ConsolidationAction]

TICKS_PER_TIMEOUT = 4
"""How often :meth:`Consolidation.tick` is called. The next five are in ticks."""
REPEAT_AFTER = 4
ACCUSE_AFTER = 8
"""Of a leaf; as much again for each level below: the first word of a tree comes up hop by hop."""
GIVE_UP_AFTER = ACCUSE_AFTER + REPEAT_AFTER
"""Of a leader: the accusation has been said twice by then, and those of other waits are here."""
FRESH_FOR = 8
"""An accusation is said again before."""
MAX_ACCUSED = 4
"""Epochs that a worker may have a part in stalling before it is left out, whatever excuses it."""
MAX_RESTARTS = 8
"""Epochs that are begun anew on the word of one worker."""
MAX_FRESH_STARTS = 3
"""Epochs of a leader that need not get further than those before it, as long as nobody dies."""
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


def heights(parents: Mapping[int, int | None]) -> dict[int, int]:
    """How many levels there are below each member of a :func:`tree`.

    Example:
        >>> heights({0: None, 1: 0, 2: 0, 3: 1})
        {0: 2, 1: 1, 2: 0, 3: 0}
    """
    found = dict.fromkeys(parents, 0)
    for rank in reversed(found):  # whoever is below comes later
        above = parents[rank]
        if above is not None:
            found[above] = max(found[above], found[rank] + 1)
    return found


def pass_over_after(num_members: int) -> int:
    """Idle ticks after which a leader of so many is passed over.

    More than it needs to give up twice, which is enough for one worker that stalls.
    """
    num_levels = num_members.bit_length() - 1
    return ACCUSE_AFTER * (3 + num_levels)


@dataclass
class _Child:
    """What a member of an epoch has from one of its children in the tree."""

    patience: int
    """For how many ticks it may be quiet."""
    landed: int = 0
    """Chunks of its partial sums that have been added."""
    distance: float | None = None
    has_committed: bool = False
    quiet_ticks: int = 0
    """How long something has been awaited from it since it last got on."""


@dataclass
class _Accusation:
    """What a parent says of a child: how often in a row, and at which tick last."""

    num_times: int
    last: int
    is_heard: bool


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
    source_quiet_ticks: int = 0
    accused: dict[tuple[int, int], _Accusation] = field(default_factory=dict)
    """At the leader, by parent and child."""

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
        self._view: dict[int, Member] = {}
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
        # Who stalls.
        self._ticks = 0
        self._vain_ticks = 0  # since anything landed here
        self._left_out: set[Process] = set()
        self._num_given_up = 0
        self._suspicion: Counter[int] = Counter()
        self._restarts: Counter[int] = Counter()
        self._watched_epoch: Epoch | None = None
        self._fresh_starts: defaultdict[int, int] = defaultdict(lambda: MAX_FRESH_STARTS)
        self._most_gained: Counter[int] = Counter()  # in an epoch of a leader
        self._waited_ticks: Counter[int] = Counter()  # of a leader, for those that are not done
        self._idle_ticks: Counter[int] = Counter()  # of a leader, since there was more than that

    # --- inputs ----------------------------------------------------------------------------

    def missing(self) -> tuple[int, ...]:
        """The live workers that are not done yet: who is waited for before anything begins."""
        return tuple(member.rank for member in self._view.values() if member.status is Status.ALIVE)

    @property
    def left_out(self) -> tuple[int, ...]:
        """The workers that live and are done, and gave this one nothing for too long."""
        return tuple(sorted(rank for rank, _ in self._left_out))

    def review(self, members: Iterable[Member]) -> Actions:
        """The membership view changed, be it that this worker itself is done now."""
        before, self._view = self._view, {member.rank: member for member in members}
        if any(not member.is_live and before[rank].is_live for rank, member in self._view.items()
               if rank in before):  # fmt: skip
            self._fresh_starts.clear()
        self._offered = {
            process: begin for process, begin in self._offered.items() if process in self._done()
        }
        return self._settle()

    def receive(self, peer: int, message: ConsolidationMessage) -> Actions:
        """A message arrived from ``peer``.

        Raises:
            ProtocolError: it breaks the rules.
        """
        if self._is_left_out(peer):
            return []
        if isinstance(message, BeginEpoch | NewerEpoch):
            known = 0 if self.highest is None else self.highest.number
            if message.epoch.number > known + MAX_LEAP:
                raise ProtocolError(f"epoch {message.epoch.number} follows none, after {known}")
            if self._hear_of(message.epoch):
                self._note_restart(peer)
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
        self._ticks += 1
        self._vain_ticks += 1
        if self._is_taking_part:
            self._watch_leader(moving)
            attempt = self._attempt
            if attempt is not None:
                if not attempt.is_refused:
                    if attempt.results_told < self._num_results:
                        self._pull_results(attempt)
                    self._watch_below(attempt, heard, moving)
                if attempt is self._attempt and self._vain_ticks % REPEAT_AFTER == 0:
                    others = {attempt.parent, attempt.source, attempt.epoch.leader}
                    if attempt.parent is None:
                        others.update(rank for rank, _ in attempt.begin.members)
                    for peer in sorted({*attempt.children, *others} - {None, self.rank}, key=str):
                        assert peer is not None
                        self._repeat(attempt, peer)
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
            child = attempt.children[peer]
            child.landed += 1
            child.quiet_ticks = self._vain_ticks = 0
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
            attempt.source_quiet_ticks = self._vain_ticks = 0
        return self._settle()

    def distance_measured(self, origin: Epoch, squared_distance: float) -> Actions:
        """The answer to :class:`MeasureDistance`."""
        if origin == self._origin and self._is_measuring:
            self._squared_distance = squared_distance
        return self._settle()

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
        """Who is to be averaged, the one who leads first."""
        done = ((rank, self._view[rank].process_id) for rank in sorted(self._view)
                if self._view[rank].status is Status.DONE)  # fmt: skip
        return tuple(process for process in done if process not in self._left_out)

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
        members, attempt = self._done(), self._attempt
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
        others.sort(key=lambda process: (self._suspicion[process[0]], process))
        begin = BeginEpoch(
            epoch,
            (own, *others),
            average,
            has_suspects=any(self._suspicion[rank] for rank, _ in others),
            left_out=tuple(sorted(self._left_out)),
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
        if (peer == leader or is_relayed) and begin.members[0] in self._done():
            self._offered[begin.members[0]] = begin

    def _join(self, begin: BeginEpoch, source: int | None) -> None:
        epoch = begin.epoch
        if (self.rank, self.process_id) not in begin.members or begin.members[0] in self._left_out:
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
        levels = heights(parents)
        children = {
            rank: _Child(patience=ACCUSE_AFTER * (1 + levels[rank]))
            for rank, above in parents.items()
            if above == self.rank
        }
        attempt = _Attempt(begin, average, parent, children, source if parent is None else parent)
        before, self._attempt = self._attempt, attempt
        if before is not None and before.begin.members == begin.members:
            # Begun anew by the word of a member, which must not win time by it.
            attempt.accused = before.accused
            for rank, child in before.children.items():
                if rank in children:
                    children[rank].quiet_ticks = child.quiet_ticks
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
            attempt.children[peer].quiet_ticks = 0
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

    # --- who stalls ------------------------------------------------------------------------

    def _is_left_out(self, rank: int) -> bool:
        member = self._view.get(rank)
        return member is not None and (rank, member.process_id) in self._left_out

    def _leave_out(self, rank: int) -> None:
        if rank in self._view and rank != self.rank:
            self._left_out.add((rank, self._view[rank].process_id))

    def _note_restart(self, peer: int) -> None:
        """What ``peer`` said has this leader begin anew."""
        if self._attempt is not None and self._attempt.parent is None:
            self._restarts[peer] += 1
            if self._restarts[peer] > MAX_RESTARTS:
                self._leave_out(peer)

    def _watch_leader(self, moving: Collection[int]) -> None:
        """Pass over a leader whose epochs bring this member no further than earlier ones did.

        While the epoch under way gets on, whoever leads it, nobody is passed over.
        """
        members, attempt = self._done(), self._attempt
        leader = members[0][0]
        if leader == self.rank:
            return
        if attempt is not None:
            led_by = attempt.epoch.leader
            # Who has begun anew begins from nothing, but not for ever.
            if self._watched_epoch != attempt.epoch and self._fresh_starts[led_by] > 0:
                self._fresh_starts[led_by] -= 1
                self._most_gained[led_by] = 0
            self._watched_epoch = attempt.epoch
            # Chunks, and bytes of the next one: anything else is said in no time.
            gained = self._num_results + sum(child.landed for child in attempt.children.values())
            around = {*attempt.children, attempt.parent, attempt.source}
            moves = not around.isdisjoint(moving) and gained >= self._most_gained[led_by]
            if moves or gained > self._most_gained[led_by]:
                self._most_gained[led_by] = gained
                self._idle_ticks.clear()
                return
        if (attempt is None or attempt.epoch.leader != leader) and self.missing():
            self._waited_ticks[leader] += 1
            if self._waited_ticks[leader] <= self.wait_ticks:
                return  # it waits for them too, since it is done itself
        self._idle_ticks[leader] += 1
        if self._idle_ticks[leader] >= pass_over_after(len(members)):
            self._leave_out(leader)

    def _awaits(self, attempt: _Attempt, rank: int, child: _Child) -> bool:
        """Whether it is the turn of ``child``, whose rank is ``rank``, to say or send something."""
        if attempt.is_committed:
            return not child.has_committed
        if self._held is not None:
            return child.distance is None
        return attempt.computes and child.landed < self._granted(attempt, rank)

    def _watch_below(
        self, attempt: _Attempt, heard: Collection[int], moving: Collection[int]
    ) -> None:
        """Count how long children are waited for; accuse them, or as the leader give up."""
        for rank, child in attempt.children.items():
            child.quiet_ticks += self._awaits(attempt, rank, child)
            if rank in moving:
                child.quiet_ticks = 0
            if child.quiet_ticks < child.patience:
                attempt.accused.pop((self.rank, rank), None)
                continue
            if (child.quiet_ticks - child.patience) % REPEAT_AFTER == 0:
                if attempt.parent is None:
                    self._note_accusation(attempt, self.rank, rank, rank in heard)
                else:
                    self._say(attempt.epoch.leader, Accuse(attempt.epoch, rank, rank in heard))
        if attempt.parent is not None:
            return
        if attempt.source is not None and self._num_results < self.total_chunks:
            attempt.source_quiet_ticks += 1
            if attempt.source in moving:
                attempt.source_quiet_ticks = 0
            if attempt.source_quiet_ticks >= GIVE_UP_AFTER:
                self._leave_out(attempt.source)
        # Each time that it did not help the leader is more patient.
        num_times = 2 << min(5, max(0, self._num_given_up - 1))
        if any(each.num_times >= num_times for each in self._standing(attempt).values()):
            self._give_up(attempt)

    def _note_accusation(self, attempt: _Attempt, parent: int, child: int, is_heard: bool) -> None:
        before = self._standing(attempt).get((parent, child))
        num_times = 1 if before is None else before.num_times + 1
        attempt.accused[parent, child] = _Accusation(num_times, self._ticks, is_heard)

    def _standing(self, attempt: _Attempt) -> dict[tuple[int, int], _Accusation]:
        """What has been said of late."""
        return {
            pair: each
            for pair, each in attempt.accused.items()
            if self._ticks - each.last < FRESH_FOR
        }

    def _give_up(self, attempt: _Attempt) -> None:
        """Begin anew, with those that may be to blame as leaves, or without them.

        Of all who are accused those that accuse nobody themselves count: the others wait for them.
        It may be the accuser that lies, or a bad link between the two. So both are leaves of the
        next tree, where they have no child to accuse. A leaf waits for nobody, and has no excuse.
        """
        self._num_given_up += 1
        fresh = self._standing(attempt)
        inner = set(tree(attempt.begin).values())
        suspicion = Counter(self._suspicion)
        for (parent, child), accusation in fresh.items():
            if any(accuser == child for accuser, _ in fresh):
                continue
            self._suspicion.update({parent, child} - {self.rank})
            has_excuse = child in inner or not accusation.is_heard
            is_certain = parent == self.rank or suspicion[child] > 0
            if (is_certain and not has_excuse) or self._suspicion[child] >= MAX_ACCUSED:
                self._leave_out(child)
        for waited in attempt.children.values():
            waited.quiet_ticks = 0
        attempt.accused = {}
        self._begin(self._done())

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
                    self._note_restart(peer)
            case Accuse(child=accused, is_heard=is_heard) if attempt.parent is None:
                if tree(attempt.begin).get(accused) == peer:
                    self._note_accusation(attempt, peer, accused, is_heard)
            case PullPartials(start=start, stop=stop) if peer == attempt.parent:
                if attempt.next_partial is None:
                    attempt.next_partial = start
                attempt.stop_partial = max(attempt.stop_partial, stop)
            case CommitEpoch(consensus_distance=value) if peer == attempt.parent:
                self._commit(attempt, value)
            case Distance(squared_distance=value) if child is not None:
                child.distance, child.quiet_ticks = value, 0
            case Committed() if child is not None:
                child.has_committed, child.quiet_ticks = True, 0
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
                if set(self._done()) <= set(attempt.begin.members):
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
        if begin is not None and {*begin.members, *begin.left_out}.issuperset(self._done()):
            self._release(begin)

    def _release(self, begin: BeginEpoch) -> None:
        for child, above in tree(begin).items():
            if above == self.rank:
                self._say(child, Release(begin.epoch))
        self.is_finished = True
        self._actions.append(Finished())
