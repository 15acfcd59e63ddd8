"""The drawings of the page as SVG: scales and numbers, lines over time, one value a pair."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = list[tuple[float, float]]

COLOURS = 7
"""Workers told apart by colour, as page.css has them; more share a scale from blue to yellow."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels; ``low`` to ``start``, ``high`` to ``end``, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; those beyond the ends are put on them."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = (math.log10(max(each, self.low)) for each in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + min(1.0, max(0.0, share)) * (self.end - self.start), 1)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the scale."""
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
    """Short, for people: 1234567 → 1.23 M.

    >>> [number(value) for value in (0, 12, 0.05, 1234567, 3e-7)]
    ['0', '12', '0.05', '1.23 M', '3e-07']
    """
    # Rounded first: in three digits 999,600 is a million.
    value = round(value) if 1000 <= abs(value) < 9999.5 else float(f"{value:.3g}")
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'T': 1e12, 'G': 1e9, 'M': 1e6, 'k': 1e3}[letter]:.3g} {letter}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Such as 0.4 s, 12.3 s, 4 min 5 s, 2 h 10 min, 3 d 4 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller)} {name}"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def colour(index: int, count: int) -> str:
    """The stroke of a worker: a variable of the style sheet, or a place on a scale."""
    if count <= COLOURS:
        return f"var(--series-{index})"
    share = index / (count - 1)
    return f"hsl({250 - 200 * share:.0f} 65% {45 + 10 * share:.0f}%)"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    """A text element."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    """A straight line."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


# Lines.

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


# One value for every pair of workers.

SIZE, MARGIN = 340, 34
MOST_LABELLED, MOST_WRITTEN = 24, 8


def heat_map(
    name: str,
    ranks: Sequence[int],
    values: Mapping[tuple[int, int], float],
    *,
    show: Callable[[float], str],
    tell: Callable[[tuple[int, int], float], str],
) -> str:
    """A figure, symmetric; pairs without a value stay empty.

    Args:
        name: of the figure, for readers that do not see it.
        ranks: the rows and columns.
        values: by (lower rank, higher rank), none negative.
        show: the text in a square, where there is room.
        tell: the text that the pointer shows.
    """
    if not values:
        return '<p class="nothing">No exchanges.</p>'
    most = max(values.values()) or 1.0
    cell = (SIZE - MARGIN) / len(ranks)
    parts = [f'<svg viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="{escape(name)}">']
    every = 1 if len(ranks) <= MOST_LABELLED else len(ranks) // 8
    for index, rank in enumerate(ranks):
        middle = MARGIN + (index + 0.5) * cell
        if index % every == 0:
            parts.append(text(middle, MARGIN - 8, str(rank), anchor="middle"))
            parts.append(text(MARGIN - 8, middle + 4, str(rank), anchor="end"))
    for row, one in enumerate(ranks):
        for column, other in enumerate(ranks):
            x, y = MARGIN + column * cell, MARGIN + row * cell
            box = f'x="{x:.1f}" y="{y:.1f}" width="{cell:.1f}" height="{cell:.1f}"'
            value = values.get((min(one, other), max(one, other))) if one != other else None
            if value is None:
                kind = "self" if one == other else "none"
                parts.append(f'<rect {box} class="cell {kind}"/>')
                continue
            share = value / most
            parts.append(
                f'<rect {box} class="cell" fill-opacity="{0.12 + 0.88 * share:.2f}">'
                f"<title>{escape(tell((min(one, other), max(one, other)), value))}</title></rect>"
            )
            if len(ranks) <= MOST_WRITTEN:
                kind = "cell-text strong" if share > 0.45 else "cell-text"
                written = text(
                    x + cell / 2, y + cell / 2 + 4, show(value), anchor="middle", kind=kind
                )
                parts.append(written)
    return f'<div class="chart heat">{"".join(parts)}</svg></div>'
