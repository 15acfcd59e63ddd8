"""Whole trainings, from the original data to the paper's table row: ``gossipdp train``.

options             what may be chosen, for the command line and for scripts
recipe              what a recipe offers to the training loop
training            the loop, and what came of it
batches             loaders of data that gives whole batches
progress            how far it is, on the terminal
cifar10, imagenet, bytes_gpt    the recipes
paper_recipe        the optimizer and schedule of the first two
resnet              ResNet-18 for images of 32 by 32, ResNet-50
augmentation        random crops and flips of whole batches
cifar10_data, python2_arrays    CIFAR-10 from its original archive
imagenet_data, image_store, jpeg_batches    ImageNet from its original archives or folders
text_data           any folder of text as bytes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossipdp.recipes.options import TrainOptions
    from gossipdp.recipes.recipe import Recipe

# The recipe NAME is a class in the module gossipdp.recipes.NAME, made from its options.
CLASSES = {"cifar10": "Cifar10", "imagenet": "ImageNet", "bytes-gpt": "BytesGpt"}


def make_recipe(options: "TrainOptions") -> "Recipe[Any]":
    """The recipe that these options are of; it opens the data.

    Raises:
        ValueError: an option cannot be meant, or the data is not what it should be.
        FileNotFoundError: there is no data; the message says how to get it.
    """
    module = import_module(f"gossipdp.recipes.{options.recipe.replace('-', '_')}")
    recipe: Recipe[Any] = getattr(module, CLASSES[options.recipe])(options)
    return recipe
