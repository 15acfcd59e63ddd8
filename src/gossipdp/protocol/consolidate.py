"""Termination: every live worker ends with the same bits, the mean of all."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """The name of one attempt to consolidate; ``incarnation`` is its leader's.

    Totally ordered by ``order``: the higher number wins, then the lower leader, then the leader's
    later life.
    """

    number: Count
    leader: Count
    incarnation: Count

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts epochs: the greatest wins."""
        return (self.number, -self.leader, self.incarnation)


Process = tuple[Count, Count]
"""(rank, process id): what holds inputs and promises, whatever its incarnation."""


class Average(msgspec.Struct, frozen=True, array_like=True):
    """One result: the mean over the ``num_members`` members of the epoch that computed it.

    ``consensus_distance`` is None until the result was committed.
    """

    origin: Epoch
    num_members: Annotated[int, msgspec.Meta(ge=1)]
    consensus_distance: float | None


class BeginEpoch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Down the tree: join this epoch. With ``average``, take that result; without, compute one."""

    epoch: Epoch
    members: tuple[Process, ...]
    average: Average | None


class NewerEpoch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To whoever leads or should lead: I am in this epoch and follow none that is lower."""

    epoch: Epoch


class Held(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the leader of ``epoch``: I hold this result in full, accepted in epoch ``accepted``."""

    epoch: Epoch
    accepted: Epoch
    average: Average


class PullPartials(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a child: send your partial sums of the chunks from ``start`` up to before ``stop``."""

    epoch: Epoch
    start: Count
    stop: Count


class PullResults(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To a parent or holder: send the chunks of this result, from ``start`` to the last."""

    origin: Epoch
    start: Count


class Distance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Up the tree: all below me hold the result; the sum of their squared distances to it."""

    epoch: Epoch
    squared_distance: float


class CommitEpoch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Down the tree: every member holds the result; it is final."""

    epoch: Epoch
    consensus_distance: float


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Up the tree: all below me have committed."""

    epoch: Epoch


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Down the tree: all have committed; leave."""

    epoch: Epoch


ConsolidationMessage = (
    BeginEpoch
    | NewerEpoch
    | Held
    | PullPartials
    | PullResults
    | Distance
    | CommitEpoch
    | Committed
    | Release
)
