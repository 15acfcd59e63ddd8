"""The logs of a run on one clock: that of the worker that started first.

Dates link the workers' clocks, so hosts must agree on the time of day. Time in which no worker ran
is cut out: no duration, rate or axis holds it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gossipdp.observe.events import Event, events_of
from gossipdp.observe.goodput import Part, Progress
from gossipdp.observe.log import GROWTH, CountsRecord
from gossipdp_lab.report.run_log import RunLog, WorkerLog

Points = list[tuple[float, float]]

LONGEST_SILENCE_S = 1.5
LONGEST_STEP = 5.0
"""In median steps: a longer time without a step is a standstill."""
NEWS_S = 2.0
"""The news of a worker's last step may come so much before or after its last sign of life."""
ENDS_OF_SILENCE = ("lost", "answered", "restarted", "began")


@dataclass(frozen=True)
class Pause:
    """A time in which no worker ran, cut out at ``at_s`` of the run.

    ``start_s`` and ``end_s`` are in seconds since the first worker started, with all pauses.
    """

    at_s: float
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Return how long no worker ran."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class LinkSpeed:
    """The single exchanges between two workers that the logs hold."""

    num_seen: int
    median_s: float
    bytes_per_s: float


class Span(NamedTuple):
    """A piece of one worker's time and its shares, each between 0 and 1.

    Four shares add up to 1: computing (gradient steps), waiting (held up by others), idle (no
    gradient step: starting, evaluating, saving) and away (no sign of life). Exchanging goes on
    beside them.
    """

    start_s: float
    end_s: float
    computing: float = 0.0
    waiting: float = 0.0
    idle: float = 0.0
    away: float = 0.0
    exchanging: float = 0.0


def spans_of(worker: WorkerLog) -> list[Span]:
    """Return the activity of a worker between its records, in its own time."""
    waits_from_s = worker.consolidating.time_s if worker.consolidating else float("inf")
    before_s = worker.lives[0].time_s if worker.lives else 0.0
    spans = [Span(0.0, before_s, idle=1.0)]
    exchanging_s = waited_s = 0.0
    still = _standing_still(worker.counts)
    for index, counts in enumerate(worker.counts):
        now_s = counts.time_s
        begun = [life.time_s for life in worker.lives[1:] if before_s < life.time_s <= now_s]
        if begun:
            spans.append(Span(before_s, begun[-1], away=1.0))
            before_s = begun[-1]
        length_s = now_s - before_s
        if length_s <= 0:
            continue
        exchanging = min(1.0, max(0.0, (counts.exchange_seconds - exchanging_s) / length_s))
        waiting = min(1.0, max(0.0, (counts.waited_seconds - waited_s) / length_s))
        if length_s > LONGEST_SILENCE_S + 4 * GROWTH * before_s:
            spans.append(Span(before_s, now_s, away=1.0))
        elif before_s >= waits_from_s:
            spans.append(Span(before_s, now_s, waiting=1.0, exchanging=exchanging))
        else:
            idle = 1.0 - waiting if index in still else 0.0
            computing = 1.0 - waiting - idle
            spans.append(Span(before_s, now_s, computing, waiting, idle, 0.0, exchanging))
        before_s = now_s
        exchanging_s, waited_s = counts.exchange_seconds, counts.waited_seconds
    if worker.end is not None and worker.end.time_s > before_s:
        # Evaluation came before consolidation.
        from_s = min(max(before_s, waits_from_s), worker.end.time_s)
        spans += [Span(before_s, from_s, idle=1.0), Span(from_s, worker.end.time_s, waiting=1.0)]
    return spans


def merged(spans: list[Span], most: int) -> list[Span]:
    """Merge spans into at most ``most``, of equal length except at the borders."""
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


