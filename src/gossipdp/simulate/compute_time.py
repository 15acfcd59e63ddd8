"""How long gradient steps take: equal, jittered, slow, or as they were measured."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import final

from gossipdp.graph.step_spread import check_step_spread

StepTimes = Callable[[int], float]
"""Draws how long the next gradient step of a rank takes, in seconds."""


class ComputeTime(ABC):
    """How long gradient steps take; a description, from which each run draws by its own seed."""

    @property
    @abstractmethod
    def nominal_s(self) -> float:
        """How long a step of an ordinary worker takes on average: the unit of time of a run."""

    @abstractmethod
    def begin(self, seed: int) -> StepTimes:
        """The step times of one run. Each rank draws from a source of its own."""


@final
@dataclass(frozen=True)
class ConstantTime(ComputeTime):
    """Every step of every worker takes ``step_s`` seconds."""

    step_s: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("step_s", self.step_s)

    @property
    def nominal_s(self) -> float:
        return self.step_s

    def begin(self, seed: int) -> StepTimes:
        return lambda rank: self.step_s


@final
@dataclass(frozen=True)
class LognormalTime(ComputeTime):
    """Step times of mean ``step_s`` whose logarithm has standard deviation ``spread``.

    A ``spread`` above 3 is refused: hardly a run would see its mean.
    """

    step_s: float = 0.1
    spread: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("step_s", self.step_s)
        check_step_spread("spread", self.spread)

    @property
    def nominal_s(self) -> float:
        return self.step_s

    def begin(self, seed: int) -> StepTimes:
        sources = _Sources(seed)
        median = math.log(self.step_s) - self.spread**2 / 2  # so that the mean is step_s
        return lambda rank: sources[rank].lognormvariate(median, self.spread)


@final
@dataclass(frozen=True)
class SlowedTime(ComputeTime):
    """Some ranks take ``factors[rank]`` times as long as ``base`` says."""

    base: ComputeTime
    factors: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, factor in self.factors.items():
            _check_positive(f"the slow factor of rank {rank}", factor)

    @property
    def nominal_s(self) -> float:
        return self.base.nominal_s

    def begin(self, seed: int) -> StepTimes:
        draw = self.base.begin(seed)
        return lambda rank: draw(rank) * self.factors.get(rank, 1.0)


@final
@dataclass(frozen=True)
class MeasuredTime(ComputeTime):
    """Steps drawn, with replacement, from times that were measured."""

    times_s: Sequence[float]

    def __post_init__(self) -> None:
        if not self.times_s:
            raise ValueError("no measured step times were given: give at least one")
        for time_s in self.times_s:
            _check_positive("a measured step time", time_s)

    @property
    def nominal_s(self) -> float:
        return math.fsum(self.times_s) / len(self.times_s)

    def begin(self, seed: int) -> StepTimes:
        sources = _Sources(seed)
        return lambda rank: sources[rank].choice(self.times_s)


class _Sources(dict[int, Random]):
    """One random source a rank, so that no worker's draws depend on another's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __missing__(self, rank: int) -> Random:
        source = self[rank] = Random(f"{self._seed} compute {rank}")
        return source


def _check_positive(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {seconds}; it must be a positive number")
