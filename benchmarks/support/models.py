"""A model to measure with that no recipe trains: one of a thousand tiny operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossipdp_lab.tasks.images import CIFAR_RESNET18_PARAMETERS


class LaunchBound(nn.Module):
    """Thousands of operations on a few values each: Python is busy all the time.

    ``ballast`` gets no gradient, so that no step computes with it, but the optimizer holds it: an
    exchange may carry as much as one of ResNet-18. (batch, 16) to (batch, 16).

    Args:
        num_layers: each a scaling and a shift with parameters of its own, and a tanh.
        num_passes: how often a forward pass goes through all of them.
        num_parameters: in all, the ballast included.
    """

    def __init__(
        self,
        num_layers: int = 200,
        num_passes: int = 6,
        num_parameters: int = CIFAR_RESNET18_PARAMETERS,
    ) -> None:
        super().__init__()
        self._num_passes = num_passes
        self.scales = nn.ParameterList(torch.ones(16) for _ in range(num_layers))
        self.shifts = nn.ParameterList(torch.zeros(16) for _ in range(num_layers))
        self.ballast = nn.Parameter(torch.zeros(num_parameters - 32 * num_layers))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values after so many scalings and shifts."""
        for _ in range(self._num_passes):
            for scale, shift in zip(self.scales, self.shifts, strict=True):
                values = torch.tanh(values * scale + shift)
        return values
