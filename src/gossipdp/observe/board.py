"""What several workers' answers say together of a job: who trains, how fast, who is slow or dead.

A pure function of answers and times, but for the counts kept for speeds. Of each worker its own
word counts while it answers; else what those say that do answer, the most advanced record of them
(membership views converge, some sooner). What nobody says any more stays as it was last.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, median

import msgspec

from gossipdp.observe.status import MemberStatus, NeighbourStatus, NoticeStatus, WorkerStatus

MAX_COUNTS = 512
SLOW_FACTOR = 1.5
"""A worker whose gradient steps take longer than this times the median of the others' is slow."""
IDLE_AFTER_S = 5.0
IDLE_AFTER_STEPS = 10.0
SPEED_OVER_S = 5.0
SPEED_OVER_STEPS = 3.0
LONGEST_SPEED_OVER_S = 60.0
# Views tell of one event within this time of one another.
SAME_EVENT_S = 3.0
MAX_MEMBERS = 4096
GONE = ("dead", "left")
_ORDER = {"joining": 0, "training": 1, "done": 2, "left": 3, "dead": 4}


class JobWorker(msgspec.Struct, frozen=True):
    """One worker.

    Attributes:
        state: ``training``; ``slow``: its steps take over 1.5 times the median of the others';
            ``idle``: no step for 5 s and for ten of its steps; ``averaging``: it has called
            ``consolidate()``; ``joining``; ``left``: gone after the average; ``dead``; ``silent``:
            it does not answer, and others have not heard it for the time-out; ``cut off``: it
            answers, and others took it for dead; ``no answer``: it does not answer here, others
            hear it.
        is_answering: whether it answered when it was asked last. Of one that does not, counts are
            what others know, and the rest what it said last.
        step_factor: its step's duration over the median of the others'.
        neighbours: of the graph, with whom it has a link; None where it is gone.
        The others: see :class:`~gossipdp.observe.status.WorkerStatus`; speeds are over the last
        seconds.
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
    since_step_s: float | None = None
    samples_per_second: float | None = None
    bytes_sent_per_second: float | None = None
    loss: float | None = None
    logged: dict[str, float | None] = {}
    edge_distance: float | None = None
    exchanges: int | None = None
    exchanges_failed: int | None = None
    achieved_comm_rate: float | None = None
    waited_seconds: float | None = None
    neighbours: tuple[int, ...] | None = None


class LinkStatus(msgspec.Struct, frozen=True):
    """One pair of workers, by what the ends that answer say.

    ``exchange_seconds``: mean duration of the last exchanges; ``bytes_per_second``: sent by both
    ends that answer, by shared memory too.
    """

    ranks: tuple[int, int]
    is_up: bool
    exchanges: int
    exchange_seconds: float | None = None
    bytes_per_second: float | None = None
    heard_ago_s: float | None = None


class JobStatus(msgspec.Struct, frozen=True):
    """The job.

    Attributes:
        samples, samples_per_second: of all workers.
        loss, edge_distance: means over the workers that are not dead and have not left.
        heard_ago_s: since the last answer of any.
        num_answering: how many workers answered when they were asked last.
        notices: oldest first.
    """

    run_id: str
    method: str
    graph: str
    comm_rate: float
    num_workers: int
    samples: int
    heard_ago_s: float
    num_answering: int
    budget_samples: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    edge_distance: float | None = None
    workers: tuple[JobWorker, ...] = ()
    links: tuple[LinkStatus, ...] = ()
    notices: tuple[NoticeStatus, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether training has ended by now, for all that is known: the average, or the budget."""
        states = {worker.state for worker in self.workers} - {"dead"}
        if states and states <= {"averaging", "left"}:
            return True
        since = (self.samples_per_second or 0.0) * self.heard_ago_s
        return self.budget_samples is not None and self.samples + since >= self.budget_samples


