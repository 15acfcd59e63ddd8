"""What commands of the lab show: lines, tables, and the progress of long work."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table


def say(console: Console, *lines: str, markup: bool = False) -> None:
    """Print lines as they are: not broken, no number coloured."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=markup)


def table_of(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows by heading; the column without a heading names them."""
    table = Table()
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row.values())
    return table


class Display:
    """A drawing on a terminal, a line now and then elsewhere. It draws in the calling thread.

    Args:
        console: shows it.
        redraw_every_s: least time between two drawings on a terminal.
        line_every_s: the same between two lines elsewhere.
        clock: in seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        redraw_every_s: float = 0.1,
        line_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._every_s = redraw_every_s if console.is_terminal else line_every_s
        self._started_s = self._shown_s = clock()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._stop: Callable[[], object] | None = None

    def start(self) -> None:
        """Take the end of a terminal. It hides the cursor, so it stops at exit at the latest."""
        if self._console.is_terminal:
            self._live.start(refresh=True)
            self._stop = weakref.finalize(self, self._live.stop)

    def stop(self) -> None:
        """Clear the drawing; a second call does nothing."""
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_due(self) -> bool:
        """Say if something would be shown now."""
        return self._clock() - self._shown_s >= self._every_s

    def show(self, drawing: RenderableType, line: str) -> None:
        """Show the drawing on a terminal, or else the line, after the seconds so far."""
        self._shown_s = now_s = self._clock()
        if self._console.is_terminal:
            self._live.update(drawing, refresh=True)
        else:
            say(self._console, f"{now_s - self._started_s:4.0f} s  {line}")


class ProgressView(Display):
    """The share of work that is done, as a bar; ``label`` is the work, such as "simulating".

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
        super().__init__(console, redraw_every_s=redraw_every_s, line_every_s=line_every_s)
        self._label = label
        self._bar = Progress(
            TextColumn("{task.fields[label]}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=1.0, label=label)
        self._live.update(self._bar.get_renderable())

    def advance(self, share: float, text: str = "") -> None:
        """Show, if it is due, that ``share`` of the work is done, 0 to 1, and ``text`` beside."""
        if self.is_due:
            self._bar.update(self._task, completed=share, description=text)
            more = f"  {text}" if text else ""
            self.show(self._bar.get_renderable(), f"{self._label}: {share:4.0%}{more}")
