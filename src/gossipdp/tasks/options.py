"""What may be chosen in a training. Imports no torch: ``--help`` is quick."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from gossipdp.parallel.options import Checkpoints, Monitor

MethodName = Literal["a2cid2", "gossip", "allreduce", "none"]


@dataclass(frozen=True)
class TrainOptions:
    """Options of every recipe; construction checks them.

    A script reads them by ``tyro.cli(Cifar10Options)``; ``gossipdp train`` has them too.
    """

    recipe: ClassVar[str]

    data: Path | None = None
    """Where the data is."""

    epochs: int = 1
    """How often the workers together go through the training data."""

    batch_size: int = 128
    """Samples of one gradient step of one worker."""

    method: MethodName = "a2cid2"
    """a2cid2: accelerated gossip; gossip: plain pairwise averaging; allreduce: synchronous;
    none: the workers train apart and are averaged at the end only."""

    graph: str = "ring"
    """complete, exponential, ring, or another that gossipdp plan knows."""

    comm_rate: float = 1.0
    """Exchanges per worker per gradient step."""

    seed: int = 0
    """Of data order, augmentation and exchange timing."""

    device: str = "cpu"
    """cpu, or cuda: a CUDA device for each worker of a machine, in turn."""

    output: Path | None = None
    """Directory for the averaged model and the checkpoints; by default under runs/."""

    checkpoint_every: int | None = None
    """Gradient steps of each worker from one checkpoint to the next; by default none is written."""

    resume: bool = False
    """Go on from the checkpoints in --output, where there are any."""

    json: Path | None = None
    """Also write the results to this file."""

    def __post_init__(self) -> None:
        """Raise ValueError for the first option that cannot be meant."""
        if self.method not in get_args(MethodName):
            known = ", ".join(get_args(MethodName))
            raise ValueError(f"there is no method {self.method!r}; choose one of {known}")
        for option, number, least in (
            ("--epochs", self.epochs, 1),
            ("--batch-size", self.batch_size, 1),
            ("--seed", self.seed, 0),
            ("--checkpoint-every", self.checkpoint_every, 1),
        ):
            if number is not None and number < least:
                raise ValueError(f"{option} is {number}; it must be at least {least}")
        if not (math.isfinite(self.comm_rate) and self.comm_rate > 0):
            raise ValueError(f"--comm-rate is {self.comm_rate}; it must be a positive number")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise ValueError(f"--json {self.json}: the directory to write it to does not exist")

    @property
    def directory(self) -> Path:
        """Where the averaged model and the checkpoints go."""
        name = f"{self.recipe}-{self.method}-{self.graph}"
        return Path("runs", name) if self.output is None else self.output

    def parallel(self) -> dict[str, Any]:
        """The arguments of ``GossipDataParallel`` that follow from the options, but the budget."""
        arguments: dict[str, Any] = {
            "method": self.method,
            "graph": self.graph,
            "comm_rate": self.comm_rate,
            "seed": self.seed,
            "monitor": Monitor(log_dir=self.directory),
        }
        if self.checkpoint_every is not None or self.resume:
            arguments["checkpoints"] = Checkpoints(
                directory=self.directory / "checkpoints",
                every_steps=self.checkpoint_every,
                resume="auto" if self.resume else None,
            )
        return arguments


@dataclass(frozen=True)
class Cifar10Options(TrainOptions):
    """ResNet-18 on CIFAR-10.

    100 epochs of SGD with momentum in batches of 128 a worker; the rate that suits one worker is
    scaled by their number over 5 epochs of warm-up and divided by 10 after 50 and 75.
    """

    recipe: ClassVar[str] = "cifar10"

    data: Path | None = Path("data")
    """The folder of cifar-10-binary.tar.gz or of cifar-10-batches-bin, or either itself."""

    epochs: int = 100
    """How often the workers together go through the training images."""


@dataclass(frozen=True)
class ImageNetOptions(TrainOptions):
    """ResNet-50 on ImageNet (ILSVRC 2012).

    90 epochs of SGD with momentum in batches of 128 a worker; the rate that suits one worker is
    scaled by their number over 5 epochs of warm-up and divided by 10 after 30, 60 and 80.
    """

    recipe: ClassVar[str] = "imagenet"

    data: Path | None = Path("data")
    """The folder that holds train/WNID/*.JPEG and val/WNID/*.JPEG."""

    epochs: int = 90
    """How often the workers together go through the training images."""

    loader_processes: int = 4
    """Processes of each worker that read and decode images; 0: the worker itself does."""

    def __post_init__(self) -> None:
        """See :class:`TrainOptions`."""
        super().__post_init__()
        if self.loader_processes < 0:
            raise ValueError(f"--loader-processes is {self.loader_processes}; 0 is the least")


@dataclass(frozen=True)
class BytesGptOptions(TrainOptions):
    """A small GPT that predicts the next byte, on any folder of text.

    AdamW with a warm-up and half a cosine; without --data it reads the source text of the standard
    library of the running Python. Validation is in bits per byte.
    """

    recipe: ClassVar[str] = "bytes-gpt"

    data: Path | None = None
    """A folder of text, or one file; by default Python's standard library."""

    epochs: int = 1
    """How often the workers together go through the text."""

    batch_size: int = 16
    """Windows of one gradient step of one worker."""

    context: int = 256
    """Bytes of a window."""

    width: int = 256
    """Values that stand for each byte within the network."""

    depth: int = 4
    """Transformer blocks."""

    heads: int = 8
    """Attention heads of each block."""

    learning_rate: float = 1e-3
    """Peak rate of AdamW, for any number of workers."""

    def __post_init__(self) -> None:
        """See :class:`TrainOptions`."""
        super().__post_init__()
        for option, number in (
            ("--context", self.context),
            ("--width", self.width),
            ("--depth", self.depth),
            ("--heads", self.heads),
        ):
            if number < 1:
                raise ValueError(f"{option} is {number}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"--width {self.width} is not a multiple of --heads {self.heads}; change one"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"--learning-rate is {self.learning_rate}; it must be positive")
