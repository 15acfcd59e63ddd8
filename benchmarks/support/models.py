"""Models to measure with that no recipe trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

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


class GptShaped(nn.Module):
    """GPT-2's matrices without its attention: 117 million parameters if no number is given.

    Each token is a sample of its own, so a small batch makes a step that is mostly the optimizer's,
    where an exchange costs most. Tokens (batch,) to logits (batch, num_tokens).

    Args:
        width: of an embedding, which the output shares.
        num_layers: each of four matrices.
        num_tokens: in the vocabulary.
    """

    def __init__(self, width: int = 768, num_layers: int = 11, num_tokens: int = 50_257) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each token."""
        values = self.embedding(tokens)
        for layer in self.layers:
            values = layer(values)
        return functional.linear(values, self.embedding.weight)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        gate, scale, value = self.mixed(self.norm(values)).chunk(3, dim=-1)
        values = values + self.out(torch.sigmoid(gate) * torch.tanh(scale) * value)
        return values + self.narrow(functional.gelu(self.wide(values)))
