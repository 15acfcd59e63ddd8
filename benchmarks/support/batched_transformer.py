"""The recipes' byte-level transformer as a simulated objective: all workers' gradients at once.

``ModuleObjective`` runs the module once for each worker. Here the workers' parameters are stacked,
so each layer is one batched product over all of them: 16 small workers take half of the time. A
test holds the gradients to those of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp_lab.simulate import Evaluation, Gradients, GradientSource, Objective
from gossipdp_lab.tasks.options import BytesGptOptions
from gossipdp_lab.tasks.text import NUM_BYTES, Gpt

HEADS = 4


class Task(Gpt):
    """The recipe's task, scored on fewer windows."""

    num_validation_windows: ClassVar[int] = 1024


@final
@dataclass(frozen=True)
class BatchedTransformer(Objective):
    """Predict the next byte of the source text of Python's standard library by a transformer.

    Args:
        disjoint: each worker has a stretch of the text of its own.
        batch_size: windows of a gradient step.
        context: bytes of a window.
        width, depth: of the network; 72,000 parameters as they are set here.
    """

    disjoint: bool = False
    batch_size: int = 8
    context: int = 64
    width: int = 48
    depth: int = 2

    name: ClassVar[str] = "transformer"

    def begin(self, num_workers: int, seed: int) -> BatchedSource:
        return BatchedSource(self, num_workers, seed)

    def make_task(self) -> Task:
        """Return data and module."""
        options = BytesGptOptions(
            batch_size=self.batch_size,
            context=self.context,
            width=self.width,
            depth=self.depth,
            heads=HEADS,
        )
        return Task(options, disjoint=self.disjoint)


@final
class BatchedSource(GradientSource):
    """One run of a :class:`BatchedTransformer`."""

    def __init__(self, objective: BatchedTransformer, num_workers: int, seed: int) -> None:
        self._depth = objective.depth
        self._task = objective.make_task()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = self._task.make_model()
        self._shapes = {name: each.shape for name, each in self._model.named_parameters()}
        row = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        self.start = row.expand(num_workers, -1).clone()
        self.num_trained = len(row)
        self._batches = [self._endless(rank, num_workers, seed) for rank in range(num_workers)]

    def _endless(self, rank: int, num_workers: int, seed: int) -> Iterator[Tensor]:
        loader = self._task.train_loader(rank, num_workers, seed)
        while True:
            yield from loader

    def gradients(self, ranks: Sequence[int], x: Tensor) -> Gradients:
        windows = torch.stack([next(self._batches[rank]) for rank in ranks])
        x = x.detach().requires_grad_()
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = zip(self._shapes.items(), torch.split(x, sizes, dim=1), strict=True)
        weights = {name: part.view(len(x), *shape) for (name, shape), part in parts}
        logits = self._logits(weights, windows[:, :, :-1])
        targets = windows[:, :, 1:].flatten()
        losses = F.cross_entropy(logits.view(-1, NUM_BYTES), targets, reduction="none")
        losses = losses.view(len(x), -1).mean(dim=1)
        (values,) = torch.autograd.grad(losses.sum(), x)
        return Gradients(values, x.new_zeros(len(x), 0), losses.detach())

    def evaluate(self, x: Tensor) -> Evaluation:
        nn.utils.vector_to_parameters(x.clone(), self._model.parameters())
        return Evaluation(loss=self._task.evaluate(self._model))

    def _logits(self, weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Compute k workers at once: weights (k, ...), tokens (k, batch, length)."""
        k, batch, length = tokens.shape
        embedding = weights["embedding.weight"]
        width = embedding.shape[-1]
        table = torch.arange(k).view(k, 1, 1) * NUM_BYTES  # each worker has its own
        hidden = F.embedding(tokens + table, embedding.reshape(k * NUM_BYTES, width))
        hidden = (hidden + weights["position"][:, :length].unsqueeze(1)).view(k, -1, width)

        def norm(values: Tensor, name: str) -> Tensor:
            scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
            return F.layer_norm(values, (width,)) * scale.unsqueeze(1) + shift.unsqueeze(1)

        def linear(values: Tensor, name: str) -> Tensor:
            weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
            return torch.baddbmm(bias.unsqueeze(1), values, weight.transpose(1, 2))

        for block in (f"blocks.{index}" for index in range(self._depth)):
            joint = linear(norm(hidden, f"{block}.norm_attention"), f"{block}.queries_keys_values")
            heads = joint.view(k * batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(k, -1, width)
            hidden = hidden + linear(mixed, f"{block}.project")
            wide = F.gelu(linear(norm(hidden, f"{block}.mlp.0"), f"{block}.mlp.1"))
            hidden = hidden + linear(wide, f"{block}.mlp.3")
        return torch.bmm(norm(hidden, "norm"), embedding.transpose(1, 2))
