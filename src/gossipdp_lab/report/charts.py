"""The drawings of the page, in pixels; charts.html makes SVG of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossipdp_lab.report.view import Points, RunView, Span, merged

COLOURS = 7
"""Up to so many workers have a colour each in page.css; more share a scale of blue to yellow."""

WIDTH, HEIGHT = 760, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 40
MOST_POINTS = 300
LOG_FROM_RATIO = 20.0
HEAT_SIZE, HEAT_MARGIN = 340, 34
MOST_HEAT_WORKERS, MOST_LABELLED, MOST_WRITTEN = 64, 24, 8
TIMELINE_TOP, MANY_WORKERS = 8, 16
MOST_SPANS = 300
STATES = ("computing", "waiting", "idle", "away")

Drawing = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """A map of values to pixels, linear or logarithmic; ``low`` is put at ``start``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; a value beyond an end gets the pixel of that end."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(each, self.low)) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the scale."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            every = max(1, math.ceil((last - first + 1) / most))
            return [10.0**power for power in range(first, last + 1, every)]
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(rough))
        every_value = next(power * step for step in (1, 2, 5, 10) if power * step >= rough)
        first_tick = math.ceil(self.low / every_value - 1e-9)
        count = math.floor((self.high - first_tick * every_value) / every_value + 1e-9)
        return [(first_tick + index) * every_value for index in range(count + 1)]


def number(value: float) -> str:
    """Return a number in short, for people: 1234567 → 1.23 M.

    >>> [number(value) for value in (0, 12, 0.05, 1234567, 3e-7)]
    ['0', '12', '0.05', '1.23 M', '3e-07']
    """
    # Rounded first: in three digits 999,600 is a million.
    value = round(value) if 1000 <= abs(value) < 9999.5 else float(f"{value:.3g}")
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g} {letter}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration for people: 0.4 s, 12.3 s, 4 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {name}"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def colour(index: int, count: int) -> str:
    """Return the stroke of a worker: a variable of the style sheet, or a place on a scale."""
    if count <= COLOURS:
        return f"var(--series-{index})"
    share = index / (count - 1)
    return f"hsl({250 - 200 * share:.0f} 65% {45 + 10 * share:.0f}%)"


# Lines.


def line_chart(
    view: RunView, field: str, *, y_label: str, end: float | None = None, end_label: str = ""
) -> Drawing | None:
    """Draw a field of the records over the whole run, a line a worker; return None without values.

    The y scale is logarithmic if positive values differ by a factor of 20. Values that are not
    finite are left out, and long lines are thinned by means. ``end`` is a value at the run's end.
    """
    lines, x_end = view.over_time(field), view.duration_s
    thinned = [_thinned(each, x_end) for each in lines]
    marks = [] if end is None else [(x_end, end)]
    values = [y for each in [*thinned, marks] for _, y in each]
    if not values:
        return None
    positive = [value for value in values if value > 0]
    is_log = bool(positive) and max(positive) / min(positive) > LOG_FROM_RATIO
    if is_log:
        low, high = min(positive) * 0.8, max(positive) * 1.25
    else:
        low, high = min(0.0, *values), max(*values, 0.0) * 1.05 or 1.0
    x = Scale(0.0, x_end, LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log)
    labels = [f"worker {rank}" for rank in view.ranks]
    colours = [colour(index, len(lines)) for index in range(len(lines))]
    shown, series = [], []
    pieces_from = view.starts_of_pieces(lines)
    for index, (each, starts) in enumerate(zip(thinned, pieces_from, strict=True)):
        points = [(at, value) for at, value in each if not is_log or value > 0]
        shown.append([[x(at), y(value), number(at), number(value)] for at, value in points])
        pieces: list[str] = []
        before = -math.inf
        for at, value in points:
            is_new = not pieces or any(before < start <= at for start in starts)
            # A point alone is a line of no length with round ends.
            place = f"{x(at):g},{y(value):g}"
            pieces.append(f"M{place}h0" if is_new else f"L{place}")
            before = at
        if pieces:
            series.append(
                {"path": "".join(pieces), "stroke": colours[index], "label": labels[index]}
            )
    keys = zip(colours, labels, thinned, strict=True)
    legend = [(stroke, label) for stroke, label, each in keys if each]
    return {
        "name": f"{y_label.capitalize()} against time",
        "width": WIDTH,
        "height": HEIGHT,
        "y_label": y_label,
        "x_ticks": [(x(tick), number(tick)) for tick in x.ticks(8)],
        "y_ticks": [(y(tick), number(tick)) for tick in y.ticks()],
        "series": series,
        "marks": [
            (x(at), y(value), number(value)) for at, value in marks if not is_log or value > 0
        ],
        "mark_label": end_label,
        "legend": legend if len(legend) <= 16 else [legend[0], ("", "…"), legend[-1]],
        "data": {"labels": labels, "colours": colours, "lines": shown},
    }


