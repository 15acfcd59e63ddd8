"""Nested values with tensors in them, as a short description and the tensors that it describes.

    pack(state) → (layout, tensors)  …  decode(layout) → StateLayout → unpack(tensors) → state

A state is nested dicts, lists and tuples of tensors, numbers, texts and None: the values that
``Optimizer.state_dict()`` gives. The layout says how they are nested, and the type and shape of
each tensor, in the order of the tensors. The tensors travel beside it: in a file, or chunk by chunk
over a link.

A layout is MessagePack, which keeps floats (NaN too) and keys of any plain type. Four extensions
(:class:`Mark`) stand for what it lacks: a tuple or a Counter is a list that begins with its mark.
Decoding builds plain values and never calls what the layout names, so it may come from anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from gossipdp.gossip.transfer import MAX_LAYOUT_BYTES

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
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Mark:
    """The codes of the extensions of MessagePack in a layout."""

    TUPLE = 1
    COUNTER = 2
    TENSOR = 3
    INTEGER = 4
    """An integer that 64 bits do not hold, such as the state of NumPy's generators."""


class TensorLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's type and shape.

    ``shape`` is that of its memory, which holds the dimensions in the order ``order``; an empty
    order is the usual one. ``data``: its bytes, for tensors so small that they travel in the
    layout.
    """

    dtype: str
    shape: tuple[Size, ...]
    order: tuple[Size, ...] = ()
    data: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown type {self.dtype[:40]!r} of a tensor")
        num_bytes = math.prod(max(1, size) for size in self.shape)  # torch's own bound on strides
        if len(self.shape) > MAX_DEPTH or num_bytes >= 1 << 60:
            raise ValueError("a tensor of a shape that no tensor has")
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError("the order of a tensor is not one of its dimensions")
        if self.data is not None and len(self.data) != self.num_bytes:
            raise ValueError(f"{len(self.data)} bytes of a tensor that takes {self.num_bytes}")

    def fill(self, tensors: Iterator[Tensor]) -> Tensor:
        """Return the tensor: of its own bytes, else the next of ``tensors``, flat or shaped."""
        if self.data is None:
            values = next(tensors)
        else:
            dtype = DTYPES[self.dtype]
            values = torch.frombuffer(bytearray(self.data or b"\0"), dtype=torch.uint8)
            values = values[: len(self.data)].view(dtype)
        values = values.reshape(self.shape)
        if not self.order:
            return values
        return values.permute([self.order.index(dim) for dim in range(values.dim())])


_TENSOR_DECODER = msgspec.msgpack.Decoder(TensorLayout)


def pack(state: Any, inline_bytes: int = 0, *, place: str = "state") -> tuple[bytes, list[Tensor]]:
    """Describe a state; return the layout, and its tensors flat, as they lie in memory.

    The tensors are not copied, except those that are not dense.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, texts and None.
        inline_bytes: tensors of at most so many bytes go into the layout, as they are now.
        place: names the state in errors, which add the place within it and the type found.

    Raises:
        ValueError: something else is in it; the message names its place.
    """
    packer = _Packer(inline_bytes)
    layout = msgspec.msgpack.encode(packer.pack(state, place, 0))
    if len(layout) > MAX_LAYOUT_BYTES:
        raise ValueError(
            f"the layout of {place} takes {len(layout)} bytes, more than {MAX_LAYOUT_BYTES}; "
            "hold long lists of numbers as tensors"
        )
    return layout, packer.tensors


def check_savable(state: Any, place: str, advice: str) -> None:
    """Raise ValueError, with ``advice``, for a state that :func:`pack` refuses."""
    try:
        pack(state, place=place)
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from None


class _Packer:
    """The values of a state as MessagePack takes them, and its tensors."""

    def __init__(self, inline_bytes: int) -> None:
        self.tensors: list[Tensor] = []
        self._inline_bytes = inline_bytes

    def pack(self, value: Any, place: str, depth: int) -> Any:
        """Return a value with marks in place of what MessagePack lacks."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{place} is nested deeper than {MAX_DEPTH}, or within itself")
        if isinstance(value, Tensor):
            return Ext(Mark.TENSOR, msgspec.msgpack.encode(self._tensor(value, place)))
        if isinstance(value, dict):
            packed = {
                _key(key, f"a key of {place}"): self.pack(held, f"{place}[{key!r}]", depth + 1)
                for key, held in value.items()
            }
            return [Ext(Mark.COUNTER, b""), packed] if isinstance(value, Counter) else packed
        if type(value) in (list, tuple):
            values = [
                self.pack(held, f"{place}[{index}]", depth + 1) for index, held in enumerate(value)
            ]
            return [Ext(Mark.TUPLE, b""), *values] if type(value) is tuple else values
        if type(value) is int and not -(1 << 63) <= value < 1 << 64:
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"{place} is an integer of more than {MAX_INTEGER_BITS} bits")
            num_bytes = value.bit_length() // 8 + 1  # with its sign
            return Ext(Mark.INTEGER, value.to_bytes(num_bytes, "little", signed=True))
        return _key(value, place)

    def _tensor(self, tensor: Tensor, place: str) -> TensorLayout:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{place} is a {type(tensor).__qualname__}; only plain tensors are saved"
            )
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise ValueError(
                f"{place} is a {tensor.layout} tensor on {tensor.device}, not dense data"
            )
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
        if flat.nbytes <= self._inline_bytes:
            data = flat.cpu().view(torch.uint8).numpy().tobytes()
        else:
            self.tensors.append(flat)
        return TensorLayout(DTYPE_NAMES[tensor.dtype], tuple(values.shape), order, data)


