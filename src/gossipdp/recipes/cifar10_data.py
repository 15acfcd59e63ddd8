"""CIFAR-10 from its original archive, or from the folder that it holds."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossipdp.recipes.python2_arrays import read_python2_pickle

ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
NUM_CLASSES = 10
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training images' three channels, as shares of the largest value."""

HOW_TO_GET_IT = (
    f"CIFAR-10 is not downloaded for you: get the archive {ARCHIVE} (170 MB) from "
    f"https://www.cs.toronto.edu/~kriz/cifar.html and put it, or the folder {FOLDER} that it "
    "holds, into a folder that you name with --data"
)


@dataclass(frozen=True)
class LabelledImages:
    """images: (count, 3, height, width), uint8; labels: (count,), int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> LabelledImages:
        """The same on a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Cifar10Images:
    """The 50,000 training and 10,000 test images, or as many as the files hold."""

    train: LabelledImages
    test: LabelledImages


def find_cifar10(path: Path) -> Path:
    """The archive or the folder of batches at or in ``path``.

    Raises:
        FileNotFoundError: neither is there; the message says how to get it.
    """
    for candidate in (path / FOLDER, path / ARCHIVE, path):
        if (candidate / TEST_FILE).is_file() or (candidate.is_file() and candidate.suffix == ".gz"):
            return candidate
    where = path.absolute()
    problem = f"{where} holds no CIFAR-10" if path.exists() else f"there is no {where}"
    raise FileNotFoundError(f"{problem}. {HOW_TO_GET_IT}")


def read_cifar10(path: Path) -> Cifar10Images:
    """All images, in memory (180 MB for the real ones).

    Raises:
        FileNotFoundError: neither archive nor folder is at ``path``.
        ValueError: a file is missing, damaged, or holds what CIFAR-10 does not.
    """
    found = find_cifar10(path)
    contents = _from_folder(found) if found.is_dir() else _from_archive(found)
    batches = {name: _batch(f"{found}: {name}", content) for name, content in contents.items()}
    train = [batches[name] for name in TRAIN_FILES]
    return Cifar10Images(
        LabelledImages(
            torch.cat([batch.images for batch in train]),
            torch.cat([batch.labels for batch in train]),
        ),
        batches[TEST_FILE],
    )


def _from_folder(folder: Path) -> dict[str, bytes]:
    return _complete(folder, lambda name: (folder / name).read_bytes())


def _from_archive(archive: Path) -> dict[str, bytes]:
    """The files of the folder in the archive, in one pass: it is compressed as a whole."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r|*") as files:
            for member in files:
                name = Path(member.name).name
                if name in (*TRAIN_FILES, TEST_FILE) and member.isfile():
                    file = files.extractfile(member)
                    assert file is not None
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{archive} cannot be read ({error}); get it again") from error
    return _complete(archive, contents.__getitem__)


def _complete(where: Path, read: Callable[[str], bytes]) -> dict[str, bytes]:
    contents = {}
    for name in (*TRAIN_FILES, TEST_FILE):
        try:
            contents[name] = read(name)
        except (KeyError, FileNotFoundError):
            raise ValueError(f"{where} has no {name}; get the original archive again") from None
    return contents


def _batch(where: str, content: bytes) -> LabelledImages:
    """One file: rows of 3,072 bytes (red, green, blue, each row by row) and their labels."""
    try:
        values: Any = read_python2_pickle(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    rows = values.get(b"data") if isinstance(values, dict) else None
    labels = values.get(b"labels") if isinstance(values, dict) else None
    if not (isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.shape[1] == 3 * 32 * 32):
        raise ValueError(f"{where} has no rows of 3,072 bytes as `data`; is it CIFAR-10?")
    if not (
        isinstance(labels, list)
        and len(labels) == len(rows) > 0
        and all(isinstance(label, int) and 0 <= label < NUM_CLASSES for label in labels)
    ):
        raise ValueError(f"{where} has no label of 0 to 9 for each image; is it CIFAR-10?")
    images = torch.from_numpy(rows.reshape(-1, 3, 32, 32).copy())
    return LabelledImages(images, torch.tensor(labels))
