"""The paper's second training: ResNet-50 on ImageNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gossipdp.recipes.augmentation import normalize, random_flip
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.imagenet_data import DEVIATION, MEAN, open_imagenet
from gossipdp.recipes.jpeg_batches import Batch, JpegBatches
from gossipdp.recipes.options import ImageNetOptions
from gossipdp.recipes.paper_recipe import PaperRecipe
from gossipdp.recipes.recipe import check_samples, worker_device
from gossipdp.recipes.resnet import resnet50
from gossipdp.workloads.workload import evaluating

SIZE = 224


@final
class ImageNet(PaperRecipe[Batch]):
    """ResNet-50, SGD, random boxes and flips; see ``ImageNetOptions``."""

    metric_name = "validation_accuracy"
    milestones = (30 / 90, 60 / 90, 80 / 90)

    def __init__(self, options: ImageNetOptions) -> None:
        super().__init__(worker_device(options.device), options.epochs)
        assert options.data is not None
        files = open_imagenet(options.data)
        self.num_classes = len(files.synsets)
        self.train = JpegBatches(files.train, size=SIZE, part="random")
        self.validation = JpegBatches(files.validation, size=SIZE, part="middle")
        check_samples("ImageNet", len(self.train), options.batch_size)
        self._options = options

    @property
    def num_samples(self) -> int:
        return len(self.train)

    def make_model(self) -> nn.Module:
        net: Any = resnet50(self.num_classes)  # torch's types lack memory_format
        moved: nn.Module = net.to(self.device, memory_format=torch.channels_last)
        return moved

    def loader(self, seed: int) -> DataLoader[Batch]:
        return whole_batches(
            self.train,
            self._options.batch_size,
            seed=seed,
            processes=self._options.loader_processes,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = (each.to(self.device, non_blocking=True) for each in batch)
        images = normalize(random_flip(images), MEAN, DEVIATION)
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the validation images that are classified correctly, of the middle of each."""
        loader = whole_batches(
            self.validation, self._options.batch_size, processes=self._options.loader_processes
        )
        return accuracy(model, loader, self.device)


def accuracy(model: nn.Module, loader: Iterable[Batch], device: torch.device) -> float:
    """Share of the images of ``loader`` that the model classifies correctly."""
    right, count = torch.zeros((), dtype=torch.int64, device=device), 0
    with evaluating(model):
        for batch in loader:
            images, labels = (each.to(device, non_blocking=True) for each in batch)
            logits = model(normalize(images, MEAN, DEVIATION))
            right += (logits.argmax(dim=1) == labels).sum()
            count += len(labels)
    return int(right) / count
