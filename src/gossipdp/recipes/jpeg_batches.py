"""Batches of image files: read, decoded and scaled to one size, in processes of a DataLoader."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from gossipdp.recipes.augmentation import random_boxes

if TYPE_CHECKING:
    from gossipdp.recipes.imagenet_data import ImageSet

Batch = tuple[Tensor, Tensor]
"""Images (batch, 3, size, size), uint8, channels last in memory; labels (batch,), int64."""

SHORTER_SIDE = 256 / 224
"""For evaluation the shorter side is scaled to this times the size before the middle is taken."""


class JpegBatches(Dataset[Batch]):
    """Whole batches by the numbers of their images.

    ``part`` says what is taken of each image: ``random``: a box of random area, shape and place;
    ``middle``: the square in the middle that is left when the shorter side is 256 and ``size`` 224.
    """

    def __init__(self, images: ImageSet, *, size: int, part: Literal["random", "middle"]) -> None:
        self._images = images
        self._labels = torch.from_numpy(images.labels)
        self._size = size
        self._part = part

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, numbers: list[int]) -> Batch:
        """What a DataLoader fetches at once: the batch as a whole."""
        size = self._size
        pixels = np.empty((len(numbers), size, size, 3), np.uint8)
        opened = [self._open(number) for number in numbers]
        boxes = self._boxes(torch.tensor([image.size for image in opened]))
        for image, box, room, number in zip(opened, boxes.tolist(), pixels, numbers, strict=True):
            try:
                room[...] = scaled_part(image, (box[0], box[1], box[2], box[3]), size)
            except OSError as error:
                raise ValueError(f"{self._images.store.name(number)}: {error}") from error
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self._labels[numbers]

    def _open(self, number: int) -> Image.Image:
        """The image, of which only the header was read."""
        content = io.BytesIO(self._images.store.read(number))
        try:
            # One of the files is a PNG by content.
            return Image.open(content, formats=("JPEG", "PNG"))
        except OSError as error:
            raise ValueError(f"{self._images.store.name(number)} is no JPEG: {error}") from error

    def _boxes(self, sizes: Tensor) -> Tensor:
        if self._part == "random":
            return random_boxes(sizes[:, 0], sizes[:, 1])
        sides = sizes.amin(dim=1, keepdim=True).double() / SHORTER_SIDE
        corners = (sizes - sides) / 2
        return torch.cat([corners, corners + sides], dim=1)


def scaled_part(
    image: Image.Image, box: tuple[float, float, float, float], size: int
) -> NDArray[np.uint8]:
    """The part of an image within ``box`` (left, upper, right, lower), as (size, size, 3).

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
