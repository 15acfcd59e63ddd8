"""Models to measure with: ResNet-18 for small images, and one of a thousand tiny operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RESNET_PARAMETERS = 11_173_962


class ResNet18(nn.Module):
    """He et al., *Deep residual learning* (CVPR 2016), with the stem for images of 32 by 32.

    The first convolution is 3 by 3 with stride 1, and nothing is pooled before the blocks.
    11,173,962 parameters with ten classes; (batch, 3, 32, 32) to (batch, ``num_classes``).
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        blocks: list[nn.Module] = []
        channels = 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [_Block(channels, width, stride), _Block(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        features = self.blocks(self.stem(images))
        return self.head(features.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(self.residual(features) + self.shortcut(features))


class LaunchBound(nn.Module):
    """Thousands of operations on a few values each: Python is busy all the time.

    ``ballast`` gets no gradient, so that no step computes with it, but the optimizer holds it: an
    exchange may carry as much as one of :class:`ResNet18`. (batch, 16) to (batch, 16).

    Args:
        num_layers: each a scaling and a shift with parameters of its own, and a tanh.
        num_passes: how often a forward pass goes through all of them.
        num_parameters: in all, the ballast included.
    """

    def __init__(
        self,
        num_layers: int = 200,
        num_passes: int = 6,
        num_parameters: int = RESNET_PARAMETERS,
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
