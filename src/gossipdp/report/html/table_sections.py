"""The sections of the page that tell in words and tables: faults, plan, workers, configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from gossipdp.report.html.prediction import compare, constants_of, constants_told
from gossipdp.report.html.run_view import Event, RunView
from gossipdp.report.html.svg import duration
from gossipdp.report.html.timeline import EVENT_WORDS


def faults_section(view: RunView) -> str:
    """Deaths, stops and returns, and the workers without an end or a log."""
    events = view.events()
    unended = [f"worker {rank}" for rank, worker in view.log.workers.items() if worker.end is None]
    missing = sorted(set(range(view.log.num_ranks)) - set(view.ranks))
    words = []
    if unended:
        words.append(
            f"Without an end in the log: {', '.join(unended)}. The run goes on, or they were "
            "killed, or left without <code>consolidate()</code>."
        )
    if missing:
        words.append(f"No log here of worker {', '.join(map(str, missing))}.")
    paragraphs = "".join(f"<p>{each}</p>" for each in words)
    if not events:
        return f'<p class="nothing">No death, stop or return was noticed.</p>{paragraphs}'
    rows = [
        (
            f"{event.time_s:.2f}",
            str(event.rank),
            EVENT_WORDS.get(event.what, event.what),
            _seen(event),
        )
        for event in events
    ]
    return table(("time (s)", "worker", "what", "noticed by"), rows) + paragraphs


def plan_section(view: RunView, counts: dict[tuple[int, int], int]) -> str:
    """What the graph promised, beside what happened; ``counts`` as for ``compare``."""
    rows = compare(view, counts)
    constants = constants_of(view)
    if not rows or constants is None:
        return (
            '<p class="nothing">Nothing was planned: one worker, a method without exchanges, or a '
            "graph too large to be logged.</p>"
        )
    compared = [(row.quantity, row.planned, row.happened) for row in rows]
    return (
        "<p>The plan is theory for an ideal network without gradients "
        "(<code>gossipdp plan</code>): "
        f"{escape(constants_told(constants))}.</p>{table(('', 'plan', 'run'), compared)}"
    )


def workers_section(view: RunView) -> str:
    """The totals of each worker."""
    rows = []
    for rank, worker in view.log.workers.items():
        step = worker.steps[-1] if worker.steps else None
        exchange = worker.exchanges[-1] if worker.exchanges else None
        rows.append(
            (
                str(rank),
                str(worker.start.configuration.get("host", "")),
                f"{step.gradient_steps:,}" if step else "0",
                f"{step.samples / step.time_s:,.0f}" if step and step.time_s else "–",
                f"{exchange.exchanges_initiated:,} + {exchange.exchanges_answered:,}"
                if exchange
                else "0",
                f"{exchange.exchanges_failed:,}" if exchange else "0",
                f"{exchange.waited_seconds:.1f}" if exchange else "0",
                str(len(worker.lives)),
            )
        )
    heads = (
        "worker",
        "host",
        "gradient steps",
        "samples/s",
        "exchanges asked + answered",
        "stopped before their end",
        "waited (s)",
        "lives",
    )
    return table(heads, rows)


def configuration_section(view: RunView) -> str:
    """How the wrapper was called, and what the script logged last."""
    configuration = {
        name: value for name, value in view.configuration.items() if name not in ("edges", "host")
    }
    differing = {
        name
        for worker in view.log.workers.values()
        for name, value in configuration.items()
        if worker.start.configuration.get(name) != value
    }
    rows = [
        (name.replace("_", " "), _shown(value) + (" (differs)" if name in differing else ""))
        for name, value in configuration.items()
    ]
    logged = {
        name: value
        for worker in view.log.workers.values()
        for name, value in worker.last_values().items()
    }
    parts = [f'<div class="pair"><div><h3>The wrapper</h3>{table(("", ""), rows)}</div>']
    if logged:
        values = [(name.replace("_", " "), _shown(value)) for name, value in logged.items()]
        parts.append(f"<div><h3>Logged by the script, latest</h3>{table(('', ''), values)}</div>")
    return "".join(parts) + "</div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of plain text, without a head where all heads are empty."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads) if any(heads) else ""
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="table"><table>{header}<tbody>{lines}</tbody></table></div>'


def _seen(event: Event) -> str:
    others = [rank for rank in event.witnesses if rank != event.rank]
    if not others:
        return "itself"
    spread_s = event.last_noticed_s - event.time_s
    told = f"worker {', '.join(map(str, others))}"
    return f"{told}, the last {duration(spread_s)} later" if spread_s > 0.01 else told


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int):
        return str(value)
    return json.dumps(value)
