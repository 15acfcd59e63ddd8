"""Handwritten digits: scikit-learn's bundled 8 by 8 images and a small network."""

from functools import cache, partial
from typing import Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

from gossipdp.rules import one_of, positive_number
from gossipdp_lab.tasks.workload import BatchLoader, Workload, evaluating, worker_seed

ImagesAndLabels = tuple[Tensor, Tensor]
NetworkName: TypeAlias = Literal["convolutional", "perceptron"]

NUM_CLASSES = 10
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)
"""Makes the optimizer of demo and simulator."""


@final
class Digits(Workload[ImagesAndLabels]):
    """1,437 training and 360 test images of ten classes; at least 0.98 test accuracy in seconds.

    The convolutional network has BatchNorm layers, so that exchanges also carry float buffers
    (running statistics) and the final average integer ones (the number of batches tracked). The
    perceptron has one hidden layer of 64 and 4,810 parameters: for simulations of many workers.

    network: "convolutional" or "perceptron".
    dirichlet_alpha: each worker's images have class shares of its own, drawn from a symmetric
        Dirichlet distribution: the smaller, the more uneven. None: all workers have all images.

    >>> digits = Digits()
    >>> images, labels = next(iter(digits.train_loader(rank=0, num_workers=4, seed=0)))
    >>> images.shape, labels.shape
    (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    metric_name = "test_accuracy"

    def __init__(
        self,
        *,
        batch_size: int = 32,
        network: NetworkName = "convolutional",
        dirichlet_alpha: float | None = None,
    ) -> None:
        super().__init__(batch_size)
        if dirichlet_alpha is not None:
            positive_number("dirichlet_alpha", dirichlet_alpha)
        self.network = one_of(("convolutional", "perceptron"), "network", network)
        self.dirichlet_alpha = dirichlet_alpha

    @property
    def num_samples(self) -> int:
        return len(_load()[0][1])

    def make_model(self) -> nn.Module:
        if self.network == "perceptron":
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES)
            )
        return nn.Sequential(
            *_convolution(1, 32),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
            *_convolution(64, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, NUM_CLASSES),
        )

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SGD(model.parameters())

    def train_loader(self, rank: int, num_workers: int, seed: int) -> BatchLoader[ImagesAndLabels]:
        shuffle = worker_seed(rank, num_workers, seed)
        images, labels = _load()[0]
        rows = torch.arange(len(labels))
        if self.dirichlet_alpha is not None:
            rows = _dirichlet_rows(labels, self.dirichlet_alpha, shuffle)
        return BatchLoader(
            rows,
            batch_size=self.batch_size,
            seed=shuffle,
            gather=lambda chosen: (images[chosen], labels[chosen]),
        )

    def loss(self, model: nn.Module, batch: ImagesAndLabels) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> float:
        """Return the share of the 360 test images that are classified correctly."""
        images, labels = _load()[1]
        with evaluating(model):
            return float((model(images).argmax(dim=1) == labels).double().mean())

    def training_loss(self, model: nn.Module) -> float:
        """Return the mean loss over the 1,437 training images."""
        with evaluating(model):
            return float(self.loss(model, _load()[0]))


@cache
def _load() -> tuple[ImagesAndLabels, ImagesAndLabels]:
    """Load training and test images: every fifth of a fixed shuffle, sorted by class, is test."""
    from sklearn.datasets import load_digits  # takes a second or two to import

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order[torch.sort(labels[order], stable=True).indices]
    is_test = torch.arange(len(order)) % 5 == 0
    train, test = order[~is_test], order[is_test]
    return (images[train], labels[train]), (images[test], labels[test])


def _dirichlet_rows(labels: Tensor, alpha: float, seed: int) -> Tensor:
    """Choose as many rows as there are labels, of class shares ~ Dirichlet(alpha).

    The images of a class are taken in a shuffled order, and again from the first after the last.
    """
    random = np.random.default_rng(seed)
    shares = random.dirichlet([alpha] * NUM_CLASSES)
    chosen = []
    for digit, count in enumerate(random.multinomial(len(labels), shares)):
        own = random.permutation(torch.nonzero(labels == digit).squeeze(1).numpy())
        chosen.append(np.resize(own, count))
    return torch.from_numpy(np.concatenate(chosen))


def _convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    ]
