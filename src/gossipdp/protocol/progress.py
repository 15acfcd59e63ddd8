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


class ProgressEntry(
    msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True
):
    """The samples and gradient steps of one life of a worker."""

    rank: Natural
    incarnation: Natural
    process_id: Natural
    samples: Natural
    steps: Natural


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
        self._own_lives = [self._own]
        self._entries: dict[Life, ProgressEntry] = {}
        self._changed_at: dict[Life, int] = {}
        self._by_version: dict[int, ProgressEntry] = {}  # in ascending order of version

    def add(self, samples: int, steps: int = 1) -> None:
        """Count work of this worker's current life."""
        if samples < 0 or steps < 0:
            raise ValueError(f"progress only grows: got samples={samples}, steps={steps}")
        known = self._entries.get(self._own)
        own = known or ProgressEntry(*self._own, 0, 0)
        entry = ProgressEntry(*self._own, own.samples + samples, own.steps + steps)
        self._store(self._own, entry, known)

    @property
    def others_samples(self) -> int:
        """Samples of all lives but those of this process, of which it has one or, renewed, more."""
        own = (self._entries.get(life) for life in self._own_lives)
        return self.total_samples - sum(entry.samples for entry in own if entry)

    def renew(self, incarnation: int) -> None:
        """Go on counting under a higher incarnation, from zero; what was counted stays."""
        rank, previous, process_id = self._own
        if incarnation < previous:
            raise ValueError(f"an incarnation only rises: from {previous} to {incarnation}?")
        self._own = (rank, incarnation, process_id)
        if incarnation > previous:
            self._own_lives.append(self._own)

    def merge(self, entry: ProgressEntry) -> bool:
        """Take in what another worker knows; return whether this view changed."""
        return self.merge_all((entry,))

    def merge_all(self, entries: Iterable[ProgressEntry]) -> bool:
        """Take in several entries; return whether any changed this view."""
        before = self.version
        for entry in entries:
            life = (entry.rank, entry.incarnation, entry.process_id)
            known = self._entries.get(life)
            if known is not None:
                # The first is the usual case where workers share memory, as in the simulator.
                if known is entry:
                    continue
                if entry.samples <= known.samples and entry.steps <= known.steps:
                    continue
                if entry.samples < known.samples or entry.steps < known.steps:
                    samples = max(known.samples, entry.samples)
                    entry = ProgressEntry(*life, samples, max(known.steps, entry.steps))
            self._store(life, entry, known)
        return self.version > before

    def news(self, since: int = 0) -> tuple[tuple[ProgressEntry, ...], int]:
        """The entries changed after version ``since``, and the version that they bring up to."""
        news: list[ProgressEntry] = []
        for version, entry in reversed(self._by_version.items()):
            if version <= since:
                break
            news.append(entry)
        news.sort()
        return tuple(news), self.version

    def by_rank(self) -> dict[int, tuple[int, int]]:
        """Samples and gradient steps of every rank over all its lives.

        Any thread may call it: the entries are copied in one step, and none ever changes.
        """
        totals: dict[int, tuple[int, int]] = {}
        for entry in list(self._entries.values()):
            samples, steps = totals.get(entry.rank, (0, 0))
            totals[entry.rank] = (samples + entry.samples, steps + entry.steps)
        return totals

    def worker_steps(self, rank: int) -> int:
        """Gradient steps of one rank over all its lives."""
        return sum(entry.steps for entry in self._entries.values() if entry.rank == rank)

    def worker_samples(self, rank: int) -> int:
        """Samples of one rank over all its lives."""
        return sum(entry.samples for entry in self._entries.values() if entry.rank == rank)

    def _store(self, life: Life, entry: ProgressEntry, known: ProgressEntry | None) -> None:
        """Put ``entry`` in the place of ``known``."""
        if known is None:
            self.total_samples += entry.samples
            self.total_steps += entry.steps
        else:
            self.total_samples += entry.samples - known.samples
            self.total_steps += entry.steps - known.steps
            del self._by_version[self._changed_at[life]]
        self.version += 1
        self._entries[life] = self._by_version[self.version] = entry
        self._changed_at[life] = self.version
