"""Values over time or samples, one line a worker, with what the pointer shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape

from gossipdp.report.html.run_view import Points
from gossipdp.report.html.svg import Scale, colour, line, number, text

WIDTH, HALF_WIDTH, HEIGHT = 760, 480, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 40
MOST_POINTS = 300
LOG_FROM_RATIO = 20.0


def line_chart(
    name: str,
    lines: Sequence[Points],
    labels: Sequence[str],
    *,
    x_label: str,
    y_label: str,
    x_end: float,
    marks: Sequence[tuple[float, float]] = (),
    mark_label: str = "",
    width: int = WIDTH,
    is_linear: bool = False,
    starts_of_pieces: Sequence[Sequence[float]] = (),
    show_x: Callable[[float], str] = number,
    show_y: Callable[[float], str] = number,
) -> str:
    """A figure; the y scale is logarithmic where positive values differ by a factor of 20.

    Args:
        name: of the figure, for readers that do not see it.
        lines: one per label; not finite values are left out, long ones thinned by means.
        labels: who each line is.
        x_label, y_label: of the axes.
        x_end: to where the horizontal axis goes, from 0.
        marks: single points besides the lines.
        mark_label: what they are.
        width: of the drawing; what is shown at half the width of the page is drawn narrower.
        is_linear: whatever the values.
        starts_of_pieces: for each line, at which x it does not go on from the point before.
        show_x, show_y: how numbers are written.
    """
    thinned = [_thinned(_finite(each), x_end) for each in lines]
    values = [y for each in [*thinned, list(marks)] for _, y in each]
    if not values:
        return '<p class="nothing">No values.</p>'
    positive = [value for value in values if value > 0]
    is_log = bool(positive) and not is_linear and max(positive) / min(positive) > LOG_FROM_RATIO
    if is_log:
        low, high = min(positive) * 0.8, max(positive) * 1.25
    else:
        low, high = min(0.0, *values), max(*values, 0.0) * 1.05 or 1.0
    x = Scale(0.0, x_end, LEFT, width - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, is_log)
    parts = [
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="{escape(name)}">',
        *(
            line(LEFT, y(tick), width - RIGHT, y(tick))
            + text(LEFT - 6, y(tick) + 4, show_y(tick), anchor="end")
            for tick in y.ticks()
        ),
        *(
            text(x(tick), HEIGHT - BOTTOM + 16, show_x(tick), anchor="middle")
            for tick in x.ticks(8)
        ),
        line(LEFT, HEIGHT - BOTTOM, width - RIGHT, HEIGHT - BOTTOM, "axis"),
        text((LEFT + width - RIGHT) / 2, HEIGHT - 6, x_label, anchor="middle", kind="axis-label"),
        f'<text class="axis-label" text-anchor="middle" transform="translate(13 '
        f'{(TOP + HEIGHT - BOTTOM) / 2:g}) rotate(-90)">{escape(y_label)}</text>',
    ]
    shown = []
    for index, each in enumerate(thinned):
        starts = starts_of_pieces[index] if starts_of_pieces else ()
        points = [(x(at), y(value), at, value) for at, value in each if not is_log or value > 0]
        shown.append([[px, py, show_x(at), show_y(value)] for px, py, at, value in points])
        if points:
            stroke = colour(index, len(lines))
            parts.append(
                f'<path d="{_path(points, starts)}" class="series" style="stroke:{stroke}">'
                f"<title>{escape(labels[index])}</title></path>"
            )
    for at, value in marks:
        if not is_log or value > 0:
            px, py = x(at), y(value)
            parts.append(
                f'<path d="M{px:g},{py - 6:g}l6,6l-6,6l-6,-6z" class="mark">'
                f"<title>{escape(mark_label)}: {escape(show_y(value))}</title></path>"
            )
    parts.append('<line class="cursor" y1="12" y2="210" x1="-9" x2="-9"/></svg>')
    data = {
        "labels": list(labels),
        "colours": [colour(i, len(lines)) for i in range(len(lines))],
        "lines": shown,
    }
    legend = _legend(labels, thinned, mark_label if marks else "")
    return f'<div class="chart lines">{"".join(parts)}{data_element(data)}</div>{legend}'


def _path(points: Sequence[tuple[float, float, float, float]], starts: Sequence[float]) -> str:
    """A line through (pixel x, pixel y, x, value), broken before each x of ``starts``."""
    pieces = []
    before: float | None = None
    for px, py, at, _ in points:
        is_new = before is None or any(before < start <= at for start in starts)
        # A point alone is a line of no length with round ends.
        pieces.append(f"M{px:g},{py:g}h0" if is_new else f"L{px:g},{py:g}")
        before = at
    return "".join(pieces)


def _legend(labels: Sequence[str], lines: Sequence[Points], mark_label: str) -> str:
    items = [
        f'<li><i style="background:{colour(index, len(labels))}"></i>{escape(label)}</li>'
        for index, label in enumerate(labels)
        if lines[index]
    ]
    if len(items) > 16:
        items = [items[0], "<li>…</li>", items[-1]]
    if mark_label:
        items.append(f'<li><i class="diamond"></i>{escape(mark_label)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def data_element(data: object) -> str:
    """What page.js reads; NaN is a ValueError."""
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{body}</script>'


def _finite(points: Points) -> Points:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _thinned(points: Points, x_end: float) -> Points:
    """At most ``MOST_POINTS``: means of neighbours along x."""
    if len(points) <= MOST_POINTS or x_end <= 0:
        return points
    groups: dict[int, Points] = {}
    for x, y in points:
        groups.setdefault(int(x / x_end * (MOST_POINTS - 1)), []).append((x, y))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for _, group in sorted(groups.items())
    ]
