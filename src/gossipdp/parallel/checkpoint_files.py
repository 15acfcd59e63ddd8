"""Files that appear whole or not at all, and the directory of them, which one run has to itself.

A file is written under another name in the same directory, synchronized, and then renamed. So a
reader sees the old content or the new, also after a crash or on a full disk.

The format is safetensors: nothing is pickled, and the files open in other programs. They are
written here and read by the safetensors library, whose own writer synchronizes nothing, cannot be
given up, and holds the interpreter's lock.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import socket
import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from gossipdp.errors import RefusedError
from gossipdp.launcher.reports import say_instead_of_traceback
from gossipdp.parallel.packing import DTYPE_NAMES
from gossipdp.parallel.shards import as_dtensor

logger = logging.getLogger("gossipdp")

TEMPORARY_SUFFIX = ".unfinished"
# After each piece its bytes are on the disk, and a write that stood still meanwhile is given up.
PIECE_BYTES = 8 << 20
CHECKSUM = "checksum"
NO_CHECKSUM = "0" * 64
LOCK_NAME = ".in-use"
LOOKS, LOOK_EVERY_S = 20, 0.05
# How file systems say that they synchronize no directory, or have no locks.
CANNOT = (errno.EINVAL, errno.EBADF, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
EXPORT_SUFFIXES = (".pt", ".pth", ".safetensors")


class DamagedFileError(ValueError):
    """A file that is cut short, changed, or of another kind."""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to; when the block ends, the file is on the disk, under ``path``.

    If anything fails, the file that was under ``path`` before stays. Several writers of one path
    do not disturb each other, in whatever process, container or host they are: the file of the
    last to end stays. As with ``tempfile.mkstemp``, the file is new and has a random name, so that
    no link is followed and no process number matters; unlike there, it gets the permissions of the
    user's other files.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    with temporary.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    try:
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # so that the rename lasts through a loss of power
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in CANNOT:
            raise


def remove_unfinished(directory: Path) -> None:
    """Remove the files that killed writers have left in a directory, which one worker writes to.

    If an earlier life of that worker is still writing, its rename fails: it leaves no file.
    """
    for temporary in directory.glob(f".*{TEMPORARY_SUFFIX}"):
        temporary.unlink(missing_ok=True)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Write contiguous host tensors as a safetensors file, whole or not at all.

    Raises:
        ValueError: a tensor's type is not among those of the format.
        OSError: of the file system, or of ``advance()``, which is called before each piece: all
            before it but the last PIECE_BYTES are on the disk.
    """
    # The checksum, which is known at the end, comes first: there it is found again.
    header: dict[str, object] = {"__metadata__": {CHECKSUM: NO_CHECKSUM, **metadata}}
    offset = 0
    for name in _in_order(tensors):
        end = offset + tensors[name].nbytes
        kind, shape = _describe(name, tensors[name])
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unsynchronized = 0
    with written_whole(path) as file:

        def write(piece: memoryview) -> None:
            nonlocal unsynchronized
            advance()
            file.write(piece)
            unsynchronized += len(piece)
            if unsynchronized >= PIECE_BYTES:
                file.flush()
                os.fdatasync(file.fileno())
                unsynchronized = 0

        file.write(len(text).to_bytes(8, "little") + text)
        checksum = _checksum(tensors, metadata, write)
        file.seek(8 + text.index(NO_CHECKSUM.encode()))
        file.write(checksum.encode())


def read_metadata(path: Path) -> dict[str, str]:
    """Read a file's metadata alone, unverified; raise DamagedFileError if that is not possible."""
    with _opened(path) as (_, metadata):
        return metadata


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file's tensors and metadata; raise DamagedFileError if they are not as written."""
    with _opened(path) as (file, metadata):
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    expected = metadata.pop(CHECKSUM, None)
    if _checksum(tensors, metadata) != expected:
        raise DamagedFileError(f"{path} is damaged: its checksum does not fit its content")
    return tensors, metadata


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file, dict(file.metadata() or {})
    except Exception as error:  # the library's own, OSError among them
        raise DamagedFileError(f"{path} cannot be read: {error}") from error


def _in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the largest elements first: each tensor lies at a multiple of its element's size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _checksum(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    write: Callable[[memoryview], object] = lambda piece: None,
) -> str:
    """Write the values piece by piece; return a hash of them, names, types, shapes and metadata."""
    hasher = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in _in_order(tensors):
        hasher.update(json.dumps([name, *_describe(name, tensors[name])]).encode())
        data = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            write(piece)
            hasher.update(piece)
    return hasher.hexdigest()


def _describe(name: str, tensor: Tensor) -> tuple[str, list[int]]:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
    return DTYPE_NAMES[tensor.dtype], list(tensor.shape)


# The directory.

_in_use: dict[Path, int] = {}
"""The descriptor of the lock of each directory that this process uses."""


