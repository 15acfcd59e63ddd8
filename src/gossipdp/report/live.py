"""The progress of a run while it trains, from the logs that its workers write."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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

LINE_INTERVAL_S = 5.0


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
            self.exchanges = record.exchanges_initiated + record.exchanges_answered
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


class LiveView:
    """A table and a bar that redraw themselves in a terminal; a line now and then elsewhere.

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
        self._console = console
        self._clock = clock
        self._started = self._last_line = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("samples"),
            TimeRemainingColumn(),
            expand=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(self._phase(), total=budget_samples)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            self._live.update(self._render(), refresh=True)
        else:
            self._console.print(self._phase())
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

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
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
        elif self._clock() - self._last_line >= LINE_INTERVAL_S:
            self._last_line = self._clock()
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _phase(self) -> str:
        num_workers = len(self.workers)
        if not any(worker.gradient_steps for worker in self.workers):
            return f"starting {num_workers} worker{'s' if num_workers > 1 else ''}"
        began = [worker.began_s for worker in self.workers if worker.began_s is not None]
        is_long_enough = not began or self._clock() >= min(began) + self._least_s
        samples = sum(worker.samples for worker in self.workers)
        if samples >= self._budget_samples and is_long_enough:
            return "evaluating and averaging"
        return "training"

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for heading in ("worker", "state", "steps", "loss", "samples/s", "exchanges", "waited (s)"):
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
        samples = sum(worker.samples for worker in self.workers)
        self._bar.update(
            self._task,
            completed=min(samples, self._budget_samples),
            description=self._phase(),
        )
        return Group(table, self._bar)

    def _line(self) -> str:
        samples = sum(worker.samples for worker in self.workers)
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        speed = sum(worker.samples_per_second for worker in self.workers)
        steps = [worker.gradient_steps for worker in self.workers]
        exchanges = sum(worker.exchanges for worker in self.workers) // 2
        mean_loss = f"{sum(losses) / len(losses):.4f}" if losses else "-"
        absent = "".join(
            f", worker {rank} is {worker.state}"
            for rank, worker in enumerate(self.workers)
            if worker.state in ("dead", "silent")
        )
        return (
            f"{self._clock() - self._started:4.0f} s  {self._phase()}: "
            f"{min(1.0, samples / self._budget_samples):4.0%} of the samples, loss {mean_loss}, "
            f"{speed:,.0f} samples/s, steps {min(steps):,} to {max(steps):,}, "
            f"{exchanges:,} exchanges{absent}"
        )
