"""The events of :mod:`~gossipdp.dynamics.update` as loops that numba compiles, one pass each.

All arrays are addresses of ``size`` values. Those of ``pending`` and ``c`` are float32; those of
``x`` and of snapshots are float32, or uint16 that holds the bits of bfloat16. Without a ``c``,
``has_c`` is False and any address takes its place. The loops of :mod:`~gossipdp.dynamics.lattice`
have arrays of one value a block besides, and its constants: this file's text names what is kept.

Rounding: the loops that hold delta are compiled without fast-math, so no operation is fused or
reordered and delta is the exact negative of the other end's. Only :func:`_add_square` and
:func:`_add_zero` may be reordered, which lets LLVM add sixteen values at a time. They touch nothing
but the sums that are returned.

Only :mod:`~gossipdp.dynamics.machine_code` imports this module, to compile a loop for the first
time on a machine.
"""

# ruff: noqa: PLR0917 (compiled functions take addresses, and positional arguments alone)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numba.extending import overload

_F32, _F64, _U64, _U32, _U16 = np.float32, np.float64, np.uint64, np.uint32, np.uint16
_I8, _U8, _I16, _I32, _I64 = np.int8, np.uint8, np.int16, np.int32, np.int64
_HALF = _F32(0.5)
BLOCK, CARRY, MOST_POINTS = 512, _U64(0x9E3779B97F4A7C15), _F32(2.0**30)


def compiled(name: str, arguments: Iterable[str], symbol: str) -> Any:
    """Compile a loop for arguments of these types; return a module of LLVM with it as ``symbol``.

    The types are named as in :mod:`~gossipdp.dynamics.machine_code`.

    Raises:
        ImportError: the user has told numba to compile nothing.
    """
    config: Any = numba.config  # its names are made when it is imported
    if config.DISABLE_JIT:
        raise ImportError("NUMBA_DISABLE_JIT is set, so numba compiles nothing: unset it")
    numbers = {"size": types.intp, "bool": types.boolean, "number": types.float64}
    pointer: Any = types.CPointer

    def type_of(argument: str) -> Any:
        if argument in numbers:
            return numbers[argument]
        precision = argument.rpartition("_")[2].replace("bfloat16", "uint16")
        return pointer(getattr(types, precision))

    signature = tuple(map(type_of, arguments))
    # A wrapper for Python would need numba wherever the code is loaded.
    bare: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    loop = numba.njit(error_model="numpy", **bare)(globals()[name])
    loop.compile(signature)
    module = llvm.parse_assembly(loop.inspect_llvm(signature))
    (function,) = (each for each in module.functions if not each.name.startswith("llvm."))
    function.name = symbol
    return module


@numba.njit(fastmath={"reassoc"})
def _add_square(total: Any, value: Any) -> Any:
    wide = _F64(value)
    return total + wide * wide


@numba.njit(fastmath={"reassoc"})
def _add_zero(total: Any, value: Any) -> Any:
    """Leave the sum at zero for every finite value; make it NaN for NaN or infinity."""
    return total + value * _F32(0.0)


def _get(values: Any, i: Any) -> Any:
    raise NotImplementedError


@overload(_get)
def _overload_get(values: Any, i: Any) -> Any:
    if values.dtype == numba.uint16:

        def get_bfloat16(values: Any, i: Any) -> Any:
            return _U32(_U32(values[i]) << _U32(16)).view(_F32)

        return get_bfloat16

    def get_float32(values: Any, i: Any) -> Any:
        return values[i]

    return get_float32


def _put(values: Any, i: Any, value: Any) -> Any:
    """Write one float32, rounded to the array's precision; return what was written."""
    raise NotImplementedError


