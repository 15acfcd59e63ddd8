"""ResNet-18 for images of 32 by 32, and the standard ResNet-50."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

CIFAR_RESNET18_PARAMETERS = 11_173_962
RESNET50_PARAMETERS = 25_557_032


def cifar_resnet18(num_classes: int = 10) -> ResNet:
    """ResNet-18 with the stem for small images: 3 by 3, stride 1, nothing pooled before the blocks.

    With ten classes it has 11,173,962 parameters.

    >>> import torch
    >>> cifar_resnet18()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    return ResNet((2, 2, 2, 2), num_classes, small_images=True)


def resnet50(num_classes: int = 1000) -> ResNet:
    """ResNet-50 for images of about 224 by 224; with 1000 classes it has 25,557,032 parameters.

    In its bottlenecks the 3 by 3 convolution has the stride, as in torchvision and in what Goyal et
    al. (arXiv 1706.02677) train; in the article of 2015 the first 1 by 1 convolution has it.
    """
    return ResNet((3, 4, 6, 3), num_classes, bottleneck=True)


@final
class ResNet(nn.Module):
    """He et al., *Deep residual learning* (CVPR 2016): (batch, 3, height, width) to logits.

    The names in ``state_dict()`` are torchvision's, so that either loads what the other saved.
    Convolutions start normally distributed with variance 2 / (outputs · kernel area), norms as the
    identity, but for the last of each block, which starts at zero: the block passes its shortcut on
    (Goyal et al., 2017, section 5.1). Otherwise the first steps at the paper's rate blow up.

    Args:
        depths: how many blocks each layer has.
        num_classes: how many logits.
        bottleneck: the kind of blocks.
        small_images: a 3 by 3 stem of stride 1 without pooling, in place of 7 by 7 of stride 2.
    """

    def __init__(
        self,
        depths: tuple[int, int, int, int],
        num_classes: int,
        *,
        bottleneck: bool = False,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        if small_images:
            self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        layers: list[nn.Module] = []
        for number, depth in enumerate(depths):
            blocks: list[nn.Module] = []
            for index in range(depth):
                stride = 2 if number and not index else 1
                block = Block(channels, 64 << number, stride, bottleneck=bottleneck)
                blocks.append(block)
                channels = block.num_outputs
            layers.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (batch, ``num_classes``)."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


@final
class Block(nn.Module):
    """Two 3 by 3 convolutions beside a shortcut; a bottleneck: 1 by 1, 3 by 3 and 1 by 1."""

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.num_outputs = 4 * width if bottleneck else width
        # Of each convolution: channels in and out, size and stride.
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