def _key(value: Any, place: str) -> bool | int | float | str | None:
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


def decode(layout: bytes) -> StateLayout:
    """Read a layout that :func:`pack` made; allocates in proportion to the layout alone.

    Raises:
        ValueError: it is no layout.
    """
    if len(layout) > MAX_LAYOUT_BYTES:
        raise ValueError(f"a layout of {len(layout)} bytes; at most {MAX_LAYOUT_BYTES} are read")
    try:
        return StateLayout(msgspec.msgpack.decode(layout))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no state layout: {error}") from error


class StateLayout:
    """A decoded layout, checked.

    Attributes:
        tensors: the tensors described, in order, without those whose bytes are in the layout.
    """

    def __init__(self, content: Any) -> None:
        self.tensors: list[TensorLayout] = []
        self._content = self._read(content, 0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors that are not in the layout."""
        return sum(each.num_bytes for each in self.tensors)

    def rooms(self) -> list[Tensor]:
        """Allocate a flat tensor for each that is described; the caller has bounded the bytes."""
        return [
            torch.empty(math.prod(each.shape), dtype=DTYPES[each.dtype], device="cpu")
            for each in self.tensors
        ]

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """Put the state together from such tensors, flat or shaped; they are taken over.

        Raises:
            ValueError: they are not the tensors that are described.
        """
        if len(tensors) != len(self.tensors):
            raise ValueError(f"{len(tensors)} tensors; {len(self.tensors)} are described")
        for each, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != DTYPES[each.dtype] or tensor.numel() != math.prod(each.shape):
                raise ValueError(f"a tensor is not what is described: {each}")
        return _filled(self._content, iter(tensors))

    def _read(self, value: Any, depth: int) -> Any:
        """Return a decoded value with its tuples and Counters, and gather its tensors."""
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Ext(code=Mark.TENSOR):
                tensor = _TENSOR_DECODER.decode(value.data)
                if tensor.data is None:
                    self.tensors.append(tensor)
                return tensor
            case Ext(code=Mark.INTEGER) if (
                memoryview(value.data).nbytes <= MAX_INTEGER_BITS // 8 + 1
            ):
                return int.from_bytes(value.data, "little", signed=True)
            case [Ext(code=Mark.TUPLE), *held]:
                return tuple([self._read(each, depth + 1) for each in held])
            case [Ext(code=Mark.COUNTER), dict(counts)]:
                return Counter(self._read(counts, depth))
            case list():
                return [self._read(each, depth + 1) for each in value]
            case dict():
                for key in value:
                    if not (key is None or type(key) in (bool, int, float, str)):
                        raise ValueError(f"a key is a {type(key).__name__}")
                return {key: self._read(each, depth + 1) for key, each in value.items()}
        raise ValueError(f"it holds a {type(value).__name__}")


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    match value:
        case TensorLayout():
            return value.fill(tensors)
        case dict():
            return type(value)({key: _filled(each, tensors) for key, each in value.items()})
        case list() | tuple():
            return type(value)([_filled(each, tensors) for each in value])
    return value
