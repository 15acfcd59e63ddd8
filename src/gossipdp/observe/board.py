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
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from gossipdp.gossip.counters import MAX_WORKERS, Counters
from gossipdp.observe.events import Event, events_of
from gossipdp.observe.goodput import SLOW_FACTOR, Progress, goodput_of
from gossipdp.observe.status import IDLE_AFTER_S, MemberStatus, NoticeStatus, WorkerStatus

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
        state: ``training``; ``slow``: its steps take over 1.5 times the median of the others';
            ``idle``: no step for 5 s and for ten steps; ``averaging``: it has called
            ``consolidate()``; ``joining``; ``left``: gone after the average; ``silent``: it does
            not answer, and others have not heard it for the time-out; ``lost``: no worker hears it
            any more, and the others go on without it; ``cut off``: it answers here, and is lost to
            the others; ``no answer``: it does not answer here, others hear it.
        is_answering: it answered the last time it was asked. If it did not, counts and
            ``since_step_s`` are what others heard, and the rest is from its last answer.
        restarts: processes of this rank before this one.
        silent_s: while it is ``silent``, the seconds since an answering worker last heard it.
        step_factor: its step's duration over the median of the others'.
        goodput: of this worker alone, since its first answer here.
        neighbours: those in the graph that it has a link to; None if it is gone.

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


