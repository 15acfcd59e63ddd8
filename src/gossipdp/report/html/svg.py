"""Scales, ticks and numbers of the drawings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

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
