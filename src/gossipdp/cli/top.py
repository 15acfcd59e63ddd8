"""``gossipdp top``: the workers of a running job, live in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated

import msgspec
import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossipdp.launcher.environment import read_addresses, show_address
from gossipdp.logs import printable
from gossipdp.observe.board import JobStatus, JobWorker, StatusBoard, duration, shown_number
from gossipdp.observe.status import Answer, StatusPoll
from gossipdp.rules import number, option, shown_rate

# The longest wait without an answer, at the beginning or later.
PATIENCE_S = 10.0
# The wait of one look; later answers are shown with the next.
WAIT_FOR_ANSWERS_S = 0.5


@dataclasses.dataclass(frozen=True)
class TopArguments:
    """Show a running job live: speed, loss, links, who is lost.

    Give the status port of any worker, as set by gossipdp run --status-port. top finds the other
    workers from there, and goes on if that worker dies.
    """

    address: Annotated[str, tyro.conf.Positional] = "127.0.0.1:9400"
    """HOST:PORT, a worker's status port, or several with commas between them."""

    interval: float = option(1.0, partial(number, least=0.1))
    """Seconds between two updates."""

    once: bool = False
    """Print one table, after two updates, and end."""

    json: bool = False
    """Print a line of JSON at each update, instead of a table."""


def run(arguments: TopArguments) -> int:
    """Look until the run is over or Ctrl+C; return 1 if no worker answers."""
    given = [show_address(*each) for each in read_addresses("the address", arguments.address)]
    if not given:
        raise ValueError("no address; write HOST:PORT, a worker's status port")
    with StatusPoll() as poll:
        return Top(arguments, StatusBoard(given), poll.answers).run()


@dataclasses.dataclass
class Top:
    """The loop: look, show, wait; ``ask`` is ``StatusPoll.answers``."""

    arguments: TopArguments
    board: StatusBoard
    ask: Callable[[Iterable[str], float], Mapping[str, Answer]]
    console: Console = dataclasses.field(default_factory=Console)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self) -> int:
        try:
            return self._once() if self.arguments.once else self._live()
        except KeyboardInterrupt:  # the usual way to leave it
            return 0

    def _look(self) -> JobStatus | None:
        answers = self.ask(self.board.addresses(), WAIT_FOR_ANSWERS_S)
        now_s = self.clock()
        self.board.take(answers, now_s)
        return self.board.job(now_s) if self.board.has_answers else None

    def _once(self) -> int:
        # The first answer finds the others, the next look asks them, the last gives speeds.
        began_s = self.clock()
        while self._look() is None:
            if self.board.all_failed or self.clock() - began_s >= PATIENCE_S:
                return self._no_answer()
        self._look()
        self.sleep(self.arguments.interval)
        job = self._look()
        assert job is not None, "a worker has answered"
        self._print(job)
        return 0

    def _live(self) -> int:
        # A dumb terminal cannot go back, so Live would show nothing but the end there.
        can_redraw = self.console.is_terminal and not self.console.is_dumb_terminal
        is_drawing = can_redraw and not self.arguments.json
        live = Live(console=self.console, auto_refresh=False, vertical_overflow="crop")
        with live if is_drawing else contextlib.nullcontext():
            has_ended = self._watch(live if is_drawing else None)
        return _say("the run has ended", 0) if has_ended else self._no_answer()

    def _watch(self, live: Live | None) -> bool:
        """Show one look after the other until no worker answers; return whether the run ended."""
        console, began_s = self.console, self.clock()
        while True:
            looked_s = self.clock()
            job = self._look()
            if live is not None:
                waiting = Text(f"waiting for a worker at {self.arguments.address}")
                shown = draw(job, console.width, console.height - 1) if job else waiting
                live.update(shown, refresh=True)
            elif job is not None:
                self._print(job, "")
            if job is None:
                if looked_s - began_s >= PATIENCE_S:
                    return False
            elif job.num_answering == 0 and (job.is_over or job.heard_ago_s >= PATIENCE_S):
                return job.is_over
            self.sleep(max(0.0, looked_s + self.arguments.interval - self.clock()))

    def _print(self, job: JobStatus, *more: str) -> None:
        if self.arguments.json:
            sys.stdout.write(msgspec.json.encode(job).decode() + "\n")
            sys.stdout.flush()
        else:
            self.console.print(draw(job, self.console.width, None), *more)

    def _no_answer(self) -> int:
        failures = "; ".join(f"{name}: {failure}" for name, failure in self.board.failures.items())
        if self.board.has_answers:
            return _say(
                f"no worker answers any more ({failures}): the run has ended, or its workers "
                "cannot be reached from here",
                1,
            )
        return _say(
            f"no worker answers ({failures or self.arguments.address}); give the status port of "
            "one that runs: gossipdp run --status-port PORT, or Monitor(status_port=...)",
            1,
        )


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"gossipdp: {printable(text, 4000)}\n")
    return code


