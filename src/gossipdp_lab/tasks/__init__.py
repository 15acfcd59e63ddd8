"""Built-in trainings: data, model, optimizer and schedule, for any training loop.

workload       the interface of all of them
digits         handwritten digits: no download, seconds
text           a small GPT on the bytes of any text, by default Python's own standard library
images         the paper's two: ResNet-18 on CIFAR-10 and ResNet-50 on ImageNet
fashion_mnist  their settings with a ResNet-8, for one core a worker
options        the options of ``gossipdp train``; training: its loop
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp_lab.tasks.options import TrainOptions
    from gossipdp_lab.tasks.workload import Workload

# Module and class of each name: first of the demo, then of the recipes.
WORKLOADS = {
    "digits": "digits.Digits",
    "pystdlib-small": "text.PyStdlib",
}
RECIPES = {
    "cifar10": "images.Cifar10",
    "imagenet": "images.ImageNet",
    "fashion-mnist": "fashion_mnist.FashionMnist",
    "bytes-gpt": "text.Gpt",
}


def make_workload(name: str, **options: Any) -> Workload[Any]:
    """Make the workload of this name, which needs no download.

    >>> make_workload("digits", disjoint=True).metric_name
    'test_accuracy'
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return _make(WORKLOADS[name], **options)


def make_recipe(options: TrainOptions) -> Workload[Any]:
    """Make the workload that these options describe; it opens the data.

    Raises:
        ValueError: an option or the data is invalid.
        FileNotFoundError: there is no data; the message says how to get it.
    """
    return _make(RECIPES[options.recipe], options)


def _make(place: str, *arguments: Any, **options: Any) -> Workload[Any]:
    module, _, name = place.partition(".")
    kind = getattr(import_module(f"gossipdp_lab.tasks.{module}"), name)
    workload: Workload[Any] = kind(*arguments, **options)
    return workload
