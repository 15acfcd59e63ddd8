"""A whole job as its workers' answers show it: what ``gossipdp top`` draws, or prints as JSON."""

from __future__ import annotations

import msgspec

from gossipdp.observe.status import NoticeStatus


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

    def with_factor(self, factor: float, state: str) -> JobWorker:
        """The same with its step's duration compared."""
        return msgspec.structs.replace(self, step_factor=factor, state=state)


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