@overload(_put)
def _overload_put(values: Any, i: Any, value: Any) -> Any:
    if values.dtype == numba.uint16:

        def put_bfloat16(values: Any, i: Any, value: Any) -> Any:
            bits = _F32(value).view(_U32)
            # To nearest, ties to even, as torch rounds. A carry must not turn NaN into a number.
            nearest = _U32((bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))
            stored = _U32(0x7FC0) if np.isnan(value) else nearest
            values[i] = _U16(stored)
            return _U32(stored << _U32(16)).view(_F32)

        return put_bfloat16

    def put_float32(values: Any, i: Any, value: Any) -> Any:
        values[i] = value
        return value

    return put_float32


def flow(size: int, values: Any, c: Any, share: float) -> None:
    """Flow: values += share c; all float32."""
    q = _F32(share)
    for i in range(size):
        values[i] = values[i] + q * c[i]


def snapshot(size: int, out: Any, x: Any, pending: Any, c: Any, has_c: bool, share: float) -> Any:
    """Write x + pending + share c to ``out``; return 0 if all is finite, else NaN."""
    q = _F32(share)
    zero = _F32(0.0)
    if has_c:
        for i in range(size):
            zero = _add_zero(zero, _put(out, i, _get(x, i) + (pending[i] + q * c[i])))
    else:
        for i in range(size):
            zero = _add_zero(zero, _put(out, i, _get(x, i) + pending[i]))
    return _F64(zero)


def exchange(
    size: int,
    pending: Any,
    c: Any,
    has_c: bool,
    mine: Any,
    peers: Any,
    share: float,
    left: float,
    alpha_tilde: float,
) -> Any:
    """Flow, then apply delta = mine - peers, if it is finite; return its squared norm."""
    squared_norm = _F64(0.0)
    for i in range(size):
        squared_norm = _add_square(squared_norm, _get(mine, i) - _get(peers, i))
    if not np.isfinite(squared_norm):
        return squared_norm
    q, s, g = _F32(share), _F32(left), _F32(alpha_tilde - 0.5)
    if has_c:
        for i in range(size):
            delta = _get(mine, i) - _get(peers, i)
            momentum = c[i]
            pending[i] = (pending[i] + q * momentum) - _HALF * delta
            c[i] = s * momentum - g * delta
    else:
        for i in range(size):
            pending[i] = pending[i] - _HALF * (_get(mine, i) - _get(peers, i))
    return squared_norm


def boundary(size: int, x: Any, pending: Any, c: Any, has_c: bool, share: float) -> None:
    """Flow, then x += pending; pending keeps the remainder of rounding x."""
    q = _F32(share)
    if has_c:
        for i in range(size):
            moved = _get(x, i) + (pending[i] + q * c[i])
            pending[i] = moved - _put(x, i, moved)
    else:
        for i in range(size):
            moved = _get(x, i) + pending[i]
            pending[i] = moved - _put(x, i, moved)


@numba.njit(inline="always")
def _power_of_two(exponent: Any) -> Any:
    return _U32(_I32(exponent + _I32(127)) << _I32(23)).view(_F32)


@numba.njit(inline="always")
def _rounded(value: Any, scale: Any) -> Any:
    return _I32(np.rint(_F32(value * scale)))


# Each result of int32 is cast: numba would go on in int64, of which half as many fit a register.


