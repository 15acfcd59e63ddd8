"""The events of a run, from the notices of all its workers: several workers notice the same event.

News crosses one link with each heartbeat, a tenth of the time-out. So some workers notice a loss
within a second, and those far away on a long ring ten seconds later; but each soon after another.
Two losses of one worker lie further apart: before the second, it was started again and has joined.
"""

import math
from collections.abc import Iterable

import msgspec

from gossipdp.gossip.counters import Counters
from gossipdp.logs import printable
from gossipdp.protocol.actions import Notice

SAME_EVENT_S = 3.0
"""The longest time between two notices of one event, or between the times since when."""


class Event(Notice, frozen=True):
    """A change in the life of worker ``rank``, as its ``witnesses`` noticed it.

    Attributes:
        at_s, last_noticed_s: when the first and the last of them noticed it, by a common clock.
        silent_s: at ``at_s``, by the witness that knew the longest silence.
    """

    witnesses: tuple[int, ...] = ()
    last_noticed_s: float = 0.0

    @property
    def since_s(self) -> float:
        """Return when the worker was heard last; NaN if that is not known."""
        return self.at_s - (math.nan if self.silent_s is None else self.silent_s)

    @property
    def words(self) -> str:
        """Return the event in words, for people; they complete "worker 3 ..."."""
        silence = "" if self.silent_s is None else f"{self.silent_s:.1f} s"
        words = {
            "joined": "joined the run",
            "silent": "fell silent" + (f": nothing heard for {silence}" if silence else ""),
            "lost": "is no longer heard; the others go on without it",
            "answered": "answers again" + (f" after {silence} of silence" if silence else ""),
            "restarted": "was restarted: a new process takes part",
            "stopped": "stood still itself" + (f" for {silence}" if silence else ""),
            "began": "made the first gradient step of its new process",
        }
        return words.get(self.kind, printable(self.kind))

    def joined_by(self, later: "Event") -> "Event":
        """Return this event with the witnesses of ``later``, which is the same one."""
        known = [each.since_s for each in (self, later) if each.silent_s is not None]
        return msgspec.structs.replace(
            self,
            witnesses=tuple(sorted({*self.witnesses, *later.witnesses})),
            last_noticed_s=later.at_s,
            silent_s=self.at_s - min(known) if known else None,
        )


def events_of(records: Iterable[tuple[float, Counters]]) -> list[Event]:
    """Return every event once, the earliest first, however many workers noticed it.

    A worker that was stopped itself notices late what happened meanwhile, but knows since when. So
    two notices are of one event if their own times agree, or their times since when.
    ``records`` are of all workers, each with its time on a common clock.
    """
    notices = [
        Event(
            each.rank,
            each.kind,
            at_s := time_s + each.at_s - record.at_s,
            silent_s=each.silent_s,
            witnesses=(record.rank,),
            last_noticed_s=at_s,
        )
        for time_s, record in records
        for each in record.noticed
    ]
    events: dict[tuple[int, str], list[Event]] = {}
    prompt_s: dict[tuple[int, str], float] = {}  # the last notice that was not late
    for notice in sorted(notices, key=lambda each: each.at_s):
        key = notice.rank, notice.kind
        known = events.setdefault(key, [])
        is_late = notice.at_s > prompt_s.get(key, -math.inf) + SAME_EVENT_S
        has_same_since = known and abs(known[-1].since_s - notice.since_s) <= SAME_EVENT_S
        is_another = is_late and not has_same_since
        if is_another:
            known.append(notice)
        else:
            known[-1] = known[-1].joined_by(notice)
        if is_another or not is_late:
            prompt_s[key] = notice.at_s
    return sorted(
        (event for each in events.values() for event in each),
        key=lambda event: (event.at_s, event.rank),
    )
