"""Fashion-MNIST with the paper's settings for CIFAR-10, and a ResNet that one core can train."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gossipdp_lab.tasks import Cifar10Options, FashionMnistOptions
from gossipdp_lab.tasks.images import WARMUP_EPOCHS, Batch, ResNet, SmallImages

PARTS = ("train", "t10k")
IMAGES, LABELS = "{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"
HOW_TO_GET = (
    "install Debian's package dataset-fashion-mnist, or name with --data a folder that holds the "
    "four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, as they are or with .gz"
)


@final
class FashionMnist(SmallImages):
    """ResNet-8, SGD, crop and flip; see ``FashionMnistOptions``.

    As a share of the run, the warm-up is as long as that of CIFAR-10.
    """

    mean, deviation = (0.2860,), (0.3530,)

    def __init__(self, options: FashionMnistOptions) -> None:
        super().__init__(options, *read_fashion_mnist(options.data))
        self.warmup_epochs = WARMUP_EPOCHS * options.epochs / Cifar10Options.epochs

    def make_network(self) -> nn.Module:
        return fashion_resnet8()


def fashion_resnet8() -> ResNet:
    """Make ResNet-8 for images of 28 by 28 in one channel, with ten classes: 77,754 parameters.

    It has three layers of one block each, of 16, 32 and 64 channels, as the smallest of the
    networks for small images in He et al., 2016, section 4.2; with a stem of stride 2, so that a
    gradient costs a quarter.
    """
    stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
    return ResNet((1, 1, 1), 10, stem=stem)


def read_fashion_mnist(folder: Path) -> tuple[Batch, Batch]:
    """Read the 60,000 training and 10,000 test images, or as many as the files hold.

    Raises:
        FileNotFoundError: a file is missing; the message says how to get it.
        ValueError: a file does not have the format of Fashion-MNIST.
    """
    batches = []
    for part in PARTS:
        images, labels = (
            read_idx(_find(folder, name.format(part)), num_dimensions=dimensions)
            for name, dimensions in ((IMAGES, 3), (LABELS, 1))
        )
        if len(images) != len(labels):
            raise ValueError(
                f"{folder} has {len(images):,} images but {len(labels):,} labels of {part}; are "
                "they of one data set?"
            )
        if images.shape[1:] != (28, 28) or not len(labels) or labels.max() >= 10:
            raise ValueError(
                f"{folder} holds no images of 28 by 28 pixels with labels 0 to 9 as {part}; is it "
                "Fashion-MNIST?"
            )
        batches.append((torch.tensor(images).unsqueeze(1), torch.tensor(labels.astype(np.int64))))
    return batches[0], batches[1]


def read_idx(path: Path, *, num_dimensions: int) -> NDArray[np.uint8]:
    """Read an array of bytes from a file in the IDX format, which may be compressed by gzip.

    Two zero bytes, 8 for unsigned bytes, the number of dimensions; then the dimensions, four bytes
    each, the most significant first; then the values.

    Raises:
        ValueError: the file is no such array, or not whole.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be decompressed ({error}): get it again") from error
    header = 4 + 4 * num_dimensions
    shape = np.frombuffer(content[4:header], ">u4") if len(content) >= header else np.zeros(0)
    is_idx = content[:4] == bytes((0, 0, 8, num_dimensions)) and len(shape) == num_dimensions
    if not is_idx or len(content) != header + int(shape.prod(dtype=np.uint64)):
        raise ValueError(
            f"{path} is no whole IDX file of bytes in {num_dimensions} dimension(s): get it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape.astype(int))


def _find(folder: Path, name: str) -> Path:
    """Return the file of this name, compressed or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {(folder / name).absolute()} or .gz: {HOW_TO_GET}")
