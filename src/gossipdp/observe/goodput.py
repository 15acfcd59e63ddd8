"""Goodput: the share of a run's possible samples that it made, from records of its workers.

    goodput = Σ_i k_i / Σ_i f_i T_i

over the workers i of a run:

    k_i  samples kept: those that the run counts of worker i after its first record here; in samples
    f_i  its full speed: what it makes while nothing slows it (see Progress); in samples a second
    T_i  time from its first record with a step until it has trained its last; in seconds

What an instant costs follows from that. A worker that is slow, stopped, evaluates or saves goes on
in T_i at its full speed; so does one that is dead, with the speed that was last known of it, until
the others end. Time before a worker's first step is start, and counts in nothing; the time until a
*restarted* worker's first step is lost. Time in which no process of the run lives is no run time.

Samples of a worker that died stay counted, as the run's budget counts them: its exchanges have put
them into its neighbours' parameters. A kill also loses what the worker did after its last exchange,
a few steps at most; nobody can know how many, so that is not taken off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

WINDOW_S, WINDOW_STEPS, LEAST_WINDOWS = 1.0, 8, 3
SLOW_FACTOR = 1.5
"""A worker is slow if its steps take longer than this times the usual."""
BIN_RATIO = 1.05


class Part(NamedTuple):
    """One worker's k, T and f of the module's equation; f is NaN while it is not known."""

    samples: float
    seconds: float
    full_samples_per_second: float


class _Record(NamedTuple):
    at_s: float
    gradient_steps: int
    samples: int


class Progress:
    """One worker's part in the goodput, from its records: its steps and samples by some time.

    Its full speed is what it makes while nothing slows it. The records are cut into windows of at
    least 1 s and 8 steps: a window's speed v is its samples over its seconds, so steps that differ
    in length make no difference. Let r be the median of the windows' speeds in which each *sample*
    has one vote. Then, over the windows with v >= r / 1.5,

        f = Σ samples / Σ seconds

    Votes by samples find the speed of a worker that is slow for most of its time: if a fault makes
    it k times slower, it casts k times fewer votes meanwhile. So r is undisturbed as long as more
    than 1 / (1 + k) of the time is: a fifth where it is 4 times slower. A mean over all windows
    near r, in place of r, favours no fast ones. What slows by less than 1.5 is taken for usual, and
    so is what lasts until most samples were made so.

    Windows are kept in bins of speeds 5% apart, so memory does not grow with the run.
    """

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, float]] = {}
        self._num_windows = 0
        self._first: _Record | None = None
        self._last = self._window = _Record(0.0, 0, 0)

    def note(self, at_s: float, gradient_steps: int, samples: int) -> None:
        """Take a record, a later one than the last; one that brings no step changes nothing."""
        if gradient_steps <= self._last.gradient_steps:
            return
        self._last = record = _Record(at_s, gradient_steps, max(samples, self._last.samples))
        if self._first is None:
            self._first = self._window = record
        began = self._window
        seconds, made = at_s - began.at_s, record.samples - began.samples
        if seconds < WINDOW_S or gradient_steps - began.gradient_steps < WINDOW_STEPS:
            return
        if made > 0:
            key = round(math.log(made / seconds, BIN_RATIO))
            held = self._bins.get(key, (0, 0.0))
            self._bins[key] = (held[0] + made, held[1] + seconds)
            self._num_windows += 1
        self._window = record

    def part(self, until_s: float = -math.inf) -> Part:
        """Return the part until the last record that brought a step, or until a later time."""
        if self._first is None:
            return Part(0, 0.0, math.nan)
        seconds = max(self._last.at_s, until_s) - self._first.at_s
        return Part(self._last.samples - self._first.samples, seconds, self._full_speed())

    def _full_speed(self) -> float:
        """Return NaN until three windows are full: the first one of a process is often slower."""
        if self._num_windows < LEAST_WINDOWS:
            return math.nan
        fastest_first = [self._bins[key] for key in sorted(self._bins, reverse=True)]
        half, votes, usual = sum(samples for samples, _ in fastest_first) / 2, 0, 0.0
        for samples, seconds in fastest_first:
            votes, usual = votes + samples, samples / seconds
            if votes >= half:
                break
        near = [(n, s) for n, s in fastest_first if n / s >= usual / SLOW_FACTOR]
        return sum(samples for samples, _ in near) / sum(seconds for _, seconds in near)


def goodput_of(parts: Iterable[Part]) -> float:
    """Return Σ k / Σ f T, at most 1; NaN while it is not known.

    A worker of unknown full speed, such as one that has just been started again, counts with the
    median of the others'.
    """
    parts = [part for part in parts if part.seconds > 0]
    speeds = [part.full_samples_per_second for part in parts]
    known = [speed for speed in speeds if not math.isnan(speed)]
    if not known:
        return math.nan
    speeds = [median(known) if math.isnan(speed) else speed for speed in speeds]
    full = sum(part.seconds * speed for part, speed in zip(parts, speeds, strict=True))
    return min(1.0, sum(part.samples for part in parts) / full)  # the last window may be faster
