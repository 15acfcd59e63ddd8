"""Files that appear whole or not at all: safetensors with a checksum, and a module's plain state.

A file is written under another name in the same directory, flushed and synchronized, and then
renamed: a reader sees the old content or the new, also after a crash or on a full disk.

The format is safetensors, and not torch's own: nothing is pickled, the files open in other
programs, and the training state is described by the same layout that workers send each other
(:mod:`.state_layout`). The files are written here and read by the library. So each piece's error
and the synchronization are ours, a write can be given up, and the interpreter's lock is free while
one is under way.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from gossipdp.parallel.shards import as_dtensor
from gossipdp.parallel.state_layout import DTYPE_NAMES

TEMPORARY_SUFFIX = ".unfinished"
# Between two pieces a write can be given up, and errors of the disk show early.
PIECE_BYTES = 8 << 20
CHECKSUM = "checksum"
EXPORT_SUFFIXES = (".pt", ".pth", ".safetensors")

IsGivenUp = Callable[[], bool]


class DamagedFileError(ValueError):
    """A file is not what was once written there: cut short, changed, or of another kind."""


class GivenUpError(Exception):
    """The owner asked for the write to end before it was complete."""


def never() -> bool:
    """No write is given up."""
    return False


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Within it, write to the file given; at its end that is on the disk, under ``path``.

    Where anything fails, what was under ``path`` before stays. Writers of one path, in whatever
    process, container or host, do not meet: the last to end leaves its file.
    """
    temporary, file = _new_file(path)
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # so that the rename lasts through a loss of power
    finally:
        os.close(descriptor)


def _new_file(path: Path) -> tuple[Path, IO[bytes]]:
    """Make a file beside ``path`` that is locked while it is open.

    As ``tempfile.mkstemp`` it makes a new one of a random name, so that no link is followed and no
    process number matters; unlike it, with the permissions that the user's files get.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
        file = temporary.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks, where nothing is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        # Before it was locked it could be taken for one that a killed writer has left.
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def remove_unfinished(directory: Path) -> None:
    """Remove what killed writers have left in a directory, and nothing that is being written."""
    for temporary in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        # BlockingIOError: it is being written. FileNotFoundError: it was, a moment ago.
        with contextlib.suppress(OSError), temporary.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    is_given_up: IsGivenUp = never,
) -> None:
    """Write contiguous host tensors as a safetensors file, whole or not at all.

    Raises:
        ValueError: a tensor's type is not among those of the format.
        OSError: of the file system.
        GivenUpError: ``is_given_up()``, which is asked before each piece, said so.
    """
    checksum = _checksum(tensors, metadata, is_given_up)
    header: dict[str, object] = {"__metadata__": {**metadata, CHECKSUM: checksum}}
    # The largest elements first, so that every tensor lies at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    offset = 0
    for name in names:
        end = offset + tensors[name].nbytes
        kind, shape = _describe(name, tensors[name])
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with written_whole(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for piece in _pieces(tensors[name], is_given_up):
                file.write(piece)


def read_metadata(path: Path) -> dict[str, str]:
    """Read a file's metadata alone, unverified.

    Raises:
        DamagedFileError: it is no safetensors file, or shorter than it says.
    """
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that :func:`write_tensors` wrote: its tensors and metadata.

    Raises:
        DamagedFileError: its content is not what was written.
    """
    with _opened(path) as file:
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    expected = metadata.pop(CHECKSUM, None)
    if _checksum(tensors, metadata) != expected:
        raise DamagedFileError(f"{path} is damaged: its checksum does not fit its content")
    return tensors, metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # the library's own, OSError among them
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def _checksum(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], is_given_up: IsGivenUp = never
) -> str:
    """Of all names, types, shapes, values and metadata."""
    hasher = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(tensors):
        hasher.update(json.dumps([name, *_describe(name, tensors[name])]).encode())
        for piece in _pieces(tensors[name], is_given_up):
            hasher.update(piece)
    return hasher.hexdigest()


def _describe(name: str, tensor: Tensor) -> tuple[str, list[int]]:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
    return DTYPE_NAMES[tensor.dtype], list(tensor.shape)


def _pieces(tensor: Tensor, is_given_up: IsGivenUp) -> Iterator[memoryview]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        if is_given_up():
            raise GivenUpError
        yield data[start : start + PIECE_BYTES]


# A module's plain state_dict, for other programs.


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a name that does not tell a format."""
    if Path(path).suffix not in EXPORT_SUFFIXES:
        raise ValueError(
            f"{str(path)!r} does not tell the format: let it end in .pt, .pth or .safetensors"
        )


def copied_state(module: nn.Module, *, is_kept: bool = True) -> dict[str, Any]:
    """Copy a module's ``state_dict`` to host memory; tied parameters stay one tensor.

    What is sharded is gathered, by all processes of the replica together and one tensor at a time;
    with ``is_kept=False`` this process only takes part in that.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        sharded = as_dtensor(value) if isinstance(value, Tensor) else None
        if sharded is not None:
            # Also where they are tied: a process without a part of them could not tell.
            whole = sharded.full_tensor().detach().cpu()
            value = whole if is_kept else None
        elif isinstance(value, Tensor):
            key = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            value = copies[key]
        state[name] = value
    return state


def write_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a copied state in the format that the name tells, whole or not at all.

    Raises:
        ValueError: safetensors cannot hold something in it.
        OSError: of the file system.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        with written_whole(path) as file:
            torch.save(state, file)
        return
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}, and a safetensors file holds tensors "
                "only: let the name end in .pt"
            )
    write_tensors(path, {name: value.contiguous() for name, value in state.items()}, {})
