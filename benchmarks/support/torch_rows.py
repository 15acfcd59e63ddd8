"""Torch's optimizers whose steps depend on the shapes of parameters, over rows of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossipdp_lab.simulate.optimizers import MakeOptimizer


def of_shapes(
    make: Callable[[list[Tensor]], list[torch.optim.Optimizer]], shapes: Sequence[torch.Size]
) -> MakeOptimizer:
    """Return a function of a worker's row that calls ``make`` with views of these shapes."""

    def of_row(rows: list[Tensor]) -> list[torch.optim.Optimizer]:
        pieces = rows[0].split([shape.numel() for shape in shapes])
        return make([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    return of_row
