"""The paper's two trainings, CIFAR-10 and ImageNet, and Fashion-MNIST, for one core a worker."""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gossipdp.parallel.schedule import parameter_groups
from gossipdp_lab.tasks import Cifar10Options, FashionMnistOptions, ImageNetOptions, TrainOptions
from gossipdp_lab.tasks.resnet import cifar_resnet18, fashion_resnet8, resnet50
from gossipdp_lab.tasks.workload import BatchLoader, Workload, evaluating, worker_seed

Batch = tuple[Tensor, Tensor]
"""Images (batch, channels, height, width), uint8; labels (batch,), int64."""

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
RULE_BATCH = 128
"""The batch of that learning rate; it is in proportion to the batch."""
WARMUP_EPOCHS = 5

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR10_ROW = 1 + 3 * 32 * 32
HOW_TO_GET_CIFAR10 = (
    "CIFAR-10 is not downloaded for you: get the binary version, cifar-10-binary.tar.gz (170 MB), "
    "from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it (tar xf), and name the folder "
    f"where {CIFAR10_FOLDER} lies with --data"
)

HOW_TO_GET_FASHION = (
    "install Debian's package dataset-fashion-mnist, or name with --data a folder that holds the "
    "four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, as they are or with .gz"
)

SIZE = 224
SHORTER_SIDE = 256 / 224
"""For evaluation the shorter side is scaled to this times the size, then the middle is taken."""

AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Bounds of a random box: its share of the image's area, and its width over its height."""

HOW_TO_GET_IMAGENET = (
    "ImageNet is not downloaded for you: register at https://image-net.org, get the archives of "
    "ILSVRC 2012, and unpack them to train/WNID/NAME.JPEG and val/WNID/NAME.JPEG in a folder that "
    "you name with --data, such as train/n01440764/n01440764_10026.JPEG"
)


