"""What a worker trains with besides its parameters: captured, encoded without pickle, restored.

    capture(optimizers) → encode → bytes → decode → restore(state, optimizers)

A state is nested dicts, lists and tuples of tensors, numbers, texts and None, which is what
``Optimizer.state_dict()`` gives. Encoded it is one safetensors file: the tensors, and in its
metadata a JSON text of the structure that names them. Decoding looks up values and never calls
what the bytes name, so they may come from a file or from another worker.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from gossipdp.dynamics.kernels import is_finite

FORMAT = "gossipdp training state 1"
# A structure takes about 100 bytes a tensor: this is enough for 100,000 parameters under AdamW,
# and a bound on what a text of nothing but brackets can make decoding allocate.
MAX_STRUCTURE_BYTES = 16 << 20
MAX_HEADER_BYTES = 2 * MAX_STRUCTURE_BYTES
MAX_DEPTH = 64
MAX_INTEGER_BITS = 4096

_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    }
)


def capture(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the optimizers' states as they are now, not copied: encode before the next step."""
    return {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}


def refuse_poison(state: Any) -> None:
    """Raise ValueError where a tensor that an optimizer keeps of a parameter is NaN or infinite.

    A gradient that was so spoils the momentum for good, and with it whoever takes it over. Settings
    (``param_groups``) and numbers are left alone: a limit of infinity is one.
    """
    optimizers = state.get("optimizers") if isinstance(state, dict) else None
    for index, values in enumerate(optimizers if isinstance(optimizers, list) else ()):
        kept = values.get("state") if isinstance(values, dict) else None
        for place, tensor in _tensors(kept, f"optimizer {index}'s state"):
            if not _is_finite(tensor):
                raise ValueError(f"{place} holds NaN or infinity")


def restore(state: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the optimizers a captured state; they own its tensors from here on.

    Every value comes back as it was captured, on its parameter's device. ``load_state_dict`` alone
    would cast the state's floats to the parameter's precision and break texts in it.

    Raises:
        ValueError: it is the state of other optimizers.
    """
    saved = state.get("optimizers") if isinstance(state, dict) else None
    if not isinstance(saved, list) or len(saved) != len(optimizers):
        held = f"{len(saved)} optimizers" if isinstance(saved, list) else "no optimizers"
        raise ValueError(f"the state is of {held}, and there are {len(optimizers)} here")
    for index, (optimizer, values) in enumerate(zip(optimizers, saved, strict=True)):
        _check_groups(index, optimizer, values)
        try:
            _load(optimizer, values)
        except Exception as error:
            raise ValueError(
                f"the state does not fit optimizer {index}, a {type(optimizer).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error


def restore_groups(state: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Give the optimizers their learning rates and other settings again, of a state that fits.

    Making a scheduler sets the rates with which a run begins.
    """
    for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
        for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True):
            for key, value in saved.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                elif key != "params":
                    group[key] = value


def encode(state: Any) -> bytes:
    """Encode a state; its tensors are copied to host memory.

    Raises:
        ValueError: something in it is not a tensor, number, text, None, dict, list or tuple; the
            message names its place.

    Example:
        >>> decode(encode({"step": 3, "mean": [torch.ones(1), None]}))
        {'step': 3, 'mean': [tensor([1.]), None]}
    """
    structure, tensors = pack(state)
    return safetensors.torch.save(tensors, {"format": FORMAT, "structure": structure})


