"""One sum over a tree, the common part of ``consolidate()`` and ``averaged()``.

The members form a binary tree (:func:`tree`). For each chunk a member adds the partial sums of its
children and then its own values, own + (left + right), and sends the sum to its parent; the root
divides. So the bits do not depend on which child is quicker. A member reads its own
values of a chunk when it sends the sum of that chunk: there is no pass over the model before.

*Credit.* A parent says up to which chunk a child may send, never more than ``WINDOW`` beyond those
that have landed. So no member holds or computes more than a few chunks at once, whatever the size
of the model, and the chunks that are asked for again after a lost link are still there.

*Stalling.* Only payload of this very sum counts, and words of the protocol that bring it further:
never heartbeats, never other bytes of the link. A member that sees payload move says so to its
parent and children with each tick (``Progressed``), and they pass it on: so one slow link is no
reason to accuse those above it. If a child's turn has come and it brings nothing for
``STALLED_AFTER`` ticks, its parent names it to the root. The root judges by :class:`Blame`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gossipdp.protocol.actions import DataAction, FinishChunk, Send, SendPartial
from gossipdp.protocol.messages import (
    AverageMessage,
    ConsolidationMessage,
    Epoch,
    Progressed,
    PullPartials,
    ReductionMessage,
    Stalled,
)

WINDOW = 4
"""Chunks by which a child may be ahead of its parent; also of a result on its way down."""
TICKS_PER_TIMEOUT = 4
"""Those below are in ticks."""
STALLED_AFTER = 6
"""A child whose turn it is, and that brings nothing for so long, is named to the root."""
REPEAT_AFTER = 4
"""Words without an answer are repeated after so long."""
GRACE = 4
"""The root waits for accusations from elsewhere, which began at about the same time."""
RIPE_AFTER = 2
"""An accusation counts after so long: the accused may itself have accused another worker."""
ABANDONED_AFTER = 24
"""A member forgets a sum after so long without movement: its root must have given it up."""

ReductionAction: TypeAlias = (
    Send[ReductionMessage] | Send[ConsolidationMessage] | Send[AverageMessage] | DataAction
)


def tree(ranks: Sequence[int], *, has_suspects: bool = False) -> dict[int, int | None]:
    """Return the parent of each member, in the order of the tree; None for the root.

    It is the binary heap over the members in their order. If some of them, the last ones, are
    suspect, the root has one child, with the heap below it, so there is a way round any bad link.
    """
    root, *others = ranks
    parents: dict[int, int | None] = {root: None}
    if has_suspects and others:
        parents[others[0]] = root
        return parents | {rank: others[i // 2] for i, rank in enumerate(others[1:])}
    return parents | {rank: ranks[i // 2] for i, rank in enumerate(others)}


@dataclass
class _Child:
    """A parent's state of one child."""

    landed: int = 0
    """Chunks of its partial sums that have been added."""
    stop: int = 0
    """It may send the chunks below this one."""
    count: int = 0
    """The number in its last ``Progressed``."""
    quiet_ticks: int = 0


