"""Optimizers over rows: one state of shape (n, d) holds the optimizers of all workers.

The arithmetic is that of :mod:`torch.optim`, which a test compares it with. Rows are taken and
put by index_select and index_copy_: indexing by a list is many times slower, more so on busy cores.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


class RowSteps(ABC):
    """The optimizer state of all workers in one run."""

    @abstractmethod
    def changes(
        self, ranks: Sequence[int], x: Tensor, gradients: Tensor, factor: float | Tensor
    ) -> Tensor:
        """What one step of each of ``ranks`` adds to its row.

        Args:
            ranks: k distinct ranks.
            x: their trained parameters; (k, d).
            gradients: at ``x``; (k, d).
            factor: multiplies the learning rate; a number, or one for each rank, (k, 1).
        """


class RowOptimizer(ABC):
    """An optimizer with its settings; frozen and picklable."""

    @abstractmethod
    def begin(self, start: Tensor) -> RowSteps:
        """Fresh state for workers whose trained parameters are ``start``, of shape (n, d)."""


@final
@dataclass(frozen=True)
class Sgd(RowOptimizer):
    """Stochastic gradient descent with heavy-ball momentum and coupled weight decay.

        g += weight_decay x,   b = momentum b + g,   x -= learning_rate b

    as ``torch.optim.SGD``, whose first step takes b = g just so.
    """

    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)
        _check("momentum", self.momentum, below=1.0)
        _check("weight_decay", self.weight_decay)

    def begin(self, start: Tensor) -> RowSteps:
        return _SgdSteps(self, start)


class _SgdSteps(RowSteps):
    def __init__(self, settings: Sgd, start: Tensor) -> None:
        self._settings = settings
        self._buffer = torch.zeros_like(start) if settings.momentum else None

    def changes(
        self, ranks: Sequence[int], x: Tensor, gradients: Tensor, factor: float | Tensor
    ) -> Tensor:
        settings = self._settings
        if settings.weight_decay:
            gradients = gradients + settings.weight_decay * x
        if self._buffer is not None:
            rows = torch.tensor(ranks)
            gradients = settings.momentum * self._buffer.index_select(0, rows) + gradients
            self._buffer.index_copy_(0, rows, gradients)
        return gradients * (-settings.learning_rate * factor)


@final
@dataclass(frozen=True)
class AdamW(RowOptimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check("learning_rate", self.learning_rate)
        for beta in self.betas:
            _check("beta", beta, below=1.0)
        _check("epsilon", self.epsilon)
        _check("weight_decay", self.weight_decay)

    def begin(self, start: Tensor) -> RowSteps:
        return _AdamWSteps(self, start)


class _AdamWSteps(RowSteps):
    def __init__(self, settings: AdamW, start: Tensor) -> None:
        self._settings = settings
        self._first = torch.zeros_like(start)
        self._second = torch.zeros_like(start)
        self._steps = torch.zeros(len(start), 1, dtype=torch.float64)

    def changes(
        self, ranks: Sequence[int], x: Tensor, gradients: Tensor, factor: float | Tensor
    ) -> Tensor:
        settings, rows = self._settings, torch.tensor(ranks)
        beta_1, beta_2 = settings.betas
        steps = self._steps.index_select(0, rows) + 1
        first = torch.lerp(gradients, self._first.index_select(0, rows), beta_1)
        second = torch.lerp(gradients.square(), self._second.index_select(0, rows), beta_2)
        for state, now in ((self._steps, steps), (self._first, first), (self._second, second)):
            state.index_copy_(0, rows, now)
        correction_1 = (1 - beta_1**steps).to(x.dtype)
        correction_2 = (1 - beta_2**steps).to(x.dtype)
        rate = factor * settings.learning_rate
        scale = (second / correction_2).sqrt() + settings.epsilon
        return -rate * (first / correction_1 / scale + settings.weight_decay * x)


def _check(name: str, value: float, *, below: float = math.inf) -> None:
    if not (0.0 <= value < below):
        bound = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} is {value}; it must be at least 0{bound}")