class PaperRecipe(Workload[Batch]):
    """SGD with momentum; a rate of 0.1 for 128 samples of a step of all workers, over 5 epochs.

    milestones: shares of the run after which the rate is divided by ten.
    warmup_epochs: epochs over which the rate rises.
    mean, deviation: of the training images' channels, as shares of the largest value.
    """

    milestones: tuple[float, ...]
    warmup_epochs: float = WARMUP_EPOCHS
    mean: ClassVar[tuple[float, ...]]
    deviation: ClassVar[tuple[float, ...]]

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options.batch_size, device=options.device)
        self._epochs = options.epochs

    def make_model(self) -> nn.Module:
        net: Any = self.make_network()  # torch's types lack memory_format
        moved: nn.Module = net.to(self.device, memory_format=torch.channels_last)
        return moved

    @abstractmethod
    def make_network(self) -> nn.Module:
        """Make the network, on the CPU."""

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.SGD(
            groups, lr=LEARNING_RATE * self.batch_size / RULE_BATCH, momentum=MOMENTUM
        )

    def rate_factor(self, progress: float, world_size: int) -> float:
        """Return the factor on one worker's rate (Goyal et al., arXiv 1706.02677, section 2.2)."""
        warmup = min(1.0, self.warmup_epochs / self._epochs)
        through = min(1.0, progress / warmup)
        drops = sum(progress >= milestone for milestone in self.milestones)
        return float((1 + through * (world_size - 1)) * 0.1**drops)

    @abstractmethod
    def augment(self, images: Tensor) -> Tensor:
        """Change a training batch at random before the network sees it."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = (each.to(self.device, non_blocking=True) for each in batch)
        return F.cross_entropy(model(self.normalize(self.augment(images))), labels)

    def normalize(self, images: Tensor) -> Tensor:
        """Turn bytes into floats: (value / 255 - mean) / deviation, channel by channel."""
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.mean, device=images.device).view(shape)
        deviation = torch.tensor(self.deviation, device=images.device).view(shape)
        return images.float().div_(255).sub_(mean).div_(deviation)

    def accuracy(self, model: nn.Module, batches: Iterable[Batch]) -> float:
        """Return the share of the images that the model classifies correctly."""
        right, count = torch.zeros((), dtype=torch.int64, device=self.device), 0
        with evaluating(model):
            for batch in batches:
                images, labels = (each.to(self.device, non_blocking=True) for each in batch)
                right += (model(self.normalize(images)).argmax(dim=1) == labels).sum()
                count += len(labels)
        return int(right) / count


class SmallImages(PaperRecipe):
    """Images that are all kept in memory, on the worker's device; crop by 4 pixels, and flip.

    The rate falls after half and after three quarters of the run, as epochs 50 and 75 of 100.
    """

    metric_name = "test_accuracy"
    milestones = (0.5, 0.75)

    def __init__(self, options: TrainOptions, train: Batch, test: Batch) -> None:
        super().__init__(options)
        self.train, self.test = (
            (images.to(self.device), labels.to(self.device)) for images, labels in (train, test)
        )
        self.check_one_batch()

    @property
    def num_samples(self) -> int:
        return len(self.train[1])

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[Batch]:
        def gather(chosen: Tensor) -> Batch:
            rows = chosen.to(self.device)
            return self.train[0][rows], self.train[1][rows]

        return BatchLoader(
            torch.arange(self.num_samples),
            batch_size=self.batch_size,
            seed=worker_seed(rank, num_workers, seed),
            gather=gather,
        )

    def augment(self, images: Tensor) -> Tensor:
        return random_crop_and_flip(images, padding=4)

    def evaluate(self, model: nn.Module) -> float:
        """Return the share of the test images that are classified correctly."""
        images, labels = (torch.split(each, 500) for each in self.test)
        return self.accuracy(model, zip(images, labels, strict=True))


@final
class Cifar10(SmallImages):
    """ResNet-18 with the stem for small images, SGD, crop and flip; see ``Cifar10Options``.

    The real images take 180 MB of memory.
    """

    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(self, options: Cifar10Options) -> None:
        super().__init__(options, *read_cifar10(options.data))

    def make_network(self) -> nn.Module:
        return cifar_resnet18()


def read_cifar10(path: Path) -> tuple[Batch, Batch]:
    """Read the 50,000 training and 10,000 test images, or as many as the files hold.

    Each file has, for each image, a byte for its label, then red, green and blue, row by row.

    Raises:
        FileNotFoundError: there is no CIFAR-10 at ``path``; the message says how to get it.
        ValueError: a file does not have the format of CIFAR-10.
    """
    folder = path / CIFAR10_FOLDER if (path / CIFAR10_FOLDER).is_dir() else path
    batches = []
    for file in (folder / name for name in CIFAR10_FILES):
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file.absolute()}. {HOW_TO_GET_CIFAR10}")
        content = np.fromfile(file, np.uint8)
        if not len(content) or len(content) % CIFAR10_ROW:
            raise ValueError(f"{file} has no rows of {CIFAR10_ROW:,} bytes; is it CIFAR-10?")
        rows = content.reshape(-1, CIFAR10_ROW)
        if rows[:, 0].max() >= 10:
            raise ValueError(f"{file} has a label that is not 0 to 9; is it CIFAR-10?")
        images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy())
        batches.append((images, torch.from_numpy(rows[:, 0].astype(np.int64))))
    images, labels = (torch.cat(each) for each in zip(*batches[:-1], strict=True))
    return (images, labels), batches[-1]


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


def read_fashion_mnist(folder: Path) -> tuple[Batch, Batch]:
    """Read the 60,000 training and 10,000 test images, or as many as the files hold.

    Raises:
        FileNotFoundError: a file is missing; the message says how to get it.
        ValueError: a file does not have the format of Fashion-MNIST.
    """
    batches = []
    for part in ("train", "t10k"):
        images = read_idx(_idx_file(folder, f"{part}-images-idx3-ubyte"), num_dimensions=3)
        labels = read_idx(_idx_file(folder, f"{part}-labels-idx1-ubyte"), num_dimensions=1)
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


def _idx_file(folder: Path, name: str) -> Path:
    """Return the file of this name, compressed or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is no {(folder / name).absolute()} or .gz: {HOW_TO_GET_FASHION}"
    )


@final
class ImageNet(PaperRecipe):
    """ResNet-50, SGD, random boxes and flips; see ``ImageNetOptions``."""

    metric_name = "validation_accuracy"
    milestones = (30 / 90, 60 / 90, 80 / 90)
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self, options: ImageNetOptions) -> None:
        super().__init__(options)
        self._loader_processes = options.loader_processes
        train, validation = options.data / "train", options.data / "val"
        for folder in (train, validation):
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no {folder.absolute()}. {HOW_TO_GET_IMAGENET}")
        self.synsets = sorted(n for n in os.listdir(train) if re.fullmatch(r"n\d{8}", n))
        self.train = JpegFolders(train, self.synsets, random_box)
        self.validation = JpegFolders(validation, self.synsets, middle_box)
        self.check_one_batch()

    @property
    def num_samples(self) -> int:
        return len(self.train)

    def make_network(self) -> nn.Module:
        return resnet50(len(self.synsets))

    def train_loader(self, rank: int, num_workers: int, seed: int) -> DataLoader[Batch]:
        generator = torch.Generator().manual_seed(worker_seed(rank, num_workers, seed))
        return self._loader(self.train, shuffle=True, generator=generator, drop_last=True)

    def augment(self, images: Tensor) -> Tensor:
        return random_flip(images)

    def evaluate(self, model: nn.Module) -> float:
        """Return the share of validation images that are classified correctly by their middle."""
        return self.accuracy(model, self._loader(self.validation))

    def _loader(self, data: JpegFolders, **options: Any) -> DataLoader[Batch]:
        return DataLoader(data, self.batch_size, num_workers=self._loader_processes, **options)


