"""A clock that runs in units of the worker's own gradient steps, and says when to ask.

A tick is one demand for an exchange. The clock's time is virtual,

    u(now) = steps + min(1, (now - last_step) / median)

so that a gradient step is worth one unit however long it lasts: an evaluation, a pause or a slow
step adds no ticks, and ticks per gradient step meet ``rate_per_step`` exactly in expectation. At
a step that ends early, u jumps to the next whole number and the ticks in the jump come due.

The paper's ticks are a Poisson process. These come more evenly: each gap is between 0.5 and 1.5 of
the mean. A Poisson gap may be long, and workers drift apart in it: with as many exchanges they
train less well (benchmarks/NOTES.md). Some chance remains, or two workers could ask at the same
moment for ever.
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from statistics import median_low

from gossipdp.rules import number

SKIPPED_STEPS = 3
MEDIAN_WINDOW = 32


class StepClock:
    """Ticks at the mean rate of ``rate_per_step`` per gradient step of this worker.

    Args:
        rate_per_step: expected ticks per gradient step; 0 means none.
        random: draws the gaps between ticks, from 0.5 to 1.5 of 1 / rate_per_step; the first from
            0 to 1, so that the mean rate holds from the start.

    Until four steps have ended there is no step duration, and no tick: the first steps
    (compilation, cold caches) say nothing about the later ones.
    """

    def __init__(self, rate_per_step: float, random: Random) -> None:
        self.num_ticks = 0
        """Ticks that came due so far."""
        self._random = random
        self._rate = number("rate_per_step", rate_per_step)
        self.steps = 0
        """Gradient steps that ended."""
        self._last_step = 0.0  # when it ended
        self._durations: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self.step_seconds: float | None = None
        """The running median of step durations, or None before there is one."""
        self._next_tick = math.inf
        self._paused_at: float | None = None

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def step(self, now: float) -> None:
        if self.steps >= SKIPPED_STEPS and not self.is_paused:
            self._durations.append(max(now - self._last_step, 1e-9))
        had_median = self.step_seconds is not None
        self.steps += 1
        self._last_step = now
        if self.is_paused:
            self._paused_at = now
        if self._durations:
            self.step_seconds = median_low(self._durations)
            if not had_median:
                self._next_tick = self.steps + self._gap(0.0, 1.0)

    def ticks_due(self, now: float) -> int:
        """Return, and consume, the number of ticks that came due since the last call."""
        ticks = 0
        while self.next_tick_at <= now:
            ticks += 1
            self._next_tick += self._gap()
        self.num_ticks += ticks
        return ticks

    @property
    def next_tick_at(self) -> float:
        """When u reaches the next tick, perhaps before now; infinity: a step must come first."""
        if self.is_paused or self.step_seconds is None:
            return math.inf
        ahead = self._next_tick - self.steps
        return math.inf if ahead > 1.0 else self._last_step + max(0.0, ahead) * self.step_seconds

    @property
    def timed_from_step(self) -> float:
        """Return the number of steps after which :attr:`next_tick_at` is a time, or inf."""
        if self.is_paused:
            return math.inf
        if self.step_seconds is None:  # look then, or the first ticks would be late
            return max(SKIPPED_STEPS, self.steps) + 1.0
        return self._next_tick - 1.0

    def pause(self, now: float) -> None:
        """Stand still until :meth:`resume`: the worker waits, or is done."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """Go on where the clock stood."""
        if self._paused_at is not None:
            self._last_step += max(0.0, now - self._paused_at)
            self._paused_at = None

    def set_rate(self, rate_per_step: float) -> None:
        """Change the rate from here on; the rest of the current gap is stretched by old / new."""
        old, self._rate = self._rate, number("rate_per_step", rate_per_step)
        if self.step_seconds is None or self._rate == old:
            return
        if old == 0.0 or self._rate == 0.0:
            self._next_tick = self.steps + self._gap(0.0, 1.0)
        else:
            ahead = max(0.0, self._next_tick - self.steps)
            self._next_tick = self.steps + ahead * old / self._rate

    def _gap(self, least: float = 0.5, most: float = 1.5) -> float:
        return self._random.uniform(least, most) / self._rate if self._rate > 0.0 else math.inf
