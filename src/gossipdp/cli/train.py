"""``gossipdp train``: finds the recipe and trains it with several workers on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro

from gossipdp.tasks.options import BytesGptOptions, Cifar10Options, ImageNetOptions

OPTIONS = (Cifar10Options, ImageNetOptions, BytesGptOptions)
RECIPES = tuple(kind.recipe for kind in OPTIONS)


def _any_recipe() -> Any:
    union: Any = None
    for kind in OPTIONS:
        option = _annotated[kind, tyro.conf.subcommand(kind.recipe)]
        union = option if union is None else union | option
    return union


_annotated: Any = Annotated  # to mypy, a class in a variable is no type
_Recipe: Any = _annotated[_any_recipe(), tyro.conf.arg(name="")]


@dataclass(frozen=True)
class TrainArguments:
    """Train a recipe with several workers on this machine.

    The paper's ResNet-18 on CIFAR-10 and ResNet-50 on ImageNet, and a small GPT on any text. Each
    has options of its own. Under a launcher (gossipdp run, torchrun) this process is one of its
    workers, and --workers says nothing.
    """

    recipe: _Recipe

    workers: int = 4
    """Worker processes."""

    max_restarts: int = 0
    """How often workers that died are started again; they rejoin the run."""

    pin: bool = False
    """Give each worker its own share of the cores."""


def run(arguments: TrainArguments) -> int:
    """Train; worker 0 shows how far it is and what came of it. Returns the exit status.

    Raises ValueError or FileNotFoundError for bad input and missing data, before any worker starts.
    """
    check(arguments)

    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        from gossipdp.tasks.training import train

        train(arguments.recipe)
        return 0

    from gossipdp.launcher.local import launch, start_fork_server

    start_fork_server()  # it imports torch while this process does so too

    from gossipdp.tasks import make_recipe
    from gossipdp.tasks.training import train
    from gossipdp.tasks.workload import worker_device

    options = arguments.recipe
    worker_device(options.device)
    make_recipe(replace(options, device="cpu"))  # opens the data
    launch(
        train,
        world_size=arguments.workers,
        args=(options,),
        pin=arguments.pin,
        max_restarts=arguments.max_restarts,
    )
    return 0


def check(arguments: TrainArguments) -> None:
    """Raise ValueError for what cannot be meant; quick, without torch."""
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; it must be at least 1")
    if arguments.max_restarts < 0:
        raise ValueError(f"--max-restarts is {arguments.max_restarts}; it must be at least 0")

    from gossipdp.graph import build_graph

    options = arguments.recipe
    build_graph(options.graph, arguments.workers, seed=options.seed)
