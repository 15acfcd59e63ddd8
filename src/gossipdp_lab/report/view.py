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
from itertools import chain, pairwise
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
    waits_from_s = worker.averaging.time_s if worker.averaging else float("inf")
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
        length_s = max(now_s - before_s, 1e-9)
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
        before_s = max(before_s, now_s)
        exchanging_s, waited_s = counts.exchange_seconds, counts.waited_seconds
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

    The time of ``pauses`` is left out. ``started_at`` is the date of that start, in seconds since
    1970, and ``latest_start`` is that of any process. By rank, ``records`` holds the counts with
    their times, and ``last`` the last counts, if there are any.
    """

    def __init__(self, run_log: RunLog) -> None:
        self.workers = run_log.workers
        self.ranks = list(run_log.workers)
        self.started_at = min(worker.start.started_at for worker in self.workers.values())
        self.offsets = {
            rank: worker.start.started_at - self.started_at for rank, worker in self.workers.items()
        }
        self.pauses = self._find_pauses()
        self.duration_s = max(self.at(rank, worker.last_s) for rank, worker in self.workers.items())
        # A resumed run may have another size and graph.
        starts = (worker.starts[-1] for worker in self.workers.values())
        self.latest_start = max(starts, key=lambda start: start.started_at)
        self.configuration = self.latest_start.configuration
        self.gossips = self.configuration.get("method") in ("a2cid2", "gossip")
        self.records = {
            rank: [(self.at(rank, counts.time_s), counts) for counts in worker.counts]
            for rank, worker in self.workers.items()
        }
        self.last = {rank: each.counts[-1] for rank, each in self.workers.items() if each.counts}

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
    def consensus_distance(self) -> float | None:
        """Return the exact distance at the end, as most workers have it; None if none has it."""
        ends = [worker.end for worker in self.workers.values() if worker.end]
        exact = [end for end in ends if not math.isnan(end.consensus_distance)]
        most = max(exact, key=lambda end: end.num_averaged, default=None)
        return None if most is None else most.consensus_distance

    # Goodput.

    @cached_property
    def trained(self) -> dict[int, float]:
        """Return by rank the time of the first record with a worker's last step."""
        return {rank: self.at(rank, worker.trained_s) for rank, worker in self.workers.items()}

    @cached_property
    def parts(self) -> dict[int, Part]:
        """Return the part in the goodput of each worker, by rank.

        It goes from the first record with a step to the last one that brought a step. Who has not
        come to the end goes on until the last worker has trained its last.
        """
        until_s, parts = max(self.trained.values()), {}
        for rank, worker in self.workers.items():
            progress = Progress()
            for at_s, counts in self.records[rank]:
                progress.note(at_s, counts.gradient_steps, counts.samples)
            parts[rank] = progress.part(-math.inf if worker.averaging else until_s)
        return parts

    @cached_property
    def num_faults(self) -> int:
        """Return the faults that are known: deaths, and standstills that workers told."""
        deaths = sum(event.kind == "lost" for event in self.missed.values())
        deaths += sum(worker.num_restarts for worker in self.workers.values())
        return deaths + sum(event.kind == "stopped" for event in self.events)

    # Lines.

    def over_time(self, name: str) -> list[Points]:
        """Return the known values of one field for each worker, in order of rank."""
        return [
            [(at_s, y) for at_s, one in records if not math.isnan(y := getattr(one, name))]
            for records in self.records.values()
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

    @cached_property
    def exchange_counts(self) -> dict[tuple[int, int], int]:
        """Return the completed exchanges by (lower rank, higher rank), without zeros.

        Both ends count an exchange, and a log may lack its last line: the larger count is taken.
        """
        counts: dict[tuple[int, int], int] = {}
        for rank, last in self.last.items():
            for peer, count in last.exchanges_by_neighbour.items():
                pair = (min(rank, peer), max(rank, peer))
                counts[pair] = max(counts.get(pair, 0), count)
        return {pair: counts[pair] for pair in sorted(counts) if counts[pair]}

    @property
    def num_ranks(self) -> int:
        """Return the number of workers in the logs, joiners without a log here included."""
        ranks = {*self.ranks, *(rank for pair in self.exchange_counts for rank in pair)}
        return max(self.latest_start.num_workers, 1 + max(ranks))

    def links(self) -> list[tuple[tuple[int, int], int, float]]:
        """Return pairs, lower rank first, the number and median of both ends' logged durations."""
        durations: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rank, worker in self.workers.items():
            for record in worker.counts:
                for peer, duration_s in record.recent:
                    durations[min(rank, peer), max(rank, peer)].append(duration_s)
        links = [(pair, len(each), median(each)) for pair, each in durations.items()]
        return sorted(links, key=lambda link: -link[2])

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
        began = [
            Event(rank, "began", self.at(rank, life.time_s))
            for rank, worker in self.workers.items()
            for life in worker.lives[1:]
        ]
        noticed = events_of(chain.from_iterable(self.records.values()))
        return sorted([*noticed, *began], key=lambda event: (event.at_s, event.rank))

    @cached_property
    def missed(self) -> dict[int, Event]:
        """Return by rank the loss, or else the silence, of each worker that has not come back."""
        missed: dict[int, Event] = {}
        for one in self.events:
            if one.kind == "lost":
                missed[one.rank] = one
            elif one.kind == "silent":
                missed.setdefault(one.rank, one)
            elif one.kind != "stopped":
                missed.pop(one.rank, None)
        return {
            rank: event
            for rank, event in missed.items()
            if rank not in self.workers or self.workers[rank].end is None
        }

    def known_of(self, event: Event) -> str:
        """Return the fate of a worker that was silent or lost, as far as the logs hold it.

        It is empty for other events, and for a silence that ended in a loss: that has its own text.
        """
        rank, worker = event.rank, self.workers.get(event.rank, WorkerLog())
        after = [one for one in self.events if one.rank == rank and one.at_s >= event.at_s]
        after = after[after.index(event) + 1 :]
        then = next((one for one in after if one.kind in ENDS_OF_SILENCE), None)
        if event.kind not in ("silent", "lost") or (then is not None and then.kind == "lost"):
            return ""
        since_s = event.at_s - (event.silent_s or 0.0) - NEWS_S
        until_s = math.inf if then is None else then.at_s
        facts = [
            f"its process {end.reason}"
            for end in worker.process_ends
            if since_s <= self.at(rank, end.time_s) <= until_s
        ][:1]
        if then is not None and then.kind == "answered":
            silence = "" if then.silent_s is None else f" after {then.silent_s:.1f} s of silence"
            facts.append(f"the same process answered again{silence}")
        elif then is not None:
            facts.append(f"a new process took its place {then.at_s - event.at_s:.1f} s later")
        return "; ".join(facts) or self._end_of_log(rank, event.at_s)

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
            ends, missed = worker.process_ends, self.missed.get(rank)
            if worker.end is not None:
                continue
            if ends and ends[-1].time_s >= worker.processes[-1][0]:
                known[rank] = f"its process {ends[-1].reason}"
            elif missed is not None and missed.kind == "lost":
                known[rank] = self._end_of_log(rank, missed.at_s)
            else:
                known[rank] = ""
        return known
