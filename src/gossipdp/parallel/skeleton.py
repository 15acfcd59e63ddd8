"""Nested values with tensors in them, as a small text and the tensors that it describes.

    pack(state) → (text, tensors)  …  decode(text) → Skeleton → unpack(tensors) → state

A state is nested dicts, lists and tuples of tensors, numbers, texts and None, which is what
``Optimizer.state_dict()`` gives. The text says how they are nested and of which type and shape each
tensor is, in the order of the tensors; these go another way: into a file, or chunk by chunk over a
link. Decoding builds plain values and never calls what the text names, so the text may come from
anywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

# A skeleton takes about 100 bytes a tensor, so this is enough for 100,000 parameters under AdamW.
# It bounds what a text of nothing but brackets can make decoding allocate.
MAX_SKELETON_BYTES = 16 << 20
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


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value that JSON has no form for, as a list that begins with its kind."""


class _Float(_Node, tag="float", frozen=True):
    value: Literal["nan", "inf", "-inf"]


class _List(_Node, tag="list", frozen=True):
    values: list[Value]
    is_tuple: bool = False


class _Dict(_Node, tag="dict", frozen=True):
    items: list[tuple[Key, Value]]
    is_counter: bool = False


class TensorNode(_Node, tag="tensor", frozen=True):
    """A tensor.

    ``shape`` is that of its memory, which holds the dimensions in the order ``order``; an empty
    order is the usual one. ``data``: its bytes, for tensors so small that they travel in the text.
    """

    dtype: str
    shape: tuple[Size, ...]
    order: tuple[Size, ...] = ()
    data: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def check(self) -> None:
        """Raise ValueError for what is no tensor."""
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown type {self.dtype[:40]!r} of a tensor")
        num_bytes = math.prod(max(1, size) for size in self.shape)  # torch's own bound on strides
        if len(self.shape) > MAX_DEPTH or num_bytes >= 1 << 60:
            raise ValueError("a tensor of a shape that no tensor has")
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError("the order of a tensor is not one of its dimensions")
        if self.data is not None and len(self.data) != self.num_bytes:
            raise ValueError(f"{len(self.data)} bytes of a tensor that takes {self.num_bytes}")

    def of(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor, flat or shaped, as this one."""
        tensor = tensor.reshape(self.shape)
        if not self.order:
            return tensor
        return tensor.permute([self.order.index(dim) for dim in range(tensor.dim())])


Key: TypeAlias = bool | int | float | str | _Float | None
Value: TypeAlias = bool | int | float | str | _Float | _List | _Dict | TensorNode | None
_DECODER = msgspec.json.Decoder(Value)


def pack(state: Any, inline_bytes: int = 0, *, place: str = "state") -> tuple[bytes, list[Tensor]]:
    """Describe a state; return the text, and its tensors flat, as they lie in memory.

    The tensors are not copied, except those that are not dense.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, texts and None.
        inline_bytes: tensors of at most so many bytes go into the text, as they are now.
        place: names the state in errors.

    Raises:
        ValueError: something else is in it; the message names its place.

    Example:
        >>> text, tensors = pack({"step": 3, "mean": [torch.ones(2), None]})
        >>> decode(text).unpack(tensors)
        {'step': 3, 'mean': [tensor([1., 1.]), None]}
    """
    packer = _Packer(inline_bytes)
    text = msgspec.json.encode(packer.pack(state, place, 0))
    if len(text) > MAX_SKELETON_BYTES:
        raise ValueError(
            f"the skeleton of {place} takes {len(text)} bytes, more than {MAX_SKELETON_BYTES}; "
            "hold long lists of numbers as tensors"
        )
    return text, packer.tensors


def check_savable(state: Any, place: str, advice: str) -> None:
    """Raise ValueError for a state that neither a checkpoint nor a joining worker could take.

    It costs what :func:`pack` does, and copies no dense tensor.

    Args:
        state: as for :func:`pack`; of a module its tensors by name.
        place: names the state in the error, which adds the place within it and the type found.
        advice: says what to do instead.
    """
    try:
        pack(state, place=place)
    except ValueError as error:
        raise ValueError(f"{error}: {advice}") from None


class _Packer:
    """Turns values into nodes and gathers their tensors."""

    def __init__(self, inline_bytes: int) -> None:
        self.tensors: list[Tensor] = []
        self._inline_bytes = inline_bytes

    def pack(self, value: Any, place: str, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise ValueError(f"{place} is nested deeper than {MAX_DEPTH}, or within itself")
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, dict):
            items = [
                (_plain(key, f"a key of {place}"), self.pack(held, f"{place}[{key!r}]", depth + 1))
                for key, held in value.items()
            ]
            return _Dict(items, isinstance(value, Counter))
        if type(value) in (list, tuple):
            values = [
                self.pack(held, f"{place}[{index}]", depth + 1) for index, held in enumerate(value)
            ]
            return _List(values, type(value) is tuple)
        return _plain(value, place)

    def _tensor(self, tensor: Tensor, place: str) -> TensorNode:
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
        return TensorNode(DTYPE_NAMES[tensor.dtype], tuple(values.shape), order, data)


def _plain(value: Any, place: str) -> Key:
    """A number, a text or None as it is."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        value.encode()  # a lone half of a character pair is a ValueError here
        return value
    if type(value) is int:
        if value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"{place} is an integer of more than {MAX_INTEGER_BITS} bits")
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return _Float("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    raise ValueError(
        f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "saved: only tensors, numbers, texts, None, dicts, lists and tuples can"
    )