@dataclass(eq=False)
class Reduction:
    """One sum as one of its members sees it; a new attempt is a new object.

    Args:
        parents: the tree, of all members.
        num_chunks: chunks that are summed; 0 to spread a result at hand.
        actions: the list to which this appends.
        blame: only at the root.
        divisor: the root divides by it; None: not known yet.
        gives: whether this worker adds values of its own.

    Attributes:
        num_finished: at the root, the chunks whose result is complete.
        progress: ticks in which payload of the sum moved: at the root anywhere, elsewhere in the
            subtree.
    """

    epoch: Epoch
    rank: int
    parents: Mapping[int, int | None]
    num_chunks: int
    actions: list[ReductionAction]
    blame: Blame | None = None
    divisor: int | None = None
    gives: bool = True

    def __post_init__(self) -> None:
        self.parent = self.parents[self.rank]
        self.children = {
            child: _Child() for child, above in self.parents.items() if above == self.rank
        }
        self.num_finished = 0
        self.progress = 0
        self._granted = 0
        self._next: int | None = None
        """The next chunk to send to the parent, or to finish; None until it asked on this link."""
        self._parent_count = 0
        self._moved: set[int] = set()
        """The peers that have advanced this sum since the last tick."""

    # --- inputs ----------------------------------------------------------------------------

    def advance(self) -> None:
        """Ask the children for as many chunks as there is room for; pass on whole sums."""
        if self.parent is None:
            self._granted = min(self.num_chunks, self.num_finished + WINDOW)
            self._next = self._next or 0
        for rank, child in self.children.items():
            if self._granted > child.stop:
                child.stop = self._granted
                self._pull(rank, child)
        num_whole = min((c.landed for c in self.children.values()), default=self._granted)
        if self._next is None or (self.parent is None and self.divisor is None):
            return
        for chunk in range(self._next, num_whole):
            if self.parent is not None:
                self.actions.append(SendPartial(self.parent, self.epoch, chunk))
            elif self.divisor is not None:
                self.actions.append(FinishChunk(self.epoch, chunk, self.divisor))
        self._next = max(self._next, num_whole)

    def receive(self, peer: int, message: ReductionMessage) -> None:
        """Take in a message of another member of this sum."""
        match message:
            case PullPartials(start=start, stop=stop) if peer == self.parent:
                self._next = start if self._next is None else self._next
                self._granted = max(self._granted, min(stop, self.num_chunks))
                self.advance()
            case Progressed(count=count):  # below a child, or anywhere by a parent's word
                if peer == self.parent and count > self._parent_count:
                    self._parent_count = count
                    self.moved(peer)
                elif peer in self.children and count > self.children[peer].count:
                    self.children[peer].count = count
                    self.moved(peer)
            case Stalled(rank=rank) if self.blame is not None:
                is_its_own = rank == peer and peer in self.parents
                if is_its_own or self.parents.get(rank) == peer:
                    self.blame.said(peer, message)
            case _:  # from a worker at another place in this tree
                pass

    def accepts(self, peer: int, chunk: int) -> bool:
        """Return whether this Partial frame is the next one expected from ``peer``."""
        child = self.children.get(peer)
        return child is not None and child.landed == chunk < child.stop

    def landed(self, peer: int, chunk: int) -> bool:
        """Count a partial sum of ``peer`` that was added; return whether it was accepted."""
        if not self.accepts(peer, chunk):
            return False
        child = self.children[peer]
        child.landed += 1
        self.moved(peer)
        self.advance()
        if child.landed == self.num_chunks:
            self._pull(peer, child)  # so that it knows that all of it has arrived
        return True

    def finished(self, chunk: int) -> None:
        """Count a chunk of the result: the root's sum of it is divided."""
        assert chunk == self.num_finished
        self.num_finished += 1
        self.moved(self.rank)
        self.advance()

    def moved(self, peer: int) -> None:
        """Note that ``peer`` has advanced this sum."""
        self._moved.add(peer)

    def link_lost(self, peer: int) -> None:
        """Wait for a parent to say where to go on: chunks on their way to it are lost."""
        if peer == self.parent:
            self._next = None

    def repeat(self, peer: int) -> None:
        """Repeat to ``peer`` the request that it may have missed."""
        child = self.children.get(peer)
        if child is not None and self.awaits(peer):
            self._pull(peer, child)

    def awaits(self, child: int) -> bool:
        """Return whether it is the turn of this child to send a partial sum."""
        return self.children[child].landed < self.children[child].stop

    # --- at each tick ----------------------------------------------------------------------

    def tick(
        self, moving: Collection[int], awaited: Collection[int], heard: Collection[int]
    ) -> bool:
        """Count how long children give nothing; name them; pass on that payload moves.

        Args:
            moving: peers with which payload of this sum was exchanged since the last tick.
            awaited: the children whose turn it is.
            heard: peers whose links show life.

        Returns:
            Whether the sum gets on, here or, on the parent's word, elsewhere.
        """
        for peer in [*self.children, self.parent]:
            if peer is not None and peer in moving:
                self.moved(peer)
        is_below = not self._moved <= {self.parent}
        for rank, child in self.children.items():
            child.quiet_ticks = 0 if rank in self._moved else child.quiet_ticks + (rank in awaited)
            late_ticks = child.quiet_ticks - STALLED_AFTER
            if late_ticks >= 0 and late_ticks % REPEAT_AFTER == 0:
                seconds = f"{child.quiet_ticks / TICKS_PER_TIMEOUT:g} time-outs"
                reason = f"worker {self.rank} had nothing of it for {seconds}"
                self.accuse(rank, reason, is_heard=rank in heard)
        if is_below:
            self.progress += 1
            if self.parent is not None:
                self._say(self.parent, Progressed(self.epoch, self.progress))
        of_all = self.progress if self.parent is None else self._parent_count
        if is_below or self._moved:
            for rank in self.children:
                self._say(rank, Progressed(self.epoch, of_all))
        gets_on = bool(self._moved)
        self._moved.clear()
        return gets_on

    def accuse(self, rank: int, reason: str, *, is_heard: bool = True) -> None:
        """Name ``rank`` to the root: it gives nothing."""
        said = Stalled(self.epoch, rank, is_heard, reason)
        if self.blame is not None:
            self.blame.said(self.rank, said)
        else:
            self._say(self.epoch.leader, said)

    def _pull(self, rank: int, child: _Child) -> None:
        self._say(rank, PullPartials(self.epoch, child.landed, child.stop))

    def _say(self, peer: int, message: ReductionMessage) -> None:
        self.actions.append(Send(peer, message))


