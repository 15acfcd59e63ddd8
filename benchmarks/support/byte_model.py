"""A small language model of bytes as a simulated objective, with gradients written out by hand.

The network is that of Bengio et al. 2003 on bytes: the embeddings of the bytes before, side by
side, one hidden layer with ReLU, and the next byte's logits; 57,696 parameters. ``ModuleObjective``
computes the same gradients from :meth:`ByteModel.make_model` in three times the time (a test holds
the two together): here each row's tensors stay within the processor's cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from support.byte_task import NUM_BYTES, ByteTask, windows_at
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
            tensors = [each.detach() for each in objective.make_model().parameters()]
        self._shapes = [each.shape for each in tensors]
        row = torch.cat([each.flatten() for each in tensors])
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
        for place, rank in enumerate(ranks):
            losses[place] = self._gradient(x[place], self.windows(rank), values[place])
        return Gradients(values, x.new_zeros(len(ranks), 0), losses)

    def windows(self, rank: int) -> Tensor:
        """Return the worker's next batch: (batch_size, context + predicted), int64."""
        return self._objective.draw(self.texts[rank], self._generators[rank])

    def evaluate(self, x: Tensor) -> Evaluation:
        nats = 0.0
        for windows in self._judged.split(64):
            contexts, targets = self._objective.split(windows)
            logits = self._forward(x, contexts)[2]
            nats += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        num_bytes = len(self._judged) * self._objective.predicted
        return Evaluation(loss=nats / num_bytes / math.log(2))

    def _tensors(self, row: Tensor) -> list[Tensor]:
        pieces = row.split([shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _forward(self, row: Tensor, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded contexts, hidden layer and logits."""
        embedding, weight_1, bias_1, weight_2, bias_2 = self._tensors(row)
        embedded = embedding.index_select(0, contexts.flatten()).view(len(contexts), -1)
        hidden = torch.addmm(bias_1, embedded, weight_1.t()).relu_()
        return embedded, hidden, torch.addmm(bias_2, hidden, weight_2.t())

    def _gradient(self, row: Tensor, windows: Tensor, out: Tensor) -> Tensor:
        """Write the gradient of one row's mean loss, in nats, and return that loss."""
        contexts, targets = self._objective.split(windows)
        embedded, hidden, logits = self._forward(row, contexts)
        places = torch.arange(len(targets))
        logits -= logits.logsumexp(dim=1, keepdim=True)
        loss = -logits[places, targets].mean()
        error = logits.exp_()
        error[places, targets] -= 1.0
        error /= len(targets)
        _, weight_1, _, weight_2, _ = self._tensors(row)
        of_embedding, of_weight_1, of_bias_1, of_weight_2, of_bias_2 = self._tensors(out)
        torch.mm(error.t(), hidden, out=of_weight_2)
        torch.sum(error, dim=0, out=of_bias_2)
        of_hidden = torch.mm(error, weight_2).mul_(hidden > 0)
        torch.mm(of_hidden.t(), embedded, out=of_weight_1)
        torch.sum(of_hidden, dim=0, out=of_bias_1)
        of_embedded = torch.mm(of_hidden, weight_1).view(-1, self._objective.width)
        of_embedding.copy_(
            torch.ops.aten.embedding_dense_backward(
                of_embedded, contexts.flatten(), NUM_BYTES, -1, False
            )
        )
        return loss