def decode(text: bytes) -> Skeleton:
    """Read what :func:`pack` described; allocates in proportion to the text alone.

    Raises:
        ValueError: the text is no skeleton.
    """
    if len(text) > MAX_SKELETON_BYTES:
        raise ValueError(f"a skeleton of {len(text)} bytes; at most {MAX_SKELETON_BYTES} are read")
    try:
        return Skeleton(_DECODER.decode(text))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"this is no skeleton: {error}") from error


class Skeleton:
    """A decoded text, checked.

    Attributes:
        tensors: what is described, in order; those whose bytes are in the text are not among them.
    """

    def __init__(self, content: Value) -> None:
        self._content = content
        self.tensors = [node for node in _nodes(content, 0) if node.data is None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors that are not in the text."""
        return sum(node.num_bytes for node in self.tensors)

    def rooms(self) -> list[Tensor]:
        """Allocate a flat tensor for each that is described; the caller has bounded the bytes."""
        return [
            torch.empty(math.prod(node.shape), dtype=DTYPES[node.dtype]) for node in self.tensors
        ]

    def unpack(self, tensors: Sequence[Tensor]) -> Any:
        """Put the state together from such tensors, flat or shaped; they are taken over.

        Raises:
            ValueError: they are not those that are described.
        """
        if len(tensors) != len(self.tensors):
            raise ValueError(f"{len(tensors)} tensors; {len(self.tensors)} are described")
        for node, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != DTYPES[node.dtype] or tensor.numel() != math.prod(node.shape):
                raise ValueError(f"a tensor is not what is described: {node}")
        return _unpack(self._content, iter(tensors))


def _nodes(value: Value, depth: int) -> Iterator[TensorNode]:
    """Every tensor's node, checked, in the order in which they were packed."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    match value:
        case TensorNode():
            value.check()
            yield value
        case _List(values=held):
            for each in held:
                yield from _nodes(each, depth + 1)
        case _Dict(items=items):
            for _, each in items:
                yield from _nodes(each, depth + 1)


def _unpack(value: Value, tensors: Iterator[Tensor]) -> Any:
    match value:
        case TensorNode(data=None):
            return value.of(next(tensors))
        case TensorNode(data=data):
            assert data is not None
            dtype = DTYPES[value.dtype]
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
            return value.of(flat.to(dtype))
        case _List(values=values):
            held = [_unpack(each, tensors) for each in values]
            return tuple(held) if value.is_tuple else held
        case _Dict(items=items):
            unpacked = {_unpack(key, tensors): _unpack(each, tensors) for key, each in items}
            if len(unpacked) != len(items):
                raise ValueError("a dict has a key twice")
            return Counter(unpacked) if value.is_counter else unpacked
        case _Float(value=text):
            return float(text)
        case _:
            return value
