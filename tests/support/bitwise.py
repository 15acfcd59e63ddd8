"""Nested states: packed and unpacked, and compared to the bit."""

from typing import Any

import torch
from torch import Tensor

from gossipdp.parallel.packing import pack, unpack


def there_and_back(state: Any) -> Any:
    """Pack a state and unpack it, as a file or a neighbour does."""
    layout, tensors = pack(state)
    rooms = iter([tensor.clone() for tensor in tensors])
    return unpack(layout, lambda _: next(rooms))


def assert_bitwise(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(
            one.contiguous().reshape(-1).view(torch.uint8),
            other.contiguous().reshape(-1).view(torch.uint8),
        )
    elif isinstance(one, dict):
        assert [(type(key), repr(key)) for key in one] == [(type(key), repr(key)) for key in other]
        for a, b in zip(one.values(), other.values(), strict=True):
            assert_bitwise(a, b)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_bitwise(a, b)
    else:
        assert repr(one) == repr(other)  # tells -0.0 from 0.0, and takes NaN for NaN
