"""What every worker did when: a row a worker, the height of a colour is its share of the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gossipdp.report.charts import Scale, colour, data_element, duration, line, number, text
from gossipdp.report.view import Event, RunView, Span, merged

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 64, 14, 8, 40
MOST_SPANS, MANY_WORKERS = 300, 16
STATES = ("computing", "waiting", "idle", "away")
STATE_WORDS = {
    "computing": "computing",
    "exchanging": "exchanging (beside computing)",
    "waiting": "waiting for others",
    "idle": "no gradient step: starting, evaluating, saving",
    "away": "no sign of life: killed or stopped",
}
EVENT_WORDS = {
    "dead": "taken for dead",
    "stopped": "silent for the time-out",
    "rejoined": "takes part again",
    "joined": "joined the run",
    "restarted": "started again, first gradient step",
}
MOST_DETAILED = 24
DETAIL_EXCHANGES = 40


def timeline(view: RunView) -> str:
    """The whole run."""
    count = len(view.ranks)
    row = 34 if count <= MANY_WORKERS else 14
    height = TOP + BOTTOM + row * count
    x = Scale(0.0, view.duration_s, LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline of all workers">',
        _hatching(),
    ]
    parts += _time_axis(x, height)
    shown = []
    every = 1 if count <= 48 else count // 16
    for index, rank in enumerate(view.ranks):
        top = TOP + index * row
        spans = merged(view.spans(rank), MOST_SPANS if count <= MANY_WORKERS else MOST_SPANS // 3)
        if index % every == 0:
            parts.append(text(LEFT - 8, top + row / 2 + 3, str(rank), anchor="end"))
        parts += _row(spans, x, top, row)
        shown.append(
            {
                "top": top,
                "height": row,
                "worker": rank,
                "spans": [
                    [x(one.start_s), x(one.end_s), duration(one.start_s), _told(one)]
                    for one in spans
                ],
            }
        )
    tops = {rank: TOP + index * row for index, rank in enumerate(view.ranks)}
    parts += [
        _flag(event, x, tops[event.rank], row) for event in view.events() if event.rank in tops
    ]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{height - BOTTOM}" x1="-9" x2="-9"/></svg>')
    legend = "".join(
        f'<li><i class="state {state}"></i>{escape(words)}</li>'
        for state, words in STATE_WORDS.items()
    )
    return (
        f'<div class="chart time">{"".join(parts)}{data_element({"rows": shown})}</div>'
        f'<ul class="legend">{legend}<li><i class="flag-key"></i>a fault or a return</li></ul>'
    )


def closer_look(view: RunView) -> str:
    """Single exchanges in a short piece from the middle of the run; nothing without any."""
    ranks = view.ranks[:MOST_DETAILED]
    seen = {
        rank: [
            (view.offsets[rank] + one.started_s, one)
            for record in view.log.workers[rank].exchanges
            for one in record.recent
        ]
        for rank in ranks
    }
    times = sorted(at_s for each in seen.values() for at_s, _ in each)
    if not times:
        return ""
    number_shown = min(len(times) - 1, DETAIL_EXCHANGES * len(ranks) // 2)
    first = (len(times) - number_shown) // 2
    start_s, end_s = times[first], times[min(first + number_shown, len(times) - 1)] + 0.01
    row = 24
    height = TOP + BOTTOM + row * len(ranks)
    x = Scale(start_s, end_s, LEFT, WIDTH - RIGHT)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Single exchanges">',
        *_time_axis(x, height),
    ]
    for index, rank in enumerate(ranks):
        top = TOP + index * row
        parts.append(text(LEFT - 8, top + row / 2 + 4, str(rank), anchor="end"))
        parts.append(line(LEFT, top + row, WIDTH - RIGHT, top + row))
        for at_s, one in seen[rank]:
            if not start_s <= at_s < end_s:
                continue
            left, right = x(at_s), x(at_s + one.duration_s)
            who = (rank, one.peer) if one.initiated else (one.peer, rank)
            place = view.ranks.index(one.peer) if one.peer in view.ranks else 0
            parts.append(
                f'<rect x="{left:g}" y="{top + 4:g}" width="{max(1.5, right - left):.1f}" '
                f'height="{row - 8:g}" rx="1" style="fill:{colour(place, len(view.ranks))}">'
                f"<title>worker {who[0]} asked worker {who[1]}: {one.duration_s * 1e3:.2f} ms, "
                f"from {at_s:.3f} s</title></rect>"
            )
    keys = "".join(
        f'<li><i style="background:{colour(index, len(view.ranks))}"></i>with worker {rank}</li>'
        for index, rank in enumerate(view.ranks[:8])
    )
    return f'<div class="chart">{"".join(parts)}</svg></div><ul class="legend">{keys}</ul>'


def _time_axis(x: Scale, height: float) -> list[str]:
    bottom = height - BOTTOM
    ticks = x.ticks(8)
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))

    def show(tick: float) -> str:
        return f"{tick:.{digits}f}" if x.high < 1e4 else number(tick)

    return [
        *(line(x(tick), TOP, x(tick), bottom) for tick in x.ticks(8)),
        *(text(x(tick), bottom + 16, show(tick), anchor="middle") for tick in x.ticks(8)),
        text(
            (LEFT + WIDTH - RIGHT) / 2, height - 6, "time (s)", anchor="middle", kind="axis-label"
        ),
        f'<text class="axis-label" text-anchor="middle" transform="translate(13 '
        f'{(TOP + bottom) / 2:g}) rotate(-90)">worker</text>',
    ]


def _row(spans: Sequence[Span], x: Scale, top: float, row: float) -> list[str]:
    """Stacked shares above, exchanges below."""
    gap = 2 if row < 20 else 4
    lane = (row - gap) * 0.28
    main = row - gap - lane - 1
    paths: dict[str, list[str]] = {state: [] for state in (*STATES, "exchanging")}
    for span in spans:
        left, right = x(span.start_s), x(span.end_s)
        below = top + main
        for state in STATES:
            size = getattr(span, state) * main
            if size > 0.05:
                paths[state].append(_box(left, right, below - size, size))
                below -= size
        size = span.exchanging * lane
        if size > 0.05:
            paths["exchanging"].append(_box(left, right, top + main + 1 + lane - size, size))
    return [
        f'<path class="state {state}" d="{"".join(each)}"/>'
        for state, each in paths.items()
        if each
    ]


def _box(left: float, right: float, top: float, height: float) -> str:
    return f"M{left:g},{top:.1f}H{max(right, left + 0.2):g}v{height:.1f}H{left:g}z"


def _flag(event: Event, x: Scale, top: float, row: float) -> str:
    words = EVENT_WORDS.get(event.what, event.what)
    return (
        f'<path class="flag {escape(event.what)}" d="M{x(event.time_s):g},{top:g}v{row - 4:g}">'
        f"<title>{event.time_s:.1f} s: worker {event.rank} {escape(words)}</title></path>"
        f'<circle class="flag {escape(event.what)}" cx="{x(event.time_s):g}" cy="{top:g}" r="3"/>'
    )


def _hatching() -> str:
    return (
        '<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatch-ground" width="6" height="6"/>'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
    )


def _told(span: Span) -> str:
    shares = [(getattr(span, state), state) for state in (*STATES, "exchanging")]
    return ", ".join(f"{state} {share:.0%}" for share, state in shares if share >= 0.005)
