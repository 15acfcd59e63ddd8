"""``gossipdp top``: the workers of a running job, live in the terminal."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from rich.console import Console, Group

    from gossipdp.observe.board import JobStatus, StatusBoard
    from gossipdp.observe.client import Answer

# How long nobody may answer, at the beginning or later.
PATIENCE_S = 10.0
# Of one look; who answers later is shown with the next.
WAIT_FOR_ANSWERS_S = 0.5


@dataclasses.dataclass(frozen=True)
class TopArguments:
    """Show a running job live: workers, speed, loss, links, who is slow or dead.

    gossipdp top HOST:PORT, the status port of any worker (gossipdp run --status-port PORT). The
    others are found from there, and the view goes on when that worker dies.
    """

    address: Annotated[str, tyro.conf.Positional] = "127.0.0.1:9400"
    """HOST:PORT of a worker's status port; several with commas between them."""

    interval: float = 1.0
    """Seconds from one look to the next."""

    once: bool = False
    """Print one table and end; it takes two looks, for the speeds."""

    json: bool = False
    """Print each look as one line of JSON instead."""


def run(arguments: TopArguments) -> int:
    """Look until the run is over or Ctrl+C; 1 where nobody answers."""
    from gossipdp.launcher.environment import read_addresses, show_address
    from gossipdp.observe.board import StatusBoard
    from gossipdp.observe.client import StatusPoll

    if not arguments.interval >= 0.1:
        raise ValueError(f"--interval is {arguments.interval}; it must be at least 0.1 s")
    given = [show_address(*each) for each in read_addresses("the address", arguments.address)]
    if not given:
        raise ValueError("no address; write HOST:PORT, a worker's status port")
    with StatusPoll() as poll:
        return Top(arguments, StatusBoard(given), poll.answers).run()


class Top:
    """The loop: look, show, wait.

    Args:
        arguments: what to show.
        board: knows whom to ask.
        ask: gives the answers that have come within a time; see ``StatusPoll.answers``.
        clock, sleep: for tests.
    """

    def __init__(
        self,
        arguments: TopArguments,
        board: StatusBoard,
        ask: Callable[[Iterable[str], float], Mapping[str, Answer]],
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from rich.console import Console

        self._arguments = arguments
        self._board = board
        self._ask = ask
        self._console = console or Console()
        self._clock = clock
        self._sleep = sleep

    def run(self) -> int:
        """See :func:`run`."""
        try:
            return self._once() if self._arguments.once else self._live()
        except KeyboardInterrupt:  # how one leaves it
            return 0

    def _look(self) -> JobStatus | None:
        answers = self._ask(self._board.addresses(), WAIT_FOR_ANSWERS_S)
        now_s = self._clock()
        self._board.take(answers, now_s)
        return self._board.job(now_s) if self._board.has_answers else None

    def _once(self) -> int:
        # The first answer finds the others, the next look asks them, the last gives speeds.
        began_s = self._clock()
        while self._look() is None:
            if self._board.all_failed or self._clock() - began_s >= PATIENCE_S:
                return self._tell_nobody()
        self._look()
        self._sleep(self._arguments.interval)
        job = self._look()
        assert job is not None, "somebody has answered"
        if self._arguments.json:
            self._show_line(job)
        else:
            self._console.print(self._drawn(job, height=None))
        return 0

    def _live(self) -> int:
        from rich.live import Live
        from rich.text import Text

        began_s = self._clock()
        # On a dumb terminal, which cannot go back, Live would show the end alone.
        can_redraw = self._console.is_terminal and not self._console.is_dumb_terminal
        is_drawing = can_redraw and not self._arguments.json
        live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        if is_drawing:
            live.start()
        try:
            while True:
                looked_s = self._clock()
                job = self._look()
                if job is None:
                    if looked_s - began_s >= PATIENCE_S:
                        break
                    if is_drawing:
                        waiting = f"waiting for a worker at {self._arguments.address}"
                        live.update(Text(waiting), refresh=True)
                elif self._arguments.json:
                    self._show_line(job)
                elif is_drawing:
                    live.update(self._drawn(job, height=self._console.height - 1), refresh=True)
                else:
                    self._console.print(self._drawn(job, height=None), "")
                if job is not None and job.num_answering == 0 and _has_ended(job):
                    break
                self._sleep(max(0.0, looked_s + self._arguments.interval - self._clock()))
        finally:
            live.stop()
        is_over = job is not None and job.is_over
        return self._tell("the run has ended", 0) if is_over else self._tell_nobody()

    def _drawn(self, job: JobStatus, *, height: int | None) -> Group:
        from gossipdp.cli.top_screen import draw

        is_stale = job.num_answering == 0
        return draw(job, width=self._console.width, height=height, is_stale=is_stale)

    def _show_line(self, job: JobStatus) -> None:
        import msgspec

        sys.stdout.write(msgspec.json.encode(job).decode() + "\n")
        sys.stdout.flush()

    def _tell_nobody(self) -> int:
        failures = "; ".join(
            f"{address}: {failure}" for address, failure in self._board.failures.items()
        )
        if self._board.has_answers:
            return self._tell(
                f"no worker answers any more ({failures}): the run has ended, or its workers "
                "cannot be reached from here",
                1,
            )
        return self._tell(
            f"no worker answers ({failures or self._arguments.address}); give the status port of "
            "one that runs: gossipdp run --status-port PORT, or "
            "Monitor(status_port=...)",
            1,
        )

    def _tell(self, text: str, code: int) -> int:
        from gossipdp.links.strangers import printable

        sys.stderr.write(f"gossipdp: {printable(text, 4000)}\n")
        return code


def _has_ended(job: JobStatus) -> bool:
    """Whether to wait no longer for an answer."""
    return job.is_over or job.heard_ago_s >= PATIENCE_S