class Blame:
    """The root's judgement on members that give nothing, from sum to sum.

    The fault may lie with the child, its accuser, or the link between them. So both are *suspect*:
    in the next tree they come last, where they have no child to accuse and another parent. A
    suspect that stalls again is left out. A child is left out at once if the root itself awaits and
    hears it; so is a member that accuses itself.
    """

    def __init__(self, rank: int) -> None:
        self.suspects: set[int] = set()
        self._rank = rank
        self._tick = 0
        self._said: dict[tuple[int, int], tuple[int, Stalled]] = {}  # with the tick

    def begin(self, ranks: Collection[int]) -> tuple[list[int], bool]:
        """Begin a new attempt, for which accusations of an earlier one do not count.

        Returns:
            The members below the root in the order of their tree, the suspects last, and whether
            any of them is suspect.
        """
        self._said.clear()
        order = sorted(ranks, key=lambda rank: (rank in self.suspects, rank))
        return order, not self.suspects.isdisjoint(ranks)

    def said(self, accuser: int, message: Stalled) -> None:
        """Note an accusation; ``accuser`` is the parent of the accused, or the accused itself."""
        self._said.setdefault((accuser, message.rank), (self._tick, message))

    def tick(self) -> dict[int, str] | None:
        """Count time; return the members to leave out of a new attempt, which must follow, and why.

        None: no accusation is old enough, so the attempt goes on.
        """
        self._tick += 1
        said = self._said
        if all(self._tick - since < GRACE for since, _ in said.values()):
            return None
        ripe = {
            pair: message
            for pair, (since, message) in said.items()
            if self._tick - since >= RIPE_AFTER
        }
        suspects, left_out = set(self.suspects), {}
        accusers = {accuser for accuser, rank in said if accuser != rank}
        for (accuser, rank), message in ripe.items():
            if accuser == rank or (
                rank not in accusers
                and (rank in suspects or (accuser == self._rank and message.is_heard))
            ):
                left_out[rank] = message.reason
            elif rank not in accusers:  # else it waits for another member itself
                self.suspects |= {accuser, rank} - {self._rank}
        if not left_out and self.suspects == suspects:  # or it would restart without end
            self.suspects |= {rank for _, rank in ripe}
        return left_out
