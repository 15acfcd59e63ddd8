"""The byte model's network and batches, with torch alone: for processes that start often.

The network is that of Bengio et al. 2003 on bytes: the embeddings of the bytes before, side by
side, one hidden layer with ReLU, and the next byte's logits; 57,696 parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

NUM_BYTES = 256
BATCH_SIZE = 32
"""Windows of a gradient step, drawn at random from the worker's text."""
CONTEXT, PREDICTED = 8, 8
"""Bytes from which each byte is predicted, and bytes that are predicted in each window."""
LENGTH = CONTEXT + PREDICTED
WIDTH, HIDDEN = 32, 96
"""Values that stand for each byte, and width of the hidden layer."""


def make_model() -> nn.Sequential:
    """Return the network; contexts of shape (k, CONTEXT) to logits of (k, 256)."""
    return nn.Sequential(
        nn.Embedding(NUM_BYTES, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, NUM_BYTES),
    )


def endless_batches(text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield contexts, (k, CONTEXT), and the bytes that follow them, (k,), without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE,), generator=generator)
        yield split(windows_at(text, starts))


def windows_at(text: Tensor, starts: Tensor) -> Tensor:
    """Return the windows of a text (1-D, uint8) that begin at ``starts``; (k, LENGTH), int64."""
    return text[starts.unsqueeze(1) + torch.arange(LENGTH)].long()


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contexts of windows, and the bytes that follow them."""
    contexts = windows[:, :-1].unfold(1, CONTEXT, 1).reshape(-1, CONTEXT)
    return contexts, windows[:, CONTEXT:].flatten()
