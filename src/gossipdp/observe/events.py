"""The events of a run, from the notices of all its workers: several workers notice the same event.

News crosses one link with each heartbeat, a tenth of the time-out. So some workers notice a loss
within a second, and those far away on a long ring ten seconds later; but each soon after another.
Two losses of one worker lie further apart: before the second, it was started again and has joined.
"""

import dataclasses
import math
from collections.abc import Iterable

SAME_EVENT_S = 3.0
"""The longest time between two notices of one event, or between the times since when."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A change in the life of worker ``rank``, as its ``witnesses`` noticed it.

    Attributes:
        time_s, last_noticed_s: when the first and the last of them noticed it.
        what: the kind of a :class:`~gossipdp.protocol.actions.Notice`.
        since_s: the earliest time, known to any of them, at which the worker was heard last.
    """

    time_s: float
    rank: int
    what: str
    witnesses: tuple[int, ...] = ()
    last_noticed_s: float = 0.0
    since_s: float | None = None

    @classmethod
    def noticed(
        cls, witness: int, time_s: float, rank: int, what: str, silent_s: float | None
    ) -> "Event":
        """Return the event of one worker's notice; see ``Notice`` for ``silent_s``."""
        since_s = None if silent_s is None else time_s - silent_s
        return cls(time_s, rank, what, (witness,), time_s, since_s)

    @property
    def silent_s(self) -> float | None:
        """Return how long nothing had been heard of the worker at ``time_s``, if it is known."""
        return None if self.since_s is None else self.time_s - self.since_s

    def has_same_since(self, other: "Event") -> bool:
        """Return whether both are known to go back to one time of silence."""
        if self.since_s is None or other.since_s is None:
            return False
        return abs(self.since_s - other.since_s) <= SAME_EVENT_S

    def joined_by(self, later: "Event") -> "Event":
        """Return this event with the witnesses of ``later``, which is the same one."""
        known = [each.since_s for each in (self, later) if each.since_s is not None]
        return dataclasses.replace(
            self,
            witnesses=tuple(sorted({*self.witnesses, *later.witnesses})),
            last_noticed_s=later.last_noticed_s,
            since_s=min(known, default=None),
        )


def events_of(notices: Iterable[Event]) -> list[Event]:
    """Return every event once, the earliest first, however many workers noticed it.

    A worker that was stopped itself notices late what happened meanwhile, but knows since when. So
    two notices are of one event if their own times agree, or their times since when.
    """
    events: dict[tuple[int, str], list[Event]] = {}
    prompt_s: dict[tuple[int, str], float] = {}  # the last notice that was not late
    for notice in sorted(notices, key=lambda each: each.time_s):
        key = notice.rank, notice.what
        known = events.setdefault(key, [])
        is_late = notice.time_s > prompt_s.get(key, -math.inf) + SAME_EVENT_S
        is_another = is_late and not (known and known[-1].has_same_since(notice))
        if is_another:
            known.append(notice)
        else:
            known[-1] = known[-1].joined_by(notice)
        if is_another or not is_late:
            prompt_s[key] = notice.time_s
    return sorted(
        (event for each in events.values() for event in each),
        key=lambda event: (event.time_s, event.rank),
    )
