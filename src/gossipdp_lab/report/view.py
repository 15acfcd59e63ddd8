"""What the logs of a run say, on one clock: that of the worker that started first.

Workers' clocks are put together by their dates, so hosts must agree on the time of day.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gossipdp.observe.log import GROWTH, ExchangeRecord, RunLog, StepRecord, WorkerLog

Points = list[tuple[float, float]]

SAME_EVENT_S = 15.0
LONGEST_SILENCE_S = 1.5
LONGEST_STEP = 5.0
"""In medians: what takes longer is no gradient step, but a pause."""


@dataclass(frozen=True)
class Event:
    """Something that befell a worker; witnesses: who noticed it, none for what it says itself."""

    time_s: float
    rank: int
    what: str
    witnesses: tuple[int, ...] = ()
    last_noticed_s: float = 0.0


@dataclass(frozen=True)
class LinkSpeed:
    """What the logs saw of single exchanges between two workers."""

    num_seen: int
    median_s: float
    bytes_per_s: float


class Span(NamedTuple):
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


def spans_of(worker: WorkerLog) -> list[Span]:
    """What a worker did between its records, in its own time."""
    waits_from_s = worker.consolidating.time_s if worker.consolidating else float("inf")
    before_s = worker.lives[0].time_s if worker.lives else 0.0
    spans = [Span(0.0, before_s, idle=1.0)]
    exchanging_s = waited_s = 0.0
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
        exchanging = min(1.0, max(0.0, (exchange.exchange_seconds - exchanging_s) / length_s))
        waiting = min(1.0, max(0.0, (exchange.waited_seconds - waited_s) / length_s))
        if length_s > LONGEST_SILENCE_S + 4 * GROWTH * before_s:
            spans.append(Span(before_s, now_s, away=1.0))
        elif before_s >= waits_from_s:
            spans.append(Span(before_s, now_s, waiting=1.0, exchanging=exchanging))
        else:
            idle = 1.0 - waiting if index in still else 0.0
            computing = 1.0 - waiting - idle
            spans.append(Span(before_s, now_s, computing, waiting, idle, 0.0, exchanging))
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
    few = []
    for group in groups.values():
        lengths = [span.end_s - span.start_s for span in group]
        _, _, *shares = zip(*group, strict=True)
        means = [
            sum(share * length for share, length in zip(each, lengths, strict=True)) / sum(lengths)
            for each in shares
        ]
        few.append(Span(group[0].start_s, group[-1].end_s, *means))
    return few


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


class RunView:
    """The logs of a run, ready to be drawn; all times in seconds since its first worker started.

    steps, exchanges: the last records of each worker that has any, by rank.
    """

    def __init__(self, run_log: RunLog) -> None:
        self.log = run_log
        self.workers = run_log.workers
        self.ranks = list(run_log.workers)
        self.offsets = {
            rank: worker.start.started_at - run_log.started_at
            for rank, worker in self.workers.items()
        }
        self.duration_s = max(
            self.offsets[rank] + worker.last_s for rank, worker in self.workers.items()
        )
        self.configuration = run_log.latest_start.configuration
        self.gossips = self.configuration.get("method") in ("a2cid2", "gossip")
        self.steps = {rank: each.steps[-1] for rank, each in self.workers.items() if each.steps}
        self.exchanges = {
            rank: each.exchanges[-1] for rank, each in self.workers.items() if each.exchanges
        }
        # Completed ones; each was initiated by one worker.
        self.num_exchanges = sum(last.exchanges_initiated for last in self.exchanges.values())

    @property
    def achieved_comm_rate(self) -> float | None:
        """2 * exchanges / all gradient steps; None without a step."""
        steps = sum(step.gradient_steps for step in self.steps.values())
        return 2 * self.num_exchanges / steps if steps else None

    @property
    def consensus_distance(self) -> float | None:
        """The exact one at the end, as most workers have it; None where nobody came to it."""
        ends = [worker.end for worker in self.workers.values() if worker.end]
        exact = [end for end in ends if end.consensus_distance is not None]
        most = max(exact, key=lambda end: end.num_averaged or 0, default=None)
        return None if most is None else most.consensus_distance

    # Lines.

    def over_time(
        self, value: Callable[[StepRecord, ExchangeRecord], float | None]
    ) -> list[Points]:
        """For each worker, in order of rank, the values that are not None."""
        return [
            [
                (self.offsets[rank] + step.time_s, number)
                for step, exchange in worker.pairs()
                if (number := value(step, exchange)) is not None
            ]
            for rank, worker in self.workers.items()
        ]

    def starts_of_pieces(self, lines: Sequence[Points]) -> list[list[float]]:
        """Where each line over time goes on after a time of which nothing is known."""
        gap_s = max(LONGEST_SILENCE_S + 4 * GROWTH * self.duration_s, self.duration_s / 100)
        return [
            [after for (before, _), (after, _) in pairwise(line) if after - before > gap_s]
            for line in lines
        ]

    def samples_at(self) -> Callable[[float], int]:
        """How many samples all workers had seen at a time."""
        histories = [
            (
                [self.offsets[rank] + step.time_s for step in worker.steps],
                [0, *(step.samples for step in worker.steps)],
            )
            for rank, worker in self.workers.items()
        ]
        return lambda time_s: sum(
            samples[bisect.bisect_right(times, time_s)] for times, samples in histories
        )

    def sending(self) -> list[Points]:
        """For each worker the bytes a second that left it, through sockets or shared memory."""
        return [
            [
                (
                    self.offsets[rank] + after.time_s,
                    max(0, after.all_bytes_sent - before.all_bytes_sent)
                    / (after.time_s - before.time_s),
                )
                for before, after in pairwise(worker.exchanges)
                if after.time_s > before.time_s
            ]
            for rank, worker in self.workers.items()
        ]

    # Pairs of workers.

    def link_speeds(self) -> dict[tuple[int, int], LinkSpeed]:
        """By (lower rank, higher rank); bytes are those of a mean exchange in one direction."""
        durations: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rank, worker in self.workers.items():
            for record in worker.exchanges:
                for one in record.recent:
                    durations[min(rank, one.peer), max(rank, one.peer)].append(one.duration_s)
        num_bytes = self.bytes_per_exchange()
        return {
            pair: LinkSpeed(len(each), median(each), num_bytes / max(median(each), 1e-6))
            for pair, each in durations.items()
        }

    def bytes_per_exchange(self) -> float:
        """What a worker sends in one exchange, in the mean, other messages included."""
        # What was sent before the first record was the start, not exchanges.
        ends = [
            (worker.exchanges[0], worker.exchanges[-1])
            for worker in self.workers.values()
            if worker.exchanges
        ]
        sent = sum(last.all_bytes_sent - first.all_bytes_sent for first, last in ends)
        exchanges = sum(last.exchanges - first.exchanges for first, last in ends)
        return sent / exchanges if exchanges else 0.0

    # Time.

    def spans(self, rank: int) -> list[Span]:
        """What a worker did, from the start of the run to its end."""
        worker, offset_s = self.workers[rank], self.offsets[rank]
        spans = [Span(0.0, offset_s, idle=1.0)]
        for each in spans_of(worker):
            start_s, end_s, *shares = each
            spans.append(Span(offset_s + start_s, offset_s + end_s, *shares))
        last_s = offset_s + worker.last_s
        over = {"idle": 1.0} if worker.end else {"away": 1.0}
        spans.append(Span(last_s, self.duration_s, **over))
        return [span for span in spans if span.end_s > span.start_s]

    def events(self) -> list[Event]:
        """Deaths, stops, returns and joins, the earliest first."""
        noticed: dict[tuple[int, str], Points] = defaultdict(list)
        events = []
        for witness, worker in self.workers.items():
            for notice in worker.notices:
                seen = (self.offsets[witness] + notice.time_s, witness)
                noticed[notice.rank, notice.what].append(seen)
            for life in worker.lives[1:]:
                events.append(Event(self.offsets[witness] + life.time_s, witness, "restarted"))
        for (rank, what), sightings in noticed.items():
            groups: list[Points] = []
            for one in sorted(sightings):
                if not groups or one[0] > groups[-1][0][0] + SAME_EVENT_S:
                    groups.append([])
                groups[-1].append(one)
            for group in groups:
                witnesses = tuple(sorted({int(witness) for _, witness in group}))
                events.append(Event(group[0][0], rank, what, witnesses, group[-1][0]))
        return sorted(events, key=lambda event: (event.time_s, event.rank))

    def standstills(self) -> dict[int, tuple[float, list[int]]]:
        """Who made no gradient step for how long at most, though it beat, and who saw that."""
        longest: dict[int, tuple[float, list[int]]] = {}
        for witness, worker in self.workers.items():
            for record in worker.exchanges:
                for rank, idle_s in record.idle_s.items():
                    most_s, witnesses = longest.get(rank, (0.0, []))
                    seen_by = witnesses if witness in witnesses else [*witnesses, witness]
                    longest[rank] = (max(most_s, idle_s), seen_by)
        return dict(sorted(longest.items()))
