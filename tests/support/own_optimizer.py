"""An optimizer that is none of torch's, and keeps whatever a test has it keep."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class OwnOptimizer(torch.optim.Optimizer):
    """Plain descent; as ``key`` it keeps what ``make`` makes of a parameter before a step.

    It does so in the step of number ``at_step``; None: in each, anew.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[Tensor], Any] | None = None,
        *,
        key: str = "kept",
        at_step: int | None = 1,
    ) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self._make, self._key, self._at_step = make, key, at_step

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        number = self.state.get("step", 0) + 1
        self.state["step"] = number
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self._make is not None and self._at_step in (None, number):
                state[self._key] = self._make(parameter)
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)
