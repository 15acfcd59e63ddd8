"""The paper's first training: ResNet-18 on CIFAR-10."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gossipdp.recipes.augmentation import normalize, random_crop_and_flip
from gossipdp.recipes.batches import whole_batches
from gossipdp.recipes.cifar10_data import DEVIATION, MEAN, LabelledImages, read_cifar10
from gossipdp.recipes.options import Cifar10Options
from gossipdp.recipes.paper_recipe import PaperRecipe
from gossipdp.recipes.recipe import check_samples, worker_device
from gossipdp.recipes.resnet import cifar_resnet18
from gossipdp.workloads.workload import evaluating

PADDING = 4
EVALUATION_BATCH = 500

Batch = tuple[Tensor, Tensor]


@final
class Cifar10(PaperRecipe[Batch]):
    """ResNet-18 with the stem for small images, SGD, crop and flip; see ``Cifar10Options``."""

    metric_name = "test_accuracy"
    milestones = (0.5, 0.75)  # epochs 50 and 75 of 100

    def __init__(self, options: Cifar10Options) -> None:
        super().__init__(worker_device(options.device), options.epochs)
        assert options.data is not None
        images = read_cifar10(options.data)
        check_samples("CIFAR-10", len(images.train), options.batch_size)
        self._options = options
        self.train, self.test = images.train.to(self.device), images.test.to(self.device)

    @property
    def num_samples(self) -> int:
        return len(self.train)

    def make_model(self) -> nn.Module:
        net: Any = cifar_resnet18()  # torch's types lack memory_format
        moved: nn.Module = net.to(self.device, memory_format=torch.channels_last)
        return moved

    def loader(self, seed: int) -> DataLoader[Batch]:
        return whole_batches(TensorBatches(self.train), self._options.batch_size, seed=seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        images = normalize(random_crop_and_flip(images, PADDING), MEAN, DEVIATION)
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Share of the test images that are classified correctly."""
        return accuracy(model, self.test)


class TensorBatches(Dataset[Batch]):
    """Whole batches by the numbers of their images, gathered where the images lie.

    That is quick, on a GPU too: no process need load ahead.
    """

    def __init__(self, data: LabelledImages) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, numbers: list[int]) -> Batch:
        """What a DataLoader fetches at once: the batch as a whole."""
        rows = torch.tensor(numbers, device=self._data.labels.device)
        return self._data.images[rows], self._data.labels[rows]


def accuracy(model: nn.Module, data: LabelledImages) -> float:
    """Share of the images that the model classifies correctly."""
    right = torch.zeros((), dtype=torch.int64, device=data.labels.device)
    with evaluating(model):
        for images, labels in zip(
            torch.split(data.images, EVALUATION_BATCH),
            torch.split(data.labels, EVALUATION_BATCH),
            strict=True,
        ):
            right += (model(normalize(images, MEAN, DEVIATION)).argmax(dim=1) == labels).sum()
    return int(right) / len(data)
