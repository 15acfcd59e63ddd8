"""Where the bytes of image files are: files of a folder, or parts of a tar archive."""

from __future__ import annotations

import abc
import os
import tarfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = tarfile.BLOCKSIZE


class ImageStore(abc.ABC):
    """Image files by number; loader processes get it by fork or by pickle."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many image files there are."""

    @abc.abstractmethod
    def read(self, number: int) -> bytes:
        """The content of one file."""

    @abc.abstractmethod
    def name(self, number: int) -> str:
        """What to call one file in a message."""


@final
class FolderStore(ImageStore):
    """Files under a folder. paths: relative to it, one string of bytes each: a million are kept."""

    def __init__(self, root: Path, paths: Sequence[bytes]) -> None:
        self._root = os.fsencode(root)
        self._paths: NDArray[np.bytes_] = np.array(paths, dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, number: int) -> bytes:
        with open(self._path(number), "rb") as file:
            return file.read()

    def name(self, number: int) -> str:
        return os.fsdecode(self._path(number))

    def _path(self, number: int) -> bytes:
        return os.path.join(self._root, bytes(self._paths[number]))


@final
class ArchiveStore(ImageStore):
    """Files in a tar archive that is not compressed, read where they lie: nothing is unpacked.

    places: (count, 2), int64: where each file begins in the archive, and its size, in bytes.
    """

    def __init__(self, archive: Path, places: NDArray[np.int64]) -> None:
        self.__setstate__((archive, places))

    def __getstate__(self) -> tuple[Path, NDArray[np.int64]]:
        return self._archive, self._places

    def __setstate__(self, state: tuple[Path, NDArray[np.int64]]) -> None:
        self._archive, self._places = state
        # Read by pread, which has no position: forked loader processes share the descriptor.
        self._descriptor = os.open(self._archive, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, number: int) -> bytes:
        start, size = (int(value) for value in self._places[number])
        return os.pread(self._descriptor, size, start)

    def name(self, number: int) -> str:
        return f"{self._archive}, at byte {int(self._places[number][0])}"


def tar_members(file: BinaryIO, start: int, size: int) -> Iterator[tuple[str, int, int]]:
    """The files of a tar archive that lies in ``size`` bytes of ``file`` from ``start`` on.

    Yields:
        (name, start of the content in ``file``, its size); what are no plain files is passed over.

    Raises:
        ValueError: there is no header where one must be.
    """
    end = start + size
    while start + BLOCK_BYTES <= end:
        file.seek(start)
        header = file.read(BLOCK_BYTES)
        if not any(header):  # the end of the archive
            return
        try:
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise ValueError(f"no tar header at byte {start}: {error}") from error
        content = start + BLOCK_BYTES
        if content + member.size > end:
            raise ValueError(f"the archive ends within {member.name!r}")
        if member.isreg():
            yield member.name, content, member.size
        start = content + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
