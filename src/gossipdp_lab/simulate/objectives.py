"""Objectives of simulated workers: the seam to their gradients, and two without data.

An :class:`Objective` describes; :meth:`Objective.begin` makes the :class:`GradientSource` of one
run, which owns that run's random state and data order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from gossipdp.rules import Checked, at_least_1, number, option

BLOCK_VALUES = 4096
"""Values of noise that are drawn for a rank at once: a single draw costs as much as many."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of k workers, of one step each.

    Attributes:
        values: gradients of the trained columns; (k, num_trained).
        buffer_changes: changes of the buffer columns; (k, d - num_trained).
    """

    values: Tensor
    buffer_changes: Tensor

    def rows(self) -> list[Gradients]:
        """Return those of each worker, as views."""
        parts = zip(self.values.split(1), self.buffer_changes.split(1), strict=True)
        return [Gradients(*part) for part in parts]


@dataclass(frozen=True)
class Evaluation:
    """The quality of one row of parameters."""

    loss: float
    """Over the training objective."""
    metric: float | None = None
    """On held-out data, if the objective has some."""


class GradientSource(ABC):
    """The gradients of one run.

    Attributes:
        start: where each worker starts; (n, d). Its dtype is that of the whole run.
        num_trained: the first so many columns are parameters; the rest are float buffers, which
            exchanges average without momentum.
    """

    start: Tensor
    num_trained: int

    @abstractmethod
    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        """Return the next gradients of each of ``ranks`` at the rows ``x`` of shape (k, d).

        Called once for every step of a rank, in the order of that rank's steps. The answer for a
        rank does not depend on the ranks that it is asked with.
        """

    @abstractmethod
    def evaluate(self, x: Tensor) -> Evaluation:
        """Judge one row of shape (d,); draws nothing from the run's random state."""


class Objective(ABC):
    """A task for simulated workers; frozen and picklable.

    Attributes:
        name: in tables and figures.
        has_gradients: whether workers take gradient steps at all.
        metric_name: of :attr:`Evaluation.metric`; None if there is none.
    """

    name: str
    has_gradients = True
    metric_name: str | None = None

    @abstractmethod
    def begin(self, num_workers: int, seed: int) -> GradientSource:
        """Return the gradients of one run; the same arguments give the same run."""


@final
@dataclass(frozen=True)
class Consensus(Checked, Objective):
    """No gradients: standard normal vectors of ``dimension`` values that only mix."""

    dimension: int = option(64, at_least_1)

    name = "consensus"
    has_gradients = False

    def begin(self, num_workers: int, seed: int) -> GradientSource:
        return _NoGradients(self.dimension, num_workers, seed)


class _NoGradients(GradientSource):
    def __init__(self, dimension: int, num_workers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randn(num_workers, dimension, generator=generator, dtype=torch.float64)
        self.num_trained = dimension

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        raise AssertionError("consensus has no gradients")

    def evaluate(self, x: Tensor) -> Evaluation:
        return Evaluation(loss=float("nan"))


@final
@dataclass(frozen=True)
class Quadratic(Checked, Objective):
    """A quadratic for each worker; only their mean has its least value at x*.

        f_i(x) = 1/2 (x - x*)^T A (x - x*) + g_i^T (x - x*),    sum_i g_i = 0
        gradient of worker i = A (x - x*) + g_i + noise

    A is diagonal, its eigenvalues spaced evenly in their logarithms from ``mu`` to ``smoothness``.
    The drifts g_i are drawn from a normal distribution, then centred and scaled. (Where A can be
    inverted, f_i is 1/2 (x - b_i)^T A (x - b_i) but for a constant, with b_i = x* - A^-1 g_i; in
    this form A may also be zero.) All workers start at zero; x* is standard normal.

    The loss is that of the mean objective over its least value, f(x) - f(x*), without noise.

    With ``mu = smoothness = 0`` there is nothing to learn, but noise and drift remain. They and
    the exchanges then set the consensus distance of the long run.

    Args:
        dimension: d, at least 1.
        mu, smoothness: the least and the largest eigenvalue of A; both zero for A = 0.
        noise_variance: sigma^2, the expected squared norm of a gradient's noise; each coordinate
            has sigma^2 / d, normal and independent.
        heterogeneity: zeta^2 = (1/n) sum_i |gradient of f_i at x*|^2 = (1/n) sum_i |g_i|^2;
            one worker alone has none.
    """

    dimension: int = option(64, at_least_1)
    mu: float = option(1.0, number)
    smoothness: float = option(1.0, number)
    noise_variance: float = option(1.0, number)
    heterogeneity: float = option(0.0, number)

    name = "quadratic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu > self.smoothness or (self.mu == 0) != (self.smoothness == 0):
            raise ValueError(
                f"mu is {self.mu} and smoothness {self.smoothness}; they must be "
                "0 < mu <= smoothness, or both 0 for noise and drift alone"
            )

    def begin(self, num_workers: int, seed: int) -> QuadraticSource:
        return QuadraticSource(self, num_workers, seed)


@final
class QuadraticSource(GradientSource):
    """One run of a :class:`Quadratic`.

    Attributes:
        optimum: x*; (d,).
        eigenvalues: the diagonal of A; (d,).
        drifts: g_i; (n, d).
    """

    def __init__(self, objective: Quadratic, num_workers: int, seed: int) -> None:
        dimension = objective.dimension
        self.start = torch.zeros(num_workers, dimension, dtype=torch.float64)
        self.num_trained = dimension
        random = np.random.default_rng([seed, 0])
        self.optimum = torch.from_numpy(random.standard_normal(dimension))
        self.eigenvalues = torch.zeros(dimension, dtype=torch.float64)
        if objective.mu:
            spaced = np.geomspace(objective.mu, objective.smoothness, dimension)
            self.eigenvalues = torch.from_numpy(spaced)
        drifts = random.standard_normal((num_workers, dimension))
        drifts -= drifts.mean(axis=0)
        if num_workers > 1:
            drifts *= math.sqrt(objective.heterogeneity * num_workers) / np.linalg.norm(drifts)
        self.drifts = torch.from_numpy(drifts)
        self._deviation = math.sqrt(objective.noise_variance / dimension)
        # A source of its own for every rank, so that no rank's noise depends on the others.
        self._sources = [np.random.default_rng([seed, 1 + rank]) for rank in range(num_workers)]
        num_steps = max(1, BLOCK_VALUES // dimension)
        self._noise = np.empty((num_workers, num_steps, dimension))
        self._places = np.full(num_workers, num_steps)

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        rows = list(ranks)
        drifts = self.drifts.index_select(0, torch.tensor(rows))
        values = (x - self.optimum) * self.eigenvalues + drifts
        if self._deviation:
            values += torch.from_numpy(self._draw(rows)) * self._deviation
        return Gradients(values, x.new_zeros(len(rows), 0))

    def evaluate(self, x: Tensor) -> Evaluation:
        away = x - self.optimum
        return Evaluation(loss=0.5 * float((away * self.eigenvalues * away).sum()))

    def _draw(self, rows: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return the next standard normal vector of each rank; (k, d)."""
        for rank in rows:
            if self._places[rank] == self._noise.shape[1]:
                self._sources[rank].standard_normal(out=self._noise[rank])
                self._places[rank] = 0
        drawn = self._noise[rows, self._places[rows]]
        self._places[rows] += 1
        return drawn
