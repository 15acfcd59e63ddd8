"""Optimizers over rows: one state of shape (n, d) holds the optimizers of all workers.

The arithmetic is that of :mod:`torch.optim`, which a test compares it with. Rows are taken and
put by index_select and index_copy_: indexing by a list is many times slower, more so on busy cores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, final

import torch
from torch import Tensor

from gossipdp.rules import Checked, number, option

RowState: TypeAlias = dict[str, Tensor]
"""The optimizer state of all workers, a row each; under the names that torch.optim uses."""


class RowOptimizer(ABC):
    """An optimizer with its settings; frozen and picklable."""

    @abstractmethod
    def begin(self, start: Tensor) -> RowState:
        """Make the state of workers whose trained parameters are ``start``, of shape (n, d)."""

    @abstractmethod
    def changes(
        self,
        state: RowState,
        ranks: Sequence[int],
        x: Tensor,
        gradients: Tensor,
        factor: float | Tensor,
    ) -> Tensor:
        """Return the change of its row by one step of each of ``ranks``; (k, d).

        Args:
            state: of all workers; the rows of ``ranks`` are updated.
            ranks: k distinct ranks.
            x: their trained parameters; (k, d).
            gradients: at ``x``; (k, d).
            factor: multiplies the learning rate; a number, or one for each rank, (k, 1).
        """


@final
@dataclass(frozen=True)
class Sgd(Checked, RowOptimizer):
    """Stochastic gradient descent with heavy-ball momentum and coupled weight decay.

        g += weight_decay x,   b = momentum b + g,   x -= learning_rate b

    as ``torch.optim.SGD``, whose first step takes b = g too.
    """

    learning_rate: float = option(0.1, number)
    momentum: float = option(0.0, partial(number, below=1.0))
    weight_decay: float = option(0.0, number)

    def begin(self, start: Tensor) -> RowState:
        return {"momentum_buffer": torch.zeros_like(start)} if self.momentum else {}

    def changes(
        self,
        state: RowState,
        ranks: Sequence[int],
        x: Tensor,
        gradients: Tensor,
        factor: float | Tensor,
    ) -> Tensor:
        if self.weight_decay:
            gradients = gradients + self.weight_decay * x
        if self.momentum:
            rows, buffer = torch.tensor(ranks), state["momentum_buffer"]
            gradients = self.momentum * buffer.index_select(0, rows) + gradients
            buffer.index_copy_(0, rows, gradients)
        return gradients * (-self.learning_rate * factor)


def _betas(name: str, value: Sequence[float]) -> tuple[float, ...]:
    return tuple(number(f"each of {name}", beta, below=1.0) for beta in value)


@final
@dataclass(frozen=True)
class AdamW(Checked, RowOptimizer):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""

    learning_rate: float = option(1e-3, number)
    betas: tuple[float, float] = option((0.9, 0.999), _betas)
    epsilon: float = option(1e-8, number)
    weight_decay: float = option(1e-2, number)

    def begin(self, start: Tensor) -> RowState:
        return {
            "exp_avg": torch.zeros_like(start),
            "exp_avg_sq": torch.zeros_like(start),
            "step": torch.zeros(len(start), 1, dtype=torch.float64),
        }

    def changes(
        self,
        state: RowState,
        ranks: Sequence[int],
        x: Tensor,
        gradients: Tensor,
        factor: float | Tensor,
    ) -> Tensor:
        beta_1, beta_2 = self.betas
        if len(ranks) == 1:  # as asynchronous workers step: in place, no copy of the rows
            rows = {name: values[ranks[0] : ranks[0] + 1] for name, values in state.items()}
        else:
            index = torch.tensor(ranks)
            rows = {name: values.index_select(0, index) for name, values in state.items()}
        step = rows["step"].add_(1)
        first = rows["exp_avg"].mul_(beta_1).add_(gradients, alpha=1 - beta_1)
        second = rows["exp_avg_sq"].mul_(beta_2).addcmul_(gradients, gradients, value=1 - beta_2)
        if len(ranks) > 1:
            for name, values in rows.items():
                state[name].index_copy_(0, index, values)
        scale = (second / (1 - beta_2**step).to(x.dtype)).sqrt_().add_(self.epsilon)
        change = torch.div(first, scale.mul_((1 - beta_1**step).to(x.dtype)), out=scale)
        return change.add_(x, alpha=self.weight_decay).mul_(-self.learning_rate * factor)