# The screen: a head, the workers, the latest notices. States without a style have the
# terminal's own colour.
STYLES = {
    "lost": "bold red",
    "cut off": "bold red",
    "silent": "red",
    "no answer": "yellow",
    "slow": "yellow",
    "idle": "yellow",
    "joining": "cyan",
    "averaging": "green",
    "left": "dim",
}
WELL = ("training", "averaging", "left")
MAX_NOTICES = 5
# The head of the page, the gap, the table's heading, and a line for workers that do not fit.
OTHER_LINES = 7
GAP = 2  # between columns
LEFT_OUT_FIRST = ("where", "wire", "waited", "sent", "distance", "links", "exchanges", "goodput")
TEXTS = ("worker", "state", "wire", "links", "where")


def draw(job: JobStatus, width: int, height: int | None) -> Group:
    """Return the page; ``height`` is in lines, None for all of it."""
    notices = job.notices[-MAX_NOTICES:]
    is_stale = job.num_answering == 0
    max_workers = len(job.workers)
    if height is not None:
        others = OTHER_LINES + (1 + len(notices) if notices else 0) + (2 if is_stale else 0)
        max_workers = max(3, height - others)
    rate = printable(shown_rate(job.comm_rate))
    graph = f" on {printable(job.graph)}, comm rate {rate}" if job.graph else ""
    head = Text(f"run {printable(job.run_id)[:12]}: {printable(job.method)}{graph}\n")
    head.append(states_of(job), style="bold")
    parts: list[RenderableType] = [head, _progress(job, width), Text("")]
    parts += _workers(job.workers, width, max_workers)
    if notices:
        parts.append(Text(""))
    for each in notices:
        text = f"{duration(job.at_s - each.at_s)} ago: worker {each.rank} {each.words}"
        parts.append(Text(text, style=STYLES.get(each.kind, "")))
    if is_stale:
        silence = f"no worker answers since {duration(job.heard_ago_s)}"
        parts += [Text(""), Text(silence, style="bold red")]
    return Group(*parts)


def states_of(job: JobStatus) -> str:
    order = ["training", "averaging", "left", "joining", *STYLES]
    states = sorted((worker.state for worker in job.workers), key=order.index)
    return f"{len(states)} workers: {_counted(states)}"


def _counted(states: Sequence[str]) -> str:
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def progress_facts(job: JobStatus, width: float = math.inf) -> str:
    """Return the known facts of the run; without room leave out distance, loss, then goodput."""
    of_all = f" of {job.budget_samples:,}" if job.budget_samples else ""
    facts = [
        f"{job.samples:,}{of_all} samples",
        f"{shown_number(job.samples_per_second, ',.0f')} samples/s",
    ]
    less_important = [f"loss {shown_number(job.loss, '.4f')}"]
    if job.goodput is not None:
        less_important.insert(0, f"goodput {job.goodput:.0%}")
    if job.edge_distance is not None:
        less_important.append(f"distance {job.edge_distance:.2g}")
    end = []
    left = (job.budget_samples or 0) - job.samples
    if left > 0 and job.samples_per_second:
        end = [f"{duration(left / job.samples_per_second)} left"]
    while less_important and len(" · ".join(facts + less_important + end)) > width:
        less_important.pop()
    return " · ".join(facts + less_important + end)


def _progress(job: JobStatus, width: int) -> RenderableType:
    text = Text(progress_facts(job, width), no_wrap=True, overflow="ellipsis")
    if not job.budget_samples:
        return text
    share = min(1.0, job.samples / job.budget_samples)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}")
    return Group(text, bar)


def _workers(workers: Sequence[JobWorker], width: int, max_workers: int) -> list[RenderableType]:
    """Return the table; if not all workers fit, those with a problem are shown first."""
    shown = list(workers)
    if len(workers) > max_workers:
        ill_first = sorted(workers, key=lambda each: (each.state in WELL, each.rank))
        shown = sorted(ill_first[:max_workers], key=lambda each: each.rank)
    rows = [each.cells for each in shown]
    empty = {name for name in LEFT_OUT_FIRST if all(row[name] == "-" for row in rows)}
    rows = [{name: cell for name, cell in row.items() if name not in empty} for row in rows]
    for heading in LEFT_OUT_FIRST:
        widths = [max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]]
        if sum(widths) + GAP * (len(widths) - 1) > width:
            for row in rows:
                row.pop(heading, None)
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading in TEXTS else "right", no_wrap=True)
    for row, each in zip(rows, shown, strict=True):  # no markup: hosts may have "["
        table.add_row(*map(Text, row.values()), style=STYLES.get(each.state))
    hidden = [each.state for each in workers if each not in shown]
    if not hidden:
        return [table]
    return [table, Text(f"and {len(hidden)} more: {_counted(hidden)}", style="dim")]