def encode(
    size: int, values: Any, exponents: Any, codes: Any, sizes: Any, weights: Any, word: Any
) -> Any:
    """Write codes, sizes and checksum; return 0 if all blocks fit."""
    total, worst = _U64(0), 0.0
    for block in range((size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        stop = min(start + BLOCK, size)
        most = _I32(0)  # bits are in the order of the sizes, with infinity and NaN last
        for i in range(start, stop):
            most = max(most, _I32(_F32(values[i]).view(_I32) & _I32(0x7FFFFFFF)))
        sizes[block] = _I32(most).view(_F32)
        scale = _power_of_two(-_I32(exponents[block]))
        if not sizes[block] * scale < MOST_POINTS:
            worst = 1.0
            continue
        first, second = _I32(0), _I32(0)
        for i in range(start, stop):
            k = _rounded(values[i], scale)
            codes[i] = _U8(k)
            above, place = _I32(k >> _I32(8)), i - start
            first = _I32(first + _I32(above * weights[place]))
            mixed = _I32(above ^ _I32(above >> _I32(13)))
            second = _I32(second + _I32(mixed * weights[BLOCK + place]))
        total = total * CARRY + _U64((_I64(first) << _I64(32)) + _I64(second))
    word[0] = _I64(total)
    return worst


def decode(
    size: int, near: Any, exponents: Any, codes: Any, differences: Any, weights: Any, word: Any
) -> None:
    """Write k of ``near`` minus k of the codes, and the latter's checksum."""
    total = _U64(0)
    for block in range((size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        scale = _power_of_two(-_I32(exponents[block]))
        first, second = _I32(0), _I32(0)
        for i in range(start, min(start + BLOCK, size)):
            k = _rounded(near[i], scale)
            apart = _I8(_U8(k) - codes[i])
            differences[i] = apart
            above, place = _I32(_I32(k - _I32(apart)) >> _I32(8)), i - start
            first = _I32(first + _I32(above * weights[place]))
            mixed = _I32(above ^ _I32(above >> _I32(13)))
            second = _I32(second + _I32(mixed * weights[BLOCK + place]))
        total = total * CARRY + _U64((_I64(first) << _I64(32)) + _I64(second))
    word[0] = _I64(total)


@numba.njit(inline="always")
def _level(bits: Any) -> Any:
    return min(_I32(_I32(bits + _I32(1 << 19)) >> _I32(20)), _I32(0x7F6))


def encode_squares(size: int, values: Any, tops: Any, codes: Any) -> None:
    """Write the code of values that are finite and not negative."""
    for block in range((size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        stop = min(start + BLOCK, size)
        most = _I32(0)
        for i in range(start, stop):
            most = max(most, _F32(values[i]).view(_I32))
        top = _level(most)
        tops[block] = _I16(top)
        for i in range(start, stop):
            level = max(_I32(_level(_F32(values[i]).view(_I32)) - top + _I32(255)), _I32(1))
            codes[i] = _U8(level if values[i] > _F32(0.0) else _I32(0))


def decode_squares(size: int, values: Any, tops: Any, codes: Any) -> None:
    """Write the values of a code."""
    for block in range((size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        lowest = _I32(min(max(_I32(tops[block]), _I32(0)), _I32(0x7F6)) - _I32(255))
        for i in range(start, min(start + BLOCK, size)):
            level = _I32(max(_I32(lowest + _I32(codes[i])), _I32(0)) << _I32(20))
            values[i] = _I32(level if codes[i] > _U8(0) else _I32(0)).view(_F32)


def exchange_coded(
    size: int,
    pending: Any,
    c: Any,
    has_c: bool,
    differences: Any,
    exponents: Any,
    distances: Any,
    share: float,
    left: float,
    alpha_tilde: float,
) -> Any:
    """Flow, then apply delta = step times difference, which is finite; return its squared norm.

    Writes the largest delta of each block to ``distances``.
    """
    q, s, g = _F32(share), _F32(left), _F32(alpha_tilde - 0.5)
    squared_norm = 0.0
    for block in range((size + BLOCK - 1) // BLOCK):
        start = block * BLOCK
        stop = min(start + BLOCK, size)
        step = _power_of_two(_I32(exponents[block]))
        most, squares = _I32(0), _I32(0)
        for i in range(start, stop):
            apart = _I32(differences[i])
            most = max(most, _I32(abs(apart)))
            squares = _I32(squares + _I32(apart * apart))
        if has_c:
            for i in range(start, stop):
                delta, momentum = step * _F32(_I32(differences[i])), c[i]
                pending[i] = (pending[i] + q * momentum) - _HALF * delta
                c[i] = s * momentum - g * delta
        else:
            for i in range(start, stop):
                pending[i] = pending[i] - _HALF * (step * _F32(_I32(differences[i])))
        distances[block] = step * _F32(most)
        squared_norm += _F64(step) * _F64(step) * _F64(squares)
    return squared_norm
