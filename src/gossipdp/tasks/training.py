"""The loop that trains a recipe, and what came of it: the row of the paper's tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from gossipdp.parallel.module import GossipDataParallel
from gossipdp.parallel.stats import Stats
from gossipdp.progress import ProgressView
from gossipdp.tasks import make_recipe
from gossipdp.tasks.options import TrainOptions

MODEL_FILE = "averaged_model.pt"
REDRAW_EVERY_S, LINE_EVERY_S = 0.5, 10.0


@dataclass(frozen=True)
class Outcome:
    """What came of a training: a row of the paper's tables, and what belongs to it.

    Attributes:
        metric: of the averaged model; its name is ``metric_name``.
        minutes: from the first batch of the worker that tells until all workers hold the average,
            by the clock; where it went on from a checkpoint or was started again, since then.
        progress_at_start: of the run, 0 to 1, where these minutes begin.
        slowest_steps, fastest_steps: gradient steps of the worker that took fewest, and most.
        samples: that all workers together trained on, also in the lives before a restart.
        consensus_distance: just before averaging.
        achieved_comm_rate: of the worker that tells; None where it exchanges nothing.
        configuration: the options.
    """

    recipe: str
    method: str
    graph: str
    num_workers: int
    metric_name: str
    metric: float
    minutes: float
    progress_at_start: float
    slowest_steps: int
    fastest_steps: int
    samples: int
    consensus_distance: float
    achieved_comm_rate: float | None
    configuration: dict[str, Any]

    def table(self) -> Table:
        """The row, under its headings."""
        table = Table()
        cells = {
            "method": self.method,
            "graph": self.graph if self.method in ("a2cid2", "gossip") else "-",
            "workers": f"{self.num_workers}",
            self.metric_name.replace("_", " "): f"{self.metric:.4f}",
            "minutes": f"{self.minutes:.2f}",
            "steps, slowest": f"{self.slowest_steps:,}",
            "steps, fastest": f"{self.fastest_steps:,}",
        }
        for heading in cells:
            table.add_column(heading, justify="right")
        table.add_row(*cells.values())
        return table


class TrainingRun:
    """Shows how far a training is, and ends it with the row of the paper's tables.

    Rank 0 shows it: a bar on a terminal, a line now and then elsewhere. The end is told and written
    by the worker of lowest rank that lives to see it.

    Args:
        model: wrapped, with a budget of ``options.epochs`` times ``num_samples``.
        options: of the training.
        num_samples: of one epoch.
        console: where to show; by default standard output.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        model: GossipDataParallel,
        options: TrainOptions,
        num_samples: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._options = options
        self._num_samples = num_samples
        self._console = Console() if console is None else console
        self._clock = clock
        self._started_s = self._told_s = clock()
        self._progress_at_start = self._told_progress = model.progress()
        self._losses: list[Tensor] = []
        self._view: ProgressView | None = None
        if model.rank == 0:
            self._console.print(self._opening(), highlight=False, soft_wrap=True)
            self._view = ProgressView(
                "training",
                console=self._console,
                clock=clock,
                redraw_every_s=REDRAW_EVERY_S,
                line_every_s=LINE_EVERY_S,
            )
            self._view.start()

    def step(self, loss: Tensor) -> None:
        """A gradient step was done; ``loss`` is of its batch, and read only when it is shown."""
        self._model.log(loss=loss)
        if self._view is None:
            return
        self._losses.append(loss.detach())
        if self._view.is_due:
            progress = self._model.progress()
            self._view.advance(progress, self._how_it_goes(progress))

    def _how_it_goes(self, progress: float) -> str:
        epochs, now_s = self._options.epochs, self._clock()
        mean = sum(float(each) for each in self._losses) / len(self._losses)
        samples = (progress - self._told_progress) * epochs * self._num_samples
        speed = samples / max(now_s - self._told_s, 1e-9)
        self._told_s, self._told_progress = now_s, progress
        self._losses.clear()
        return f"epoch {progress * epochs:.2f} of {epochs}, loss {mean:.4f}, {speed:,.0f} samples/s"

    def finish(self, metric_name: str, evaluate: Callable[[], float]) -> Outcome | None:
        """Average all workers; then one saves the average, evaluates it, and shows the row.

        It is saved first: where the evaluation fails, the training is not lost.

        Returns:
            What came of it, on the worker that tells; None on the others.
        """
        if self._view is not None:
            self._view.stop()
        consolidated = self._model.consolidate()
        minutes = (self._clock() - self._started_s) / 60
        stats, options = self._model.stats(), self._options
        if self._model.rank != _lowest_alive(stats):
            return None
        options.directory.mkdir(parents=True, exist_ok=True)
        self._model.save_averaged(options.directory / MODEL_FILE)
        steps = consolidated.gradient_steps_by_rank.values()
        has_exchanges = options.method in ("a2cid2", "gossip") and stats.world_size > 1
        outcome = Outcome(
            recipe=options.recipe,
            method=options.method,
            graph=options.graph,
            num_workers=stats.world_size,
            metric_name=metric_name,
            metric=evaluate(),
            minutes=minutes,
            progress_at_start=self._progress_at_start,
            slowest_steps=min(steps),
            fastest_steps=max(steps),
            samples=consolidated.samples,
            consensus_distance=consolidated.consensus_distance,
            achieved_comm_rate=stats.achieved_comm_rate if has_exchanges else None,
            configuration=_configuration(options),
        )
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(outcome), indent=2) + "\n", "utf-8")
        self._show(outcome)
        return outcome

    def _opening(self) -> str:
        options, model = self._options, self._model
        parameters = list(model.parameters())
        text = f"{options.recipe}: {self._num_samples:,} samples, epochs {options.epochs}, "
        text += f"{sum(each.numel() for each in parameters):,} parameters; "
        text += f"workers {model.world_size} on {parameters[0].device.type}, "
        text += f"method {options.method}"
        if options.method in ("a2cid2", "gossip"):
            text += f", graph {options.graph}, comm rate {options.comm_rate:g}"
        return f"{text}, batch {options.batch_size} a worker"

    def _show(self, outcome: Outcome) -> None:
        self._console.print(outcome.table())
        lines = [
            f"trained on {outcome.samples:,} samples; consensus distance just before averaging: "
            f"{outcome.consensus_distance:.3g}"
        ]
        # Where all began together, others may have made a step before this one looked.
        if outcome.progress_at_start >= 0.01:
            lines.append(
                f"minutes: since worker {self._model.rank} began, at "
                f"{outcome.progress_at_start:.0%} of the run"
            )
        if outcome.achieved_comm_rate is not None:
            lines.append(
                f"achieved comm rate of worker {self._model.rank}: "
                f"{outcome.achieved_comm_rate:.3f}, asked for {self._options.comm_rate:g}"
            )
        lines.append(f"averaged model: {escape(str(self._options.directory / MODEL_FILE))}")
        if self._options.json is not None:
            lines.append(f"results: {escape(str(self._options.json))}")
        for line in lines:
            self._console.print(line, highlight=False, soft_wrap=True)


