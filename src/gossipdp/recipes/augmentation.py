"""Random crops and flips of whole batches, where the batch lies: no loop over the images."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def random_crop_and_flip(images: Tensor, padding: int) -> Tensor:
    """Shift each image by up to ``padding`` pixels each way, black at the borders; flip half.

    The draws come from torch's generator of the images' device.

    Args:
        images: (batch, channels, height, width), any type.
        padding: black pixels at each border, of which the crop may take in some.

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


def normalize(images: Tensor, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Tensor:
    """Bytes to floats: (value / 255 - mean) / deviation, channel by channel.

    images: (batch, channels, height, width), uint8; the order in memory stays.
    """
    shape = (1, -1, 1, 1)
    scale = torch.tensor([1 / (255 * d) for d in deviation], device=images.device).view(shape)
    shift = torch.tensor(
        [-m / d for m, d in zip(mean, deviation, strict=True)], device=images.device
    ).view(shape)
    return images.float().mul_(scale).add_(shift)


def random_boxes(
    widths: Tensor,
    heights: Tensor,
    *,
    areas: tuple[float, float] = (0.08, 1.0),
    ratios: tuple[float, float] = (3 / 4, 4 / 3),
    num_tries: int = 10,
) -> Tensor:
    r"""A random part of each image, to be scaled to the size of the network's input.

    A share of the area is drawn evenly from ``areas`` and the ratio of width to height evenly in
    its logarithm from ``ratios``; what does not fit is drawn again. Where no try fits, it is the
    largest box of an allowed ratio, in the middle.

    Args:
        widths, heights: of the images, in pixels; (batch,).
        areas: least and largest share of the image's area.
        ratios: least and largest ratio of width to height.
        num_tries: how often to draw.

    Returns:
        (batch, 4), float: left, upper, right, lower edge in pixels.

    References:
        Szegedy et al., *Going deeper with convolutions*, 2015, section 6; with the ranges that
        Goyal et al., 2017, use.
    """
    widths, heights = widths.double()[:, None], heights.double()[:, None]
    shape = (len(widths), num_tries)
    area = widths * heights * torch.empty(shape, dtype=torch.double).uniform_(*areas)
    logarithms = math.log(ratios[0]), math.log(ratios[1])
    ratio = torch.empty(shape, dtype=torch.double).uniform_(*logarithms).exp()
    box_widths, box_heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (box_widths <= widths) & (box_heights <= heights)
    fits &= (box_widths >= 1) & (box_heights >= 1)
    first = fits.byte().argmax(dim=1, keepdim=True)
    found = fits.any(dim=1, keepdim=True)
    box_widths, box_heights = box_widths.gather(1, first), box_heights.gather(1, first)
    left = (torch.rand_like(widths) * (widths - box_widths + 1)).floor()
    upper = (torch.rand_like(heights) * (heights - box_heights + 1)).floor()
    # Where none fits: as much of the middle as an allowed ratio leaves.
    least, most = ratios
    middle_widths = torch.minimum(widths, (heights * most).round())
    middle_heights = torch.minimum(heights, (widths / least).round())
    box_widths = torch.where(found, box_widths, middle_widths)
    box_heights = torch.where(found, box_heights, middle_heights)
    left = torch.where(found, left, ((widths - middle_widths) / 2).floor())
    upper = torch.where(found, upper, ((heights - middle_heights) / 2).floor())
    return torch.cat([left, upper, left + box_widths, upper + box_heights], dim=1)
