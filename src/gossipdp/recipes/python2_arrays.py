"""Reads the pickles of CIFAR-10, which Python 2 wrote, and nothing else that a pickle may hold.

A pickle is a program: with ``pickle.load`` a file from elsewhere may do anything. The files of
CIFAR-10 hold dicts, lists, numbers, strings of bytes and one array of bytes. NumPy's arrays name
three functions to be called; here these names lead to checks of our own, and no others exist, so
that NumPy itself is called with nothing that the file says but the array's shape and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

BYTES_PER_ARRAY = 1 << 30
"""No array larger than this is taken for one of CIFAR-10 (a real one has 30,720,000 bytes)."""


def read_python2_pickle(content: bytes) -> Any:
    """What one of those files holds; texts are bytes, as in Python 2.

    Raises:
        ValueError: it is no pickle, or holds more than dicts, lists, tuples, numbers, strings and
            C-ordered arrays of uint8.
    """
    try:
        return _arrays_filled(_Unpickler(io.BytesIO(content), encoding="bytes").load())
    except ValueError:
        raise
    except Exception as error:  # a damaged pickle may fail in any way
        raise ValueError(f"not a pickle as Python 2 wrote it: {error!r}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file leads to; the whole of what is admitted."""
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            module = "multiarray"
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise ValueError(
                f"the pickle wants to call {module}.{name}, which no file of CIFAR-10 does; it is "
                "not read. Get the original archive"
            ) from None

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to what lies outside the file."""
        raise ValueError("the pickle refers to what lies outside of it; it is not read")


class _UnsignedBytes:
    """The only type of elements that is admitted: ``dtype("u1")``."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in (b"u1", "u1"):
            raise ValueError(f"an array of {code!r} in the pickle; CIFAR-10 has arrays of bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment mean nothing for single bytes."""


class _Array:
    """An array that gets its content by ``__setstate__``, as NumPy's pickles do it."""

    def __init__(self, *_: Any) -> None:
        self.values: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if not isinstance(kind, _UnsignedBytes) or is_fortran or not isinstance(content, bytes):
            raise ValueError("an array in the pickle is no C-ordered array of bytes")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"an array in the pickle has the shape {shape!r}")
        if not math.prod(shape) == len(content) <= BYTES_PER_ARRAY:
            raise ValueError(f"an array of shape {shape!r} in the pickle has {len(content)} bytes")
        self.values = np.frombuffer(content, dtype=np.uint8).reshape(shape)


_ADMITTED = {
    ("multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _UnsignedBytes,
}


def _arrays_filled(value: Any) -> Any:
    """The value with the arrays themselves in place of what held them while they were read."""
    if value is None or isinstance(value, (bytes, str, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_arrays_filled, value))
    if isinstance(value, dict):
        return {_arrays_filled(key): _arrays_filled(each) for key, each in value.items()}
    if isinstance(value, _Array) and value.values is not None:
        return value.values
    raise ValueError(f"the pickle holds {value!r}, which no file of CIFAR-10 does")
