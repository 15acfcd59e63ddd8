"""Networks that predict bytes, their batches, and their score on held-out text.

For processes that start often: torch alone is imported. The text is the source of Python's standard
library, its files in the order of their paths; every twentieth of 200 equal pieces is held out.

``BYTES``: that of Bengio et al. 2003 on bytes: the embeddings of the bytes before, side by side,
one hidden layer with ReLU, and the next byte's logits; 57,696 parameters. ``TRANSFORMER``: a
decoder of a million parameters, which fills a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

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


def make_transformer() -> nn.Module:
    """Return a decoder; bytes of shape (k, 128) to logits of (k, 128, 256)."""
    from gossipdp_lab.tasks import BytesGptOptions
    from gossipdp_lab.tasks.text import ByteTransformer

    return ByteTransformer(BytesGptOptions(width=128, depth=5, heads=4, context=128))


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the contexts of windows, and the bytes that follow them."""
    contexts = windows[:, :-1].unfold(1, CONTEXT, 1).reshape(-1, CONTEXT)
    return contexts, windows[:, CONTEXT:].flatten()


class Task(NamedTuple):
    """A network and its batches: windows of a text at random places.

    batch_size, num_judged: windows of a gradient step, and held-out ones that a model is judged by.
    length: bytes of a window.
    split: windows, (k, length), to what the network takes in, and the bytes it predicts, (n,).
    """

    make_model: Callable[[], nn.Module]
    batch_size: int
    num_judged: int
    length: int
    split: Callable[[Tensor], tuple[Tensor, Tensor]]

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is taken in and predicted at these places of a text (1-D, uint8)."""
        return self.split(text[starts.unsqueeze(1) + torch.arange(self.length)].long())

    def batches(self, text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - self.length, (self.batch_size,), generator=generator)
            yield self.windows(text, starts)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy of the predicted bytes, in nats."""
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])


BYTES = Task(make_model, BATCH_SIZE, 2048, LENGTH, split)
TRANSFORMER = Task(
    make_transformer, 8, 256, 129, lambda windows: (windows[:, :-1], windows[:, 1:].flatten())
)


@cache
def num_parameters(task: Task = BYTES) -> int:
    return sum(parameter.numel() for parameter in task.make_model().parameters())


@cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the training and the held-out text; 1-D, uint8."""
    from gossipdp_lab.tasks.text import read_text

    return read_text(None)


@torch.no_grad()
def bits_a_byte(model: nn.Module, task: Task = BYTES) -> float:
    """Return the loss on windows of the held-out text, evenly spaced."""
    held_out, nats = texts()[1], 0.0
    for starts in torch.linspace(0, len(held_out) - task.length, task.num_judged).long().split(64):
        nats += float(task.loss(model, task.windows(held_out, starts))) * len(starts)
    return nats / task.num_judged / math.log(2)
