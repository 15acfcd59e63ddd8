"""Who takes part in consolidation: all who are done, but for those that bring it no further.

A live worker may be done, beat, and hold all others up. Only progress of an epoch counts: its next
chunk, distance or acknowledgement, and bytes on the link that carries them, since on a slow link
one chunk may take longer than the time-out. A member tells the leader of a child that made none for
two time-outs for each level of the tree that its next word has to come up through. The leader then
begins anew with both of them as leaves: it may be the child, the one who accuses it, or the link
between them. A suspect leaf that stalls again is *left out*: the epochs that follow are without it.
A leader under whom nothing moved here for six time-outs and two for each level of the tree is
passed over: left out by whoever waits for it, so that the next lowest leads. A worker that was left
out by mistake consolidates by itself once the others have left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import Epoch, Process

TICKS_PER_TIMEOUT = 4
"""How often time is counted. The next five are in these ticks."""
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


def heights(parents: Mapping[int, int | None]) -> dict[int, int]:
    """How many levels there are below each member of a tree, given by parents, the root first.

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
class _Wait:
    """For a child in the tree: for how many ticks it may be quiet, and for how long it was."""

    patience: int
    quiet_ticks: int = 0


@dataclass
class _Accusation:
    """What a parent says of a child: how often in a row, and at which tick last."""

    num_times: int
    last: int
    is_heard: bool


