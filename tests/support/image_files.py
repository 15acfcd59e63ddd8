"""Small files in the formats of the image data sets, of images made up here."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SYNSETS = ("n01440764", "n01443537", "n02105855")


def cifar10_files(images_per_file: int, seed: int = 0) -> dict[str, bytes]:
    """Make the files of the folder: noise on a patch whose place and colour tell the class."""
    random = np.random.default_rng(seed)
    files = {}
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        labels = random.integers(10, size=images_per_file, dtype=np.uint8)
        images = random.integers(100, size=(images_per_file, 3, 32, 32), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            row = 6 * (label // 3)
            image[label % 3, row : row + 10, 8:24] += 150
        rows = np.concatenate([labels[:, None], images.reshape(images_per_file, -1)], axis=1)
        files[name] = rows.tobytes()
    return files


def write_cifar10(folder: Path, images_per_file: int = 8) -> Path:
    """Write the folder that cifar-10-binary.tar.gz holds."""
    path = folder / "cifar-10-batches-bin"
    path.mkdir()
    for name, content in cifar10_files(images_per_file).items():
        (path / name).write_bytes(content)
    return path


def fashion_mnist_arrays(num_train: int, num_test: int) -> dict[str, NDArray[np.uint8]]:
    """Make the arrays of the four files: noise, and as many bright rows as the class says."""
    random, arrays = np.random.default_rng(0), {}
    for part, count in (("train", num_train), ("t10k", num_test)):
        labels = random.integers(10, size=count, dtype=np.uint8)
        images = random.integers(100, size=(count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 : 4 + 2 * label] += 150
        arrays[f"{part}-images-idx3-ubyte"] = images
        arrays[f"{part}-labels-idx1-ubyte"] = labels
    return arrays


def idx(array: NDArray[np.uint8]) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_fashion_mnist(
    folder: Path, num_train: int = 8, num_test: int = 8, suffix: str = ".gz"
) -> None:
    for name, array in fashion_mnist_arrays(num_train, num_test).items():
        content = gzip.compress(idx(array)) if suffix == ".gz" else idx(array)
        (folder / f"{name}{suffix}").write_bytes(content)


def jpeg(label: int, number: int, kind: str = "JPEG", mode: str = "RGB") -> bytes:
    """Draw an image of class ``label``; its size depends on ``number``."""
    size = (60 + 7 * (number % 5), 48 + 5 * (number % 7))
    colour = [40, 40, 40]
    colour[label] = 200
    image = Image.new("RGB", size, (colour[0], colour[1], colour[2])).convert(mode)
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def write_imagenet(folder: Path, per_class: int = 4) -> None:
    """train/WNID and val/WNID, among them a PNG by content and an image in CMYK."""
    for part, count in (("train", per_class), ("val", 2)):
        for label, synset in enumerate(SYNSETS):
            directory = folder / part / synset
            directory.mkdir(parents=True)
            for number in range(count):
                kind = "PNG" if (label, number) == (2, 1) else "JPEG"
                mode = "CMYK" if (label, number) == (1, 1) else "RGB"
                content = jpeg(label, number, kind, mode)
                (directory / f"{synset}_{number}.JPEG").write_bytes(content)
