"""The residual networks of the image recipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

CIFAR_RESNET18_PARAMETERS = 11_173_962


def cifar_resnet18(num_classes: int = 10) -> ResNet:
    """Make ResNet-18 with the stem for small images: 3 by 3, stride 1, no pooling after it.

    With ten classes it has 11,173,962 parameters.
    """
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    return ResNet((2, 2, 2, 2), num_classes, stem=stem)


def resnet50(num_classes: int = 1000) -> ResNet:
    """Make ResNet-50 for images of 224 by 224; with 1000 classes it has 25,557,032 parameters.

    In its bottlenecks the 3 by 3 convolution has the stride, as in torchvision and in what Goyal et
    al. (arXiv 1706.02677) train; in the article of 2015 the first 1 by 1 convolution has it.
    """
    stem = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    return ResNet((3, 4, 6, 3), num_classes, stem=stem, pool=pool, bottleneck=True)


def fashion_resnet8() -> ResNet:
    """Make ResNet-8 for images of 28 by 28 in one channel, with ten classes: 77,754 parameters.

    It has three layers of one block each, of 16, 32 and 64 channels, as the smallest of the
    networks for small images in He et al., 2016, section 4.2; with a stem of stride 2, so that a
    gradient costs a quarter.
    """
    stem = nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False)
    return ResNet((1, 1, 1), 10, stem=stem)


@final
class ResNet(nn.Module):
    """He et al., *Deep residual learning* (CVPR 2016), from images to logits.

    The names in ``state_dict()`` are torchvision's, so that either loads what the other saved.
    Convolutions start normally distributed with variance 2 / (outputs · kernel area), norms as the
    identity, except the last of each block, which starts at zero: the block then passes its
    shortcut on (Goyal et al., 2017, section 5.1). Otherwise the first steps at the paper's rate
    blow up.

    Args:
        depths: number of blocks of each layer. Each layer but the first halves the image, and has
            twice as many channels as the one before.
        num_classes: number of logits.
        stem: the first convolution; the first layer has as many channels as it gives.
        pool: what follows the stem's norm; None: nothing.
        bottleneck: the kind of blocks.
    """

    def __init__(
        self,
        depths: Sequence[int],
        num_classes: int,
        *,
        stem: nn.Conv2d,
        pool: nn.Module | None = None,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        channels = width = stem.out_channels
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = pool or nn.Identity()
        self.num_layers = len(depths)
        for number, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for index in range(depth):
                stride = 2 if number and not index else 1
                block = Block(channels, width << number, stride, bottleneck=bottleneck)
                blocks.append(block)
                channels = block.num_outputs
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (batch, ``num_classes``)."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, self.num_layers + 1):
            features = self.get_submodule(f"layer{number}")(features)
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


@final
class Block(nn.Module):
    """Two 3 by 3 convolutions beside a shortcut; a bottleneck: 1 by 1, 3 by 3 and 1 by 1."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.num_outputs = 4 * width if bottleneck else width
        # Channels in and out, size and stride of each convolution.
        shapes = [(channels, width, 3, stride), (width, width, 3, 1)]
        if bottleneck:
            shapes = [
                (channels, width, 1, 1),
                (width, width, 3, stride),
                (width, self.num_outputs, 1, 1),
            ]
        self.num_convolutions = len(shapes)
        for number, (inputs, outputs, size, step) in enumerate(shapes, start=1):
            convolution = nn.Conv2d(inputs, outputs, size, step, padding=size // 2, bias=False)
            norm = nn.BatchNorm2d(outputs)
            self.add_module(f"conv{number}", convolution)
            self.add_module(f"bn{number}", norm)
        nn.init.zeros_(norm.weight)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or channels != self.num_outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, self.num_outputs, 1, stride, bias=False),
                nn.BatchNorm2d(self.num_outputs),
            )

    def forward(self, features: Tensor) -> Tensor:
        residual = features
        for number in range(1, self.num_convolutions + 1):
            residual = self.get_submodule(f"conv{number}")(residual)
            residual = self.get_submodule(f"bn{number}")(residual)
            if number < self.num_convolutions:
                residual = self.relu(residual)
        shortcut = features if self.downsample is None else self.downsample(features)
        result: Tensor = self.relu(residual + shortcut)
        return result
