"""The paper's first training: ResNet-18 on CIFAR-10, from its original archive."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp.tasks.images import Batch, PaperRecipe, random_crop_and_flip
from gossipdp.tasks.options import Cifar10Options
from gossipdp.tasks.resnet import cifar_resnet18
from gossipdp.tasks.workload import BatchLoader, worker_seed

ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
NUM_CLASSES = 10
IMAGE_BYTES = 3 * 32 * 32
PADDING = 4
EVALUATION_BATCH = 500

HOW_TO_GET_IT = (
    f"CIFAR-10 is not downloaded for you: get the binary version, {ARCHIVE} (170 MB), from "
    f"https://www.cs.toronto.edu/~kriz/cifar.html and put it, or the folder {FOLDER} that it "
    "holds, into a folder that you name with --data"
)


@final
class Cifar10(PaperRecipe):
    """ResNet-18 with the stem for small images, SGD, crop and flip; see ``Cifar10Options``.

    All images are kept in memory, on the worker's device (180 MB for the real ones).
    """

    metric_name = "test_accuracy"
    milestones = (0.5, 0.75)  # epochs 50 and 75 of 100
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, data: Path, *, batch_size: int, device: str, epochs: int) -> None:
        super().__init__(batch_size=batch_size, device=device, epochs=epochs)
        train, test = read_cifar10(data)
        self.train, self.test = (
            (images.to(self.device), labels.to(self.device)) for images, labels in (train, test)
        )
        self.check_samples("CIFAR-10")

    @classmethod
    def of(cls, options: Cifar10Options) -> Self:
        """As ``gossipdp train cifar10`` trains it."""
        assert options.data is not None
        return cls(
            options.data,
            batch_size=options.batch_size,
            device=options.device,
            epochs=options.epochs,
        )

    @property
    def num_samples(self) -> int:
        return len(self.train[1])

    def make_model(self) -> nn.Module:
        net: Any = cifar_resnet18()  # torch's types lack memory_format
        moved: nn.Module = net.to(self.device, memory_format=torch.channels_last)
        return moved

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[Batch]:
        images, labels = self.train

        def gather(chosen: Tensor) -> Batch:
            rows = chosen.to(self.device)
            return images[rows], labels[rows]

        return BatchLoader(
            torch.arange(self.num_samples),
            batch_size=self.batch_size,
            seed=worker_seed(rank, num_workers, seed),
            gather=gather,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        images = self.normalize(random_crop_and_flip(images, PADDING))
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the test images that are classified correctly."""
        images, labels = (torch.split(each, EVALUATION_BATCH) for each in self.test)
        return self.accuracy(model, zip(images, labels, strict=True))


def read_cifar10(path: Path) -> tuple[Batch, Batch]:
    """The 50,000 training and 10,000 test images, or as many as the files hold.

    Raises:
        FileNotFoundError: it is not at ``path``; the message says how to get it.
        ValueError: a file is missing, or is none of CIFAR-10's.
    """
    for found in (path / FOLDER, path / ARCHIVE, path):
        if (found / TEST_FILE).is_file() or (found.is_file() and found.suffix == ".gz"):
            break
    else:
        where = path.absolute()
        problem = f"{where} holds no CIFAR-10" if path.exists() else f"there is no {where}"
        raise FileNotFoundError(f"{problem}. {HOW_TO_GET_IT}")
    contents = _from_folder(found) if found.is_dir() else _from_archive(found)
    missing = [name for name in (*TRAIN_FILES, TEST_FILE) if name not in contents]
    if missing:
        raise ValueError(f"{found} has no {missing[0]}; get the original archive again")
    batches = {name: _batch(f"{found}: {name}", content) for name, content in contents.items()}
    train = [batches[name] for name in TRAIN_FILES]
    images, labels = (torch.cat(each) for each in zip(*train, strict=True))
    return (images, labels), batches[TEST_FILE]


def _from_folder(folder: Path) -> dict[str, bytes]:
    paths = (folder / name for name in (*TRAIN_FILES, TEST_FILE))
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


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
    return contents


def _batch(where: str, content: bytes) -> Batch:
    """One file: for each image a byte for its label, then red, green and blue, row by row."""
    if not content or len(content) % (1 + IMAGE_BYTES):
        raise ValueError(f"{where} has no rows of {1 + IMAGE_BYTES:,} bytes; is it CIFAR-10?")
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_BYTES)
    if rows[:, 0].max() >= NUM_CLASSES:
        raise ValueError(f"{where} has a label that is not 0 to 9; is it CIFAR-10?")
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
    return images, torch.from_numpy(rows[:, 0].astype(np.int64))