class Participants:
    """Who is to be averaged, as one worker sees it.

    Args:
        rank, process_id: this worker.

    Attributes:
        left_out: who is done, and gave this worker nothing for too long.
    """

    def __init__(self, rank: int, process_id: int) -> None:
        self.rank = rank
        self.process_id = process_id
        self.left_out: set[Process] = set()
        self._view: dict[int, Member] = {}
        self._ticks = 0
        # In the epoch under way.
        self._members: tuple[Process, ...] = ()
        self._parents: Mapping[int, int | None] = {}
        self._children: dict[int, _Wait] = {}
        self._source_quiet_ticks = 0
        self._accused: dict[tuple[int, int], _Accusation] = {}  # at the leader, (parent, child)
        # What this worker has seen as a leader.
        self._num_given_up = 0
        self._suspicion: Counter[int] = Counter()
        self._restarts: Counter[int] = Counter()
        # What it has seen of leaders.
        self._watched_epoch: Epoch | None = None
        self._fresh_starts: defaultdict[int, int] = defaultdict(lambda: MAX_FRESH_STARTS)
        self._most_gained: Counter[int] = Counter()  # in an epoch
        self._waited_ticks: Counter[int] = Counter()  # for those that are not done
        self._idle_ticks: Counter[int] = Counter()  # since there was more than that

    def review(self, members: Iterable[Member]) -> None:
        """The membership view changed."""
        before, self._view = self._view, {member.rank: member for member in members}
        known = (before[rank] for rank in before.keys() & self._view.keys())
        if any(member.is_live and not self._view[member.rank].is_live for member in known):
            self._fresh_starts.clear()

    @property
    def includes_self(self) -> bool:
        """Whether this very process is done."""
        own = self._view.get(self.rank)
        return own is not None and (own.process_id, own.status) == (self.process_id, Status.DONE)

    def missing(self) -> tuple[int, ...]:
        """The live workers that are not done yet."""
        return tuple(member.rank for member in self._view.values() if member.status is Status.ALIVE)

    def done(self) -> tuple[Process, ...]:
        """Who is to be averaged, the one who leads first."""
        done = ((rank, self._view[rank].process_id) for rank in sorted(self._view)
                if self._view[rank].status is Status.DONE)  # fmt: skip
        return tuple(process for process in done if process not in self.left_out)

    def is_left_out(self, rank: int) -> bool:
        """Whether the process that has this rank now is left out."""
        member = self._view.get(rank)
        return member is not None and (rank, member.process_id) in self.left_out

    def suspicion(self, rank: int) -> int:
        """In how many epochs given up by this worker ``rank`` had a part."""
        return self._suspicion[rank]

    # --- what happens in an epoch ----------------------------------------------------------

    def joined(self, members: tuple[Process, ...], parents: Mapping[int, int | None]) -> None:
        """An epoch over these members begins; ``parents`` is their tree.

        One over the same as before was begun anew by the word of one of them, which must not win
        time by it.
        """
        before = self._children if members == self._members else {}
        if members != self._members:
            self._accused = {}
        levels = heights(parents)
        self._members, self._parents = members, parents
        self._source_quiet_ticks = 0
        self._children = {
            rank: _Wait(ACCUSE_AFTER * (1 + levels[rank]))
            for rank, above in parents.items()
            if above == self.rank
        }
        for rank in before.keys() & self._children.keys():
            self._children[rank].quiet_ticks = before[rank].quiet_ticks

    def got_on(self, child: int) -> None:
        """``child`` brought the epoch further."""
        self._children[child].quiet_ticks = 0

    def source_got_on(self) -> None:
        """A chunk of a result arrived from whoever sends it."""
        self._source_quiet_ticks = 0

    def restarted_by(self, peer: int) -> None:
        """What ``peer`` said has this leader begin anew."""
        self._restarts[peer] += 1
        if self._restarts[peer] > MAX_RESTARTS:
            self._leave_out(peer)

    def accused_by(self, parent: int, child: int, is_heard: bool) -> None:
        """``parent`` told this leader that its child does not get on."""
        if self._parents.get(child) == parent:
            before = self._standing().get((parent, child))
            num_times = 1 if before is None else before.num_times + 1
            self._accused[parent, child] = _Accusation(num_times, self._ticks, is_heard)

    # --- at each tick ----------------------------------------------------------------------

    def tick(self) -> None:
        """A quarter of the time-out has passed."""
        self._ticks += 1

    def watch_leader(
        self, epoch: Epoch | None, gained: int, *, is_moving: bool, wait_ticks: float
    ) -> None:
        """Pass over a leader whose epochs bring this member no further than earlier ones did.

        While the epoch under way gets on, whoever leads it, nobody is passed over.

        Args:
            epoch: the one under way.
            gained: chunks that it has brought here; anything else is said in no time.
            is_moving: whether bytes of the next one came or left since the last tick.
            wait_ticks: for how long a leader may wait for those that are not done.
        """
        members = self.done()
        leader = members[0][0]
        if leader == self.rank:
            return
        if epoch is not None:
            led_by = epoch.leader
            # Who has begun anew begins from nothing, but not for ever.
            if self._watched_epoch != epoch and self._fresh_starts[led_by] > 0:
                self._fresh_starts[led_by] -= 1
                self._most_gained[led_by] = 0
            self._watched_epoch = epoch
            most = self._most_gained[led_by]
            if gained > most or (is_moving and gained == most):
                self._most_gained[led_by] = gained
                self._idle_ticks.clear()
                return
        if (epoch is None or epoch.leader != leader) and self.missing():
            self._waited_ticks[leader] += 1
            if self._waited_ticks[leader] <= wait_ticks:
                return  # it waits for them too, since it is done itself
        self._idle_ticks[leader] += 1
        if self._idle_ticks[leader] >= pass_over_after(len(members)):
            self._leave_out(leader)

    def watch_children(
        self, awaited: Collection[int], heard: Collection[int], moving: Collection[int]
    ) -> list[tuple[int, bool]]:
        """Count how long each of those ``awaited`` is waited for.

        Returns:
            Whom to accuse to the leader now, with whether it is heard; a leader notes it itself.
        """
        to_accuse = []
        for rank, wait in self._children.items():
            wait.quiet_ticks = 0 if rank in moving else wait.quiet_ticks + (rank in awaited)
            late_ticks = wait.quiet_ticks - wait.patience
            if late_ticks < 0:
                self._accused.pop((self.rank, rank), None)
            elif late_ticks % REPEAT_AFTER == 0:
                to_accuse.append((rank, rank in heard))
        if self._parents[self.rank] is not None:
            return to_accuse
        for rank, is_heard in to_accuse:
            self.accused_by(self.rank, rank, is_heard)
        return []

    def watch_source(self, source: int, moving: Collection[int]) -> None:
        """Leave out who is to send this leader a result, and does not."""
        self._source_quiet_ticks = 0 if source in moving else self._source_quiet_ticks + 1
        if self._source_quiet_ticks >= GIVE_UP_AFTER:
            self._leave_out(source)

    def gives_up(self) -> bool:
        """Whether this leader begins anew: those to blame are to be leaves now, or left out.

        Of all who are accused those that accuse nobody themselves count: the others wait for them.
        It may be the accuser that lies, or a bad link between the two. So both are leaves of the
        next tree, where they have no child to accuse. A leaf waits for nobody, and has no excuse.
        """
        # Each time that it did not help the leader is more patient.
        num_times = 2 << min(5, max(0, self._num_given_up - 1))
        fresh = self._standing()
        if all(each.num_times < num_times for each in fresh.values()):
            return False
        self._num_given_up += 1
        inner = set(self._parents.values())
        suspicion = Counter(self._suspicion)
        for (parent, child), accusation in fresh.items():
            if any(accuser == child for accuser, _ in fresh):
                continue
            self._suspicion.update({parent, child} - {self.rank})
            has_excuse = child in inner or not accusation.is_heard
            is_certain = parent == self.rank or suspicion[child] > 0
            if (is_certain and not has_excuse) or self._suspicion[child] >= MAX_ACCUSED:
                self._leave_out(child)
        for wait in self._children.values():
            wait.quiet_ticks = 0
        self._accused = {}
        return True

    def _standing(self) -> dict[tuple[int, int], _Accusation]:
        """What has been said of late."""
        return {
            pair: each
            for pair, each in self._accused.items()
            if self._ticks - each.last < FRESH_FOR
        }

    def _leave_out(self, rank: int) -> None:
        if rank in self._view and rank != self.rank:
            self.left_out.add((rank, self._view[rank].process_id))
