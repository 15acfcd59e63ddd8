"""What a worker did when, from the records of its log: shares of time between one and the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from gossipdp.observe.run_log import WorkerLog
from gossipdp.observe.run_log_records import StepRecord
from gossipdp.observe.run_log_writer import GROWTH

LONGEST_SILENCE_S = 1.5
LONGEST_STEP = 5.0
"""In medians: what takes longer is no gradient step, but a pause."""


@dataclass(frozen=True)
class Span:
    """A piece of one worker's time and the shares of it, between 0 and 1.

    computing, waiting, idle and away come to 1: gradient steps; held up by others; no gradient
    step (starting, evaluating, saving); no sign of life. Exchanging is beside them.
    """

    start_s: float
    end_s: float
    computing: float = 0.0
    waiting: float = 0.0
    idle: float = 0.0
    away: float = 0.0
    exchanging: float = 0.0

    @property
    def shares(self) -> tuple[float, ...]:
        """In the order of the fields."""
        return (self.computing, self.waiting, self.idle, self.away, self.exchanging)

    def moved(self, by_s: float) -> Span:
        """The same at another time."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)


def spans_of(worker: WorkerLog) -> list[Span]:
    """What a worker did between its records, in its own time."""
    spans = []
    waits_from_s = worker.consolidating.time_s if worker.consolidating else float("inf")
    first_s = worker.lives[0].time_s if worker.lives else 0.0
    spans.append(Span(0.0, first_s, idle=1.0))
    before_s, exchanging_s, waited_s = first_s, 0.0, 0.0
    pairs = worker.pairs()
    still = _standing_still([step for step, _ in pairs])
    for index, (step, exchange) in enumerate(pairs):
        now_s = step.time_s
        begun = [life.time_s for life in worker.lives[1:] if before_s < life.time_s <= now_s]
        if begun:
            spans.append(Span(before_s, begun[-1], away=1.0))
            before_s = begun[-1]
        length_s = now_s - before_s
        if length_s <= 0:
            continue
        if length_s > LONGEST_SILENCE_S + 4 * GROWTH * before_s:
            spans.append(Span(before_s, now_s, away=1.0))
        else:
            exchanging = _share(exchange.exchange_seconds - exchanging_s, length_s)
            waiting = _share(exchange.waited_seconds - waited_s, length_s)
            if before_s >= waits_from_s:
                spans.append(Span(before_s, now_s, waiting=1.0, exchanging=exchanging))
            elif index in still:
                idle = 1 - waiting
                spans.append(Span(before_s, now_s, 0.0, waiting, idle, 0.0, exchanging))
            else:
                spans.append(Span(before_s, now_s, 1 - waiting, waiting, 0.0, 0.0, exchanging))
        before_s = now_s
        exchanging_s, waited_s = exchange.exchange_seconds, exchange.waited_seconds
    if worker.end is not None and worker.end.time_s > before_s:
        # Evaluation came before consolidation.
        from_s = min(max(before_s, waits_from_s), worker.end.time_s)
        spans += [Span(before_s, from_s, idle=1.0), Span(from_s, worker.end.time_s, waiting=1.0)]
    return spans


def merged(spans: list[Span], most: int) -> list[Span]:
    """About as much time in at most so many spans, of equal length but for the borders."""
    if len(spans) <= most:
        return spans
    length_s = (spans[-1].end_s - spans[0].start_s) / most
    groups: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        middle_s = (span.start_s + span.end_s) / 2 - spans[0].start_s
        groups[min(most - 1, int(middle_s / length_s))].append(span)
    merged_spans = []
    for group in groups.values():
        total_s = sum(span.end_s - span.start_s for span in group)
        shares = [
            sum(
                share * (span.end_s - span.start_s) for share, span in zip(each, group, strict=True)
            )
            / total_s
            for each in zip(*(span.shares for span in group), strict=True)
        ]
        merged_spans.append(Span(group[0].start_s, group[-1].end_s, *shares))
    return merged_spans


def _standing_still(steps: Sequence[StepRecord]) -> set[int]:
    """The records before which no step ended, nor was one under way.

    One was where the time from one record with a new step to the next is that of a few steps.
    """
    counts = [0, *(step.gradient_steps for step in steps)]
    stepped = [index for index, (old, new) in enumerate(pairwise(counts)) if new > old]
    durations_s = [
        (steps[to].time_s - steps[since].time_s) / (counts[to + 1] - counts[since + 1])
        for since, to in pairwise(stepped)
    ]
    longest_s = LONGEST_STEP * median(durations_s) if durations_s else 0.0
    still = set(range(stepped[0] if stepped else len(steps)))
    for since, to in pairwise([*stepped, len(steps)]):
        if steps[min(to, len(steps) - 1)].time_s - steps[since].time_s > longest_s:
            still |= set(range(since + 1, to))
    return still


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s))