def train(options: TrainOptions) -> Outcome | None:
    """Train as one worker, together with those that the environment names; see ``TrainingRun``."""
    torch.manual_seed(options.seed)
    recipe = make_recipe(options)
    net = recipe.make_model()
    optimizer = recipe.make_optimizer(net)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    model = GossipDataParallel(
        net,
        optimizer,
        budget_samples=options.epochs * recipe.num_samples,
        **options.parallel(),
    )
    torch.manual_seed(model.worker_seed)  # each worker draws its own crops
    run = TrainingRun(model, options, recipe.num_samples)
    for batch in model.batches(recipe.train_loader(0, 1, model.worker_seed)):
        factor = recipe.rate_factor(model.progress(), model.world_size)
        for group, peak in zip(optimizer.param_groups, peak_rates, strict=True):
            group["lr"] = peak * factor
        optimizer.zero_grad()
        loss = recipe.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.step(loss)
    return run.finish(recipe.metric_name, lambda: recipe.evaluate(net))


def _lowest_alive(stats: Stats) -> int:
    """The lowest rank that is not known to be dead."""
    dead: set[int] = set()
    for notice in stats.noticed:
        if notice.kind == "dead":
            dead.add(notice.rank)
        elif notice.kind == "rejoined":
            dead.discard(notice.rank)
    ranks: set[int] = {*range(stats.world_size), stats.rank}
    return min(ranks - dead)


def _configuration(options: TrainOptions) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(options).items()
    }
