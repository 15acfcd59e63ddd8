"""A small language model of bytes as a simulated objective.

The network is that of Bengio et al. 2003 on bytes: the embeddings of the bytes before, side by
side, one hidden layer with ReLU, and the next byte's logits; 57,696 parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from support.byte_task import ByteTask, windows_at
from torch import Tensor, nn

from gossipdp_lab.simulate import Evaluation, Gradients, GradientSource, Objective
from gossipdp_lab.tasks.text import read_text

NUM_JUDGED = 2048
"""Held-out windows, evenly spaced, of which the mean model is judged."""


@final
@dataclass(frozen=True)
class ByteModel(ByteTask, Objective):
    """Predict the next byte of the source text of Python's standard library.

    The loss is that of the held-out text, in bits a byte. All workers start alike.
    """

    name = "bytes"

    def begin(self, num_workers: int, seed: int) -> ByteSource:
        return ByteSource(self, num_workers, seed)


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    return read_text(None)


@final
class ByteSource(GradientSource):
    """One run of a :class:`ByteModel`.

    Attributes:
        texts: what each worker draws its windows from; 1-D, uint8.
    """

    def __init__(self, objective: ByteModel, num_workers: int, seed: int) -> None:
        self._objective = objective
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = objective.make_model()
        row = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        self.start = row.expand(num_workers, -1).clone()
        self.num_trained = len(row)
        train, held_out = _text()
        parts = train.tensor_split(num_workers) if objective.disjoint else [train] * num_workers
        self.texts = parts
        self._generators = [
            torch.Generator().manual_seed((seed << 20) + rank) for rank in range(num_workers)
        ]
        starts = torch.linspace(0, len(held_out) - objective.length, NUM_JUDGED).long()
        self._judged = windows_at(held_out, starts, objective.length)

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        values, losses = torch.empty(len(ranks), self.num_trained), torch.empty(len(ranks))
        parameters = list(self._model.parameters())
        for place, rank in enumerate(ranks):
            nn.utils.vector_to_parameters(x[place], parameters)
            contexts, targets = self._objective.split(self.windows(rank))
            loss = nn.functional.cross_entropy(self._model(contexts), targets)
            gradients = torch.autograd.grad(loss, parameters)
            torch.cat([each.flatten() for each in gradients], out=values[place])
            losses[place] = loss.detach()
        return Gradients(values, x.new_zeros(len(ranks), 0), losses)

    def windows(self, rank: int) -> Tensor:
        """Return the worker's next batch: (batch_size, context + predicted), int64."""
        return self._objective.draw(self.texts[rank], self._generators[rank])

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Evaluation:
        nats = 0.0
        nn.utils.vector_to_parameters(x, self._model.parameters())
        for windows in self._judged.split(64):
            contexts, targets = self._objective.split(windows)
            logits = self._model(contexts)
            nats += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        num_bytes = len(self._judged) * self._objective.predicted
        return Evaluation(loss=nats / num_bytes / math.log(2))