def _thinned(points: Points, x_end: float) -> Points:
    """Return the finite points, at most ``MOST_POINTS``: means of neighbours along x."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) <= MOST_POINTS or x_end <= 0:
        return points
    groups: dict[int, Points] = {}
    for x, y in points:
        groups.setdefault(int(x / x_end * (MOST_POINTS - 1)), []).append((x, y))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for _, group in sorted(groups.items())
    ]


# One value for every pair of workers.


def heat_map(view: RunView) -> Drawing | None:
    """Draw the exchanges by pair of workers; return None without an exchange."""
    counts = view.exchange_counts
    if not counts:
        return None
    all_ranks = sorted({*view.ranks, *(rank for pair in counts for rank in pair)})
    ranks = all_ranks[:MOST_HEAT_WORKERS]
    most, total = max(counts.values()), sum(counts.values())
    size = (HEAT_SIZE - HEAT_MARGIN) / len(ranks)
    places = [HEAT_MARGIN + index * size for index in range(len(ranks))]
    cells = []
    for one, y in zip(ranks, places, strict=True):
        for other, x in zip(ranks, places, strict=True):
            pair = (min(one, other), max(one, other))
            kind = "self" if one == other else "" if pair in counts else "none"
            cell: Drawing = {"x": x, "y": y, "kind": kind, "text": ""}
            if not kind:
                count = counts[pair]
                share = count / most
                title = f"{pair[0]} – {pair[1]}: {count:,} exchanges, {count / total:.1%} of all"
                cell |= {"opacity": 0.12 + 0.88 * share, "title": title}
                if len(ranks) <= MOST_WRITTEN:
                    cell |= {"text": str(count), "is_strong": share > 0.45}
            cells.append(cell)
    every = 1 if len(ranks) <= MOST_LABELLED else len(ranks) // 8
    labels = [(place + size / 2, rank) for place, rank in zip(places, ranks, strict=True)]
    return {
        "num_shown": len(ranks),
        "left_out": len(all_ranks) - len(ranks),
        "cell": size,
        "cells": cells,
        "labels": labels[::every],
    }


# Time.


def timeline(view: RunView) -> Drawing:
    """Draw a row for each worker, in which the height of a colour is its share of the time."""
    count = len(view.ranks)
    row = 34 if count <= MANY_WORKERS else 14
    x = Scale(0.0, view.duration_s, LEFT, WIDTH - RIGHT)
    every = 1 if count <= 48 else count // 16
    tops = {rank: TIMELINE_TOP + index * row for index, rank in enumerate(view.ranks)}
    rows, shown = [], []
    for index, (rank, top) in enumerate(tops.items()):
        spans = merged(view.spans(rank), MOST_SPANS if count <= MANY_WORKERS else MOST_SPANS // 3)
        label = str(rank) if index % every == 0 else ""
        rows.append({"y": top + row / 2 + 3, "label": label, "paths": _row(spans, x, top, row)})
        texts = [
            [x(one.start_s), x(one.end_s), duration(one.start_s), _state_text(one)] for one in spans
        ]
        shown.append({"top": top, "height": row, "worker": rank, "spans": texts})
    flags = [
        {
            "x": x(event.at_s),
            "y": tops[event.rank],
            "kind": event.kind,
            "title": f"{event.at_s:.1f} s: worker {event.rank} {event.words}",
        }
        for event in view.events
        if event.rank in tops
    ]
    cuts = [
        (x(pause.at_s), f"no worker ran for {duration(pause.length_s)}") for pause in view.pauses
    ]
    ticks = x.ticks(8)
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    return {
        "row": row,
        "height": TIMELINE_TOP + BOTTOM + row * count,
        "x_ticks": [
            (x(tick), f"{tick:.{digits}f}" if x.high < 1e4 else number(tick)) for tick in ticks
        ],
        "rows": rows,
        "flags": flags,
        "cuts": cuts,
        "data": {"rows": shown},
    }


def _row(spans: Sequence[Span], x: Scale, top: float, row: float) -> dict[str, str]:
    """Return paths by state: stacked shares above, exchanges below."""
    gap = 2 if row < 20 else 4
    lane = (row - gap) * 0.28
    main = row - gap - lane - 1
    paths = dict.fromkeys((*STATES, "exchanging"), "")
    for span in spans:
        below = top + main
        for state in paths:
            if state == "exchanging":
                below = top + main + 1 + lane
            size = getattr(span, state) * (lane if state == "exchanging" else main)
            if size > 0.05:
                below -= size
                left = x(span.start_s)
                right = max(x(span.end_s), left + 0.2)
                paths[state] += f"M{left:g},{below:.1f}H{right:g}v{size:.1f}H{left:g}z"
    return {state: path for state, path in paths.items() if path}


def _state_text(span: Span) -> str:
    shares = [(getattr(span, state), state) for state in (*STATES, "exchanging")]
    return ", ".join(f"{state} {share:.0%}" for share, state in shares if share >= 0.005)