class Speeds:
    """Remembers the latest counts of each key, and says how fast they grew.

    Example:
        >>> speeds = Speeds()
        >>> for at_s in range(4):
        ...     speeds.note("one", at_s, samples=30 * at_s, bytes_sent=7 * at_s)
        >>> speeds.since("one", 1.0)
        (30.0, 7.0)
    """

    def __init__(self) -> None:
        # By key: (at_s, samples, bytes_sent).
        self._counts: dict[Hashable, deque[tuple[float, int, int | None]]] = {}

    def note(self, key: Hashable, at_s: float, samples: int, bytes_sent: int | None = None) -> None:
        """What had been counted at a time; counts that fell are another process's, or link's."""
        counts = self._counts.setdefault(key, deque(maxlen=MAX_COUNTS))
        if counts and bytes_sent is not None:
            _, samples_before, bytes_before = counts[-1]
            if bytes_before is not None and (samples < samples_before or bytes_sent < bytes_before):
                counts.clear()
        counts.append((at_s, samples, bytes_sent))

    def since(self, key: Hashable, from_s: float) -> tuple[float | None, float | None]:
        """Samples and bytes a second from a time on, or between the last two counts if later.

        Bytes count as far back as they were known without a break.
        """
        counts = list(self._counts.get(key, ()))
        samples = _speed([(at_s, samples) for at_s, samples, _ in counts], from_s)
        known: list[tuple[float, int]] = []
        for at_s, _, bytes_sent in reversed(counts):
            if bytes_sent is None:
                break
            known.append((at_s, bytes_sent))
        return None if samples is None else max(0.0, samples), _speed(known[::-1], from_s)


def _speed(counted: list[tuple[float, int]], from_s: float) -> float | None:
    if len(counted) < 2:
        return None
    recent = [each for each in counted[:-1] if each[0] >= from_s]
    (first_s, first), (last_s, last) = recent[0] if recent else counted[-2], counted[-1]
    return (last - first) / (last_s - first_s) if last_s > first_s else None


@dataclass
class _Source:
    """One address that is asked."""

    status: WorkerStatus | None = None
    answered_s: float = -math.inf
    is_answering: bool = False
    failure: str = ""


