"""What the two trainings of the paper share: its optimizer and schedule, augmentation, accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossipdp.parallel.schedule import parameter_groups
from gossipdp.tasks.workload import Workload, evaluating

Batch = tuple[Tensor, Tensor]
"""Images (batch, 3, height, width), uint8; labels (batch,), int64."""

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
WARMUP_EPOCHS = 5


class PaperRecipe(Workload[Batch]):
    """SGD with momentum; the rate that suits one worker is scaled by their number over 5 epochs.

    milestones: shares of the run after which the rate is divided by ten.
    mean, deviation: of the training images' three channels, as shares of the largest value.
    """

    default_batch_size = 128
    milestones: ClassVar[tuple[float, ...]]
    mean: ClassVar[tuple[float, float, float]]
    deviation: ClassVar[tuple[float, float, float]]

    def __init__(self, *, batch_size: int | None, device: str, epochs: int) -> None:
        super().__init__(batch_size=batch_size, device=device)
        self._epochs = epochs

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = parameter_groups(model, WEIGHT_DECAY)
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM)

    def rate_factor(self, progress: float, world_size: int) -> float:
        """Of one worker's rate (Goyal et al., arXiv 1706.02677, section 2.2)."""
        warmup = min(1.0, WARMUP_EPOCHS / self._epochs)
        through = min(1.0, progress / warmup)
        drops = sum(progress >= milestone for milestone in self.milestones)
        return float((1 + through * (world_size - 1)) * 0.1**drops)

    def normalize(self, images: Tensor) -> Tensor:
        """Bytes to floats: (value / 255 - mean) / deviation, channel by channel."""
        shape = (1, -1, 1, 1)
        mean = torch.tensor(self.mean, device=images.device).view(shape)
        deviation = torch.tensor(self.deviation, device=images.device).view(shape)
        return images.float().div_(255).sub_(mean).div_(deviation)

    def accuracy(self, model: nn.Module, batches: Iterable[Batch]) -> float:
        """Share of the images that the model classifies correctly."""
        right, count = torch.zeros((), dtype=torch.int64, device=self.device), 0
        with evaluating(model):
            for batch in batches:
                images, labels = (each.to(self.device, non_blocking=True) for each in batch)
                right += (model(self.normalize(images)).argmax(dim=1) == labels).sum()
                count += len(labels)
        return int(right) / count

    def check_samples(self, what: str) -> None:
        """Raise ValueError where the training data does not fill one batch."""
        if self.num_samples < self.batch_size:
            raise ValueError(
                f"{what}: {self.num_samples} training samples are less than one batch of "
                f"{self.batch_size}; choose a smaller --batch-size"
            )


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
