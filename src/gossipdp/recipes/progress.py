"""How far a training is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

REDRAW_INTERVAL_S = 0.5
LINE_INTERVAL_S = 10.0


class TrainingProgress:
    """Draws in the calling thread, between two gradient steps; a loss is read only then.

    Args:
        epochs: what the whole run is.
        samples_per_epoch: of all workers together.
        share: of the run that was done before, 0 to 1; a resumed run starts with some.
        console: where to draw.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        epochs: int,
        samples_per_epoch: int,
        share: float,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epochs = epochs
        self._samples_per_epoch = samples_per_epoch
        self._console = console
        self._clock = clock
        self._started_s = self._shown_s = clock()
        self._shown_share = share
        self._losses: list[Tensor] = []
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._stop: Callable[[], object] | None = None
        if console.is_terminal:
            self._bar.start()
            # It hides the cursor, so it must stop however training ends: at exit at the latest.
            self._stop = weakref.finalize(self, self._bar.stop)

    def step(self, loss: Tensor, share: float) -> None:
        """A gradient step of this worker was done, and ``share`` of the run by all, 0 to 1."""
        self._losses.append(loss.detach())
        now_s = self._clock()
        is_terminal = self._console.is_terminal
        elapsed_s = now_s - self._shown_s
        if elapsed_s < (REDRAW_INTERVAL_S if is_terminal else LINE_INTERVAL_S):
            return
        mean = sum(float(each) for each in self._losses) / len(self._losses)
        samples = (share - self._shown_share) * self._epochs * self._samples_per_epoch
        text = (
            f"epoch {share * self._epochs:.2f} of {self._epochs}, loss {mean:.4f}, "
            f"{samples / elapsed_s:,.0f} samples/s"
        )
        self._shown_s, self._shown_share = now_s, share
        self._losses.clear()
        if is_terminal:
            self._bar.update(self._task, completed=share, description=text, refresh=True)
        else:
            line = f"{now_s - self._started_s:5.0f} s  {share:4.0%}  {text}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar off the terminal; a second call does nothing."""
        if self._stop is not None:
            self._stop()
