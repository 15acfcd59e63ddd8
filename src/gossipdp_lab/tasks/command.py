"""``gossipdp train``: a recipe, trained with several workers on this machine, and its results.

torch is imported where workers train: ``--help`` is quick.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import tyro
from rich.console import Console
from rich.markup import escape

from gossipdp.launcher.environment import with_torchrun_names
from gossipdp.rules import at_least_0, at_least_1, option, shown_rate
from gossipdp_lab.console import ProgressView, say, table_of
from gossipdp_lab.tasks import (
    BytesGptOptions,
    Cifar10Options,
    FashionMnistOptions,
    ImageNetOptions,
    RunOptions,
    TrainOptions,
    make_recipe,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gossipdp.parallel.module import GossipDataParallel
    from gossipdp.parallel.options import Checkpoints
    from gossipdp_lab.baselines import SynchronousDataParallel

    Trained: TypeAlias = GossipDataParallel | SynchronousDataParallel

MODEL_FILE = "averaged_model.pt"

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

    if "RANK" in with_torchrun_names(os.environ) or os.environ.get("GOSSIPDP_JOIN"):
        train(options)  # as one worker of another launcher
        return 0

    from gossipdp.launcher.local import launch, start_fork_server

    # It imports torch and this module while this process does so too.
    start_fork_server(also=[__name__])

    from gossipdp_lab.tasks.workload import worker_device

    worker_device(options.device)
    make_recipe(replace(options, device="cpu"))  # opens the data
    launch(
        train, world_size=arguments.workers, args=(options,), max_restarts=arguments.max_restarts
    )
    return 0


def train(options: TrainOptions) -> dict[str, Any] | None:
    """Train as one worker, together with those that the environment names.

    The lead shows the progress: a bar on a terminal, a line now and then elsewhere. At the end it
    saves the averaged model, then evaluates it, so that an evaluation that fails does not lose the
    training, and shows the results.

    Returns:
        The content of ``--json`` on the lead; None on the others.
        ``minutes`` are by the clock, from the first batch until all workers hold the average;
        ``progress_at_start``, 0 to 1, is the progress at which they begin: above 0 on a worker that
        resumed from a checkpoint or was started again. Steps and samples are of all lives.
    """
    import torch

    from gossipdp.parallel.options import Checkpoints
    from gossipdp.parallel.schedule import ProgressLR

    torch.manual_seed(options.seed)
    recipe = make_recipe(options)
    net = recipe.make_model()
    optimizer = recipe.make_optimizer(net)
    checkpoints = None
    if options.checkpoint_every is not None or options.resume:
        checkpoints = Checkpoints(
            directory=options.directory / "checkpoints",
            every_steps=options.checkpoint_every,
            resume="auto" if options.resume else None,
        )
    model = wrap(
        net,
        optimizer,
        options,
        batch_size=options.batch_size,
        budget_samples=options.epochs * recipe.num_samples,
        log_dir=options.directory,
        checkpoints=checkpoints,
    )
    schedule = ProgressLR(optimizer, model, lambda at: recipe.rate_factor(at, model.world_size))
    torch.manual_seed(model.worker_seed)  # each worker draws its own crops
    console = Console()
    view = TrainingView(model, options, recipe.num_samples, console)
    started_s, progress_at_start = time.monotonic(), model.progress()
    for batch in model.batches(recipe.train_loader(0, 1, model.worker_seed)):
        optimizer.zero_grad()
        loss = recipe.loss(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        model.log(loss=loss)
        view.step(loss)
    view.stop()
    consolidated = model.consolidate()
    minutes = (time.monotonic() - started_s) / 60
    stats = model.stats()
    if not model.is_lead:
        return None
    options.directory.mkdir(parents=True, exist_ok=True)
    model.save_averaged(options.directory / MODEL_FILE)
    steps = consolidated.gradient_steps_by_rank.values()
    exchanges = options.method in ("a2cid2", "gossip") and stats.world_size > 1
    outcome = {
        "recipe": options.recipe,
        "method": options.method,
        "graph": options.graph,
        "num_workers": stats.world_size,
        "metric_name": recipe.metric_name,
        "metric": recipe.evaluate(net),
        "minutes": minutes,
        "progress_at_start": progress_at_start,
        "slowest_steps": min(steps),
        "fastest_steps": max(steps),
        "samples": consolidated.samples,
        "consensus_distance": consolidated.consensus_distance,
        "achieved_comm_rate": stats.achieved_comm_rate if exchanges else None,
        "configuration": json.loads(json.dumps(asdict(options), default=str)),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(outcome, indent=2) + "\n", "utf-8")
    console.print(table_of([_outcome_row(outcome)]))
    say(console, *_outcome_lines(outcome, options, model.rank), markup=True)
    return outcome


def wrap(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: RunOptions,
    *,
    batch_size: int,
    budget_samples: int | None,
    least_s: float = 0.0,
    log_dir: Path,
    checkpoints: Checkpoints | None = None,
) -> Trained:
    """Wrap a model by the options' method; ``least_s``: see SynchronousDataParallel."""
    from gossipdp.parallel.module import GossipDataParallel
    from gossipdp.parallel.options import Counting, Monitor
    from gossipdp_lab.baselines import SynchronousDataParallel

    if options.method == "allreduce":
        return SynchronousDataParallel(
            net,
            batch_size=batch_size,
            budget_samples=budget_samples,
            least_s=least_s,
            seed=options.seed,
            log_dir=log_dir,
        )
    return GossipDataParallel(
        net,
        optimizer,
        budget_samples=budget_samples,
        method=options.method,
        graph=options.graph,
        comm_rate=options.comm_rate,
        seed=options.seed,
        counting=Counting(samples_per_step=batch_size),
        monitor=Monitor(log_dir=log_dir),
        checkpoints=checkpoints,
    )


