"""The paper's second training: ResNet-50 on ImageNet, from folders of JPEG files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gossipdp.tasks.images import Batch, PaperRecipe, random_flip
from gossipdp.tasks.options import ImageNetOptions
from gossipdp.tasks.resnet import resnet50
from gossipdp.tasks.workload import worker_seed

SIZE = 224
SHORTER_SIDE = 256 / 224
"""For evaluation the shorter side is scaled to this times the size before the middle is taken."""

AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of a random box: its share of the image's area, and its width over its height."""

HOW_TO_GET_IT = (
    "ImageNet is not downloaded for you: register at https://image-net.org, get the archives of "
    "ILSVRC 2012, and unpack them to train/WNID/NAME.JPEG and val/WNID/NAME.JPEG in a folder that "
    "you name with --data, such as train/n01440764/n01440764_10026.JPEG"
)

_SYNSET = re.compile(r"n\d{8}")

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


@final
class ImageNet(PaperRecipe):
    """ResNet-50, SGD, random boxes and flips; see ``ImageNetOptions``."""

    metric_name = "validation_accuracy"
    milestones = (30 / 90, 60 / 90, 80 / 90)
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(
        self, data: Path, *, batch_size: int, device: str, epochs: int, loader_processes: int
    ) -> None:
        super().__init__(batch_size=batch_size, device=device, epochs=epochs)
        self._loader_processes = loader_processes
        for folder in (data / "train", data / "val"):
            if not folder.is_dir():
                raise FileNotFoundError(f"there is no {folder.absolute()}. {HOW_TO_GET_IT}")
        names = os.listdir(data / "train")
        self.synsets = sorted(name for name in names if _SYNSET.fullmatch(name))
        self.train = JpegFolders(data / "train", self.synsets, part="random")
        self.validation = JpegFolders(data / "val", self.synsets, part="middle")
        self.check_samples("ImageNet")

    @classmethod
    def of(cls, options: ImageNetOptions) -> Self:
        """As ``gossipdp train imagenet`` trains it."""
        assert options.data is not None
        return cls(
            options.data,
            batch_size=options.batch_size,
            device=options.device,
            epochs=options.epochs,
            loader_processes=options.loader_processes,
        )

    @property
    def num_samples(self) -> int:
        return len(self.train)

    def make_model(self) -> nn.Module:
        net: Any = resnet50(len(self.synsets))  # torch's types lack memory_format
        moved: nn.Module = net.to(self.device, memory_format=torch.channels_last)
        return moved

    def train_loader(self, rank: int, num_workers: int, seed: int) -> DataLoader[Batch]:
        generator = torch.Generator().manual_seed(worker_seed(rank, num_workers, seed))
        return self._loader(self.train, shuffle=True, generator=generator, drop_last=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = (each.to(self.device, non_blocking=True) for each in batch)
        return F.cross_entropy(model(self.normalize(random_flip(images))), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the validation images that are classified correctly, of the middle of each."""
        return self.accuracy(model, self._loader(self.validation))

    def _loader(self, data: JpegFolders, **options: Any) -> DataLoader[Batch]:
        return DataLoader(
            data,
            self.batch_size,
            num_workers=self._loader_processes,
            collate_fn=_as_it_is,
            **options,
        )


class JpegFolders(Dataset[Batch]):
    """Images of root/WNID/NAME.JPEG, in whole batches; the label is the WNID's place in order.

    ``part`` says what is taken of each image: ``random``: a box of random area, shape and place;
    ``middle``: the square in the middle that is left when the shorter side is 256 and ``size`` 224.
    """

    def __init__(
        self,
        root: Path,
        synsets: Sequence[str],
        *,
        part: Literal["random", "middle"],
        size: int = SIZE,
    ) -> None:
        names: list[bytes] = []
        labels: list[int] = []
        for label, synset in enumerate(synsets):
            if (root / synset).is_dir():
                files = sorted(each for each in os.listdir(root / synset) if each.endswith(".JPEG"))
                names += [os.fsencode(f"{synset}/{each}") for each in files]
                labels += [label] * len(files)
        if not names:
            raise ValueError(f"{root} holds no images as WNID/NAME.JPEG, such as n01440764/x.JPEG")
        self._root = root
        # One array in place of a million strings: loader processes share its memory.
        self._names: NDArray[np.bytes_] = np.array(names, dtype=np.bytes_)
        self._labels = torch.tensor(labels)
        self._part = part
        self._size = size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, numbers: list[int]) -> Batch:
        """What a DataLoader fetches at once: the batch as a whole, channels last in memory."""
        size = self._size
        pixels = np.empty((len(numbers), size, size, 3), np.uint8)
        for room, number in zip(pixels, numbers, strict=True):
            path = self._root / os.fsdecode(bytes(self._names[number]))
            try:
                # One of the original files is a PNG by content.
                with Image.open(path, formats=("JPEG", "PNG")) as image:
                    box = (random_box if self._part == "random" else middle_box)(*image.size)
                    room[...] = scaled_part(image, box, size)
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error}") from error
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self._labels[numbers]


def random_box(width: int, height: int) -> Box:
    """A random part of an image, to be scaled to the size of the network's input.

    A share of the area is drawn evenly from ``AREAS`` and the ratio of width to height evenly in
    its logarithm from ``RATIOS``; what does not fit is drawn again. Where none of ten tries fits,
    it is the largest box of an allowed ratio, in the middle.

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
    """The square in the middle that evaluation looks at."""
    side = min(width, height) / SHORTER_SIDE
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def scaled_part(image: Image.Image, box: Box, size: int) -> NDArray[np.uint8]:
    """The part of an image within ``box``, as (size, size, 3).

    A JPEG is decoded at a half, a quarter or an eighth where that is not less than what is needed.
    """
    width, height = image.size
    needed = size / min(box[2] - box[0], box[3] - box[1])
    if needed < 1:
        image.draft("RGB", (math.ceil(width * needed), math.ceil(height * needed)))
    new_width, new_height = image.size
    part = image.convert("RGB").resize(
        (size, size),
        Image.Resampling.BILINEAR,
        box=(
            box[0] * new_width / width,
            box[1] * new_height / height,
            min(new_width, box[2] * new_width / width),
            min(new_height, box[3] * new_height / height),
        ),
    )
    return np.asarray(part)


def _as_it_is(batch: Any) -> Any:
    return batch
