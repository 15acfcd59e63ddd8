"""The workers that a consolidation averages: all who are done, but for those left out.

A live worker may be done, send heartbeats, and hold all others up. The root of a sum judges which
worker gives nothing to it (:class:`~gossipdp.protocol.reduction.Blame`). A root under which nothing
moves is *passed over*: those that wait for it leave it out, so the next lowest leads. A worker that
was left out by mistake consolidates by itself once the others have left.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from gossipdp.protocol.members import Member, Status
from gossipdp.protocol.messages import Epoch, Process
from gossipdp.protocol.reduction import TICKS_PER_TIMEOUT

PASS_OVER_AFTER = 16
"""A leader is passed over after these ticks without movement. A live leader would have restarted
sooner, without the worker that stalls."""
MAX_RESTARTS = 8
"""Epochs that a leader restarts on the word of one worker."""
MAX_EPOCHS = 16
"""Epochs that one leader may begin while no worker dies or comes."""


class Participants:
    """The workers to be averaged, as one worker sees them.

    ``left_out``: the processes that are done but gave nothing for too long, and why.
    ``wait_ticks``: for how long a leader may wait for workers that are not done.
    """

    def __init__(self, rank: int, process_id: int) -> None:
        self.rank = rank
        self.process_id = process_id
        self.left_out: dict[Process, str] = {}
        self.wait_ticks = math.inf
        self._view: dict[int, Member] = {}
        self._restarts: Counter[int] = Counter()
        self._watched: Epoch | None = None
        self._num_epochs: Counter[int] = Counter()
        self._waited_ticks: Counter[int] = Counter()  # for those that are not done
        self._idle_ticks: Counter[int] = Counter()

    def review(self, members: Iterable[Member]) -> None:
        before, self._view = self.done(), {member.rank: member for member in members}
        if self.done() != before:
            self._num_epochs.clear()

    @property
    def includes_self(self) -> bool:
        """Return whether this very process is done."""
        own = self._view.get(self.rank)
        return own is not None and (own.process_id, own.status) == (self.process_id, Status.DONE)

    def missing(self) -> tuple[int, ...]:
        """Return the live workers that are not done yet."""
        return tuple(member.rank for member in self._view.values() if member.status is Status.ALIVE)

    def done(self) -> tuple[Process, ...]:
        """Return the processes to be averaged, the leader first."""
        done = ((rank, self._view[rank].process_id) for rank in sorted(self._view)
                if self._view[rank].status is Status.DONE)  # fmt: skip
        return tuple(process for process in done if process not in self.left_out)

    def is_left_out(self, rank: int) -> bool:
        """Return whether the process that has this rank now is left out."""
        member = self._view.get(rank)
        return member is not None and (rank, member.process_id) in self.left_out

    def is_lost(self, rank: int) -> bool:
        """Return whether the process that has this rank now is dead, or left out."""
        member = self._view.get(rank)
        is_dead = member is not None and member.status is Status.DEAD
        return is_dead or self.is_left_out(rank)

    def leave_out(self, rank: int, reason: str) -> None:
        if rank in self._view and rank != self.rank:
            self.left_out[rank, self._view[rank].process_id] = reason

    def restarted_by(self, peer: int) -> None:
        """Note that this leader restarts on the word of ``peer``."""
        self._restarts[peer] += 1
        if self._restarts[peer] > MAX_RESTARTS:
            self.leave_out(peer, f"it made worker {self.rank} restart {MAX_RESTARTS} times")

    def watch_leader(self, epoch: Epoch | None, *, gets_on: bool) -> None:
        """Pass over a leader under which nothing moves, or that restarts without end.

        Args:
            epoch: the epoch under way. While it gets on no leader is passed over.
            gets_on: whether any of it moved since the last tick.
        """
        leader = self.done()[0][0]
        if leader == self.rank:
            return
        if epoch is not None and epoch != self._watched:
            self._watched = epoch
            self._num_epochs[epoch.leader] += 1
            if self._num_epochs[epoch.leader] > MAX_EPOCHS:
                reason = f"it began {MAX_EPOCHS} times, and worker {self.rank} had no result"
                self.leave_out(epoch.leader, reason)
            gets_on = True
        if gets_on:
            self._idle_ticks.clear()
            return
        if (epoch is None or epoch.leader != leader) and self.missing():
            self._waited_ticks[leader] += 1
            if self._waited_ticks[leader] <= self.wait_ticks:
                return  # it waits for them too, since it is done itself
        self._idle_ticks[leader] += 1
        if self._idle_ticks[leader] >= PASS_OVER_AFTER:
            idle = f"{PASS_OVER_AFTER / TICKS_PER_TIMEOUT:g} time-outs"
            self.leave_out(leader, f"it led, and worker {self.rank} had nothing of it for {idle}")
