"""Speeds from counts that are noted now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_COUNTS = 512

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class _Count:
    at_s: float
    samples: int
    bytes_sent: int | None


class Speeds(Generic[_Key]):
    """Remembers the latest counts of each key, and says how fast they grew.

    Example:
        >>> speeds = Speeds[str]()
        >>> for at_s in range(4):
        ...     speeds.note("one", at_s, samples=30 * at_s, bytes_sent=7 * at_s)
        >>> speeds.since("one", 1.0)
        (30.0, 7.0)
    """

    def __init__(self) -> None:
        self._counts: dict[_Key, deque[_Count]] = {}

    def note(self, key: _Key, at_s: float, samples: int, bytes_sent: int | None = None) -> None:
        """What had been counted at a time; counts that fell are another process's, or link's."""
        count = _Count(at_s, samples, bytes_sent)
        counts = self._counts.setdefault(key, deque(maxlen=MAX_COUNTS))
        if counts and _fell(counts[-1], count):
            counts.clear()
        counts.append(count)

    def since(self, key: _Key, from_s: float) -> tuple[float | None, float | None]:
        """Samples and bytes a second from a time on, or between the last two counts if later.

        Bytes count as far back as they were known without a break.
        """
        counts = list(self._counts.get(key, ()))
        samples = _speed([(count.at_s, count.samples) for count in counts], from_s)
        known: list[tuple[float, int]] = []
        for count in reversed(counts):
            if count.bytes_sent is None:
                break
            known.append((count.at_s, count.bytes_sent))
        return None if samples is None else max(0.0, samples), _speed(known[::-1], from_s)


def _speed(counted: list[tuple[float, int]], from_s: float) -> float | None:
    if len(counted) < 2:
        return None
    recent = [each for each in counted[:-1] if each[0] >= from_s]
    (first_s, first), (last_s, last) = recent[0] if recent else counted[-2], counted[-1]
    return (last - first) / (last_s - first_s) if last_s > first_s else None


def _fell(before: _Count, after: _Count) -> bool:
    if before.bytes_sent is not None and after.bytes_sent is not None:
        return after.bytes_sent < before.bytes_sent or after.samples < before.samples
    return False
