"""What a checkpoint says of itself, and which ones are of a life that the run has outlived.

A worker that died long before its run ended left a checkpoint of the point where it died. A run
that resumes from it, or averages it with the others', is thrown back. So each checkpoint says which
lives had ended by then, and one of a life that a newer checkpoint calls ended is passed over.

- A death of the last ``GRACE_S`` says nothing: when a whole run is ended (SIGTERM, a power cut),
  the workers that save last have seen the others die.
- Two halves of a cut network call each other dead; both trained on, and both count.
- A worker taken for dead by mistake, or started anew, goes on under a higher incarnation: what it
  saves then is not of the life that ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from gossipdp.gossip.published import Notice
from gossipdp.protocol.members import Member, ProgressEntry, Status

GRACE_S = 10.0
"""From the first to the last worker of a run that is ended: at most a step, a save, a time-out."""

BEFORE_THIS_RUN = -1
"""In place of an incarnation: the lives that a rank had before its run was last resumed."""

EndedLife = tuple[int, int]
"""A rank, and the highest of its incarnations that have ended."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint says of itself, as JSON in its metadata.

    ``generation`` counts the numbers of workers that the run has had: files of a lower one were
    merged into those of the next. ``step`` numbers this worker's gradient steps and names the
    file; ``steps`` and ``samples`` are what this worker has done itself, in all of its lives.
    ``progress`` holds every life that it knew of, which together make the progress of the run.
    ``run_id`` and ``incarnation`` name the life that saved, and ``ended`` those that it knew to
    have ended; allreduce has but one life a rank.
    """

    rank: int
    world_size: int
    generation: int
    method: str
    step: int
    steps: int
    samples: int
    progress: tuple[ProgressEntry, ...]
    gossipdp: str
    run_id: str = ""
    incarnation: int = 0
    ended: tuple[EndedLife, ...] = ()


def ended_lives(
    members: Iterable[Member], notices: Iterable[Notice], now_s: float
) -> tuple[EndedLife, ...]:
    """Return the lives that ended more than ``GRACE_S`` ago, as one worker knows them.

    Args:
        members: its view.
        notices: what it noticed, oldest first.
        now_s: the time, on the notices' clock.
    """
    died_s = {notice.rank: notice.at_s for notice in notices if notice.kind == "dead"}
    return tuple(
        (member.rank, incarnation)
        for member in members
        if (incarnation := member.incarnation - (member.status is not Status.DEAD)) >= 0
        and now_s - died_s.get(member.rank, -math.inf) >= GRACE_S
    )


def outlived(newest: Mapping[int, Facts]) -> set[int]:
    """Return the ranks whose newest checkpoint is of a life that the run has outlived.

    Args:
        newest: what the newest checkpoint of each rank says of itself.
    """
    return {
        rank
        for rank, facts in newest.items()
        if any(
            _samples(other) > _samples(facts)
            and _is_ended(facts, other)
            # Not where two halves of one run call each other dead.
            and not (facts.run_id == other.run_id and _is_ended(other, facts))
            for other in newest.values()
        )
    }


def _samples(facts: Facts) -> int:
    return sum(entry.samples for entry in facts.progress)


def _is_ended(facts: Facts, other: Facts) -> bool:
    """Whether ``other``, of the same run or one that went on from it, says that its life ended."""
    if facts.run_id != other.run_id:
        return any(rank == facts.rank for rank, _ in other.ended)
    return any(rank == facts.rank and facts.incarnation <= last for rank, last in other.ended)
