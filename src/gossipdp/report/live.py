"""The progress of a run while it trains, from the logs that its workers write."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from gossipdp.links.clock import since_boot_s
from gossipdp.observe.log import (
    BeganRecord,
    EndRecord,
    ExchangeRecord,
    NoticeRecord,
    Record,
    RunLogTail,
    StepRecord,
    worker_file,
)
from gossipdp.progress import ProgressView

HEADINGS = ("worker", "state", "steps", "loss", "samples/s", "exchanges", "waited (s)")


@dataclass
class WorkerProgress:
    """The latest of one worker.

    state: what the worker itself or, of a dead or silent one, another says last.
    began_s: when its first process made its first gradient step, by ``since_boot_s``.
    """

    state: str = "starting"
    process_id: int | None = None
    began_s: float | None = None
    num_lives: int = 0
    gradient_steps: int = 0
    samples: int = 0
    loss: float | None = None
    samples_per_second: float = 0.0
    exchanges: int = 0
    waited_seconds: float = 0.0
    ended: bool = False

    def take(self, record: Record) -> None:
        """Bring up to date."""
        if isinstance(record, StepRecord):
            if self.state == "starting":
                self.state = "training"
            self.gradient_steps = record.gradient_steps
            self.samples = record.samples
            self.loss = self.loss if record.loss is None else record.loss
            self.samples_per_second = record.samples_per_second
        elif isinstance(record, ExchangeRecord):
            self.exchanges = record.exchanges
            self.waited_seconds = record.waited_seconds
        elif isinstance(record, BeganRecord):
            self.process_id = record.process_id
            self.num_lives += 1
            self.state = "training"
            if self.began_s is None:
                self.began_s = record.at_s
        elif isinstance(record, EndRecord):
            self.ended = True
            self.state = "done"

    def noticed(self, what: str) -> None:
        """Another worker has noticed something of this one."""
        if self.ended:
            return
        if what == "dead":
            self.state, self.samples_per_second = "dead", 0.0
        elif what == "stopped" and self.state == "training":
            self.state, self.samples_per_second = "silent", 0.0
        elif what == "rejoined":
            self.state = "training"


class LiveView(ProgressView):
    """A bar under a table of the workers in a terminal; a line now and then elsewhere.

    Call ``poll`` a few times a second. It draws in the calling thread and starts none.

    >>> options = {"num_workers": 4, "budget_samples": 1000, "console": console}  # doctest: +SKIP
    >>> with LiveView(directory, **options) as view:  # doctest: +SKIP
    ...     launch(train, world_size=4, on_poll=view.poll)
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        budget_samples: int,
        console: Console,
        clock: Callable[[], float] = since_boot_s,
        least_s: float = 0.0,
    ) -> None:
        self.workers = [WorkerProgress() for _ in range(num_workers)]
        self._tails = [RunLogTail(worker_file(directory, rank)) for rank in range(num_workers)]
        self._budget_samples = budget_samples
        self._least_s = least_s
        super().__init__(self._phase(clock()), console=console, above=self._table, clock=clock)

    def poll(self) -> None:
        """Read what the workers logged since the last call and show it."""
        notices = []
        for worker, tail in zip(self.workers, self._tails, strict=True):
            for record in tail.read_new():
                worker.take(record)
                if isinstance(record, NoticeRecord) and record.rank < len(self.workers):
                    notices.append(record)
        for notice in sorted(notices, key=lambda notice: notice.at_s):
            self.workers[notice.rank].noticed(notice.what)
        samples, budget = self._samples(), self._budget_samples
        text = f"{min(samples, budget):,} of {budget:,} samples"  # the rest is in the table
        text = text if self._console.is_terminal else self._text()
        self.advance(min(1.0, samples / budget), text, self._phase(self._clock()))

    def _samples(self) -> int:
        return sum(worker.samples for worker in self.workers)

    def _phase(self, now_s: float) -> str:
        if not any(worker.gradient_steps for worker in self.workers):
            return f"starting {len(self.workers)} worker{'s' if len(self.workers) > 1 else ''}"
        began = [worker.began_s for worker in self.workers if worker.began_s is not None]
        is_long_enough = not began or now_s >= min(began) + self._least_s
        is_over = self._samples() >= self._budget_samples and is_long_enough
        return "evaluating and averaging" if is_over else "training"

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", min_width=8)
        for rank, worker in enumerate(self.workers):
            table.add_row(
                str(rank),
                worker.state,
                f"{worker.gradient_steps:,}",
                "-" if worker.loss is None else f"{worker.loss:.4f}",
                f"{worker.samples_per_second:,.0f}",
                f"{worker.exchanges:,}",
                f"{worker.waited_seconds:.1f}",
                style={"dead": "bold red", "silent": "yellow"}.get(worker.state),
            )
        return table

    def _text(self) -> str:
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        speed = sum(worker.samples_per_second for worker in self.workers)
        steps = [worker.gradient_steps for worker in self.workers]
        facts = [
            f"loss {fmean(losses):.4f}" if losses else "loss -",
            f"{speed:,.0f} samples/s",
            f"steps {min(steps):,} to {max(steps):,}",
            f"{sum(worker.exchanges for worker in self.workers) // 2:,} exchanges",
        ]
        for rank, worker in enumerate(self.workers):
            if worker.state in ("dead", "silent"):
                facts.append(f"worker {rank} is {worker.state}")
        return ", ".join(facts)
