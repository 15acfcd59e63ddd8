"""A module's parameters and float buffers as one row of numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Where a tensor lies in the row."""

    begin: int
    end: int
    shape: torch.Size


class RowLayout:
    """Trainable parameters, then float buffers, each in the order in which the module names them.

    A parameter under several names is one, under the first of them. Frozen parameters and integer
    buffers are not in the row.

    Args:
        model: has at least one trainable parameter; all of one dtype, on the CPU.

    Attributes:
        parameters, buffers: where each lies; by name.
        num_trained: the number of parameter values, which come first.
        num_values: the length of a row.
    """

    def __init__(self, model: nn.Module) -> None:
        trained: dict[str, Tensor] = {
            name: p for name, p in model.named_parameters() if p.requires_grad
        }
        buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
        if not trained:
            raise ValueError("the module has no trainable parameter: there is nothing to simulate")
        tensors = [*trained.values(), *buffers.values()]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1:
            raise ValueError(
                f"the module's parameters and float buffers are of {len(dtypes)} dtypes "
                f"({', '.join(sorted(map(str, dtypes)))}); a row has one: convert the module, "
                "for instance by .float()"
            )
        devices = {tensor.device.type for tensor in tensors}
        if devices != {"cpu"}:
            raise ValueError(
                f"the module lies on {', '.join(sorted(devices))}; make it on the CPU, where "
                "simulations run"
            )
        self.parameters, self.num_trained = _places(trained, 0)
        self.buffers, self.num_values = _places(buffers, self.num_trained)
        self.dtype = tensors[0].dtype

    def read(self, model: nn.Module) -> Tensor:
        """The row of a module; (d,)."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        names = [*self.parameters, *self.buffers]
        return torch.cat([tensors[name].detach().reshape(-1) for name in names])

    @torch.no_grad()
    def write(self, row: Tensor, model: nn.Module) -> None:
        """Copy a row of shape (d,) into a module."""
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, place in (self.parameters | self.buffers).items():
            tensors[name].copy_(row[place.begin : place.end].view(place.shape))

    def trained_of(self, rows: Tensor) -> dict[str, Tensor]:
        """The parameters of rows of shape (k, d), by name; views of shape (k, *shape)."""
        return _views(rows, self.parameters)

    def buffers_of(self, rows: Tensor) -> dict[str, Tensor]:
        """The float buffers of rows of shape (k, d), by name; views of shape (k, *shape)."""
        return _views(rows, self.buffers)


def _places(tensors: dict[str, Tensor], begin: int) -> tuple[dict[str, Place], int]:
    places = {}
    for name, tensor in tensors.items():
        places[name] = Place(begin, begin + tensor.numel(), tensor.shape)
        begin += tensor.numel()
    return places, begin


def _views(rows: Tensor, places: dict[str, Place]) -> dict[str, Tensor]:
    return {
        name: rows[:, place.begin : place.end].view(len(rows), *place.shape)
        for name, place in places.items()
    }