@contextlib.contextmanager
def in_use(directory: Path, run_id: str) -> Iterator[None]:
    """Keep the workers of all other runs out of a directory; raise RefusedError if one is there.

    All workers of a run share a lock (fcntl's, which forked loaders do not inherit) on a file that
    names the run. When a process ends, however it does, its system drops its part, or the NFS
    server. Only a worker that has the lock alone writes there, and only one that shares it reads.
    Of a process's models the first has it.
    """
    directory = directory.resolve()
    if directory in _in_use:
        yield
        return
    try:
        _in_use[directory] = _lock(directory, run_id)
    except OSError as error:
        say_instead_of_traceback()
        raise RefusedError(
            f"{str(directory)!r} cannot be written to ({error.strerror}): for checkpoints and logs "
            "name a directory that this process may write to, on a disk with room"
        ) from error
    try:
        yield
    finally:
        os.close(_in_use.pop(directory))


def _lock(directory: Path, run_id: str) -> int:
    own = f"run {run_id}: process {os.getpid()} on {socket.gethostname()}, {time.ctime()}"
    holder = ""
    with contextlib.ExitStack() as opened:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        opened.callback(os.close, descriptor)
        for _ in range(LOOKS):  # one that only looks may share it for a moment
            if _has_lock(descriptor, fcntl.LOCK_EX):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, own.encode(), 0)
                os.fsync(descriptor)  # a full disk is found now, not hours later
            if _has_lock(descriptor, fcntl.LOCK_SH):
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace")
                if holder.startswith(f"run {run_id}:"):
                    opened.pop_all()
                    return descriptor
                fcntl.lockf(descriptor, fcntl.LOCK_UN)
            time.sleep(LOOK_EVERY_S)
    say_instead_of_traceback()
    raise RefusedError(
        f"another run is alive and uses {str(directory)!r} ({holder}): end that one, or give this "
        "run a directory of its own"
    )


def _has_lock(descriptor: int, kind: int) -> bool:
    """Return whether the lock could be had; so too if the file system has no locks."""
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, *CANNOT):
            raise
        return error.errno in CANNOT
    return True


# A module's plain state_dict, for other programs.


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if the name has none of the known endings."""
    if Path(path).suffix not in EXPORT_SUFFIXES:
        raise ValueError(f"{str(path)!r} names no format: let it end in .pt, .pth or .safetensors")


def copied_state(
    module: nn.Module, *, is_kept: bool = True, without: Collection[str] = ()
) -> dict[str, Any]:
    """Copy a module's ``state_dict`` to host memory; tied parameters stay one tensor.

    All processes of a replica call it together: they gather sharded tensors, one at a time. With
    ``is_kept=False`` this process takes part in the gathering and keeps nothing. Names in
    ``without`` are left out.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if name in without:
            continue
        sharded = as_dtensor(value) if isinstance(value, Tensor) else None
        if sharded is not None:
            # Tied ones are gathered again: a process without a part of them cannot see the tie.
            whole = sharded.full_tensor().detach().cpu()
            value = whole if is_kept else None
        elif isinstance(value, Tensor):
            key = (value.data_ptr() or name, value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            value = copies[key]
        state[name] = value
    return state


class Average(msgspec.Struct, frozen=True):
    """The origin of a saved average: its run, and the samples that the run had trained on.

    ``rank``: the lowest of the workers that it is of, if ``is_end``; before the end, the saver's.
    ``num_workers``: how many these are; 0 before the end.
    """

    run_id: str
    samples: int
    rank: int
    is_end: bool
    num_workers: int = 0


def write_average(path: str | os.PathLike[str], state: dict[str, Any], average: Average) -> Path:
    """Write a copied state in the format of the path's ending; return the path of the file.

    If two parts of a run ended apart, the average of more workers stays, or of as many the one of
    more samples; the other one is written beside it. A worker that trains on after the others have
    ended has always more samples.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    other = _average_of(path)
    if (
        other is not None
        and (other.run_id, other.is_end) == (average.run_id, True)
        and other.rank != average.rank
        and (other.num_workers, other.samples) >= (average.num_workers, average.samples)
    ):
        beside = path.with_name(f"{path.stem}-of-worker-{average.rank}{path.suffix}")
        logger.warning(
            "%s stays: this run has ended there after %d samples, under worker %d; this average, "
            "after %d, is in %s",
            path,
            other.samples,
            other.rank,
            average.samples,
            beside,
        )
        path = beside
    text = msgspec.json.encode(average)
    if path.suffix != ".safetensors":
        with written_whole(path) as file:
            torch.save(state, file)
            # The archive's comment, which it ends with: its length, and so far no text.
            file.seek(-2, os.SEEK_END)
            file.write(len(text).to_bytes(2, "little") + text)
        return path
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} is a {type(value).__name__}, and a safetensors file holds tensors "
                "only: let the name end in .pt"
            )
    tensors = {name: value.contiguous() for name, value in state.items()}
    write_tensors(path, tensors, {"average": text.decode()})
    return path


def _average_of(path: Path) -> Average | None:
    """Return what a file says that it is the average of; None: it says nothing, or is not there."""
    try:
        if path.suffix == ".safetensors":
            text = read_metadata(path)["average"].encode()
        else:
            with zipfile.ZipFile(path) as archive:
                text = archive.comment
        return msgspec.json.decode(text, type=Average)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None
