"""The state of all simulated workers, a row each, and their gradient steps."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gossipdp.dynamics import update
from gossipdp.simulate.objectives import GradientSource
from gossipdp.simulate.optimizers import RowOptimizer
from gossipdp.tasks.workload import learning_rate_factor


class Population:
    """The state of n workers as matrices, under the same arithmetic as on real workers.

    A row of ``x`` is what others see of a worker: its parameters and what exchanges and flow have
    brought (``x + pending`` of a real worker). ``c`` is the momentum of the trained columns; float
    buffers, in the columns after them, are averaged without.

    Args:
        start: the workers' first values; (n, d). It is copied.
        num_trained: the number of trained columns.
        momentum: whether there is a ``c`` (method ``a2cid2``).
    """

    def __init__(self, start: Tensor, num_trained: int, *, momentum: bool) -> None:
        self.x = start.clone()
        self.num_trained = num_trained
        self.c = torch.zeros_like(self.x[:, :num_trained]) if momentum else None
        self.theta = np.zeros(len(start))
        """The phase to which each row has been flowed."""
        # Where the sum of x + c/2 would be if gradient steps alone moved it.
        self._expected_sum = self.x[:, :num_trained].sum(dim=0, dtype=torch.float64)
        self.half_applied = torch.zeros(num_trained, dtype=torch.float64)
        """What exchanges that only one end has applied yet did to the sum of x + c/2."""

    @property
    def num_workers(self) -> int:
        """Number of rows."""
        return len(self.x)

    @property
    def trained(self) -> Tensor:
        """The trained columns of ``x``; a view of shape (n, num_trained)."""
        return self.x[:, : self.num_trained]

    def flow(self, rank: int, theta: float) -> None:
        """Flow one row up to the phase ``theta``, which never goes back."""
        if theta <= self.theta[rank]:
            return
        if self.c is not None:
            s = math.exp(-2.0 * (theta - self.theta[rank]))
            update.flow(self.x[rank, : self.num_trained], self.c[rank], s)
        self.theta[rank] = theta

    def flow_all(self, theta: float) -> None:
        """Flow every row up to the phase ``theta``."""
        for rank in range(self.num_workers):
            self.flow(rank, theta)

    def flow_out(self, rank: int) -> None:
        """Flow one row to where its flow ends: x += c/2, c = 0."""
        if self.c is not None:
            update.flow(self.x[rank, : self.num_trained], self.c[rank], 0.0)

    def apply(self, rank: int, mine: Tensor, peers: Tensor, alpha_tilde: float) -> None:
        """One end of an exchange, from the snapshots of both ends."""
        row, trained = self.x[rank], self.num_trained
        c = None if self.c is None else self.c[rank]
        update.exchange(row[:trained], c, mine[:trained], peers[:trained], 1.0, alpha_tilde)
        if trained < len(row):
            update.exchange(row[trained:], None, mine[trained:], peers[trained:], 1.0, 0.5)

    def take_over(self, rank: int, peer: int) -> None:
        """Give one row x + c/2 of another, and no momentum; its change is no drift."""
        row = self.x[peer].clone()
        if self.c is not None:
            row[: self.num_trained] += 0.5 * self.c[peer]
        self.put(rank, row)

    def put(self, rank: int, row: Tensor) -> None:
        """Give one worker another row, and no momentum; its change is no drift."""
        self._expected_sum -= self.x[rank, : self.num_trained].double()
        if self.c is not None:
            self._expected_sum -= 0.5 * self.c[rank].double()
            self.c[rank].zero_()
        self.x[rank].copy_(row)
        self._expected_sum += row[: self.num_trained].double()

    def step(self, ranks: list[int], changes: Tensor) -> None:
        """Add what gradient steps changed: rows of (k, d)."""
        if len(ranks) == 1:  # as asynchronous workers step: no copy of the row
            self.x[ranks[0]].add_(changes[0])
            self._expected_sum.add_(changes[0, : self.num_trained])
        else:
            rows = torch.tensor(ranks)
            self.x.index_copy_(0, rows, self.x.index_select(0, rows) + changes)
            self._expected_sum += changes[:, : self.num_trained].sum(dim=0, dtype=torch.float64)

    def consensus_distance(self) -> float:
        """(1/n) sum_i |x_i - mean|^2 over the trained columns."""
        centred = self.trained - self.trained.mean(dim=0)
        return float(centred.square().sum()) / self.num_workers

    def mean(self) -> Tensor:
        """The mean row of x + c/2, where the flow ends; (d,)."""
        mean = self.x.mean(dim=0)
        if self.c is not None:
            mean[: self.num_trained] += 0.5 * self.c.mean(dim=0)
        return mean

    def drift(self) -> float:
        """How far the mean of x + c/2 is from where gradient steps alone would have moved it.

        The Euclidean norm of the difference; exchanges that both ends applied leave rounding
        errors only, and those that one end is still to apply (``half_applied``) do not count.
        """
        expected = (self._expected_sum + self.half_applied) / self.num_workers
        return float((self.mean()[: self.num_trained].double() - expected).norm())


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
        self._changes: dict[int, Tensor] = {}
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
