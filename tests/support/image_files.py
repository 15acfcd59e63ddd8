"""Small files in the formats of the image data sets, of images made up here."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SYNSETS = ("n01440764", "n01443537", "n02105855")


def write_cifar10(folder: Path, images_per_file: int = 8) -> Path:
    """Write the folder that cifar-10-binary.tar.gz holds, and return it.

    An image is noise on a patch whose place and colour tell the class.
    """
    random = np.random.default_rng(0)
    path = folder / "cifar-10-batches-bin"
    path.mkdir()
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        labels = random.integers(10, size=images_per_file, dtype=np.uint8)
        images = random.integers(100, size=(images_per_file, 3, 32, 32), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row = 6 * (label // 3)
            image[label % 3, row : row + 10, 8:24] += 150
        rows = np.concatenate([labels[:, None], images.reshape(images_per_file, -1)], axis=1)
        (path / name).write_bytes(rows.tobytes())
    return path


def idx(array: NDArray[np.uint8]) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_fashion_mnist(
    folder: Path, num_train: int = 8, num_test: int = 8, suffix: str = ".gz"
) -> dict[str, NDArray[np.uint8]]:
    """Write the four files, and return their arrays: noise, and bright rows that tell the class."""
    random, arrays = np.random.default_rng(0), {}
    for part, count in (("train", num_train), ("t10k", num_test)):
        labels = random.integers(10, size=count, dtype=np.uint8)
        images = random.integers(100, size=(count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 : 4 + 2 * label] += 150
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = labels
    for name, array in arrays.items():
        content = gzip.compress(idx(array)) if suffix == ".gz" else idx(array)
        (folder / f"{name}{suffix}").write_bytes(content)
    return arrays


def write_imagenet(folder: Path, per_class: int = 4) -> None:
    """Write train/WNID and val/WNID, a colour a class; one is a PNG by content, one in CMYK."""
    for part, count in (("train", per_class), ("val", 2)):
        for label, synset in enumerate(SYNSETS):
            directory = folder / part / synset
            directory.mkdir(parents=True)
            for number in range(count):
                colour = [40, 40, 40]
                colour[label] = 200
                size = 60 + 7 * (number % 5), 48 + 5 * (number % 7)
                image = Image.new("RGB", size, tuple(colour))
                if (label, number) == (1, 1):
                    image = image.convert("CMYK")
                kind = "PNG" if (label, number) == (2, 1) else "JPEG"
                image.save(directory / f"{synset}_{number}.JPEG", kind)
