"""Numbers that options take."""

from __future__ import annotations

import math


def check_number(option: str, value: float, *, is_positive: bool = False) -> float:
    """``value``; raises ValueError unless it is finite and positive, or 0 where it may be."""
    if not math.isfinite(value) or value < 0 or (is_positive and value == 0):
        kind = "a positive number" if is_positive else "a number of at least 0"
        raise ValueError(f"{option} is {value:g}; it must be {kind}")
    return value