def decode(data: bytes) -> Any:
    """Decode what :func:`encode` gave; every tensor bitwise, on the CPU, in memory of its own.

    Takes memory in proportion to ``data``, whose size the caller limits.

    Raises:
        ValueError: ``data`` is anything else.
    """
    try:
        num_header_bytes = int.from_bytes(data[:8], "little")
        if not 0 < num_header_bytes <= min(len(data) - 8, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {num_header_bytes} bytes in {len(data)}")
        header = json.loads(data[8 : 8 + num_header_bytes])
        metadata = header["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        tensors = safetensors.torch.load(data)
        return unpack(metadata["structure"], tensors)
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise ValueError(f"this is no training state: {type(error).__name__}: {error}") from error


def pack(state: Any, prefix: str = "") -> tuple[str, dict[str, Tensor]]:
    """Split a state into a JSON text and the named tensors it refers to, copied to the host.

    Names are ``prefix`` and a number. A tensor that occurs twice is held once. One that is dense
    but not contiguous (channels_last) is held in the order of its memory, which the text tells.

    Raises:
        ValueError: see :func:`encode`.
    """
    packer = _Packer(prefix)
    structure = json.dumps(packer.pack(state, "state", 0), separators=(",", ":"))
    if len(structure) > MAX_STRUCTURE_BYTES:
        raise ValueError(
            f"the state's structure takes {len(structure)} bytes, more than {MAX_STRUCTURE_BYTES}; "
            "hold long lists of numbers as tensors"
        )
    return structure, packer.tensors


def unpack(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put together what :func:`pack` split; the tensors are taken over, not copied.

    Raises:
        ValueError: the text is no structure, or does not refer to exactly these tensors.
    """
    if not isinstance(structure, str) or len(structure) > MAX_STRUCTURE_BYTES:
        raise ValueError("the structure is no text, or too long")
    try:
        content = json.loads(structure, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the structure is nested too deeply") from None
    unpacker = _Unpacker(tensors)
    state = unpacker.unpack(content, 0)
    unused = tensors.keys() - unpacker.used.keys()
    if unused:
        raise ValueError(f"the structure does not refer to tensor {min(unused)!r}")
    return state


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, with its place."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from _tensors(held, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, held in enumerate(value):
            yield from _tensors(held, f"{place}[{index}]")


def _is_finite(values: Tensor) -> bool:
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        return True
    return is_finite(values.float() if values.element_size() == 1 else values)


class _Packer:
    """Turns values into JSON and gathers their tensors.

    Containers other than lists, and what JSON does not know, are objects of one key that says
    what they are: ``{"dict": [[key, value], ...]}`` (or "counter"), ``{"tuple": [...]}``,
    ``{"float": "nan"}``, ``{"tensor": name}`` or ``{"tensor": name, "order": [...]}``. Dicts of
    other classes come back as plain ones.
    """

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._prefix = prefix
        # By identity; the tensor is kept so that its identity is not given to another.
        self._packed: dict[int, tuple[Tensor, dict[str, Any]]] = {}

    def pack(self, value: Any, place: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"{place} is nested deeper than {MAX_DEPTH}, or within itself")
        if value is None or isinstance(value, (bool, str)):
            return value
        if type(value) is int:
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"{place} is an integer of more than {MAX_INTEGER_BITS} bits")
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Tensor):
            return self._pack_tensor(value, place)
        if isinstance(value, dict):
            for key in value:
                if not (key is None or type(key) in (bool, int, float, str)):
                    raise ValueError(f"{place} has a key {key!r}; keys are numbers and texts")
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {
                kind: [
                    [
                        self.pack(key, place, depth + 1),
                        self.pack(held, f"{place}[{key!r}]", depth + 1),
                    ]
                    for key, held in value.items()
                ]
            }
        if type(value) in (list, tuple):
            values = [
                self.pack(held, f"{place}[{index}]", depth + 1) for index, held in enumerate(value)
            ]
            return values if type(value) is list else {"tuple": values}
        raise ValueError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "saved: only tensors, numbers, texts, None, dicts, lists and tuples can"
        )

    def _pack_tensor(self, tensor: Tensor, place: str) -> dict[str, Any]:
        if id(tensor) in self._packed:
            return self._packed[id(tensor)][1]
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                f"{place} is a {type(tensor).__qualname__}; only plain tensors are saved"
            )
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise ValueError(
                f"{place} is a {tensor.layout} tensor on {tensor.device}, not dense data"
            )
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{place} is a tensor of {tensor.dtype}, which cannot be saved")
        name = f"{self._prefix}{len(self.tensors)}"
        reference: dict[str, Any] = {"tensor": name}
        values = tensor.detach().resolve_conj().resolve_neg()
        strides = values.stride()
        order = sorted(range(values.dim()), key=lambda dim: -strides[dim])
        if not values.is_contiguous() and values.permute(order).is_contiguous():
            values = values.permute(order)
            reference["order"] = order
        self.tensors[name] = values.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._packed[id(tensor)] = (tensor, reference)
        return reference


class _Unpacker:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.used: dict[str, Tensor] = {}
        self._tensors = tensors
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "dict": self._dict,
            "counter": lambda held, depth: Counter(self._dict(held, depth)),
            "tuple": self._tuple,
            "float": self._float,
        }

    def unpack(self, content: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"the structure is nested deeper than {MAX_DEPTH}")
        if isinstance(content, list):
            return [self.unpack(held, depth + 1) for held in content]
        if not isinstance(content, dict):
            return content
        if "tensor" in content:
            return self._tensor(content)
        if len(content) != 1:
            raise ValueError(f"an object with {len(content)} keys is no value")
        ((kind, held),) = content.items()
        if kind not in self._kinds:
            raise ValueError(f"unknown kind {kind[:40]!r}")
        return self._kinds[kind](held, depth)

    def _dict(self, held: Any, depth: int) -> dict[Any, Any]:
        pairs = _checked_list(held)
        values = {}
        for pair in pairs:
            if not (isinstance(pair, list) and len(pair) == 2):
                raise ValueError("a dict is a list of pairs")
            key = self.unpack(pair[0], depth + 1)
            if isinstance(key, (dict, list, tuple, Tensor)):
                raise ValueError("a key is a number or a text")
            values[key] = self.unpack(pair[1], depth + 1)
        if len(values) != len(pairs):
            raise ValueError("a dict has a key twice")
        return values

    def _tuple(self, held: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self.unpack(each, depth + 1) for each in _checked_list(held))

    def _float(self, held: Any, depth: int) -> float:
        if held not in ("nan", "inf", "-inf"):
            raise ValueError("a float that JSON does not know is nan, inf or -inf")
        return float(held)

    def _tensor(self, content: dict[str, Any]) -> Tensor:
        name = content["tensor"]
        order = content.get("order")
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"there is no tensor {str(name)[:40]!r}")
        if len(content) > 1 + ("order" in content):
            raise ValueError(f"tensor {name!r} has unknown attributes")
        if name in self.used:
            return self.used[name]
        tensor = self._tensors[name]
        if order is not None:
            dims = [each for each in _checked_list(order) if type(each) is int]
            if sorted(dims) != list(range(tensor.dim())) or len(dims) != len(order):
                raise ValueError(f"the order of tensor {name!r} is not one of its dimensions")
            tensor = tensor.permute([dims.index(dim) for dim in range(tensor.dim())])
        self.used[name] = tensor
        return tensor


def _checked_list(held: Any) -> list[Any]:
    if not isinstance(held, list):
        raise ValueError("a list was expected")
    return held


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _check_groups(index: int, optimizer: torch.optim.Optimizer, values: Any) -> None:
    """Raise ValueError unless the parameter groups are of the optimizer's sizes."""
    saved = values.get("param_groups") if isinstance(values, dict) else None
    if not (isinstance(saved, list) and isinstance(values.get("state"), dict)):
        raise ValueError(f"the state of optimizer {index} is none")
    sizes = [
        len(group["params"])
        if isinstance(group, dict) and isinstance(group.get("params"), list)
        else None
        for group in saved
    ]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        raise ValueError(
            f"the state of optimizer {index} is of parameter groups of sizes {sizes}, and the "
            f"optimizer's have {expected}; make the optimizer as it was"
        )


def _load(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(values)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for key, value in group.items():
            if isinstance(value, Tensor) and isinstance(old.get(key), Tensor):
                group[key] = value.to(old[key].device)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = [name for group in values["param_groups"] for name in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name in values["state"]:
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = _as_saved(values["state"][name], loaded, parameter.device)


def _as_saved(saved: Any, loaded: Any, device: torch.device) -> Any:
    """``loaded`` with what the optimizer's loading has cast or broken as it was saved."""
    if isinstance(saved, str):
        return saved
    if isinstance(saved, Tensor):
        if not isinstance(loaded, Tensor) or (loaded.dtype, loaded.shape) == (
            saved.dtype,
            saved.shape,
        ):
            return loaded
        return saved.to(device)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _as_saved(saved[key], loaded[key], device)
    elif isinstance(saved, (list, tuple)) and type(loaded) is type(saved):
        pairs = itertools.zip_longest(saved, loaded)
        return type(saved)(_as_saved(each, other, device) for each, other in pairs)
    return loaded
