"""One value for every pair of workers, as squares; darker is more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from gossipdp.report.html.svg import text

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