class StatusBoard:
    """Knows whom to ask, takes the answers, and says what they come to.

    Args:
        addresses: HOST:PORT of any workers of the job.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._given = tuple(addresses)
        self._sources: dict[str, _Source] = {address: _Source() for address in self._given}
        self._speeds = Speeds()  # by rank, and by link and direction
        self._run_id: str | None = None

    @property
    def has_answers(self) -> bool:
        """Whether anybody has ever answered."""
        return any(source.status is not None for source in self._sources.values())

    @property
    def all_failed(self) -> bool:
        """Whether it is known of every address asked now that it does not answer."""
        return self.failures.keys() >= set(self.addresses())

    @property
    def failures(self) -> dict[str, str]:
        """Why each address that does not answer does not."""
        return {
            address: source.failure for address, source in self._sources.items() if source.failure
        }

    def addresses(self) -> tuple[str, ...]:
        """Whom to ask now: those given, and wherever a worker that may live shows its status."""
        wanted = dict.fromkeys(self._given)
        for member in self._members().values():
            if member.status_address and member.state not in ("left", "dead"):
                wanted[member.status_address] = None
        return tuple(wanted)

    def take(self, answers: Mapping[str, WorkerStatus | Exception], now_s: float) -> None:
        """What was answered, and by whom not; ``now_s`` in seconds, monotonic."""
        for address, answer in answers.items():
            source = self._sources.setdefault(address, _Source())
            if isinstance(answer, Exception):
                source.is_answering, source.failure = False, str(answer) or repr(answer)
                continue
            if self._run_id is None:
                self._run_id = answer.run_id
            if answer.run_id != self._run_id:
                source.is_answering = False
                source.failure = f"it is of another run, {answer.run_id}"
                continue
            source.status, source.answered_s = answer, now_s
            source.is_answering, source.failure = True, ""
        if all(isinstance(answer, Exception) for answer in answers.values()):
            return  # nothing is known of how far they are now
        own = self._own()
        for rank, member in self._members().items():
            status = own.get(rank)
            if status is None:
                self._speeds.note(rank, now_s, member.samples)
                continue
            is_answering = self._is_answering(status)
            sent = status.bytes_sent + status.shared_bytes_sent if is_answering else None
            self._speeds.note(rank, now_s, max(status.samples, member.samples), sent)
            for each in status.neighbours:
                self._speeds.note((rank, each.rank), now_s, 0, each.bytes_sent)

    def job(self, now_s: float) -> JobStatus:
        """What is known now.

        Raises:
            ValueError: nobody has ever answered.
        """
        latest = max(self._sources.values(), key=lambda source: source.answered_s)
        about = latest.status
        if about is None:
            raise ValueError("no worker has answered yet")
        workers = self._marked(list(self._workers(now_s)))
        present = [worker for worker in workers if worker.state not in GONE]
        losses = [each.loss for each in present if each.loss is not None]
        distances = [each.edge_distance for each in present if each.edge_distance is not None]
        speeds = [worker.samples_per_second for worker in workers]
        return JobStatus(
            run_id=about.run_id,
            method=about.method,
            graph=about.graph,
            comm_rate=about.comm_rate,
            num_workers=about.num_workers,
            budget_samples=about.budget_samples,
            # Ranks whose lives are counted here, or what the best informed worker knows.
            samples=max(
                sum(worker.samples for worker in workers),
                *(s.status.run_samples for s in self._sources.values() if s.status is not None),
            ),
            samples_per_second=sum(filter(None, speeds)) if any(speeds) else None,
            loss=fmean(losses) if losses else None,
            edge_distance=fmean(distances) if distances else None,
            heard_ago_s=now_s - latest.answered_s,
            num_answering=sum(worker.is_answering for worker in workers),
            workers=tuple(workers),
            links=tuple(self._links({each.rank for each in workers if each.state in GONE}, now_s)),
            notices=tuple(self._notices(now_s)),
        )

    # Who is who.

    def _answering(self) -> list[WorkerStatus]:
        """Those that answer; once nobody does, all that ever did."""
        known = [source for source in self._sources.values() if source.status is not None]
        sources = [source for source in known if source.is_answering] or known
        return [source.status for source in sources if source.status is not None]

    def _members(self) -> dict[int, MemberStatus]:
        """The most advanced record of each worker, by rank."""
        members: dict[int, MemberStatus] = {}
        for status in self._answering():
            for member in status.members[:MAX_MEMBERS]:
                known = members.get(member.rank)
                if known is None or _order(member) > _order(known):
                    members[member.rank] = member
        return dict(sorted(members.items()))

    def _own(self) -> dict[int, WorkerStatus]:
        """Of each worker the last that it said itself, of its latest life."""
        own: dict[int, WorkerStatus] = {}
        for source in sorted(self._sources.values(), key=lambda each: each.answered_s):
            status = source.status
            if status is None:
                continue
            known = own.get(status.rank)
            if known is None or status.incarnation >= known.incarnation:
                own[status.rank] = status
        return own

    def _is_answering(self, status: WorkerStatus) -> bool:
        return any(each.is_answering and each.status is status for each in self._sources.values())

    def _workers(self, now_s: float) -> Iterator[JobWorker]:
        own = self._own()
        silent = {
            each.rank for other in self._answering() for each in other.members if each.is_silent
        }
        for rank, member in self._members().items():
            status = own.get(rank)
            is_answering = status is not None and self._is_answering(status)
            if status is not None and member.incarnation > status.incarnation and not is_answering:
                status = None  # what a former life said
            state = _state(member, status if is_answering else None, is_silent=rank in silent)
            samples_per_second, bytes_per_second = self._speed(rank, status, now_s)
            if state in GONE:
                samples_per_second = bytes_per_second = None
            if status is None:
                yield JobWorker(
                    rank=rank,
                    incarnation=member.incarnation,
                    state=state,
                    is_answering=False,
                    status_address=member.status_address,
                    gradient_steps=member.gradient_steps,
                    samples=member.samples,
                    samples_per_second=samples_per_second,
                )
                continue
            yield JobWorker(
                rank=rank,
                incarnation=max(member.incarnation, status.incarnation),
                state=state,
                is_answering=is_answering,
                status_address=member.status_address,
                host=status.host,
                process_id=status.process_id,
                gradient_steps=max(status.gradient_steps, member.gradient_steps),
                samples=max(status.samples, member.samples),
                step_seconds=status.step_seconds,
                since_step_s=status.since_step_s,
                samples_per_second=samples_per_second,
                bytes_sent_per_second=bytes_per_second,
                loss=status.logged.get("loss"),
                logged=status.logged,
                edge_distance=status.edge_distance,
                exchanges=status.exchanges,
                exchanges_failed=status.exchanges_failed,
                achieved_comm_rate=status.achieved_comm_rate,
                waited_seconds=status.waited_seconds,
                neighbours=None
                if state in GONE
                else tuple(
                    each.rank for each in status.neighbours if each.is_linked and each.is_neighbour
                ),
            )

    def _marked(self, workers: list[JobWorker]) -> list[JobWorker]:
        """With those that are slow marked, by the median of the others' steps."""
        timed = {
            worker.rank: worker.step_seconds
            for worker in workers
            if worker.is_answering and worker.state in ("training", "idle") and worker.step_seconds
        }
        marked = []
        for worker in workers:
            others = [seconds for rank, seconds in timed.items() if rank != worker.rank]
            if worker.rank in timed and others:
                factor = timed[worker.rank] / median(others)
                is_slow = factor > SLOW_FACTOR and worker.state == "training"
                worker = msgspec.structs.replace(
                    worker, step_factor=factor, state="slow" if is_slow else worker.state
                )
            marked.append(worker)
        return marked

    def _speed(
        self, rank: int, status: WorkerStatus | None, now_s: float
    ) -> tuple[float | None, float | None]:
        """Samples and bytes a second, over the last seconds, or some steps if that is longer."""
        step_s = (status.step_seconds if status is not None else None) or 0.0
        over_s = min(max(SPEED_OVER_S, SPEED_OVER_STEPS * step_s), LONGEST_SPEED_OVER_S)
        return self._speeds.since(rank, now_s - over_s)

    # Links, and what was noticed.

    def _links(self, gone: set[int], now_s: float) -> Iterator[LinkStatus]:
        """Every edge of which one end answers and none is gone, by what both ends say."""
        ends: dict[tuple[int, int], dict[int, NeighbourStatus]] = {}
        for rank, status in self._own().items():
            if self._is_answering(status):
                for each in filter(_matters, status.neighbours):
                    pair = (min(rank, each.rank), max(rank, each.rank))
                    ends.setdefault(pair, {})[rank] = each
        for pair, said in sorted(ends.items()):
            if not gone.isdisjoint(pair):
                continue
            durations = [
                each.exchange_seconds for each in said.values() if each.exchange_seconds is not None
            ]
            speeds = [
                speed
                for ends_of in (pair, pair[::-1])
                if ends_of[0] in said
                and (speed := self._speeds.since(ends_of, now_s - SPEED_OVER_S)[1]) is not None
            ]
            heard = [each.heard_ago_s for each in said.values() if each.heard_ago_s is not None]
            yield LinkStatus(
                ranks=pair,
                is_up=all(each.is_linked for each in said.values()),
                exchanges=max(each.exchanges for each in said.values()),
                exchange_seconds=fmean(durations) if durations else None,
                bytes_per_second=sum(speeds) if speeds else None,
                heard_ago_s=max(heard, default=None),
            )

    def _notices(self, now_s: float) -> Iterator[NoticeStatus]:
        """Every event once, however many noticed it, oldest first."""
        events: list[tuple[float, int, str]] = []
        for source in self._sources.values():
            if source.status is not None:
                age_s = now_s - source.answered_s
                for each in source.status.notices:
                    events.append((age_s + each.ago_s, each.rank, each.kind))
        last: dict[tuple[int, str], float] = {}
        for ago_s, rank, kind in sorted(events, reverse=True):
            before_s = last.get((rank, kind))
            if before_s is None or before_s - ago_s > SAME_EVENT_S:
                yield NoticeStatus(rank=rank, kind=kind, ago_s=ago_s)
            last[rank, kind] = ago_s


def _matters(neighbour: NeighbourStatus) -> bool:
    """Whether it is a neighbour in the graph, or was one and its link is still up."""
    return neighbour.is_neighbour or (neighbour.is_linked and neighbour.exchanges > 0)


def _order(member: MemberStatus) -> tuple[int, int, int]:
    return (member.incarnation, _ORDER[member.state], member.samples)


def _state(member: MemberStatus, status: WorkerStatus | None, *, is_silent: bool) -> str:
    """One word for a worker; ``status``: what it says itself, if it answers."""
    if status is not None:
        is_given_up = member.state == "dead" and member.incarnation >= status.incarnation
        if is_given_up:
            return "cut off"  # it lives, and others take it for dead
        if member.state == "joining" or status.state == "averaging":
            return member.state if member.state == "joining" else "averaging"
        idle_after_s = max(IDLE_AFTER_S, IDLE_AFTER_STEPS * (status.step_seconds or 0.0))
        if status.since_step_s is not None and status.since_step_s > idle_after_s:
            return "idle"
        return "training"
    if member.state in ("dead", "left", "joining"):
        return member.state
    if is_silent:
        return "silent"
    if member.status_address:
        return "no answer"
    return "averaging" if member.state == "done" else member.state
