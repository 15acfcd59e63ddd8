"""The byte model as a simulated objective, and its score on held-out text.

The text is the source of Python's standard library, its files in the order of their paths; every
twentieth of 200 equal pieces is held out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from support.byte_task import LENGTH, PREDICTED, endless_batches, make_model, split, windows_at
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gossipdp_lab.simulate import Evaluation, ModuleObjective
from gossipdp_lab.tasks.text import read_text

NUM_JUDGED = 2048
"""Held-out windows, evenly spaced, by which a model is judged."""


@functools.cache
def texts() -> tuple[Tensor, Tensor]:
    """Return the training and the held-out text; 1-D, uint8."""
    return read_text(None)


def byte_objective(*, disjoint: bool = False) -> ModuleObjective:
    """Make the objective; its loss is that of the held-out text, in bits a byte.

    disjoint: each worker has a stretch of the text of its own: packages that follow one another by
        name. Otherwise all draw from the whole text.
    """

    def of_worker(rank: int, num_workers: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        text = texts()[0]
        own = text.tensor_split(num_workers)[rank] if disjoint else text
        return endless_batches(own, (seed << 20) + rank)

    return ModuleObjective(
        make_model,
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        of_worker,
        evaluate=lambda model: Evaluation(bits_a_byte(model)),
        name="bytes",
        max_rows=1,
    )


@torch.no_grad()
def bits_a_byte(model: nn.Module) -> float:
    """Return the loss on the held-out text."""
    held_out, nats = texts()[1], 0.0
    starts = torch.linspace(0, len(held_out) - LENGTH, NUM_JUDGED).long()
    for windows in windows_at(held_out, starts).split(64):
        contexts, targets = split(windows)
        nats += float(cross_entropy(model(contexts), targets, reduction="sum"))
    return nats / (NUM_JUDGED * PREDICTED) / math.log(2)
