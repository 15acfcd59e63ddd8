"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A table; the first ``num_left`` columns are aligned to the left, the others to the right."""
    marks = ["---" if column < num_left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, marks, *rows])


def verdict(holds: bool) -> str:
    """Said in the same words everywhere."""
    return "**reproduced**" if holds else "**not reproduced**"
