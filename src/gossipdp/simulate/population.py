"""The (x, c) state of all simulated workers, one row each."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gossipdp.dynamics import kernels


class Population:
    """The state of n workers as matrices, under the same kernels as on real workers.

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
        self._scratch = torch.empty_like(self.x[0])

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
            kernels.flow_(self.x[rank, : self.num_trained], self.c[rank], s)
        self.theta[rank] = theta

    def flow_all(self, theta: float) -> None:
        """Flow every row up to the phase ``theta``."""
        if self.c is not None:
            s = torch.from_numpy(np.exp(-2.0 * (theta - self.theta))).to(self.c.dtype).unsqueeze(1)
            self.trained.addcmul_(0.5 * (1.0 - s), self.c)
            self.c.mul_(s)
        self.theta[:] = theta

    def flow_out(self, rank: int) -> None:
        """Flow one row to where its flow ends: x += c/2, c = 0."""
        if self.c is not None:
            self.x[rank, : self.num_trained].add_(self.c[rank], alpha=0.5)
            self.c[rank].zero_()

    def apply(self, rank: int, mine: Tensor, peers: Tensor, alpha_tilde: float) -> None:
        """One end of an exchange, from the snapshots of both ends."""
        kernels.difference_(self._scratch, mine, peers)
        delta, row = self._scratch, self.x[rank]
        kernels.exchange_(row, None, delta, 0.5)
        if self.c is not None:
            self.c[rank].add_(delta[: self.num_trained], alpha=0.5 - alpha_tilde)

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
