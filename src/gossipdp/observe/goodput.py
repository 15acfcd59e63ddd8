"""Goodput: the share of a run's possible samples that it made. Pure: time comes in as ``now``.

    goodput = Σ_i k_i / Σ_i f_i T_i        lost a fault = (1 - goodput) Σ_i T_i / faults

over the workers i of a run:

    k_i  samples kept: those that the run counts of worker i after its first step here; in samples
    f_i  its full speed: what it makes while nothing slows it (see FullSpeed); in samples a second
    T_i  time since the end of its first step, until it has trained its last; in seconds

What an instant costs follows from that. A worker that is slow, stopped, evaluates or saves goes on
in T_i at its full speed; so does one that is dead, with the speed that was last known of it, until
the others end. Time before a worker's first step is start, and counts in nothing; the time until a
*restarted* worker's first step is lost. Time in which no process of the run lives is no run time.

Samples of a worker that died stay counted, as the run's budget counts them: its exchanges have put
them into its neighbours' parameters. A kill also loses what the worker did after its last exchange,
a few steps at most; nobody can know how many, so that is not taken off.

A worker says its own part (:class:`Part`, made by :class:`GoodputMeter`). Whoever has the parts of
all makes the run's figure: ``gossipdp top`` from the status of each, the report from the logs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

WINDOW_S, WINDOW_STEPS, LEAST_WINDOWS = 1.0, 8, 3
SLOW_FACTOR = 1.5
"""A worker is slow if its steps take longer than this times the usual."""
BIN_RATIO = 1.05


class FullSpeed:
    """The speed of a worker while nothing slows it, in samples a second, from its steps alone.

    The steps are cut into windows of at least 1 s and 8 steps: a window's speed v is its samples
    over its seconds, so steps that differ in length make no difference. Let r be the median of the
    windows' speeds in which each *sample* has one vote. Then, over the windows with v >= r / 1.5,

        f = Σ samples / Σ seconds

    Votes by samples find the speed of a worker that is slow for most of its time: if a fault makes
    it k times slower, it casts k times fewer votes meanwhile. So r is undisturbed as long as more
    than 1 / (1 + k) of the time is: a fifth where it is 4 times slower. A mean over all windows
    near r, in place of r, favours no fast ones. What slows by less than 1.5 is taken for usual, and
    so is what lasts until most samples were made so.

    Windows are kept in bins of speeds 5% apart, so memory does not grow with the run.
    """

    def __init__(self) -> None:
        self.samples_per_second = math.nan
        """NaN until three windows are full: the first one of a process is often slower."""
        self._bins: dict[int, tuple[int, float]] = {}
        self._began_s = math.nan
        self._steps = self._samples = self._num_windows = 0

    def step(self, samples: int, now: float) -> None:
        """Take a step that ended at ``now``. The first one only begins the first window."""
        if math.isnan(self._began_s):
            self._began_s = now
            return
        self._steps += 1
        self._samples += samples
        seconds = now - self._began_s
        if seconds < WINDOW_S or self._steps < WINDOW_STEPS:
            return
        if self._samples > 0:
            key = round(math.log(self._samples / seconds, BIN_RATIO))
            held = self._bins.get(key, (0, 0.0))
            self._bins[key] = (held[0] + self._samples, held[1] + seconds)
            self._num_windows += 1
            if self._num_windows >= LEAST_WINDOWS:
                self.samples_per_second = self._estimate()
        self._began_s, self._steps, self._samples = now, 0, 0

    def _estimate(self) -> float:
        fastest_first = [self._bins[key] for key in sorted(self._bins, reverse=True)]
        half, votes, usual = sum(samples for samples, _ in fastest_first) / 2, 0, 0.0
        for samples, seconds in fastest_first:
            votes, usual = votes + samples, samples / seconds
            if votes >= half:
                break
        near = [(n, s) for n, s in fastest_first if n / s >= usual / SLOW_FACTOR]
        return sum(samples for samples, _ in near) / sum(seconds for _, seconds in near)


@dataclass(frozen=True)
class Part:
    """One worker's part in the goodput of a run: k, T and f of the module's equation.

    ``full_samples_per_second`` is NaN while it is not known.
    """

    samples: float
    seconds: float
    full_samples_per_second: float

    def away(self, seconds: float, samples: float = 0.0) -> Part:
        """Return the part after more time, in which the worker made so many samples."""
        return replace(
            self, samples=self.samples + samples, seconds=self.seconds + max(0.0, seconds)
        )


def goodput_of(parts: Iterable[Part]) -> float:
    """Return Σ k / Σ f T; NaN while it is not known.

    A worker of unknown full speed, such as one that has just been started again, counts with the
    median of the others'.

    Example:
        >>> goodput_of([Part(1000, 10.0, 100.0), Part(250, 10.0, 100.0)])
        0.625
    """
    parts = [part for part in parts if part.seconds > 0]
    speeds = [part.full_samples_per_second for part in parts]
    known = [speed for speed in speeds if not math.isnan(speed)]
    if not known:
        return math.nan
    usual = median(known)
    full = sum(
        part.seconds * (usual if math.isnan(speed) else speed)
        for part, speed in zip(parts, speeds, strict=True)
    )
    return sum(part.samples for part in parts) / full


def lost_seconds_per_fault(parts: Iterable[Part], num_faults: int) -> float:
    """Return (1 - goodput) Σ T / faults, in seconds of one worker; NaN without a fault.

    All that is lost is laid to the faults, also what evaluations and saving took.

    Example:
        >>> lost_seconds_per_fault([Part(1000, 10.0, 100.0), Part(250, 10.0, 100.0)], 3)
        2.5
    """
    parts = list(parts)
    if num_faults == 0:
        return math.nan
    return max(0.0, 1.0 - goodput_of(parts)) * sum(part.seconds for part in parts) / num_faults


class GoodputMeter:
    """One worker's own part, from its steps.

    Args:
        earlier: if an earlier life of the worker took part in this run, the end of its first step
            and the samples that it has made in the run since.
    """

    def __init__(self, earlier: tuple[float, int] | None = None) -> None:
        self._full = FullSpeed()
        self._first_s, self._samples = (math.nan, 0) if earlier is None else earlier
        self._last: tuple[float, int, int] | None = None
        self._ended = False

    @property
    def first_s(self) -> float:
        """Return when the worker's first step ended; NaN before it."""
        return self._first_s

    def step(self, samples: int, now: float) -> None:
        """Count a step that ended at ``now``."""
        if math.isnan(self._first_s):
            self._first_s = now  # this step began before
        else:
            self._samples += samples
        self._full.step(samples, now)
        # One assignment: other threads read all three.
        self._last = now, self._samples, samples

    def end(self) -> None:
        """End the time with the last step: the worker trains no more."""
        self._ended = True

    def part(self, now: float) -> Part:
        """Return the worker's part now; any thread may call it.

        The step under way counts as far as it should be by now, and no more than the last one: so a
        long step costs nothing while it runs, and a loop that hangs is lost time.
        """
        full, last = self._full.samples_per_second, self._last
        if last is None:  # a life that has not made its first step
            seconds = 0.0 if math.isnan(self._first_s) else max(0.0, now - self._first_s)
            return Part(self._samples, seconds, full)
        last_s, samples, of_step = last
        seconds = last_s - self._first_s
        if self._ended:
            return Part(samples, seconds, full)
        since_s = max(0.0, now - last_s)
        under_way = 0.0 if math.isnan(full) else min(of_step, full * since_s)
        return Part(samples + under_way, seconds + since_s, full)