class TrainingView(ProgressView):
    """The display of the lead while it trains; other workers show nothing.

    num_samples: of one epoch.
    """

    def __init__(
        self, model: Trained, options: TrainOptions, num_samples: int, console: Console
    ) -> None:
        super().__init__("training", console=console, redraw_every_s=0.5, line_every_s=10.0)
        self._model = model
        self._epochs = options.epochs
        self._num_samples = num_samples
        self._at_s, self._progress = time.monotonic(), model.progress()
        self._losses: list[Tensor] = []
        self._is_shown = model.is_lead
        if self._is_shown:
            say(console, _opening(model, options, num_samples), markup=True)
            self.start()

    def step(self, loss: Tensor) -> None:
        """Count a gradient step; ``loss`` is of its batch, and is read only when it is shown."""
        self._losses.append(loss.detach())
        if not self.is_due:
            return
        if self._model.is_lead != self._is_shown:
            self._is_shown = not self._is_shown
            (self.start if self._is_shown else self.stop)()
        if not self._is_shown:
            self._losses.clear()
            return
        progress, now_s = self._model.progress(), time.monotonic()
        mean = sum(float(each) for each in self._losses) / len(self._losses)
        samples = (progress - self._progress) * self._epochs * self._num_samples
        speed = samples / max(now_s - self._at_s, 1e-9)
        epoch = f"epoch {progress * self._epochs:.2f} of {self._epochs}"
        self.advance(progress, f"{epoch}, loss {mean:.4f}, {speed:,.0f} samples/s")
        self._at_s, self._progress = now_s, progress
        self._losses.clear()


def _opening(model: Trained, options: TrainOptions, num_samples: int) -> str:
    parameters = list(model.parameters())
    text = f"{options.recipe}: {num_samples:,} samples, epochs {options.epochs}, "
    text += f"{sum(each.numel() for each in parameters):,} parameters; "
    text += f"workers {model.world_size} on {parameters[0].device.type}, method {options.method}"
    if options.method in ("a2cid2", "gossip"):
        text += f", graph {options.graph}, comm rate {shown_rate(options.comm_rate)}"
    return f"{text}, batch {options.batch_size} a worker"


def _outcome_row(outcome: dict[str, Any]) -> dict[str, str]:
    """Return the row of the paper's tables, under its headings."""
    return {
        "method": outcome["method"],
        "graph": outcome["graph"] if outcome["method"] in ("a2cid2", "gossip") else "-",
        "workers": f"{outcome['num_workers']}",
        outcome["metric_name"].replace("_", " "): f"{outcome['metric']:.4f}",
        "minutes": f"{outcome['minutes']:.2f}",
        "steps, slowest": f"{outcome['slowest_steps']:,}",
        "steps, fastest": f"{outcome['fastest_steps']:,}",
    }


def _outcome_lines(outcome: dict[str, Any], options: TrainOptions, rank: int) -> list[str]:
    lines = [
        f"trained on {outcome['samples']:,} samples; consensus distance just before averaging: "
        f"{outcome['consensus_distance']:.3g}"
    ]
    # If all began together, others may have made a step before this one looked.
    if outcome["progress_at_start"] >= 0.01:
        share = f"{outcome['progress_at_start']:.0%}"
        lines.append(f"minutes: since worker {rank} began, at {share} of the run")
    if outcome["achieved_comm_rate"] is not None:
        rate = f"{outcome['achieved_comm_rate']:.3f}"
        asked = f"asked for {shown_rate(options.comm_rate)}"
        lines.append(f"achieved comm rate of worker {rank}: {rate}, {asked}")
    lines.append(f"averaged model: {escape(str(options.directory / MODEL_FILE))}")
    if options.json is not None:
        lines.append(f"results: {escape(str(options.json))}")
    return lines
