"""Gradients of a module at many rows: together by vmap, or one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from gossipdp.simulate.objective import Gradients
from gossipdp.simulate.row_layout import RowLayout

Loss = Callable[[nn.Module, Any], Tensor]


class RowGradients(ABC):
    """Gradients of one loss at rows, each on a batch of its own."""

    @abstractmethod
    def gradients(self, x: Tensor, batches: Sequence[Any], seeds: Sequence[int]) -> Gradients:
        """At rows of shape (k, d); ``seeds`` of what the model draws at random, one a row."""


class _LossOfModel(nn.Module):
    """Makes the loss a module, so that functional calls replace the model's tensors within."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


class _Functional:
    """The loss of one row, its gradient and its new buffers, as a pure function of tensors."""

    def __init__(self, model: nn.Module, loss: Loss, layout: RowLayout) -> None:
        self._module = _LossOfModel(model, loss)
        self._counters = {
            name: buffer.clone()
            for name, buffer in model.named_buffers()
            if name not in layout.buffers
        }
        self.gradients = grad_and_value(self._loss, has_aux=True)

    def train(self) -> None:
        """Put the model, which evaluation shares, back into training mode."""
        self._module.train()

    def _loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # The model changes its buffers in place: copies, so that nothing outside is changed.
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        counters = {name: buffer.clone() for name, buffer in self._counters.items()}
        state = {f"model.{name}": t for name, t in (parameters | buffers | counters).items()}
        loss = functional_call(self._module, state, (batch,))
        return loss, buffers


@final
class VectorizedGradients(RowGradients):
    """Many rows together; batches of different shapes are computed apart.

    Args:
        model: whose structure counts; its own values do not.
        loss: ``loss(model, batch)``.
        layout: of the rows.
        max_rows: how many rows are computed together, at most.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: RowLayout, max_rows: int) -> None:
        self._layout = layout
        self._functional = _Functional(model, loss, layout)
        self._together = vmap(self._functional.gradients)
        self._max_rows = max_rows

    def gradients(self, x: Tensor, batches: Sequence[Any], seeds: Sequence[int]) -> Gradients:
        self._functional.train()
        by_shape: dict[Any, list[int]] = {}
        for place, batch in enumerate(batches):
            by_shape.setdefault(_shape(batch), []).append(place)
        if len(by_shape) == 1 and len(x) <= self._max_rows:
            return self._gradients(x, batches)
        found: list[Gradients] = []
        order: list[int] = []
        for places in by_shape.values():
            for begin in range(0, len(places), self._max_rows):
                part = places[begin : begin + self._max_rows]
                rows = x.index_select(0, torch.tensor(part))
                found.append(self._gradients(rows, [batches[place] for place in part]))
                order += part
        back = torch.tensor(order).argsort()
        return Gradients(
            torch.cat([part.values for part in found]).index_select(0, back),
            torch.cat([part.buffer_changes for part in found]).index_select(0, back),
            torch.cat([part.losses for part in found]).index_select(0, back),
        )

    def _gradients(self, x: Tensor, batches: Sequence[Any]) -> Gradients:
        layout = self._layout
        values, (losses, buffers) = self._together(
            layout.trained_of(x), layout.buffers_of(x), _stack(batches)
        )
        return Gradients(
            torch.cat([values[name].flatten(1) for name in layout.parameters], dim=1),
            _changes(x, buffers, layout),
            losses.detach(),
        )


@final
class LoopedGradients(RowGradients):
    """One row after the other, each with a random state of its own.

    Args:
        model: whose structure counts; its own values do not.
        loss: ``loss(model, batch)``.
        layout: of the rows.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: RowLayout) -> None:
        self._layout = layout
        self._functional = _Functional(model, loss, layout)

    def gradients(self, x: Tensor, batches: Sequence[Any], seeds: Sequence[int]) -> Gradients:
        self._functional.train()
        with torch.random.fork_rng(devices=[]):
            found = [
                self._one(row, batch, seed)
                for row, batch, seed in zip(torch.split(x, 1), batches, seeds, strict=True)
            ]
        return Gradients(
            torch.cat([part.values for part in found]),
            torch.cat([part.buffer_changes for part in found]),
            torch.cat([part.losses for part in found]),
        )

    def _one(self, row: Tensor, batch: Any, seed: int) -> Gradients:
        layout = self._layout
        torch.manual_seed(seed)
        parameters = {name: view[0] for name, view in layout.trained_of(row).items()}
        buffers = {name: view[0] for name, view in layout.buffers_of(row).items()}
        values, (loss, buffers) = self._functional.gradients(parameters, buffers, batch)
        return Gradients(
            torch.cat([values[name].flatten() for name in layout.parameters]).unsqueeze(0),
            _changes(row, {name: b.unsqueeze(0) for name, b in buffers.items()}, layout),
            loss.detach().reshape(1),
        )


def _changes(x: Tensor, buffers: dict[str, Tensor], layout: RowLayout) -> Tensor:
    """What a step adds to the buffer columns; (k, d - num_trained)."""
    if not layout.buffers:
        return x.new_zeros(len(x), 0)
    now = torch.cat([buffers[name].detach().flatten(1) for name in layout.buffers], dim=1)
    return now - x[:, layout.num_trained :]


def _shape(batch: Any) -> Any:
    """Something hashable that is the same for batches that can be stacked."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, dict):
        return tuple((key, _shape(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(_shape(value) for value in batch)
    raise ValueError(
        f"a batch holds a {type(batch).__name__}; it must be a tensor, or a tuple, list or dict "
        "of tensors"
    )


def _stack(batches: Sequence[Any]) -> Any:
    """Batches of one shape as one, with the rows in a new first dimension."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, dict):
        return {key: _stack([batch[key] for batch in batches]) for key in first}
    stacked = [_stack(values) for values in zip(*batches, strict=True)]
    return stacked if isinstance(first, list) else tuple(stacked)
