"""Built-in trainings: data, model, optimizer and schedule, for any training loop.

workload       the interface of all of them
digits         handwritten digits: no download, seconds
text           a small GPT on the bytes of any text, by default Python's own standard library
images         the paper's two, ResNet-18 on CIFAR-10 and ResNet-50 on ImageNet; and a ResNet-8 on
               Fashion-MNIST, for one core a worker. resnet: the networks
command        ``gossipdp train``: its workers, their loop, and the results

Their names are here, and the options of recipes. This module imports no torch: ``--help`` is quick.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gossipdp.rules import (
    DEFAULT_GRAPH,
    at_least_0,
    at_least_1,
    check_flags,
    comm_rate,
    option,
    output_file,
    positive_number,
)

if TYPE_CHECKING:
    from gossipdp_lab.tasks.workload import Workload

# Module and class of each name: first of the demo, then of the recipes.
WORKLOADS = {"digits": "digits.Digits", "pystdlib-small": "text.PyStdlib"}
RECIPES = {
    "cifar10": "images.Cifar10",
    "imagenet": "images.ImageNet",
    "fashion-mnist": "images.FashionMnist",
    "bytes-gpt": "text.Gpt",
}


def make_workload(name: str, **options: Any) -> Workload[Any]:
    """Make the workload of this name, which needs no download."""
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


# The options.

MethodName = Literal["a2cid2", "gossip", "none", "allreduce"]


@dataclass(frozen=True)
class RunOptions:
    """Options of the demo and of every recipe."""

    method: MethodName = "a2cid2"
    """a2cid2; gossip: plain pairwise averaging; allreduce: DDP; none: workers train apart."""

    graph: str = DEFAULT_GRAPH
    """ring, path, star, complete, exponential or torus."""

    comm_rate: float | Literal["auto"] = option("auto", comm_rate)
    """Exchanges per worker per gradient step; auto: as many as there is room for."""

    seed: int = option(0, at_least_0)
    """Seed of data order, augmentation and exchange timing."""

    json: Path | None = option(None, output_file)
    """Also write the results to this file."""

    output: Path | None = None
    """Directory of all files; by default under runs/."""


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Options of every recipe; construction checks them."""

    recipe: ClassVar[str]

    data: Path | None = None
    """Directory or file of the data."""

    epochs: int = option(1, at_least_1)
    """Passes through the training data, all workers together."""

    batch_size: int = option(128, at_least_1)
    """Samples of a gradient step of a worker."""

    device: str = "cpu"
    """cpu or cuda. With cuda workers take the devices in turn."""

    checkpoint_every: int | None = option(None, at_least_1)
    """A worker's steps between two checkpoints; by default none are saved."""

    resume: bool = False
    """Go on from the checkpoints in --output, if any."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first option that is invalid."""
        check_flags(self)
        if self.method == "allreduce" and (self.checkpoint_every or self.resume):
            name = "--checkpoint-every" if self.checkpoint_every else "--resume"
            raise ValueError(
                f"{name} has no effect with --method allreduce: leave it out, or choose one of: "
                "a2cid2, gossip, none"
            )

    @property
    def directory(self) -> Path:
        """Return the directory of the averaged model and the checkpoints."""
        return self.output or Path("runs", f"{self.recipe}-{self.method}-{self.graph}")


@dataclass(frozen=True)
class Cifar10Options(TrainOptions):
    """ResNet-18 on CIFAR-10.

    It trains 100 epochs by SGD with momentum, in batches of 128 on each worker. The learning rate
    is 0.1 for each 128 samples of a step of all workers. It rises to that over 5 epochs, and is
    divided by 10 after epochs 50 and 75.
    """

    recipe: ClassVar[str] = "cifar10"

    data: Path = Path("data")
    """The folder cifar-10-batches-bin, or the one that holds it."""

    epochs: int = option(100, at_least_1)


@dataclass(frozen=True)
class ImageNetOptions(TrainOptions):
    """ResNet-50 on ImageNet (ILSVRC 2012).

    It trains 90 epochs by SGD with momentum, in batches of 128 on each worker. The learning rate
    is 0.1 for each 128 samples of a step of all workers. It rises to that over 5 epochs, and is
    divided by 10 after epochs 30, 60 and 80.
    """

    recipe: ClassVar[str] = "imagenet"

    data: Path = Path("data")
    """The folder that holds train/WNID/*.JPEG and val/WNID/*.JPEG."""

    epochs: int = option(90, at_least_1)

    loader_processes: int = option(4, at_least_0)
    """Processes of each worker that decode images; 0: none."""


@dataclass(frozen=True)
class FashionMnistOptions(TrainOptions):
    """ResNet-8 on Fashion-MNIST, for one core a worker.

    It trains 20 epochs by SGD with momentum, in batches of 128 on each worker. The learning rate
    is 0.1 for each 128 samples of a step of all workers. It rises to that over one epoch, and is
    divided by 10 after epochs 10 and 15.
    """

    recipe: ClassVar[str] = "fashion-mnist"

    data: Path = Path("/usr/share/datasets/fashion-mnist")
    """The folder of the four files."""

    epochs: int = option(20, at_least_1)


@dataclass(frozen=True)
class BytesGptOptions(TrainOptions):
    """A small GPT that predicts the next byte, on any folder of text.

    It trains by AdamW with a warm-up and half a cosine, and is validated in bits per byte. By
    default it reads the source text of Python's own standard library.
    """

    recipe: ClassVar[str] = "bytes-gpt"

    data: Path | None = None
    """A folder of text, or one file; by default Python's standard library."""

    batch_size: int = option(16, at_least_1)
    """Windows of text in a gradient step of a worker."""

    context: int = option(256, at_least_1)
    """Bytes of a window."""

    width: int = option(256, at_least_1)
    """Length of the network's hidden vectors."""

    depth: int = option(4, at_least_1)
    """Transformer blocks."""

    heads: int = option(8, at_least_1)
    """Attention heads of a block."""

    learning_rate: float = option(1e-3, positive_number)
    """Peak rate of AdamW."""

    def __post_init__(self) -> None:
        """Check as :class:`TrainOptions` does, and the options of this recipe."""
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(
                f"--width {self.width} is not a multiple of --heads {self.heads}; change one"
            )
