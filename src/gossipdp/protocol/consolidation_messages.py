"""What the members of a consolidation say to one another; :mod:`.consolidate` says when."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]

Process: TypeAlias = tuple[Natural, Natural]
"""(rank, process id): what holds inputs and keeps promises, whatever its incarnation."""


class _Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of what travels inside messages."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages: a msgpack array whose first item is the class's name."""


class Epoch(_Value, frozen=True):
    """The name of one attempt to consolidate: its leader, the leader's process, and a number.

    ``process_tag`` is the low 32 bits of the leader's process id: an incarnation would not do,
    for two lives that did not know of each other may share one. ``order`` is total: the higher
    number wins, then the lower leader, then the higher tag.
    """

    number: Natural
    leader: Natural
    process_tag: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts epochs; the greatest wins."""
        return (self.number, -self.leader, self.process_tag)


class Average(_Value, frozen=True):
    """A result: the mean over the ``num_members`` members of epoch ``origin``, which names it.

    ``consensus_distance`` is None until it is committed. ``order`` says which of two results
    survives: a committed one, then the one computed later.
    """

    origin: Epoch
    num_members: Annotated[int, msgspec.Meta(ge=1)]
    consensus_distance: float | None

    @property
    def is_committed(self) -> bool:
        """Whether a worker has committed to it."""
        return self.consensus_distance is not None

    @property
    def order(self) -> tuple[bool, tuple[int, int, int]]:
        """Sorts results; the greatest survives."""
        return (self.is_committed, self.origin.order)


class BeginEpoch(_Message, frozen=True):
    """Down the tree: join this epoch. Spread ``average``, or where it is None compute one."""

    epoch: Epoch
    members: tuple[Process, ...]
    average: Average | None

    def __post_init__(self) -> None:
        ranks = [rank for rank, _ in self.members]
        if not ranks or ranks != sorted(set(ranks)) or ranks[0] != self.epoch.leader:
            raise ValueError(
                f"the members of an epoch are sorted, each once, its leader first: got ranks "
                f"{ranks} for leader {self.epoch.leader}"
            )


class NewerEpoch(_Message, frozen=True):
    """To the one who leads, or should: I am in this epoch and follow none below it."""

    epoch: Epoch


class Held(_Message, frozen=True):
    """To the leader of ``epoch``: I do not join, for I hold this result; spread it instead."""

    epoch: Epoch
    average: Average


class PullPartials(_Message, frozen=True):
    """To a child: send your partial sums of the chunks up to before ``stop``.

    ``start`` counts on a new link only: the first chunk that has not arrived.
    """

    epoch: Epoch
    start: Natural
    stop: Natural


class PullResults(_Message, frozen=True):
    """To the parent or a holder: send the chunks of this result from ``start`` to the last."""

    origin: Epoch
    start: Natural


class Distance(_Message, frozen=True):
    """Up the tree: all below hold the result; the sum of their squared distances to it."""

    epoch: Epoch
    squared_distance: float


class CommitEpoch(_Message, frozen=True):
    """Down the tree: every member holds the result; commit to it."""

    epoch: Epoch
    consensus_distance: float


class Committed(_Message, frozen=True):
    """Up the tree: all below have committed."""

    epoch: Epoch


class Release(_Message, frozen=True):
    """Down the tree: all have committed; leave."""

    epoch: Epoch


ConsolidationMessage: TypeAlias = (
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
