"""Torch's optimizers over rows: each simulated worker has its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor
from torch.optim import Optimizer

MakeOptimizer: TypeAlias = Callable[[list[Tensor]], Optimizer | Sequence[Optimizer]]
"""Makes the optimizer of one worker, or several, from ``[row]``: its trained parameters as one
vector. Those whose steps depend on shapes are made of views of the row."""


@final
class RowOptimizers:
    """The optimizers of n workers.

    Args:
        make: makes those of one worker.
        start: the trained parameters of all; (n, d).

    Attributes:
        state: what they keep, a row each, under torch's names; exchanges may average it.
    """

    def __init__(self, make: MakeOptimizer, start: Tensor) -> None:
        # One row and its gradient serve all workers: each optimizer keeps a state of its own.
        self._row, self._gradient = torch.zeros_like(start[0]), torch.zeros_like(start[0])
        self._optimizers = [self._begin(make([self._row])) for _ in start]
        self._row.zero_()
        widths: dict[str, int] = {}
        for _, name, value in self._kept(0):
            widths[name] = widths.get(name, 0) + value.numel()
        self.state = {name: start.new_zeros(len(start), width) for name, width in widths.items()}
        for rank in range(len(start)):
            ends = dict.fromkeys(widths, 0)
            for kept, name, value in self._kept(rank):
                begin, ends[name] = ends[name], ends[name] + value.numel()
                kept[name] = self.state[name][rank, begin : ends[name]].view_as(value)

    def _begin(self, made: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
        optimizers = [made] if isinstance(made, Optimizer) else list(made)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
                for values in group["params"]:
                    begin = values.storage_offset()
                    values.grad = self._gradient[begin : begin + values.numel()].view_as(values)
            optimizer.step()  # it makes its state, which the views of zeros replace
        return optimizers

    def _kept(self, rank: int) -> list[tuple[dict[str, Tensor], str, Tensor]]:
        """Return what a worker's optimizers keep of each parameter: where, its name, the tensor."""
        found = []
        for optimizer in self._optimizers[rank]:
            for kept in optimizer.state.values():
                kept["step"] = torch.zeros(())
                found += [
                    (kept, name, value)
                    for name, value in kept.items()
                    if name != "step" and value is not None
                ]
        return found

    @torch.no_grad()
    def changes(self, ranks: Sequence[int], x: Tensor, gradients: Tensor, factor: float) -> Tensor:
        """Return the change of its row by one step of each of ``ranks``; (k, d).

        Args:
            ranks: k distinct ranks.
            x: their trained parameters; (k, d).
            gradients: at ``x``; (k, d).
            factor: multiplies the learning rates.
        """
        changes = torch.empty_like(x)
        for place, rank in enumerate(ranks):
            self._row.copy_(x[place])
            self._gradient.copy_(gradients[place])
            for optimizer in self._optimizers[rank]:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * factor
                optimizer.step()
            torch.sub(self._row, x[place], out=changes[place])
        return changes
