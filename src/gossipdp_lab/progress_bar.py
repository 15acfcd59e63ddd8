"""The progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class ProgressView:
    """A display of the share of work that is done. It draws in the calling thread.

    Args:
        label: the work, such as "simulating".
        console: shows it.
        redraw_every_s: least time between two drawings on a terminal.
        line_every_s: the same between two lines elsewhere.

    >>> from rich.console import Console
    >>> with ProgressView("simulating", console=Console()) as view:
    ...     view.advance(0.5)
    """

    def __init__(
        self,
        label: str,
        *,
        console: Console,
        redraw_every_s: float = 0.1,
        line_every_s: float = 5.0,
    ) -> None:
        self._label = label
        self._console = console
        self._every_s = redraw_every_s if console.is_terminal else line_every_s
        self._started_s = self._shown_s = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.fields[label]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1.0, label=label)
        self._stop: Callable[[], object] | None = None

    def start(self) -> None:
        """Draw the empty bar. It hides the cursor, so it stops at exit at the latest."""
        if self._console.is_terminal:
            self._bar.start()
            self._stop = weakref.finalize(self, self._bar.stop)

    def stop(self) -> None:
        """Take the bar off the terminal; a second call does nothing."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_due(self) -> bool:
        """Say if :meth:`advance` would show anything now."""
        return time.monotonic() - self._shown_s >= self._every_s

    def advance(self, share: float, text: str = "") -> None:
        """Show that ``share`` of the work is done, 0 to 1, and ``text`` beside it."""
        if not self.is_due:
            return
        self._shown_s = now_s = time.monotonic()
        if self._console.is_terminal:
            self._bar.update(self._task, completed=share, description=text, refresh=True)
        else:
            more = f"  {text}" if text else ""
            line = f"{now_s - self._started_s:4.0f} s  {self._label}: {share:4.0%}{more}"
            self._console.print(line, highlight=False, soft_wrap=True)
