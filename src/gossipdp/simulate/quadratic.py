"""A quadratic with known optimum, gradient noise and heterogeneity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from gossipdp.simulate.objective import Evaluation, Gradients, GradientSource, Objective

BLOCK_VALUES = 4096
"""So much noise is drawn for a rank at once, since a single draw costs as much as many."""


@final
@dataclass(frozen=True)
class Quadratic(Objective):
    """Each worker has its own quadratic; only their mean has its least value at x*.

        f_i(x) = 1/2 (x - x*)^T A (x - x*) + g_i^T (x - x*),    sum_i g_i = 0
        gradient of worker i = A (x - x*) + g_i + noise

    A is diagonal, its eigenvalues spaced evenly in their logarithms from ``mu`` to ``smoothness``.
    The drifts g_i are drawn from a normal distribution, then centred and scaled. (Where A can be
    inverted, f_i is 1/2 (x - b_i)^T A (x - b_i) but for a constant, with b_i = x* - A^-1 g_i; in
    this form A may also be zero.) All workers start at zero; x* is standard normal.

    The loss is that of the mean objective over its least value, f(x) - f(x*), without noise.

    With ``mu = smoothness = 0`` there is nothing to learn, but noise and drift remain: what is
    left of the consensus distance in the long run is then what the exchanges make of them.

    Args:
        dimension: d, at least 1.
        mu, smoothness: the least and the largest eigenvalue of A; both zero for A = 0.
        noise_variance: sigma^2, the expected squared norm of a gradient's noise; each coordinate
            has sigma^2 / d, normal and independent.
        heterogeneity: zeta^2 = (1/n) sum_i |gradient of f_i at x*|^2 = (1/n) sum_i |g_i|^2;
            one worker alone has none.
    """

    dimension: int = 64
    mu: float = 1.0
    smoothness: float = 1.0
    noise_variance: float = 1.0
    heterogeneity: float = 0.0

    name: ClassVar[str] = "quadratic"

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"dimension is {self.dimension}; it must be at least 1")
        for field in ("mu", "smoothness", "noise_variance", "heterogeneity"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field} is {value}; it must be a number of at least 0")
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
        away, drifts = x - self.optimum, self.drifts.index_select(0, torch.tensor(rows))
        pull = away * self.eigenvalues
        values = pull + drifts
        losses = ((0.5 * pull + drifts) * away).sum(dim=1)
        if self._deviation:
            values += torch.from_numpy(self._draw(rows)) * self._deviation
        return Gradients(values, x.new_zeros(len(rows), 0), losses)

    def evaluate(self, x: Tensor) -> Evaluation:
        away = x - self.optimum
        return Evaluation(loss=0.5 * float((away * self.eigenvalues * away).sum()))

    def _draw(self, rows: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """The next standard normal vector of each rank; (k, d)."""
        for rank in rows:
            if self._places[rank] == self._noise.shape[1]:
                self._sources[rank].standard_normal(out=self._noise[rank])
                self._places[rank] = 0
        drawn = self._noise[rows, self._places[rows]]
        self._places[rows] += 1
        return drawn
