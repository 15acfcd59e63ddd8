"""``gossipdp train``: a recipe, trained with several workers on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from gossipdp.rules import at_least_0, at_least_1, option
from gossipdp_lab.tasks.options import (
    BytesGptOptions,
    Cifar10Options,
    FashionMnistOptions,
    ImageNetOptions,
)

Recipe = (
    Annotated[Cifar10Options, tyro.conf.subcommand("cifar10")]
    | Annotated[ImageNetOptions, tyro.conf.subcommand("imagenet")]
    | Annotated[FashionMnistOptions, tyro.conf.subcommand("fashion-mnist")]
    | Annotated[BytesGptOptions, tyro.conf.subcommand("bytes-gpt")]
)


@dataclass(frozen=True)
class TrainArguments:
    """Train a recipe with several workers on this machine.

    The paper's ResNet-18 on CIFAR-10 and ResNet-50 on ImageNet, a ResNet-8 on Fashion-MNIST, and a
    small GPT on any text. Each recipe has options of its own. If gossipdp run or torchrun started
    this process, it is one of their workers, and --workers has no effect.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]

    workers: int = option(4, at_least_1)
    """Worker processes."""

    max_restarts: int = option(0, at_least_0)
    """Restarts of dead workers, in all."""


def run(arguments: TrainArguments) -> int:
    """Train; worker 0 shows the progress and the results. Return the exit status.

    Raises:
        ValueError: an option is invalid; no worker has started then.
        FileNotFoundError: the data is missing; no worker has started then.
    """
    from gossipdp.graph import build_graph

    options = arguments.recipe
    if arguments.max_restarts and options.method == "allreduce":
        raise ValueError(
            "--max-restarts has no effect with --method allreduce, where a death ends the run: "
            "leave it out, or choose one of: a2cid2, gossip, none"
        )
    build_graph(options.graph, arguments.workers)

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        from gossipdp_lab.tasks.training import train

        train(options)
        return 0

    from gossipdp.launcher.local import launch, start_fork_server

    start_fork_server()  # it imports torch while this process does so too

    from gossipdp_lab.tasks import make_recipe
    from gossipdp_lab.tasks.training import train
    from gossipdp_lab.tasks.workload import worker_device

    worker_device(options.device)
    make_recipe(replace(options, device="cpu"))  # opens the data
    launch(
        train,
        world_size=arguments.workers,
        args=(options,),
        max_restarts=arguments.max_restarts,
    )
    return 0
