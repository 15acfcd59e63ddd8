"""Any optimizer of torch as one over rows: each simulated worker has its own.

For optimizers of which the simulator has no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from gossipdp_lab.simulate import RowOptimizer
from gossipdp_lab.simulate.optimizers import RowState

MakeOptimizers: TypeAlias = Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]


@final
class TorchRows(RowOptimizer):
    """The optimizers of n workers, made by ``make`` from parameters of the given shapes.

    What they keep of each parameter are views of the state's rows, under the optimizer's names, so
    exchanges may average it. Steps are counted by the optimizers. An instance serves one run.
    """

    def __init__(self, make: MakeOptimizers, shapes: Sequence[torch.Size]) -> None:
        self._make, self._shapes = make, list(shapes)
        self._parameters: list[list[nn.Parameter]] = []
        self._optimizers: list[list[torch.optim.Optimizer]] = []

    def begin(self, start: Tensor) -> RowState:
        self._parameters = [
            [nn.Parameter(torch.zeros(shape)) for shape in self._shapes] for _ in start
        ]
        self._optimizers = [self._make(parameters) for parameters in self._parameters]
        for parameters, optimizers in zip(self._parameters, self._optimizers, strict=True):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["initial_lr"] = group["lr"]
                optimizer.step()  # it makes its state, which is emptied below
        widths: dict[str, int] = {}
        for _, name, value in self._kept(0):
            widths[name] = widths.get(name, 0) + value.numel()
        state = {name: start.new_zeros(len(start), width) for name, width in widths.items()}
        for rank in range(len(start)):
            ends = dict.fromkeys(widths, 0)
            for kept, name, value in self._kept(rank):
                begin, ends[name] = ends[name], ends[name] + value.numel()
                kept[name] = state[name][rank, begin : ends[name]].view_as(value)
        return state

    def _kept(self, rank: int) -> list[tuple[dict[str, Tensor], str, Tensor]]:
        """Return what a worker's optimizers keep of each parameter: where, its name, the tensor."""
        found = []
        for optimizer in self._optimizers[rank]:
            for kept in optimizer.state.values():
                kept["step"] = torch.zeros(())
                found += [(kept, name, kept[name]) for name in kept if name != "step"]
        return found

    @torch.no_grad()
    def changes(
        self,
        state: RowState,
        ranks: Sequence[int],
        x: Tensor,
        gradients: Tensor,
        factor: float | Tensor,
    ) -> Tensor:
        after = torch.empty_like(x)
        sizes = [shape.numel() for shape in self._shapes]
        for place, rank in enumerate(ranks):
            values, found = x[place].split(sizes), gradients[place].split(sizes)
            for parameter, value, gradient in zip(
                self._parameters[rank], values, found, strict=True
            ):
                parameter.copy_(value.view_as(parameter))
                parameter.grad = gradient.view_as(parameter)
            times = float(factor[place]) if isinstance(factor, Tensor) else factor
            for optimizer in self._optimizers[rank]:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * times
                optimizer.step()
            torch.cat([each.flatten() for each in self._parameters[rank]], out=after[place])
        return after.sub_(x)
