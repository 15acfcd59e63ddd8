"""The answers of several workers, put together to a job: who trains, how fast, who is slow or lost.

The job is a pure function of answers and times, except for the counts that are kept for speeds. If
a worker answers, its own account counts; if it does not, the most advanced record of those that do
(membership views converge, some sooner). A fact that no answer holds any more stays as it was last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import msgspec

from gossipdp.gossip.counters import MAX_WORKERS
from gossipdp.logs import printable
from gossipdp.observe.events import Event, events_of
from gossipdp.observe.goodput import SLOW_FACTOR, Progress, goodput_of
from gossipdp.observe.status import IDLE_AFTER_S, MemberStatus, WorkerStatus

MAX_COUNTS = 512
IDLE_AFTER_STEPS = 10.0
SPEED_OVER_S = 5.0
SPEED_OVER_STEPS = 3.0
LONGEST_SPEED_OVER_S = 60.0
GONE = ("lost", "left")
AT_WORK_OR_DONE = ("training", "slow", "averaging", "left")
_ORDER = ("joining", "training", "done", "left", "lost")


class JobWorker(msgspec.Struct, frozen=True):
    """One worker.

    Attributes:
        state: one of the words that docs/monitoring.md explains.
        is_answering: it answered the last time it was asked. If it did not, counts and
            ``since_step_s`` are what others heard, and the rest is from its last answer.
        restarts: processes of this rank before this one.
        silent_s: while it is ``silent``, the seconds since an answering worker last heard it.
        step_factor: its step's duration over the median of the others'.
        goodput: of this worker alone, since its first answer here.
        neighbours: those in the graph that it has a link to; None if it is gone, or has none in
            the graph.

    The other fields are those of :class:`~gossipdp.observe.status.WorkerStatus`; speeds are over
    the last seconds.
    """

    rank: int
    incarnation: int
    state: str
    is_answering: bool
    status_address: str
    gradient_steps: int
    samples: int
    host: str = ""
    process_id: int | None = None
    step_seconds: float | None = None
    step_factor: float | None = None
    goodput: float | None = None
    since_step_s: float | None = None
    samples_per_second: float | None = None
    bytes_sent_per_second: float | None = None
    loss: float | None = None
    logged: dict[str, float | None] = {}
    edge_distance: float | None = None
    exchanges: int | None = None
    exchanges_failed: int | None = None
    achieved_comm_rate: float | None = None
    aimed_comm_rate: float | None = None
    comm_rate_bound: str = "fixed"
    wire_formats: dict[int, str] = {}
    waited_seconds: float | None = None
    neighbours: tuple[int, ...] | None = None
    restarts: int = 0
    silent_s: float | None = None

    @property
    def cells(self) -> dict[str, str]:
        """Return the worker's row in a table, by column; "-" for what is not known."""
        state, linked = self.state, self.neighbours
        if state == "slow" and self.step_factor is not None:
            state = f"slow {self.step_factor:.1f}x"
        elif state == "idle" and self.since_step_s is not None:
            state = f"idle {duration(self.since_step_s)}"
        elif self.silent_s is not None:
            state = f"silent {duration(self.silent_s)}"
        step = shown_number(self.step_seconds, ".1f", 1e3, " ms")
        if (self.step_seconds or 0.0) >= 1:
            step = f"{self.step_seconds:.2f} s"
        rate = shown_number(self.achieved_comm_rate, ".2f")
        if self.comm_rate_bound != "fixed":  # it sets itself
            rate = f"{shown_number(self.aimed_comm_rate, '.2g')} {printable(self.comm_rate_bound)}"
        links = "-" if linked is None else " ".join(map(str, linked)) or "none"
        place = f"{printable(self.host)} ({self.process_id})" if self.host else "-"
        return {
            "worker": str(self.rank),
            "state": f"{state}, life {self.restarts + 1}" if self.restarts else state,
            "steps": f"{self.gradient_steps:,}",
            "step": step,
            "samples/s": shown_number(self.samples_per_second, ",.0f"),
            "goodput": shown_number(self.goodput, ".0%"),
            "loss": shown_number(self.loss, ".4f"),
            "distance": shown_number(self.edge_distance, ".2g"),
            "exchanges": shown_number(self.exchanges, ",.0f"),
            "rate": rate,
            "wire": printable(", ".join(sorted(set(self.wire_formats.values())))) or "-",
            "sent": shown_number(self.bytes_sent_per_second, ".1f", 1e-6, " MB/s"),
            "waited": "-" if self.waited_seconds is None else duration(self.waited_seconds),
            "links": f"{len(linked)} workers" if linked and len(linked) > 4 else links,
            "where": f"{place} {printable(self.status_address)}".strip(),
        }


