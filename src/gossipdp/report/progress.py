"""How far long work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0
REDRAW_INTERVAL_S = 0.1


class ProgressView:
    """Shows a share that is told from time to time. It draws in the calling thread.

    Args:
        label: what is going on, such as "simulating".
        console: where to draw.

    >>> from rich.console import Console
    >>> with ProgressView("simulating", console=Console()) as view:
    ...     view.advance(0.5)
    """

    def __init__(
        self, label: str, *, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._console = console
        self._clock = clock
        self._started_s = self._shown_s = clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=1.0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:  # else it would print an empty line
            self._bar.stop()

    def advance(self, share: float) -> None:
        """``share`` of the work is done, 0 to 1."""
        now_s = self._clock()
        is_terminal = self._console.is_terminal
        if now_s - self._shown_s < (REDRAW_INTERVAL_S if is_terminal else LINE_INTERVAL_S):
            return
        self._shown_s = now_s
        if is_terminal:
            self._bar.update(self._task, completed=share, refresh=True)
        else:
            line = f"{now_s - self._started_s:4.0f} s  {self._label}: {share:4.0%}"
            self._console.print(line, highlight=False, soft_wrap=True)