class JobStatus(msgspec.Struct, frozen=True):
    """The job.

    Attributes:
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
    samples: int
    heard_ago_s: float
    num_answering: int
    budget_samples: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    edge_distance: float | None = None
    goodput: float | None = None
    workers: tuple[JobWorker, ...] = ()
    notices: tuple[NoticeStatus, ...] = ()

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


class _Answer(NamedTuple):
    status: WorkerStatus
    at_s: float


class StatusBoard:
    """The collector of the answers: it names the addresses to ask, and gives the job.

    Args:
        addresses: HOST:PORT of any workers of the job.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._given = tuple(addresses)
        self._answers: dict[str, _Answer] = {}  # the last of each address
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
            self._answers[address] = _Answer(answer, now_s)
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
        """Return the job as it is known now.

        Raises:
            ValueError: no worker has answered yet.
        """
        if not self._answers:
            raise ValueError("no worker has answered yet")
        about, answered_s = max(self._answers.values(), key=lambda each: each.at_s)
        workers = self._workers(now_s)
        # Who makes no step goes on in time, as long as any worker answers.
        until_s = now_s if any(each.is_answering for each in workers) else answered_s
        parts = {
            each.rank: self._progress[each.rank].part(
                -math.inf if each.state in AT_WORK_OR_DONE else until_s
            )
            for each in workers
        }
        workers = tuple(
            msgspec.structs.replace(each, goodput=_known(goodput_of([parts[each.rank]])))
            for each in workers
        )
        present = [worker for worker in workers if worker.state not in GONE]
        speeds = [each.samples_per_second for each in workers if each.samples_per_second]
        return JobStatus(
            run_id=about.run_id,
            method=about.method,
            graph=about.graph,
            comm_rate=about.comm_rate,
            num_workers=about.num_workers,
            budget_samples=about.budget_samples,
            # The sum over the ranks here, or the count of the best informed worker if it is larger.
            samples=max(
                sum(worker.samples for worker in workers),
                *(each.status.run_samples for each in self._answers.values()),
            ),
            samples_per_second=sum(speeds) if speeds else None,
            loss=mean_of_known(each.loss for each in present),
            edge_distance=mean_of_known(each.edge_distance for each in present),
            goodput=_known(goodput_of(parts.values())),
            heard_ago_s=now_s - answered_s,
            num_answering=sum(worker.is_answering for worker in workers),
            workers=workers,
            notices=self._notices(now_s),
        )

    # The workers.

    def _present(self) -> list[WorkerStatus]:
        known = self._answers.items()
        return [each.status for address, each in known if address not in self._failures]

    def _views(self) -> Iterator[MemberStatus]:
        """Return the members as all who answer see them; if none does, as all who once did."""
        for status in self._present() or [each.status for each in self._answers.values()]:
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
        for address, (status, _) in sorted(self._answers.items(), key=lambda each: each[1].at_s):
            if status.incarnation >= own.get(status.rank, (status,))[0].incarnation:
                own[status.rank] = status, address not in self._failures
        return own

    def _workers(self, now_s: float) -> tuple[JobWorker, ...]:
        own, views = self._own(), list(self._views())
        silent = {each.rank for each in views if each.is_silent}
        ages: dict[int, float] = {}
        for each in views:
            if each.since_step_s is not None:
                ages[each.rank] = min(each.since_step_s, ages.get(each.rank, math.inf))
        steps = [
            status.step_seconds
            for status, is_answering in own.values()
            if is_answering and status.step_seconds > 0
        ]
        usual_s = median(steps) if steps else 0.0
        workers = []
        for rank, member in self._members().items():
            status, is_answering = own.get(rank, (None, False))
            if status is not None and member.incarnation > status.incarnation and not is_answering:
                status = None  # it is of a former life
            step_s = _known(status.step_seconds if status else None) or 0.0
            age_s = _known(status.since_step_s) if status and is_answering else ages.get(rank)
            idle_after_s = max(IDLE_AFTER_S, IDLE_AFTER_STEPS * (step_s or usual_s))
            is_idle = age_s is not None and age_s > idle_after_s
            state = _state(member, status if is_answering else None, rank in silent, is_idle)
            # If steps take long, the speed is that over several of them.
            over_s = min(max(SPEED_OVER_S, SPEED_OVER_STEPS * step_s), LONGEST_SPEED_OVER_S)
            own_facts = facts_of(status) if status else {}
            facts = own_facts | {
                "state": state,
                "is_answering": is_answering,
                "status_address": member.status_address,
                "since_step_s": age_s,
                "loss": status.logged.get("loss") if status else None,
                "neighbours": None,
                "silent_s": self._silent_s(rank) if state == "silent" else None,
            }
            for name in ("rank", "incarnation", "restarts", "gradient_steps", "samples"):
                facts[name] = max(getattr(member, name), own_facts.get(name, 0))
            if state not in GONE:
                speed = partial(self._speeds.since, from_s=now_s - over_s)
                facts["samples_per_second"] = speed(("samples", rank))
                if status is not None:
                    facts["bytes_sent_per_second"] = speed(("bytes", rank))
                    linked = (each for each in status.neighbours if each.is_linked)
                    facts["neighbours"] = tuple(each.rank for each in linked if each.is_neighbour)
            workers.append(JobWorker(**facts))
        return mark_slow(workers)

    def _silent_s(self, rank: int) -> float | None:
        """Return the time since one of those who answer, and are linked to it, heard it last."""
        heard_ago_s = (
            each.heard_ago_s
            for status in self._present()
            for each in status.neighbours
            if each.rank == rank and each.heard_ago_s is not None
        )
        return min(heard_ago_s, default=None)

    # Notices.

    def _notices(self, now_s: float) -> tuple[NoticeStatus, ...]:
        """Return every event once, however many workers noticed it, oldest first."""
        noticed = (
            Event.noticed(status.rank, at_s - each.ago_s, each.rank, each.kind, each.silent_s)
            for status, at_s in self._answers.values()
            for each in status.notices
        )
        return tuple(
            NoticeStatus(each.rank, each.what, now_s - each.time_s, each.silent_s)
            for each in events_of(noticed)
        )


def facts_of(record: Counters) -> dict[str, Any]:
    """Return the fields of a :class:`JobWorker` that a status or a log's record holds too."""
    names = (name for name in JobWorker.__struct_fields__ if hasattr(record, name))
    return {name: _known(getattr(record, name)) for name in names}


def _known(value: Any) -> Any:
    return None if value != value else value  # noqa: PLR0124


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def mark_slow(workers: Iterable[JobWorker]) -> tuple[JobWorker, ...]:
    """Add how each worker's step compares with the median of the others', and mark the slow."""
    workers, marked = tuple(workers), []
    known = {each.rank: s for each in workers if each.is_answering and (s := each.step_seconds)}
    for worker in workers:
        others = [seconds for rank, seconds in known.items() if rank != worker.rank]
        if worker.rank in known and others and worker.state in ("training", "idle"):
            factor = known[worker.rank] / median(others)
            is_slow = factor > SLOW_FACTOR and worker.state == "training"
            state = "slow" if is_slow else worker.state
            worker = msgspec.structs.replace(worker, step_factor=factor, state=state)
        marked.append(worker)
    return tuple(marked)


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
