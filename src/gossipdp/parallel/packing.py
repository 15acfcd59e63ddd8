"""Nested values with tensors in them, as a short layout and the tensors that it describes.

    pack(state) → (layout, tensors)  …  unpack(layout, room) → state

A state is nested dicts, lists and tuples of tensors, numbers, texts and None: the values that
``Optimizer.state_dict()`` gives. The layout says how they are nested, and the type and shape of
each tensor. The tensors travel beside it, in its order: in a file, or chunk by chunk over a link.
Those of at most ``INLINE_BYTES``, such as Adam's step counts, are in the layout.

A layout is MessagePack, which keeps floats (NaN too) and keys of any plain type. Four extensions
(:class:`Mark`) stand for what it lacks: a tuple or a Counter is a list that begins with its mark.
Unpacking builds plain values and never calls what the layout names, so it may come from anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from gossipdp.gossip.transfer import MAX_LAYOUT_BYTES

INLINE_BYTES = 256
MAX_DEPTH = 64
MAX_INTEGER_BITS = 2048

# By the names that safetensors gives them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Size = Annotated[int, msgspec.Meta(ge=0)]


class Mark:
    """The codes of the extensions of MessagePack in a layout."""

    # The last is an integer that 64 bits do not hold, such as the state of NumPy's generators.
    TUPLE, COUNTER, TENSOR, INTEGER = 1, 2, 3, 4


class TensorLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's type and shape.

    ``shape`` is that of its memory, which holds the dimensions in the order ``order``; an empty
    order is the usual one. ``data``: its bytes, for tensors so small that they travel in the
    layout.
    """

    name: str
    shape: tuple[Size, ...]
    order: tuple[Size, ...] = ()
    data: bytes | None = None

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __post_init__(self) -> None:
        if self.name not in DTYPES:
            raise ValueError(f"unknown type {self.name[:40]!r} of a tensor")
        num_elements = math.prod(max(1, size) for size in self.shape)  # torch's bound on strides
        if len(self.shape) > MAX_DEPTH or num_elements >= 1 << 60:
            raise ValueError("a tensor of a shape that no tensor has")
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError("the order of a tensor is not one of its dimensions")
        if self.data is not None and len(self.data) != self.num_bytes:
            raise ValueError(f"{len(self.data)} bytes of a tensor that takes {self.num_bytes}")


_TENSOR_DECODER = msgspec.msgpack.Decoder(TensorLayout)


def pack(state: Any, place: str = "state") -> tuple[bytes, list[Tensor]]:
    """Describe a state; return the layout, and its tensors flat, as they lie in memory.

    The tensors are not copied, except those that are not dense, or small. ``place`` names the state
    in the ValueError for something else in it, which adds the place within it and the type found.
    """
    tensors: list[Tensor] = []
    layout = msgspec.msgpack.encode(_packed(state, place, 0, tensors))
    if len(layout) > MAX_LAYOUT_BYTES:
        raise ValueError(
            f"the layout of {place} takes {len(layout)} bytes, more than {MAX_LAYOUT_BYTES}; "
            "hold long lists of numbers as tensors"
        )
    return layout, tensors


def check_savable(state: Any, place: str, advice: str) -> None:
    """Raise ValueError, with ``advice``, for a state that :func:`pack` refuses."""
    try:
        pack(state, place)
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from None


