"""The byte model's network and batches, with torch alone: for processes that start often."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_BYTES = 256


@dataclass(frozen=True)
class ByteTask:
    """Predict the next byte of a text from those before it.

    Files lie in the order of their paths, and every twentieth of 200 equal pieces is held out.

    Args:
        disjoint: each worker has a stretch of the text of its own: packages that follow one another
            by name. Otherwise all draw from the whole text.
        batch_size: windows of a gradient step, drawn at random from the worker's text.
        context: bytes from which each byte is predicted.
        predicted: bytes that are predicted in each window.
        width: values that stand for each byte.
        hidden: width of the hidden layer.
    """

    disjoint: bool = False
    batch_size: int = 32
    context: int = 8
    predicted: int = 8
    width: int = 32
    hidden: int = 96

    @property
    def length(self) -> int:
        """Return the bytes of a window."""
        return self.context + self.predicted

    def make_model(self) -> nn.Sequential:
        """Return the network as a module; contexts of shape (k, context) to logits of (k, 256)."""
        return nn.Sequential(
            nn.Embedding(NUM_BYTES, self.width),
            nn.Flatten(),
            nn.Linear(self.context * self.width, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, NUM_BYTES),
        )

    def draw(self, text: Tensor, generator: torch.Generator) -> Tensor:
        """Return a batch: (batch_size, context + predicted), int64."""
        size = (self.batch_size,)
        starts = torch.randint(len(text) - self.length, size, generator=generator)
        return windows_at(text, starts, self.length)

    def split(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contexts, (k, context), and the bytes that follow them, (k,)."""
        contexts = windows[:, :-1].unfold(1, self.context, 1).reshape(-1, self.context)
        return contexts, windows[:, self.context :].flatten()


def windows_at(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return the windows of a text (1-D, uint8) that begin at ``starts``."""
    return text[starts.unsqueeze(1) + torch.arange(length)].long()
