"""The progress of a run while it trains, from the logs that its workers write."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gossipdp.report.run_log import (
    EndRecord,
    ExchangeRecord,
    Record,
    RunLogTail,
    StepRecord,
    worker_file,
)

LINE_INTERVAL_S = 5.0


@dataclass
class WorkerProgress:
    """The latest of one worker."""

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
            self.gradient_steps = record.gradient_steps
            self.samples = record.samples
            self.loss = record.loss
            self.samples_per_second = record.samples_per_second
        elif isinstance(record, ExchangeRecord):
            self.exchanges = record.exchanges_initiated + record.exchanges_answered
            self.waited_seconds = record.waited_seconds
        elif isinstance(record, EndRecord):
            self.ended = True


class LiveView:
    """A table and a bar that redraw themselves in a terminal; a line now and then elsewhere.

    Call ``poll`` a few times a second. It draws in the calling thread and starts none.

    >>> options = {"num_workers": 4, "budget_samples": 1000, "console": console}  # doctest: +SKIP
    >>> with LiveView(directory, **options) as view:  # doctest: +SKIP
    ...     launch(train, workers=4, on_poll=view.poll)
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        budget_samples: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = [WorkerProgress() for _ in range(num_workers)]
        self._tails = [RunLogTail(worker_file(directory, rank)) for rank in range(num_workers)]
        self._budget_samples = budget_samples
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
        for worker, tail in zip(self.workers, self._tails, strict=True):
            for record in tail.read_new():
                worker.take(record)
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
        elif self._clock() - self._last_line >= LINE_INTERVAL_S:
            self._last_line = self._clock()
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _phase(self) -> str:
        num_workers = len(self.workers)
        if not any(worker.gradient_steps for worker in self.workers):
            return f"starting {num_workers} worker{'s' if num_workers > 1 else ''}"
        if sum(worker.samples for worker in self.workers) >= self._budget_samples:
            return "evaluating and averaging"
        return "training"

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        for heading in ("worker", "steps", "loss", "samples/s", "exchanges", "waited (s)"):
            table.add_column(heading, justify="right", min_width=8)
        for rank, worker in enumerate(self.workers):
            table.add_row(
                str(rank),
                f"{worker.gradient_steps:,}",
                "-" if worker.loss is None else f"{worker.loss:.4f}",
                f"{worker.samples_per_second:,.0f}",
                f"{worker.exchanges:,}",
                f"{worker.waited_seconds:.1f}",
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
        return (
            f"{self._clock() - self._started:4.0f} s  {self._phase()}: "
            f"{min(1.0, samples / self._budget_samples):4.0%} of the samples, loss {mean_loss}, "
            f"{speed:,.0f} samples/s, steps {min(steps):,} to {max(steps):,}, "
            f"{exchanges:,} exchanges"
        )
