"""No gradients: random vectors that only agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gossipdp.simulate.objective import Evaluation, Gradients, GradientSource, Objective


@final
@dataclass(frozen=True)
class Consensus(Objective):
    """Every worker starts from a standard normal vector of ``dimension`` values, and only mixes."""

    dimension: int = 64

    name: ClassVar[str] = "consensus"
    has_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ValueError(f"dimension is {self.dimension}; it must be at least 1")

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
