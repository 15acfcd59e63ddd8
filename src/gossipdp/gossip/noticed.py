"""What one worker notices of the others' lives, for logs and reports: who died, when, who is back.

Worked out from the membership view and the silent links alone, so it is what this worker acts on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gossipdp.links.clock import since_boot_s
from gossipdp.protocol.members import Member, Status

Kind: TypeAlias = Literal["dead", "stopped", "rejoined", "joined"]

MAX_NOTICES = 1000


@dataclass(frozen=True)
class Notice:
    """One thing noticed.

    Attributes:
        rank: of the worker concerned.
        kind: ``dead``: declared dead, here or elsewhere, or replaced by a new process;
            ``stopped``: its link has been silent for the time-out, though it is open;
            ``rejoined``: it takes part again, as a new process or as the old one that was taken
            for dead; ``joined``: it takes part, and was not one of the run's first workers;
        at_s: :func:`~gossipdp.links.clock.since_boot_s`, the same for all of one machine.
        number: of this worker's notices so far, this one included.
    """

    rank: int
    kind: Kind
    at_s: float
    number: int = 0


class Noticed:
    """The notices of one worker, at most ``MAX_NOTICES`` of them, oldest first.

    If there are more, the oldest goes that is not the last word on its worker: a death is never
    forgotten. Written by the gossip thread; :attr:`notices` is replaced whole, and any may read it.

    Args:
        rank: of this worker.
        num_workers: that the run began with.
    """

    def __init__(self, rank: int, num_workers: int) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self.notices: tuple[Notice, ...] = ()
        self._num_noted = 0
        self._version = -1
        self._known: dict[int, Member] = {}
        self._silent: frozenset[int] = frozenset()

    def note(self, rank: int, kind: Kind, now_s: float) -> None:
        """Add one notice."""
        self._num_noted += 1
        notices = [*self.notices, Notice(rank, kind, now_s, self._num_noted)]
        if len(notices) > MAX_NOTICES:
            last = {notice.rank: index for index, notice in enumerate(notices)}
            old = (index for index, notice in enumerate(notices) if last[notice.rank] != index)
            del notices[next(old, 0)]
        self.notices = tuple(notices)

    def look(
        self,
        version: int,
        members: Callable[[], Iterable[Member]],
        silent: Collection[int],
        now_s: float | None = None,
    ) -> None:
        """Note what has changed since the last look.

        Args:
            version: of the membership view; the same one is not looked at twice.
            members: gives all that are known.
            silent: linked peers that have been silent for the time-out.
            now_s: the time.
        """
        now_s = since_boot_s() if now_s is None else now_s
        if silent or self._silent:
            for rank in sorted(set(silent) - self._silent):
                self.note(rank, "stopped", now_s)
            self._silent = frozenset(silent)
        if version == self._version:
            return
        self._version = version
        for member in members():
            before = self._known.get(member.rank)
            if member is before:
                continue
            self._known[member.rank] = member
            if member.rank != self._rank:
                self._compare(before, member, now_s)

    def _compare(self, before: Member | None, member: Member, now_s: float) -> None:
        if member.status is Status.DEAD:
            if before is None or before.status is not Status.DEAD:
                self.note(member.rank, "dead", now_s)
            return
        is_another = before is not None and before.process_id not in (0, member.process_id)
        if is_another and before is not None and before.is_live:
            # Started again so soon that its new life is known before the death is.
            self.note(member.rank, "dead", now_s)
        if not member.is_live:
            return
        if before is None or before.status is Status.JOINING:
            if member.rank >= self._num_workers and member.incarnation == 0:
                self.note(member.rank, "joined", now_s)
            elif member.incarnation > 0:
                self.note(member.rank, "rejoined", now_s)
        elif before.is_over or is_another:
            self.note(member.rank, "rejoined", now_s)
