"""Built-in trainings: data, model, optimizer and schedule, for any training loop.

workload     what each of them offers
digits       handwritten digits: no download, seconds
text         a small GPT on the bytes of any text, by default Python's own standard library
cifar10      ResNet-18 on CIFAR-10, as in the paper; imagenet: ResNet-50
images       what those two share; resnet: the networks
options      what ``gossipdp train`` lets one choose; training: its loop
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp.tasks.options import TrainOptions
    from gossipdp.tasks.workload import Workload

# Module and class of each name: those that need no download, and those that a recipe trains.
WORKLOADS = {"digits": "digits.Digits", "pystdlib": "text.PyStdlib"}
RECIPES = {"cifar10": "cifar10.Cifar10", "imagenet": "imagenet.ImageNet", "bytes-gpt": "text.Gpt"}


def make_workload(
    name: str, *, disjoint: bool = False, batch_size: int | None = None
) -> Workload[Any]:
    """The workload of this name, which needs no download.

    >>> make_workload("digits").metric_name
    'test_accuracy'
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    workload: Workload[Any] = _class(WORKLOADS[name])(disjoint=disjoint, batch_size=batch_size)
    return workload


def make_recipe(options: TrainOptions) -> Workload[Any]:
    """The workload that these options describe; it opens the data.

    Raises:
        ValueError: an option cannot be meant, or the data is not what it should be.
        FileNotFoundError: there is no data; the message says how to get it.
    """
    workload: Workload[Any] = _class(RECIPES[options.recipe]).of(options)
    return workload


def _class(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"gossipdp.tasks.{module}"), name)
