"""How ``gossipdp top`` draws a job: a head, the workers, the links, what was noticed last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossipdp.links.strangers import printable
from gossipdp.observe.board import JobStatus, JobWorker, LinkStatus

# What is not here is drawn in the terminal's own colour.
STYLES = {
    "dead": "bold red",
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
MAX_LINKS, MAX_NOTICES = 8, 5
# The head of the page, the gap, the table's heading, and a line for workers that do not fit.
OTHER_LINES = 7
NONE = "-"
# Between columns.
GAP = 2


@dataclass(frozen=True)
class _Column:
    heading: str
    show: Callable[[JobWorker], str]
    is_text: bool = False
    # The higher, the sooner it is left out where not all fit; 0: never.
    spare: int = 0


def draw(job: JobStatus, *, width: int, height: int | None, is_stale: bool = False) -> Group:
    """The page; ``height`` in lines, None: all there is. ``is_stale``: nobody answers any more."""
    links = _troubled_or_slow(job.links)
    notices = job.notices[-MAX_NOTICES:]
    max_workers = None
    if height is not None:
        others = OTHER_LINES + (1 + len(notices) if notices else 0) + (2 if is_stale else 0)
        if others + 3 + len(links) + len(job.workers) > height:  # links go before workers do
            links = []
        max_workers = max(3, height - others - (3 + len(links) if links else 0))
    parts: list[RenderableType] = [_head(job), _progress(job, width), Text("")]
    parts += _workers(job.workers, width, max_workers)
    if links:
        parts += [Text(""), _links(job, links)]
    if notices:
        parts += [Text(""), *(_notice(each.rank, each.kind, each.ago_s) for each in notices)]
    if is_stale:
        parts += [
            Text(""),
            Text(f"no worker answers since {_duration(job.heard_ago_s)}", style="bold red"),
        ]
    return Group(*parts)


def _head(job: JobStatus) -> Text:
    states = [worker.state for worker in job.workers]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states, key=_rarity))
    )
    graph = f" on {printable(job.graph)}, comm rate {job.comm_rate:g}" if job.graph else ""
    text = Text(f"run {printable(job.run_id)[:12]}: {printable(job.method)}{graph}\n")
    text.append(f"{len(states)} workers: {counts}", style="bold")
    return text


def _rarity(state: str) -> int:
    order = ["training", "averaging", "left", "joining", *STYLES]
    return order.index(state) if state in order else len(order)


def _progress(job: JobStatus, width: int) -> RenderableType:
    facts = [f"{_count(job.samples_per_second)} samples/s", f"loss {_number(job.loss, 4)}"]
    if job.edge_distance is not None:
        facts.append(f"distance {_small(job.edge_distance)}")
    if not job.budget_samples:
        return Text(" · ".join([f"{job.samples:,} samples", *facts]))
    share = min(1.0, job.samples / job.budget_samples)
    left = job.budget_samples - job.samples
    if left > 0 and job.samples_per_second:
        facts.append(f"{_duration(left / job.samples_per_second)} left")
    text = f"{job.samples:,} of {job.budget_samples:,} samples · " + " · ".join(facts)
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    bar.add_row(ProgressBar(total=1.0, completed=share), f"{share:.0%}")
    return Group(Text(text, no_wrap=True, overflow="ellipsis"), bar)


def _columns() -> list[_Column]:
    return [
        _Column("worker", lambda each: str(each.rank), is_text=True),
        _Column("state", _state, is_text=True),
        _Column("steps", lambda each: f"{each.gradient_steps:,}"),
        _Column("step", lambda each: _milliseconds(each.step_seconds)),
        _Column("samples/s", lambda each: _count(each.samples_per_second)),
        _Column("loss", lambda each: _number(each.loss, 4)),
        _Column("distance", lambda each: _small(each.edge_distance), spare=3),
        _Column("exchanges", lambda each: _count(each.exchanges), spare=1),
        _Column("rate", lambda each: _number(each.achieved_comm_rate, 2)),
        _Column("sent", lambda each: _bytes(each.bytes_sent_per_second), spare=4),
        _Column("waited", lambda each: _waited(each.waited_seconds), spare=5),
        _Column("links", lambda each: _neighbours(each.neighbours), is_text=True, spare=2),
        _Column("where", _where, is_text=True, spare=6),
    ]


def _fitting(workers: Sequence[JobWorker], width: int) -> list[_Column]:
    """The columns for which there is room."""
    columns = _columns()
    widths = {
        column: max(map(len, [column.heading, *map(column.show, workers)])) for column in columns
    }
    while sum(widths[column] + GAP for column in columns) - GAP > width:
        first = max(columns, key=lambda column: column.spare)
        if not first.spare:
            break
        columns.remove(first)
    return columns


def _workers(
    workers: Sequence[JobWorker], width: int, max_workers: int | None
) -> list[RenderableType]:
    """The table; where not all fit, those that something is the matter with come first."""
    shown = list(workers)
    if max_workers is not None and len(workers) > max_workers:
        ill_first = sorted(workers, key=lambda each: (each.state in WELL, each.rank))
        shown = sorted(ill_first[: max_workers - 1], key=lambda each: each.rank)
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False)
    columns = _fitting(shown, width)
    for column in columns:
        justify = "left" if column.is_text else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for worker in shown:
        cells = [Text(column.show(worker)) for column in columns]  # no markup: hosts may have "["
        table.add_row(*cells, style=STYLES.get(worker.state))
    hidden = [worker for worker in workers if worker not in shown]
    if not hidden:
        return [table]
    states = [worker.state for worker in hidden]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return [table, Text(f"and {len(hidden)} more: {counts}", style="dim")]


def _state(worker: JobWorker) -> str:
    state = worker.state
    if state == "slow" and worker.step_factor is not None:
        state = f"slow {worker.step_factor:.1f}x"
    elif state == "idle" and worker.since_step_s is not None:
        state = f"idle {_duration(worker.since_step_s)}"
    lives = f", life {worker.incarnation + 1}" if worker.incarnation else ""
    return f"{state}{lives}"


def _links(job: JobStatus, links: Sequence[LinkStatus]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold", pad_edge=False)
    for heading in ("link", "state", "exchanges", "exchange", "throughput"):
        justify = "left" if heading in ("link", "state") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for link in links:
        table.add_row(
            f"{link.ranks[0]} – {link.ranks[1]}",
            "up" if link.is_up else "down",
            f"{link.exchanges:,}",
            _milliseconds(link.exchange_seconds),
            _bytes(link.bytes_per_second),
            style=None if link.is_up else "red",
        )
    others = len(job.links) - len(links)
    if others:
        table.add_row(f"and {others} more", style="dim")
    return table


def _troubled_or_slow(links: Sequence[LinkStatus]) -> list[LinkStatus]:
    """Those that are down, then those whose exchanges take longest."""
    return sorted(
        links, key=lambda link: (link.is_up, -(link.exchange_seconds or 0.0), link.ranks)
    )[:MAX_LINKS]


def _notice(rank: int, kind: str, ago_s: float) -> Text:
    words = {
        "dead": "was found dead",
        "stopped": "fell silent",
        "rejoined": "is back",
        "joined": "joined",
    }
    style = STYLES.get({"stopped": "silent"}.get(kind, kind))
    what = words.get(kind, printable(kind))
    return Text(f"{_duration(ago_s)} ago: worker {rank} {what}", style=style or "")


def _where(worker: JobWorker) -> str:
    place = f"{printable(worker.host)} ({worker.process_id})" if worker.host else NONE
    return f"{place} {printable(worker.status_address)}".strip()


def _neighbours(ranks: Sequence[int] | None) -> str:
    if ranks is None:
        return NONE
    if len(ranks) > 4:
        return f"{len(ranks)} workers"
    return " ".join(map(str, ranks)) or "none"


def _waited(seconds: float | None) -> str:
    return NONE if seconds is None else _duration(seconds)


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def _bytes(per_second: float | None) -> str:
    return NONE if per_second is None else f"{per_second / 1e6:.1f} MB/s"


def _count(number: float | None) -> str:
    return NONE if number is None else f"{number:,.0f}"


def _number(number: float | None, digits: int) -> str:
    return NONE if number is None else f"{number:.{digits}f}"


def _small(number: float | None) -> str:
    return NONE if number is None else f"{number:.2g}"
