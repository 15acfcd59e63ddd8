"""Waits for events: long deadlines, since a test that passes never comes to one."""

import time
from collections.abc import Callable
from typing import TypeVar

LONGEST_S = 100.0  # less than the time-outs of a test and of its workers: this one says more
FOR_EVER_S = 3600.0  # longer than a test may last: what sleeps so long is ended by another

T = TypeVar("T")


def pause() -> None:
    """Leave the cores to the other processes for a moment."""
    time.sleep(0.01)


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str],
    meanwhile: Callable[[], object] = pause,
    longest_s: float = LONGEST_S,
) -> T:
    """Do ``meanwhile`` until ``condition()`` holds, and return what it returned.

    Fails after ``longest_s`` with ``what``.
    """
    deadline_s = time.monotonic() + longest_s
    while not (held := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not in {longest_s:g} s: {what() if callable(what) else what}")
        meanwhile()
    return held
