"""The gradient steps of all simulated workers."""

from __future__ import annotations

import math

import torch

from gossipdp.simulate.objective import GradientSource
from gossipdp.simulate.optimizers import RowOptimizer
from gossipdp.simulate.population import Population
from gossipdp.workloads.workload import learning_rate_factor


class Training:
    """Starts and ends gradient steps: evaluated at a step's start, applied at its end.

    So is it on a real worker, whose parameters do not change under a forward and backward pass.
    And so the gradients of all steps under way can be evaluated together: when the first of them
    is needed, all are, in one batch. What a step finds does not depend on that.

    Args:
        source: the gradients, or None where workers take none (consensus): steps then only count.
        optimizer: how rows step.
        population: the rows.
    """

    def __init__(
        self, source: GradientSource | None, optimizer: RowOptimizer, population: Population
    ) -> None:
        self.steps = [0] * population.num_workers
        """Gradient steps that each worker has ended."""
        self._source = source
        self._population = population
        self._rows = optimizer.begin(population.trained)
        self._starts = torch.zeros_like(population.x)
        self._factors = [1.0] * population.num_workers
        self._under_way: dict[int, None] = {}
        self._changes: dict[int, torch.Tensor] = {}
        self._loss_sum, self._num_losses = 0.0, 0

    def start_step(self, rank: int, progress: float | None = None) -> None:
        """A worker begins a step at its current row; ``progress`` (0 to 1) sets the step's rate."""
        if self._source is None:
            return
        self._starts[rank] = self._population.x[rank]
        self._factors[rank] = 1.0 if progress is None else learning_rate_factor(progress)
        self._under_way[rank] = None

    def end_step(self, rank: int) -> None:
        """Apply the step that the worker began last."""
        self.steps[rank] += 1
        if self._source is None:
            return
        if rank not in self._changes:
            self._evaluate()
        self._population.step([rank], self._changes.pop(rank))

    def take_loss(self) -> float:
        """The mean loss of the batches evaluated since the last call; NaN for none."""
        mean = self._loss_sum / self._num_losses if self._num_losses else math.nan
        self._loss_sum, self._num_losses = 0.0, 0
        return mean

    def _evaluate(self) -> None:
        assert self._source is not None
        ranks = sorted(self._under_way)
        self._under_way.clear()
        x = self._starts.index_select(0, torch.tensor(ranks))
        num_trained = self._population.num_trained
        found = self._source.gradients(ranks, x)
        factors = torch.tensor([self._factors[rank] for rank in ranks], dtype=x.dtype).unsqueeze(1)
        changes = self._rows.changes(ranks, x[:, :num_trained], found.values, factors)
        if found.buffer_changes.numel():
            changes = torch.cat([changes, found.buffer_changes], dim=1)
        self._changes.update(zip(ranks, torch.split(changes, 1), strict=True))
        self._loss_sum += float(found.losses.sum())
        self._num_losses += len(ranks)