def _packed(value: Any, place: str, depth: int, tensors: list[Tensor]) -> Any:
    """Return a value with marks in place of what MessagePack lacks; gather its tensors."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{place} is nested deeper than {MAX_DEPTH}, or within itself")
    if isinstance(value, Tensor):
        return Ext(Mark.TENSOR, msgspec.msgpack.encode(_packed_tensor(value, place, tensors)))
    if isinstance(value, dict):
        packed = {
            _plain(key, f"a key of {place}"): _packed(held, f"{place}[{key!r}]", depth + 1, tensors)
            for key, held in value.items()
        }
        return [Ext(Mark.COUNTER, b""), packed] if isinstance(value, Counter) else packed
    if type(value) in (list, tuple):
        held = [_packed(each, f"{place}[{i}]", depth + 1, tensors) for i, each in enumerate(value)]
        return [Ext(Mark.TUPLE, b""), *held] if type(value) is tuple else held
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"{place} is an integer of more than {MAX_INTEGER_BITS} bits")
        num_bytes = value.bit_length() // 8 + 1  # with its sign
        return Ext(Mark.INTEGER, value.to_bytes(num_bytes, "little", signed=True))
    return _plain(value, place)


def _packed_tensor(tensor: Tensor, place: str, tensors: list[Tensor]) -> TensorLayout:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{place} is a {type(tensor).__qualname__}; only plain tensors are saved")
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(f"{place} is a {tensor.layout} tensor on {tensor.device}, not dense data")
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{place} is a tensor of {tensor.dtype}, which cannot be saved")
    values = tensor.detach().resolve_conj().resolve_neg()
    order: tuple[int, ...] = ()
    if not values.is_contiguous():
        strides = values.stride()
        by_stride = tuple(sorted(range(values.dim()), key=lambda dim: -strides[dim]))
        if values.permute(by_stride).is_contiguous():
            values, order = values.permute(by_stride), by_stride
    flat = values.reshape(-1)
    data = None
    if flat.nbytes <= INLINE_BYTES:
        data = flat.cpu().view(torch.uint8).numpy().tobytes()
    else:
        tensors.append(flat)
    return TensorLayout(DTYPE_NAMES[tensor.dtype], tuple(values.shape), order, data)


def _plain(value: Any, place: str) -> bool | int | float | str | None:
    """Return a value that is no container, as the plain one that MessagePack has."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        value.encode()  # a lone half of a character pair is a ValueError here
        return str.__str__(value)
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if isinstance(value, float):
        return float(value)
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "saved: only tensors, numbers, texts, None, dicts, lists and tuples can"
    )


def unpack(layout: bytes, room: Callable[[TensorLayout], Tensor]) -> Any:
    """Put a state together; it allocates in proportion to the layout alone.

    Args:
        layout: made by :func:`pack`, or by anyone.
        room: returns the memory of a tensor that is not in the layout, flat or shaped, in their
            order. The state is made of this memory, whose values may come later.

    Raises:
        ValueError: it is no layout, or a room is not of the type and size described.
    """
    if len(layout) > MAX_LAYOUT_BYTES:
        raise ValueError(f"a layout of {len(layout)} bytes; at most {MAX_LAYOUT_BYTES} are read")
    try:
        content = msgspec.msgpack.decode(layout)
    except RecursionError as error:
        raise ValueError(f"a layout is nested too deep: {error}") from error
    return _unpacked(content, 0, room)


def _unpacked(value: Any, depth: int, room: Callable[[TensorLayout], Tensor]) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"a layout is nested deeper than {MAX_DEPTH}")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Ext(code=Mark.TENSOR):
            return _unpacked_tensor(_TENSOR_DECODER.decode(value.data), room)
        case Ext(code=Mark.INTEGER) if memoryview(value.data).nbytes <= MAX_INTEGER_BITS // 8 + 1:
            return int.from_bytes(value.data, "little", signed=True)
        case [Ext(code=Mark.TUPLE), *held]:
            return tuple([_unpacked(each, depth + 1, room) for each in held])
        case [Ext(code=Mark.COUNTER), dict(counts)]:
            return Counter(_unpacked(counts, depth, room))
        case list():
            return [_unpacked(each, depth + 1, room) for each in value]
        case dict():
            for key in value:
                if not (key is None or type(key) in (bool, int, float, str)):
                    raise ValueError(f"a key in a layout is a {type(key).__name__}")
            return {key: _unpacked(each, depth + 1, room) for key, each in value.items()}
    raise ValueError(f"a layout holds a {type(value).__name__}")


def _unpacked_tensor(layout: TensorLayout, room: Callable[[TensorLayout], Tensor]) -> Tensor:
    if layout.data is None:
        values = room(layout)
        if values.dtype != layout.dtype or values.numel() != math.prod(layout.shape):
            raise ValueError(f"a tensor is not what is described: {layout}")
    else:
        memory = torch.frombuffer(bytearray(layout.data or b"\0"), dtype=torch.uint8)
        values = memory[: len(layout.data)].view(layout.dtype)
    values = values.reshape(layout.shape)
    if not layout.order:
        return values
    return values.permute([layout.order.index(dim) for dim in range(values.dim())])