class JpegFolders(Dataset[Batch]):
    """Images of root/WNID/NAME.JPEG, uint8; the label is the WNID's place in order.

    ``choose_box`` returns the part of an image of that width and height.
    """

    def __init__(
        self, root: Path, synsets: Sequence[str], choose_box: Callable[[int, int], Box]
    ) -> None:
        names: list[bytes] = []
        labels: list[int] = []
        for label, synset in enumerate(synsets):
            files = sorted((root / synset).glob("*.JPEG"))
            names += [os.fsencode(f"{synset}/{file.name}") for file in files]
            labels += [label] * len(files)
        if not names:
            raise ValueError(f"{root} holds no images as WNID/NAME.JPEG, such as n01440764/x.JPEG")
        self._root = root
        # One array in place of a million strings: loader processes share its memory.
        self._names: NDArray[np.bytes_] = np.array(names, dtype=np.bytes_)
        self._labels = torch.tensor(labels)
        self._choose_box = choose_box

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> Batch:
        path = self._root / os.fsdecode(bytes(self._names[number]))
        try:
            # One of the original files is a PNG by content.
            with Image.open(path, formats=("JPEG", "PNG")) as image:
                pixels = scaled_part(image, self._choose_box(*image.size), SIZE)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        return torch.tensor(pixels).permute(2, 0, 1), self._labels[number]


def random_crop_and_flip(images: Tensor, padding: int) -> Tensor:
    """Shift each image by up to ``padding`` pixels each way, black at the borders; flip half.

    The draws come from torch's generator of the images' device.

    Args:
        images: (batch, channels, height, width), any type.
        padding: black pixels at each border, some of which may lie in the crop.

    Returns:
        Images of the same shape and type, in memory in the order of channels last.

    References:
        He et al., 2016, section 4.2: 4 pixels on CIFAR-10.
    """
    batch, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, batch, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    flips = torch.rand(batch, 1, device=device) < 0.5
    columns = torch.where(flips, columns.flip(1), columns)
    which = torch.arange(batch, device=device)[:, None, None]
    # Three index tensors around a slice: the sliced dimension, channels, comes out last.
    crops = padded[which, :, rows[:, :, None], columns[:, None, :]]
    return crops.permute(0, 3, 1, 2)


def random_flip(images: Tensor) -> Tensor:
    """Mirror each image, left to right, with probability one half; (batch, ..., width)."""
    flips = torch.rand(len(images), device=images.device) < 0.5
    return torch.where(flips.view(-1, *[1] * (images.dim() - 1)), images.flip(-1), images)


def random_box(width: int, height: int) -> Box:
    """Draw a random part of an image, to be scaled to the size of the network's input.

    A share of the area is drawn evenly from ``AREAS`` and the ratio of width to height evenly in
    its logarithm from ``RATIOS``; a box that does not fit is drawn again. If none of ten tries
    fits, it is the largest box of an allowed ratio, in the middle.

    References:
        Szegedy et al., *Going deeper with convolutions*, 2015, section 6; with the ranges that
        Goyal et al., 2017, use.
    """
    for _ in range(10):
        area, logarithm, across, down = torch.rand(4, dtype=torch.float64).tolist()
        area = width * height * (AREAS[0] + area * (AREAS[1] - AREAS[0]))
        least, most = (math.log(ratio) for ratio in RATIOS)
        ratio = math.exp(least + logarithm * (most - least))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 1 <= box_width <= width and 1 <= box_height <= height:
            left = math.floor(across * (width - box_width + 1))
            upper = math.floor(down * (height - box_height + 1))
            return left, upper, left + box_width, upper + box_height
    box_width = min(width, round(height * RATIOS[1]))
    box_height = min(height, round(width / RATIOS[0]))
    left, upper = (width - box_width) // 2, (height - box_height) // 2
    return left, upper, left + box_width, upper + box_height


def middle_box(width: int, height: int) -> Box:
    """Return the middle square that is evaluated: 224 wide if the shorter side is scaled to 256."""
    side = min(width, height) / SHORTER_SIDE
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def scaled_part(image: Image.Image, box: Box, size: int) -> NDArray[np.uint8]:
    """Return the part of an image within ``box``, as (size, size, 3).

    A JPEG is decoded at a half, a quarter or an eighth of its size if that is large enough.
    """
    width, height = image.size
    needed = size / min(box[2] - box[0], box[3] - box[1])
    if needed < 1:
        image.draft("RGB", (math.ceil(width * needed), math.ceil(height * needed)))
    across, down = image.size[0] / width, image.size[1] / height
    left, upper = box[0] * across, box[1] * down
    right, lower = min(image.size[0], box[2] * across), min(image.size[1], box[3] * down)
    part = image.convert("RGB").resize(
        (size, size), Image.Resampling.BILINEAR, box=(left, upper, right, lower)
    )
    return np.asarray(part)