def _standing_still(steps: Sequence[CountsRecord]) -> set[int]:
    """Return the indices of the records before which no step ended and none was under way.

    If the time from one record with a new step to the next is that of a few steps, a step was under
    way at the records between them.
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

    The time of ``pauses`` is left out. ``last`` holds the last counts of each worker that has any,
    by rank.
    """

    def __init__(self, run_log: RunLog) -> None:
        self.log = run_log
        self.workers = run_log.workers
        self.ranks = list(run_log.workers)
        self.offsets = {
            rank: worker.start.started_at - run_log.started_at
            for rank, worker in self.workers.items()
        }
        self.pauses = self._find_pauses()
        self.duration_s = max(self.at(rank, worker.last_s) for rank, worker in self.workers.items())
        self.configuration = run_log.latest_start.configuration
        self.gossips = self.configuration.get("method") in ("a2cid2", "gossip")
        self.last = {rank: each.counts[-1] for rank, each in self.workers.items() if each.counts}
        # Completed ones; each was initiated by one worker.
        self.num_exchanges = sum(last.exchanges_initiated for last in self.last.values())

    def _find_pauses(self) -> tuple[Pause, ...]:
        """Return the times in which no process lived, as far as the logs hold it."""
        lives = sorted(
            (self.offsets[rank] + start_s, self.offsets[rank] + end_s)
            for rank, worker in self.workers.items()
            for start_s, end_s in worker.processes
        )
        pauses: list[Pause] = []
        until_s = paused_s = 0.0
        for start_s, end_s in lives:
            # The log of a killed process ends a little before the process did.
            if start_s - until_s > LONGEST_SILENCE_S + 4 * GROWTH * until_s:
                pauses.append(Pause(until_s - paused_s, until_s, start_s))
                paused_s += start_s - until_s
            until_s = max(until_s, end_s)
        return tuple(pauses)

    def at(self, rank: int, time_s: float) -> float:
        """Return a time of a worker's log in the run, which leaves its pauses out."""
        at_s = self.offsets[rank] + time_s
        return at_s - sum(
            min(at_s, pause.end_s) - pause.start_s for pause in self.pauses if at_s > pause.start_s
        )

    @property
    def achieved_comm_rate(self) -> float | None:
        """Return 2 * exchanges / all gradient steps; None without a step."""
        steps = sum(last.gradient_steps for last in self.last.values())
        return 2 * self.num_exchanges / steps if steps else None

    @property
    def consensus_distance(self) -> float | None:
        """Return the exact distance at the end, as most workers have it; None if none has it."""
        ends = [worker.end for worker in self.workers.values() if worker.end]
        exact = [end for end in ends if end.consensus_distance is not None]
        most = max(exact, key=lambda end: end.num_averaged or 0, default=None)
        return None if most is None else most.consensus_distance

    # Goodput.

    @cached_property
    def parts(self) -> dict[int, Part]:
        """Return the part in the goodput of each worker, by rank.

        It goes from the first record with a step to the last one that brought a step. Who has not
        come to the end goes on until the last worker has trained its last.
        """
        trained = {rank: self.at(rank, worker.trained_s) for rank, worker in self.workers.items()}
        until_s, parts = max(trained.values(), default=0.0), {}
        for rank, worker in self.workers.items():
            progress = Progress()
            for counts in worker.counts:
                progress.note(self.at(rank, counts.time_s), counts.gradient_steps, counts.samples)
            has_ended = worker.consolidating is not None or worker.end is not None
            parts[rank] = progress.part(-math.inf if has_ended else until_s)
        return parts

    @cached_property
    def num_faults(self) -> int:
        """Return the faults that are known: deaths, and standstills that workers told."""
        lost = {one.rank: one.what == "lost" for one in self.events if one.what in ENDS_OF_SILENCE}
        ended = {rank for rank, worker in self.workers.items() if worker.end is not None}
        deaths = sum(lost[rank] for rank in lost.keys() - ended)
        deaths += sum(worker.num_restarts for worker in self.workers.values())
        return deaths + sum(one.what == "stopped" for one in self.events)

    # Lines.

    def over_time(self, name: str) -> list[Points]:
        """Return the known values of one field for each worker, in order of rank."""
        return [
            [
                (self.at(rank, counts.time_s), number)
                for counts in worker.counts
                if not math.isnan(number := getattr(counts, name))
            ]
            for rank, worker in self.workers.items()
        ]

    def starts_of_pieces(self, lines: Sequence[Points]) -> list[list[float]]:
        """Return the times at which each line goes on after a gap in the log, or a pause."""
        gap_s = max(LONGEST_SILENCE_S + 4 * GROWTH * self.duration_s, self.duration_s / 100)
        cuts_s = [pause.at_s for pause in self.pauses]
        return [
            [
                after
                for (before, _), (after, _) in pairwise(line)
                if after - before > gap_s or any(before <= cut_s < after for cut_s in cuts_s)
            ]
            for line in lines
        ]

    # Pairs of workers.

    def link_speeds(self) -> dict[tuple[int, int], LinkSpeed]:
        """Return speeds by (lower rank, higher rank), with the bytes of a mean exchange one way."""
        durations: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rank, worker in self.workers.items():
            for record in worker.counts:
                for one in record.recent:
                    durations[min(rank, one.peer), max(rank, one.peer)].append(one.duration_s)
        num_bytes = self.bytes_per_exchange()
        return {
            pair: LinkSpeed(len(each), median(each), num_bytes / max(median(each), 1e-6))
            for pair, each in durations.items()
        }

    def bytes_per_exchange(self) -> float:
        """Return the mean bytes that a worker sends in one exchange, other messages included."""
        # Bytes before the first record belong to the start, not to exchanges.
        ends = [
            (worker.counts[0], worker.counts[-1])
            for worker in self.workers.values()
            if worker.counts
        ]
        sent = sum(last.all_bytes_sent - first.all_bytes_sent for first, last in ends)
        exchanges = sum(last.exchanges - first.exchanges for first, last in ends)
        return sent / exchanges if exchanges else 0.0

    # Time.

    def spans(self, rank: int) -> list[Span]:
        """Return the activity of a worker from the start of the run to its end."""
        worker = self.workers[rank]
        spans = [Span(0.0, self.at(rank, 0.0), idle=1.0)]
        for each in spans_of(worker):
            start_s, end_s, *shares = each
            spans.append(Span(self.at(rank, start_s), self.at(rank, end_s), *shares))
        last_s = self.at(rank, worker.last_s)
        over = {"idle": 1.0} if worker.end else {"away": 1.0}
        spans.append(Span(last_s, self.duration_s, **over))
        return [span for span in spans if span.end_s > span.start_s]

    @cached_property
    def events(self) -> list[Event]:
        """Return losses, silences, returns and joins, the earliest first.

        ``began``, without a witness: a later process of the worker made its first gradient step.
        """
        noticed = [
            Event.noticed(
                witness,
                self.at(witness, notice.time_s),
                notice.rank,
                notice.what,
                notice.silent_s,
            )
            for witness, worker in self.workers.items()
            for notice in worker.notices
        ]
        began = [
            Event(self.at(rank, life.time_s), rank, "began")
            for rank, worker in self.workers.items()
            for life in worker.lives[1:]
        ]
        return sorted([*events_of(noticed), *began], key=lambda event: (event.time_s, event.rank))

    def known_of(self, event: Event) -> str:
        """Return the fate of a worker that was silent or lost, as far as the logs hold it.

        It is empty for other events, and for a silence that ended in a loss: that has its own text.
        """
        rank = event.rank
        after = [one for one in self.events if one.rank == rank and one.time_s >= event.time_s]
        after = after[after.index(event) + 1 :]
        then = next((one for one in after if one.what in ENDS_OF_SILENCE), None)
        if event.what not in ("silent", "lost") or (then is not None and then.what == "lost"):
            return ""
        facts = []
        if end := self._process_end(event, math.inf if then is None else then.time_s):
            facts.append(f"its process {end}")
        if then is not None and then.what == "answered":
            silence = "" if then.silent_s is None else f" after {then.silent_s:.1f} s of silence"
            facts.append(f"the same process answered again{silence}")
        elif then is not None:
            facts.append(f"a new process took its place {then.time_s - event.time_s:.1f} s later")
        return "; ".join(facts) or self._end_of_log(rank, event.time_s)

    def _process_end(self, event: Event, until_s: float) -> str:
        """Return the end of the process that was found silent or lost; empty if not known."""
        since_s = event.time_s - (event.silent_s or 0.0) - NEWS_S
        worker = self.workers.get(event.rank)
        ends = worker.process_ends if worker is not None else ()
        return next(
            (end.reason for end in ends if since_s <= self.at(event.rank, end.time_s) <= until_s),
            "",
        )

    def _end_of_log(self, rank: int, since_s: float) -> str:
        """Return the news in its own log about a worker that was last heard at ``since_s``."""
        worker = self.workers.get(rank)
        if worker is None:
            return "there is no log of it here"
        last_s = self.at(rank, worker.last_s)
        if worker.end is not None:
            return "it came to the end of the run"
        if last_s > since_s + NEWS_S:
            return f"its own log goes on until {last_s:.1f} s: it ran, and was not heard"
        if self.duration_s > since_s + NEWS_S:
            return f"its log ends at {last_s:.1f} s, and the run went on"
        return f"all logs end here, its own at {last_s:.1f} s"

    def unended(self) -> dict[int, str]:
        """Return by rank the known facts about each worker whose log has no end; may be empty."""
        known = {}
        for rank, worker in self.workers.items():
            if worker.end is None:
                ends = worker.process_ends
                is_last = bool(ends) and ends[-1].time_s >= worker.processes[-1][0]
                missed = [one for one in self.events if one.rank == rank and one.what == "lost"]
                back = [one for one in self.events if one.rank == rank and one.what != "lost"]
                is_lost = bool(missed) and (not back or back[-1].time_s < missed[-1].time_s)
                if is_last:
                    known[rank] = f"its process {ends[-1].reason}"
                else:
                    known[rank] = self._end_of_log(rank, missed[-1].time_s) if is_lost else ""
        return known
