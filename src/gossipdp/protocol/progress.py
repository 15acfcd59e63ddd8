"""How much the network has trained: a counter that every worker can add to and that never falls.

A grow-only counter: each life of a worker, named by (rank, incarnation, process id), counts its
own samples and steps, and only that life raises them. Views merge by maximum, entry by entry, so
the order and the number of merges do not matter. An entry is never dropped, whatever becomes of
the worker, so that the totals never fall and never exceed what was really done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]

Life = tuple[int, int, int]
"""One life of a worker: (rank, incarnation, process id)."""


class ProgressEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The samples and gradient steps of one life of a worker."""

    rank: Natural
    incarnation: Natural
    process_id: Natural
    samples: Natural
    steps: Natural

    @property
    def life(self) -> Life:
        """What names this entry."""
        return (self.rank, self.incarnation, self.process_id)


class Progress:
    """The progress of all as one worker knows it, its own counter included.

    ``version`` rises with every change; ``news(since)`` gives the entries that changed after a
    version, which is all that a link needs that was told everything up to then.
    """

    def __init__(self, rank: int, incarnation: int, process_id: int) -> None:
        self.version = 0
        self.total_samples = 0
        self.total_steps = 0
        self._own: Life = (rank, incarnation, process_id)
        self._entries: dict[Life, ProgressEntry] = {}
        self._changed_at: dict[Life, int] = {}

    def add(self, samples: int, steps: int = 1) -> None:
        """Count work of this worker's current life."""
        if samples < 0 or steps < 0:
            raise ValueError(f"progress only grows: got samples={samples}, steps={steps}")
        own = self._entries.get(self._own, ProgressEntry(*self._own, 0, 0))
        self._store(ProgressEntry(*self._own, own.samples + samples, own.steps + steps))

    @property
    def others_samples(self) -> int:
        """Samples of all lives but this worker's current one."""
        own = self._entries.get(self._own)
        return self.total_samples - (own.samples if own else 0)

    def renew(self, incarnation: int) -> None:
        """Go on counting under a higher incarnation, from zero; what was counted stays."""
        rank, previous, process_id = self._own
        if incarnation < previous:
            raise ValueError(f"an incarnation only rises: from {previous} to {incarnation}?")
        self._own = (rank, incarnation, process_id)

    def merge(self, entry: ProgressEntry) -> bool:
        """Take in what another worker knows; return whether this view changed."""
        known = self._entries.get(entry.life)
        if known is None:
            merged = entry
        else:
            merged = ProgressEntry(
                *entry.life, max(known.samples, entry.samples), max(known.steps, entry.steps)
            )
        if merged == known:
            return False
        self._store(merged)
        return True

    def merge_all(self, entries: Iterable[ProgressEntry]) -> bool:
        """Take in several entries; return whether any changed this view."""
        before = self.version
        for entry in entries:
            self.merge(entry)
        return self.version > before

    def news(self, since: int = 0) -> tuple[tuple[ProgressEntry, ...], int]:
        """The entries changed after version ``since``, and the version that they bring up to."""
        changed = (life for life, version in self._changed_at.items() if version > since)
        return tuple(self._entries[life] for life in sorted(changed)), self.version

    def worker_steps(self, rank: int) -> int:
        """Gradient steps of one rank over all its lives."""
        return sum(entry.steps for entry in self._entries.values() if entry.rank == rank)

    def worker_samples(self, rank: int) -> int:
        """Samples of one rank over all its lives."""
        return sum(entry.samples for entry in self._entries.values() if entry.rank == rank)

    def _store(self, entry: ProgressEntry) -> None:
        known = self._entries.get(entry.life)
        self.total_samples += entry.samples - (known.samples if known else 0)
        self.total_steps += entry.steps - (known.steps if known else 0)
        self.version += 1
        self._entries[entry.life] = entry
        self._changed_at[entry.life] = self.version
