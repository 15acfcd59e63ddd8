"""Compiled loops of :mod:`~gossipdp.dynamics.update_loops`, as machine code that is kept on disk.

numba takes a second of processor time to be imported and to register its types. So numba compiles a
loop once on a machine; each later start loads the machine code with LLVM, in milliseconds.

A file holds one loop. Its name has a digest of all that the code depends on: the source of the
loops, the versions of numba and LLVM, the processor, and the types of the arguments. The files lie
beside Python's own compiled files, or in the user's cache directory if that place cannot be
written. They are trusted as Python's are.

A loop is called by the convention of numba's compiled functions: the address of the result, that of
an exception (no loop raises one), then the arguments. An array is the address of its first value.
ctypes makes the call, with the interpreter's lock free.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ARGUMENTS = {
    "flow": "float32 float32 number",
    "snapshot": "wire x float32 float32 bool number",
    "exchange": "float32 float32 bool wire wire number number number",
    "boundary": "x float32 float32 bool number",
    "encode": "float32 block_int8 uint8 block_float32 any_int32 any_int64",
    "decode": "float32 block_int8 uint8 int8 any_int32 any_int64",
    "encode_squares": "float32 block_int16 uint8",
    "decode_squares": "float32 block_int16 uint8",
    "exchange_coded": "float32 float32 bool int8 block_int8 block_float32 number number number",
}
"""By loop, its arguments after ``size``: numbers, and arrays by their precision; ``x`` and ``wire``
are the precisions of parameters and of snapshots. ``block``: one value for each block; ``any``: as
many as the loop reads."""
CODED = [name for name, arguments in ARGUMENTS.items() if "block" in arguments]
"""The loops of the 8-bit codes."""
BLOCK = 512
"""Values of a block of :mod:`~gossipdp.dynamics.lattice`: with half or a quarter, error and
failures change little."""

CHECKSUM_BYTES = 16

_SOURCE = Path(__file__).with_name("update_loops.py")


class Loop:
    """One loop, for arrays of one set of precisions: tensors of one length, without gaps."""

    def __init__(self, function: Callable[..., object], kinds: Sequence[str]) -> None:
        self._function = function
        parts = [kind.rpartition("_") for kind in kinds]
        self._dtypes = [getattr(torch, name, None) for _, _, name in parts]
        self._per = [{"": 1, "block": BLOCK, "any": 0}[prefix] for prefix, _, _ in parts]
        self._unused = ctypes.c_double()

    def __call__(self, *arguments: Tensor | float) -> float:
        """Run the loop and return its result."""
        result = ctypes.c_double()
        self._function(ctypes.byref(result), None, *self._given(arguments))
        return result.value

    def operation(self, *arguments: Tensor | float) -> Callable[[], object]:
        """Return the call as one C function without arguments. The caller keeps the tensors."""
        return partial(self._function, ctypes.byref(self._unused), None, *self._given(arguments))

    def _given(self, arguments: tuple[Tensor | float, ...]) -> Iterator[float]:
        """Yield the size and the addresses: another type or length would spoil other memory."""
        first = arguments[0]
        size = first.numel() if isinstance(first, Tensor) else -1
        yield size
        for dtype, per, each in zip(self._dtypes, self._per, arguments, strict=True):
            if isinstance(each, Tensor):
                has_other = per > 0 and each.numel() != -(-size // per)
                if each.dtype is not dtype or has_other or not each.is_contiguous():
                    raise TypeError(
                        f"a loop over {size} {dtype} was given {each.shape} {each.dtype}"
                    )
                yield each.data_ptr()
            else:
                yield each


@cache
def loop(name: str, x: torch.dtype = torch.float32, wire: torch.dtype = torch.float32) -> Loop:
    """Load a loop, or compile it, for parameters and snapshots of these precisions.

    Raises:
        ImportError: LLVM cannot be imported; or numba, if the loop must be compiled.
    """
    precisions = {"x": str(x).removeprefix("torch."), "wire": str(wire).removeprefix("torch.")}
    return _load(name, "size", *(precisions.get(each, each) for each in ARGUMENTS[name].split()))


@cache
def _load(name: str, *kinds: str) -> Loop:
    llvm, machine, engine = _llvm()
    symbol = f"{name}-{_checksum(' '.join((_origin(), *kinds)).encode()).hex()}"
    code = _kept(symbol)
    if code is None:
        from gossipdp.dynamics import update_loops

        code = machine.emit_object(update_loops.compiled(name, kinds, symbol))
        _keep(symbol, code)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    numbers = {"size": ctypes.c_ssize_t, "bool": ctypes.c_uint8, "number": ctypes.c_double}
    types: list[Any] = [numbers.get(kind, ctypes.c_void_p) for kind in kinds]
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *types)
    return Loop(function(engine.get_function_address(symbol)), kinds[1:])


@cache
def _llvm() -> tuple[Any, Any, Any]:
    """Return LLVM, what makes its code for this processor, and what loads it."""
    import llvmlite.binding as llvm  # small models do without

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(*processor, jit=True)
    return llvm, machine, llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


@cache
def _origin() -> str:
    """Return all that the code of every loop depends on."""
    llvm, *_ = _llvm()
    versions = (importlib.metadata.version(each) for each in ("numba", "llvmlite"))
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    options = (f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
    system = llvm.get_process_triple(), *processor, *sorted(options)
    return "\n".join((_SOURCE.read_text("utf-8"), *versions, *system))


def _folders() -> Iterator[Path]:
    yield Path(importlib.util.cache_from_source(str(_SOURCE))).parent
    with suppress(RuntimeError):  # the user has no home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossipdp"


def _kept(symbol: str) -> bytes | None:
    """Return the machine code from disk; None if there is none, or not all of it."""
    for folder in _folders():
        with suppress(OSError):
            data = (folder / f"{symbol}.code").read_bytes()
            if data.startswith(_checksum(code := data[CHECKSUM_BYTES:])):
                return code
    return None


def _keep(symbol: str, code: bytes) -> None:
    """Write the machine code to the first place that takes it, whole or not at all."""
    problem: OSError | None = None
    for folder in _folders():
        part = folder / f"{symbol}.{os.getpid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(_checksum(code) + code)
            part.replace(folder / f"{symbol}.code")
            return
        except OSError as error:
            problem = error
            with suppress(OSError):
                part.unlink()
    logger.warning(
        "compiled kernels cannot be kept on disk, so each start compiles them: %s", problem
    )


def _checksum(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=CHECKSUM_BYTES).digest()