def shown_number(value: float | None, form: str, scale: float = 1, unit: str = "") -> str:
    """Return a number in a format, in another unit; "-" if it is not known."""
    return "-" if value is None else f"{scale * value:{form}}{unit}"


def duration(seconds: float) -> str:
    """Return a duration in whole seconds, minutes, or hours and minutes."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


class JobStatus(msgspec.Struct, frozen=True):
    """The job.

    Attributes:
        at_s: the time of this picture, by the clock of its notices.
        samples, samples_per_second: of all workers.
        loss, edge_distance: means over the workers that are not lost and have not left.
        heard_ago_s: since the last answer of any worker.
        num_answering: workers that answered the last time they were asked.
        goodput: since the first answers; see :mod:`~gossipdp.observe.goodput`.
        notices: oldest first.
    """

    run_id: str
    method: str
    graph: str
    comm_rate: float | str
    num_workers: int
    at_s: float
    samples: int
    heard_ago_s: float
    num_answering: int
    budget_samples: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    edge_distance: float | None = None
    goodput: float | None = None
    workers: tuple[JobWorker, ...] = ()
    notices: tuple[Event, ...] = ()

    @property
    def is_over(self) -> bool:
        """Return whether all are averaging or the budget is used up, as far as is known."""
        states = {worker.state for worker in self.workers} - {"lost"}
        if states and states <= {"averaging", "left"}:
            return True
        since = (self.samples_per_second or 0.0) * self.heard_ago_s
        return self.budget_samples is not None and self.samples + since >= self.budget_samples


class Speeds:
    """The speeds of counters, by key, from their latest values."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, deque[tuple[float, int]]] = {}

    def note(self, key: Hashable, at_s: float, count: int | None) -> None:
        """Take the count at a time, None if unknown; if it fell, a new process or link began."""
        counts = self._counts.setdefault(key, deque(maxlen=MAX_COUNTS))
        if counts and (count is None or count < counts[-1][1]):
            counts.clear()
        if count is not None:
            counts.append((at_s, count))

    def since(self, key: Hashable, from_s: float) -> float | None:
        """Return the growth a second from a time on, or over the last two counts if shorter."""
        counts = list(self._counts.get(key, ()))
        if len(counts) < 2:
            return None
        recent = (each for each in counts[:-1] if each[0] >= from_s)
        (first_s, first), (last_s, last) = next(recent, counts[-2]), counts[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None


class StatusBoard:
    """The collector of the answers of a job, at first those of workers at these addresses."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._given = tuple(addresses)
        # The last answer of each address, and its time.
        self._answers: dict[str, tuple[float, WorkerStatus]] = {}
        self._failures: dict[str, str] = {}  # of the addresses that do not answer now
        self._speeds = Speeds()
        self._progress: dict[int, Progress] = {}
        self._run_id: str | None = None

    @property
    def has_answers(self) -> bool:
        """Return whether any worker has ever answered."""
        return self._run_id is not None

    @property
    def all_failed(self) -> bool:
        """Return whether every address that is asked now is known not to answer."""
        return all(address in self._failures for address in self.addresses())

    @property
    def failures(self) -> dict[str, str]:
        """Return the reason for each address, given or heard once, that does not answer."""
        known = {*self._given, *self._answers}
        return {name: failure for name, failure in self._failures.items() if name in known}

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses to ask now: those given, and those of workers that may live."""
        wanted = dict.fromkeys(self._given)
        for member in self._members().values():
            if member.status_address and member.state not in GONE:
                wanted[member.status_address] = None
        return tuple(wanted)

    def take(self, answers: Mapping[str, WorkerStatus | Exception], now_s: float) -> None:
        """Take answers and failures, by address; ``now_s`` in seconds, monotonic."""
        for address, answer in answers.items():
            if isinstance(answer, Exception):
                self._failures[address] = str(answer) or repr(answer)
                continue
            self._run_id = self._run_id or answer.run_id
            if answer.run_id != self._run_id:
                self._failures[address] = f"it is of another run, {answer.run_id}"
                continue
            self._answers[address] = now_s, answer
            self._failures.pop(address, None)
        if all(isinstance(answer, Exception) for answer in answers.values()):
            return  # their present counts are unknown
        own = self._own()
        for rank, member in self._members().items():
            steps, samples, sent = member.gradient_steps, member.samples, None
            if rank in own:
                status, is_answering = own[rank]
                steps, samples = max(steps, status.gradient_steps), max(samples, status.samples)
                sent = status.all_bytes_sent if is_answering else None
            self._speeds.note(("samples", rank), now_s, samples)
            self._progress.setdefault(rank, Progress()).note(now_s, steps, samples)
            self._speeds.note(("bytes", rank), now_s, sent)

    def job(self, now_s: float) -> JobStatus:
        """Return the job as it is known now; raise ValueError if no worker has answered yet."""
        if not self._answers:
            raise ValueError("no worker has answered yet")
        answered_s, about = max(self._answers.values(), key=itemgetter(0))
        rows = self._rows(now_s)
        # Who makes no step goes on in time, as long as any worker answers.
        until_s = now_s if any(row["is_answering"] for row in rows) else answered_s
        parts = []
        for row in rows:
            is_at_work = row["state"] in AT_WORK_OR_DONE
            part = self._progress[row["rank"]].part(-math.inf if is_at_work else until_s)
            row["goodput"] = _known(goodput_of([part]))
            parts.append(part)
        workers = tuple(JobWorker(**row) for row in rows)
        present = [worker for worker in workers if worker.state not in GONE]
        speeds = [each.samples_per_second for each in workers if each.samples_per_second]
        return JobStatus(
            run_id=about.run_id,
            method=about.method,
            graph=about.graph,
            comm_rate=about.comm_rate,
            num_workers=about.world_size,
            at_s=now_s,
            budget_samples=about.budget_samples,
            # The sum over the ranks here, or the count of the best informed worker if it is larger.
            samples=max(
                sum(worker.samples for worker in workers),
                *(status.run_samples for _, status in self._answers.values()),
            ),
            samples_per_second=sum(speeds) if speeds else None,
            loss=_mean_of_known(each.loss for each in present),
            edge_distance=_mean_of_known(each.edge_distance for each in present),
            goodput=_known(goodput_of(parts)),
            heard_ago_s=now_s - answered_s,
            num_answering=sum(worker.is_answering for worker in workers),
            workers=workers,
            notices=tuple(events_of(self._answers.values())),
        )

    # The workers.

    def _views(self) -> Iterator[MemberStatus]:
        """Return the members as all who answer see them; if none does, as all who once did."""
        answering = [each for name, each in self._answers.items() if name not in self._failures]
        for _, status in answering or self._answers.values():
            yield from status.members[:MAX_WORKERS]

    def _members(self) -> dict[int, MemberStatus]:
        latest_last = sorted(
            self._views(),
            key=lambda each: (each.incarnation, _ORDER.index(each.state), each.samples),
        )
        return dict(sorted({each.rank: each for each in latest_last}.items()))

    def _own(self) -> dict[int, tuple[WorkerStatus, bool]]:
        """Return each worker's own last answer, in its latest life, and whether it answers now."""
        own: dict[int, tuple[WorkerStatus, bool]] = {}
        for address, (_, status) in sorted(self._answers.items(), key=lambda each: each[1][0]):
            if status.incarnation >= own.get(status.rank, (status,))[0].incarnation:
                own[status.rank] = status, address not in self._failures
        return own

    def _rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the fields of each :class:`JobWorker`, except its goodput."""
        own, views = self._own(), list(self._views())
        silent = {each.rank for each in views if each.is_silent}
        ages = _least((each.rank, each.since_step_s) for each in views)
        silences = _least((each.rank, each.heard_ago_s) for each in views)
        steps = {
            rank: status.step_seconds
            for rank, (status, is_answering) in own.items()
            if is_answering and status.step_seconds > 0
        }
        usual_s = median(steps.values()) if steps else 0.0
        rows = []
        for rank, member in self._members().items():
            status, is_answering = own.get(rank, (None, False))
            if status is not None and member.incarnation > status.incarnation and not is_answering:
                status = None  # it is of a former life
            step_s = _known(status.step_seconds if status else None) or 0.0
            age_s = _known(status.since_step_s) if status and is_answering else ages.get(rank)
            idle_after_s = max(IDLE_AFTER_S, IDLE_AFTER_STEPS * (step_s or usual_s))
            is_idle = age_s is not None and age_s > idle_after_s
            state = _state(member, status if is_answering else None, rank in silent, is_idle)
            row = {
                name: _known(getattr(status, name))
                for name in JobWorker.__struct_fields__
                if hasattr(status, name)
            }
            for name in ("rank", "incarnation", "restarts", "gradient_steps", "samples"):
                row[name] = max(getattr(member, name), row.get(name, 0))
            row |= {"is_answering": is_answering, "status_address": member.status_address}
            row |= {"state": state, "since_step_s": age_s}
            if state == "silent":
                row["silent_s"] = silences.get(rank)
            others = [seconds for other, seconds in steps.items() if other != rank]
            if rank in steps and others and state in ("training", "idle"):
                row["step_factor"] = factor = steps[rank] / median(others)
                if state == "training" and factor > SLOW_FACTOR:
                    row["state"] = "slow"
            if status is not None:
                row["loss"] = status.logged.get("loss")
            if state not in GONE:
                # If steps take long, the speed is that over several of them.
                over_s = min(max(SPEED_OVER_S, SPEED_OVER_STEPS * step_s), LONGEST_SPEED_OVER_S)
                speed = partial(self._speeds.since, from_s=now_s - over_s)
                row["samples_per_second"] = speed(("samples", rank))
                if status is not None:
                    row["bytes_sent_per_second"] = speed(("bytes", rank))
                    near = [each for each in status.members if each.is_neighbour]
                    linked = tuple(each.rank for each in near if each.heard_ago_s is not None)
                    row["neighbours"] = linked if near else None
            rows.append(row)
        return rows


def _least(values: Iterable[tuple[int, float | None]]) -> dict[int, float]:
    """Return the least known value of each rank."""
    least: dict[int, float] = {}
    for rank, value in values:
        if value is not None:
            least[rank] = min(value, least.get(rank, math.inf))
    return least


def _known(value: Any) -> Any:
    return None if value != value else value  # noqa: PLR0124


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _state(member: MemberStatus, own: WorkerStatus | None, is_silent: bool, is_idle: bool) -> str:
    """Return the one word for a worker; ``own`` is its own answer, if there is one."""
    if own is not None:
        if member.state == "lost" and member.incarnation >= own.incarnation:
            return "cut off"  # it answers here, and is lost to the others
        if member.state == "joining":
            return "joining"
        if own.state == "averaging":
            return "averaging"
        return "idle" if is_idle else "training"
    if member.state in ("lost", "left", "joining"):
        return member.state
    if is_silent:
        return "silent"
    if is_idle and member.state == "training":
        return "idle"
    if member.status_address:
        return "no answer"
    return "averaging" if member.state == "done" else member.state
