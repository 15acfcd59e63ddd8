"""Files that appear whole or not at all, and safetensors files with a checksum over their content.

A file is written under another name in the same directory, flushed and synchronized, and then
renamed: whoever looks sees the old content or the new, also after a crash or on a full disk.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import safe_open
from torch import Tensor

TEMPORARY_SUFFIX = ".unfinished"
# Between two pieces a write can be given up, and errors of the disk show early.
PIECE_BYTES = 8 << 20
CHECKSUM = "checksum"

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


class DamagedFileError(ValueError):
    """A file is not what was once written there: cut short, changed, or of another kind."""


class GivenUpError(Exception):
    """The owner asked for the write to end before it was complete."""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Within it, write to the file given; at its end that is on the disk, under ``path``.

    Where anything fails, what was under ``path`` before stays.

    Raises:
        OSError: of the file system; the disk may be full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _synchronize_directory(path.parent)


def _synchronize_directory(directory: Path) -> None:
    """Make a rename in it last through a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(directory: Path) -> None:
    """Remove what a writer that was killed left in ``directory``, which nobody else writes to."""
    for path in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Write contiguous host tensors as a safetensors file, whole or not at all.

    Written here and not by the library, so that each piece's error, the flush and the
    synchronization are ours; the library reads it.

    Raises:
        ValueError: a tensor's type is not among those of the format.
        OSError: of the file system.
        GivenUpError: ``is_given_up()`` said so.
    """
    metadata = dict(metadata)
    hasher = _hasher(metadata)
    for name in sorted(tensors):
        _hash_tensor(hasher, name, tensors[name], is_given_up)
    metadata[CHECKSUM] = hasher.hexdigest()
    header: dict[str, object] = {"__metadata__": metadata}
    # The largest elements first, so that every tensor lies at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _type_name(name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _pieces(tensors[name]):
                _stop_if(is_given_up)
                _write(file, piece)


def read_metadata(path: Path) -> dict[str, str]:
    """Read a file's metadata alone, unverified.

    Raises:
        DamagedFileError: it is no safetensors file, or shorter than it says.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except Exception as error:  # the library's own, OSError among them
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that :func:`write_tensors` wrote: its tensors and metadata.

    Raises:
        DamagedFileError: its content is not what was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except Exception as error:
        raise DamagedFileError(f"{path} cannot be read: {error}") from error
    expected = metadata.pop(CHECKSUM, None)
    hasher = _hasher(metadata)
    for name, tensor in tensors.items():
        _hash_tensor(hasher, name, tensor)
    if hasher.hexdigest() != expected:
        raise DamagedFileError(f"{path} is damaged: its checksum does not fit its content")
    return tensors, metadata


def _hasher(metadata: Mapping[str, str]) -> "hashlib._Hash":
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())


def _hash_tensor(
    hasher: "hashlib._Hash",
    name: str,
    tensor: Tensor,
    is_given_up: Callable[[], bool] = lambda: False,
) -> None:
    hasher.update(json.dumps([name, _type_name(name, tensor), list(tensor.shape)]).encode())
    for piece in _pieces(tensor):
        _stop_if(is_given_up)
        hasher.update(piece)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _write(file: IO[bytes], piece: memoryview) -> None:
    file.write(piece)


def _type_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
    return _NAMES[tensor.dtype]


def _stop_if(is_given_up: Callable[[], bool]) -> None:
    if is_given_up():
        raise GivenUpError
