"""Repeat the paper's experiment on real images: all-reduce, gossip and A2CiD2 on Fashion-MNIST.

Simulated workers train the network of ``gossipdp train fashion-mnist`` by its recipe, the paper's
for CIFAR-10, on batches of 32: on a ring, with plain gossip at one and at two exchanges a step and
with A2CiD2 at one (figures 1 and 2 of the paper), on a complete graph, where A2CiD2 is plain
gossip, and by the library's defaults. Exchanges follow the real protocol over links of 100 Gbit/s.
All rows train on equally many samples. The learning rate is the paper's times a factor, in
proportion to the samples of a step.

The model that is judged is the mean of the workers. Exchanges average the running statistics of
BatchNorm too; they lag behind the parameters, so they are computed anew, of 2,000 training images,
before a model is judged.

``--kind real``: real processes instead, by the command. ``--kind clock``: how long the paper's run
on CIFAR-10 takes with 4 to 64 workers, by the simulator's clock. The data is that of Debian's
package dataset-fashion-mnist. A run of 24 epochs takes 10 to 20 minutes of one core. Each run that
ends is appended to a file of JSON lines, and is not run again: the benchmark can be stopped at any
time. Writes benchmarks/results/paper_images.{jsonl,json,md}: tables of all runs so far.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from quality_simulated import chosen, of_shapes
from reproduction.parts import Estimate
from support.finished_runs import Simulations, loss_of
from support.report import Report, Table, results_folder, run_script
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from gossipdp_lab.report.run_log import RunLog
from gossipdp_lab.report.view import RunView
from gossipdp_lab.simulate import (
    ConstantTime,
    Evaluation,
    Link,
    LinkModel,
    LognormalTime,
    ModuleObjective,
    Quadratic,
    Scenario,
    SlowedTime,
    Trace,
)
from gossipdp_lab.simulate.scenario import MakeOptimizer
from gossipdp_lab.tasks import FashionMnistOptions
from gossipdp_lab.tasks.command import MODEL_FILE
from gossipdp_lab.tasks.images import RULE_BATCH, FashionMnist
from gossipdp_lab.tasks.resnet import CIFAR_RESNET18_PARAMETERS

NAME = "paper_images"
NUM_RECORDS, NUM_BINS = 12, 40
JUDGED, CALIBRATED = 5_000, 2_000
"""Training images of which the loss is taken, and of which BatchNorm's statistics are computed."""
SLOW_FACTOR = 2.0
LINKS = LinkModel(Link(latency_s=50e-6, bytes_per_s=100e9 / 8))
MODEL_BYTES = 4.0 * CIFAR_RESNET18_PARAMETERS
STEP_S = 0.04
CLOCKED = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Row:
    """One way to agree. ``has_straggler``: one worker takes twice as long for its steps."""

    method: str
    graph: str = "ring"
    comm_rate: float = 1.0
    has_straggler: bool = False

    @property
    def is_synchronous(self) -> bool:
        return self.method == "allreduce"

    def compute_time(self, step_s: float = 0.1) -> SlowedTime:
        """Return step times that vary by a tenth; the first worker may be slow."""
        return SlowedTime(LognormalTime(step_s), {0: SLOW_FACTOR} if self.has_straggler else {})


ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED = (
    "AR-SGD",
    "gossip, ring",
    "gossip, ring, 2 exchanges a step",
    "A2CiD2, ring",
)
DEFAULTS = "our defaults: exponential graph, 4 exchanges a step"
ROWS = {
    ALL_REDUCE: Row("allreduce"),
    GOSSIP: Row("gossip"),
    DOUBLED: Row("gossip", comm_rate=2.0),
    ACCELERATED: Row("a2cid2"),
    "gossip and A2CiD2, complete graph": Row("a2cid2", "complete"),
    DEFAULTS: Row("a2cid2", "exponential", 4.0),
    "A2CiD2, ring, one worker 2 times slower": Row("a2cid2", has_straggler=True),
}


@dataclass(frozen=True)
class Setting:
    """The settings that all rows share; the samples are those of an epoch.

    times: the factor of the paper's learning rate.
    """

    workers: int
    epochs: int
    batch_size: int
    num_samples: int
    times: float = 1.0

    @property
    def steps(self) -> float:
        """Return the gradient steps of each worker, if all take equally many."""
        return self.epochs * self.num_samples / self.batch_size / self.workers

    def __str__(self) -> str:
        return f"{self.workers} workers, batches of {self.batch_size}, {self.epochs} epochs"


PAPER = Setting(workers=4, epochs=300, batch_size=128, num_samples=50_000)
"""Of the paper's run on CIFAR-10, for its times."""


class Task:
    """The recipe as simulated workers train it."""

    def __init__(
        self, data: Path, *, workers: int, epochs: int, batch_size: int, times: float = 1.0
    ) -> None:
        options = FashionMnistOptions(data=data, epochs=epochs, batch_size=batch_size)
        self.recipe, self.data = FashionMnist(options), data
        self.setting = Setting(workers, epochs, batch_size, self.recipe.num_samples, times)

    def objective(self) -> ModuleObjective:
        """Return the objective; row by row is quicker here than all rows at once by vmap."""
        recipe = self.recipe
        return ModuleObjective(
            recipe.make_model,
            recipe.loss,
            recipe.train_loader,
            evaluate=self.judge,
            name="fashion-mnist",
            metric_name=recipe.metric_name,
            max_rows=1,
        )

    def judge(self, model: nn.Module) -> Evaluation:
        """Return the loss on training images and the accuracy on the test images."""
        recipe = self.recipe
        images, labels = (each[:JUDGED] for each in recipe.train)
        torch.manual_seed(0)
        seen = [recipe.normalize(recipe.augment(each)) for each in images[:CALIBRATED].split(200)]
        update_bn(seen, model)
        loss = 0.0
        for some, theirs in zip(images.split(500), labels.split(500), strict=True):
            logits = model(recipe.normalize(some))
            loss += float(F.cross_entropy(logits, theirs, reduction="sum"))
        return Evaluation(loss / len(labels), recipe.evaluate(model))

    def optimizer(self) -> MakeOptimizer:
        """Return the recipe's, for workers of this batch, at a multiple of the paper's rate."""
        template = self.recipe.make_model()
        places = {id(each): place for place, each in enumerate(template.parameters())}
        groups = self.recipe.make_optimizer(template).param_groups
        rate = groups[0]["lr"] * self.setting.times

        def make(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
            mine = [
                group
                | {"lr": rate, "params": [parameters[places[id(each)]] for each in group["params"]]}
                for group in groups
            ]
            return [torch.optim.SGD(mine)]

        return of_shapes(make, [each.shape for each in template.parameters()])

    def scenario(self, row: Row, seed: int) -> Scenario:
        """Return a run of as many gradient steps, of all workers, as the setting asks for."""
        setting, n = self.setting, self.setting.workers
        speed = (n - 1 + 1 / SLOW_FACTOR) / n if row.has_straggler else 1.0
        # All-reduce makes as many rounds, whatever they take: :meth:`Runs.find_clock` has that.
        return Scenario(
            graph=row.graph,
            num_workers=n,
            objective=self.objective(),
            optimizer=self.optimizer(),
            comm_rate=row.comm_rate,
            fidelity="links",
            compute_time=ConstantTime() if row.is_synchronous else row.compute_time(),
            links=LinkModel(Link(latency_s=0.0)) if row.is_synchronous else LINKS,
            model_bytes=MODEL_BYTES,
            num_steps=setting.steps / speed,
            num_records=NUM_RECORDS,
            seed=seed,
            schedule=lambda progress: self.recipe.rate_factor(progress, n),
        )


class Runs(Simulations):
    def __init__(self, path: Path) -> None:
        super().__init__(path, ("kind", "row", *(each.name for each in fields(Setting)), "seed"))

    def of_row(self, kind: str, name: str, setting: Setting) -> list[dict[str, Any]]:
        return self.of(kind=kind, row=name, **asdict(setting))

    def settings(self, kind: str) -> list[Setting]:
        """Return all for which there are runs of this kind, the longest first."""
        names = [each.name for each in fields(Setting)]
        every = [run for run in self.known.values() if run["kind"] == kind]
        found = {tuple(run[name] for name in names) for run in every}
        return sorted((Setting(*each) for each in found), key=lambda each: -each.epochs)

    def find_simulated(self, name: str, task: Task, seed: int) -> dict[str, Any]:
        """Return a simulated run, from the file or made now."""
        row = ROWS[name]

        def outcome(trace: Trace) -> dict[str, Any]:
            last, distances = trace.records[-1], trace.column("consensus_distance")
            return {
                "accuracy": last.metric,
                "accuracies": trace.column("metric").tolist(),
                "consensus_distance": float(distances[NUM_RECORDS // 2 :].mean()),
                "gradient_steps": last.gradient_steps,
                "exchanges_per_step": trace.achieved_comm_rate,
            }

        run = {"kind": "simulated", "row": name, **asdict(task.setting), "seed": seed}
        return self.find(run, row.method, lambda: task.scenario(row, seed), outcome)

    def find_clock(self, name: str, workers: int, *, has_straggler: bool) -> None:
        """Find how long the paper's run takes with so many workers, from the file or made now."""
        setting = replace(PAPER, workers=workers)
        row = replace(ROWS[name], has_straggler=has_straggler)
        scenario = Scenario(
            graph=row.graph,
            num_workers=workers,
            objective=Quadratic(dimension=2),
            comm_rate=row.comm_rate,
            fidelity="links",
            compute_time=row.compute_time(STEP_S),
            links=LINKS,
            model_bytes=MODEL_BYTES,
            num_steps=setting.steps,
            num_records=1,
        )

        def outcome(trace: Trace) -> dict[str, Any]:
            share = setting.steps * workers / trace.records[-1].gradient_steps
            return {
                "seconds": share * scenario.end_s,
                "slowest": share * min(trace.worker_steps),
                "fastest": share * max(trace.worker_steps),
                "exchanges_per_step": trace.achieved_comm_rate,
            }

        kind = "straggler" if has_straggler else "alike"
        run = {"kind": kind, "row": name, **asdict(setting), "seed": scenario.seed}
        self.find(run, row.method, lambda: scenario, outcome)

    def find_real(self, name: str, task: Task, seed: int) -> dict[str, Any]:
        """Return a run of real processes by the command, from the file or made now.

        The averaged model is judged as a simulated one is.
        """
        row, setting, recipe = ROWS[name], task.setting, task.recipe
        if row.has_straggler or setting.times != 1:
            raise ValueError(
                f"of real processes no worker is slower, and the rate is the paper's: {name}, "
                f"{setting.times:g} times the rate, is simulated alone"
            )
        run = {"kind": "real", "row": name, **asdict(setting), "seed": seed}
        known = self.known.get(self.key(run))
        if known is not None:
            return known
        given = {
            "workers": setting.workers,
            "epochs": setting.epochs,
            "batch-size": setting.batch_size,
            "data": task.data,
            "method": row.method,
            "graph": row.graph,
            "seed": seed,
        }
        if not row.is_synchronous:
            given["comm-rate"] = row.comm_rate
        with TemporaryDirectory() as folder:
            path = Path(folder, "results.json")
            given |= {"output": folder, "json": path}
            words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
            command = [sys.executable, "-m", "gossipdp", "train", "fashion-mnist", *words]
            subprocess.run(command, check=True)
            outcome = json.loads(path.read_text())
            model = recipe.make_model()
            model.load_state_dict(torch.load(Path(folder, MODEL_FILE), weights_only=True))
            distances = distances_over_time(Path(folder))
        with torch.no_grad():
            judged = task.judge(model.eval())
        run |= {
            "accuracy": judged.metric,
            "loss": judged.loss,
            "accuracy_as_trained": outcome["metric"],
            "edge_distances": distances,
            "consensus_distance": outcome["consensus_distance"],
            "exchanges_per_step": outcome["achieved_comm_rate"],
            "slowest_steps": outcome["slowest_steps"],
            "fastest_steps": outcome["fastest_steps"],
            "minutes": outcome["minutes"],
        }
        self.keep(run)
        return run


def clock_table(runs: Runs) -> list[Table]:
    """Return how long the paper's run on CIFAR-10 takes by the simulator's clock."""
    rows = []
    for kind, workers in product(("alike", "straggler"), CLOCKED):
        setting = replace(PAPER, workers=workers)
        pair = [run for name in (ALL_REDUCE, ACCELERATED) for run in
                runs.of_row(kind, name, setting)]  # fmt: skip
        if len(pair) == 2:
            minutes = [run["seconds"] / 60 for run in pair]
            steps = [f"{run['slowest']:,.0f} / {run['fastest']:,.0f}" for run in pair]
            shown = [f"{each:.1f}" for each in minutes]
            rows.append([f"{workers}, {kind}", *shown, f"{minutes[1] / minutes[0]:.2f}", *steps])
    head = ("workers", "minutes, AR-SGD", "A2CiD2, ring", "over AR-SGD",
            "steps, slowest / fastest, AR-SGD", "A2CiD2")  # fmt: skip
    note = (
        f"{PAPER.epochs} epochs of {PAPER.num_samples:,} samples of all workers together, batches "
        f"of {PAPER.batch_size}; gradient steps of {STEP_S * 1000:g} ms on average (standard "
        "deviation of their logarithm 0.1), links of 100 Gbit/s and 50 microseconds, models as "
        "large as the paper's ResNet-18 (44.7 MB), one exchange a step. Straggler: one worker "
        f"{SLOW_FACTOR:g} times slower. AR-SGD sends after the gradient, by a ring, and waits for "
        "the slowest worker in each step; A2CiD2 sends while it computes. Nothing was trained."
    )
    title = "Time of the paper's run on CIFAR-10, by the simulator's clock"
    return [Table(title, head, rows, note)] if rows else []


def distances_over_time(folder: Path) -> list[list[float]]:
    """Return shares of a run's time and the mean edge distance of all workers, by their logs."""
    view = RunView(RunLog.read(folder))
    bins: dict[int, list[float]] = {}
    for points in view.over_time("edge_distance"):
        for time_s, distance in points:
            place = min(NUM_BINS - 1, int(NUM_BINS * time_s / view.duration_s))
            bins.setdefault(place, []).append(distance)
    return [[place / NUM_BINS, statistics.fmean(bins[place])] for place in sorted(bins)]


def percent(values: Sequence[float]) -> str:
    """Return the mean of accuracies, in percent, and of several the standard deviation."""
    estimate = Estimate.of([100 * value for value in values])
    spread = f" ± {estimate.deviation:.2f}" if len(values) > 1 else ""
    return f"{estimate.mean:.2f}{spread}"


def cells(name: str, found: list[dict[str, Any]]) -> list[str]:
    losses = [loss_of(run) for run in found]
    rates = [run["exchanges_per_step"] for run in found if run["exchanges_per_step"]]
    distances = [run["consensus_distance"] for run in found]
    return [
        name,
        percent([run["accuracy"] for run in found]),
        Estimate.of(losses).text if math.isfinite(sum(losses)) else "diverged",
        "" if ROWS[name].is_synchronous else Estimate.of(distances).text,
        f"{statistics.fmean(rates):.2f}" if rates and not ROWS[name].is_synchronous else "",
        str(len(found)),
    ]


HEAD = (
    "", "test accuracy, %", "training loss", "consensus distance", "exchanges a step", "seeds"
)  # fmt: skip
NOTE = (
    "Mean ± standard deviation over the seeds, at the end. Test accuracy and training loss (5,000 "
    "images, not augmented) are those of the mean of the workers, with BatchNorm's statistics "
    "computed anew of 2,000 augmented training images. Consensus distance: mean squared distance "
    "of the workers from their mean, over the second half of the run; of real processes at its "
    "end. On a complete graph A2CiD2 is plain gossip: one row for both. The paper's rate: 0.1 for "
    "each 128 samples of a step of all workers"
)


def tables(runs: Runs) -> list[Table]:
    found = []
    for kind in ("simulated", "real"):
        for setting in runs.settings(kind):
            by_row = {name: runs.of_row(kind, name, setting) for name in ROWS}
            rows = [cells(name, results) for name, results in by_row.items() if results]
            peak = 0.1 * setting.times * setting.batch_size / RULE_BATCH * setting.workers
            title = f"{kind}, {setting}, {setting.times:g} times the paper's learning rate"
            found.append(Table(title, HEAD, rows, f"{NOTE}. The largest here: {peak:g}."))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", help="only these, with semicolons between them")
    parser.add_argument("--data", type=Path, default=FashionMnistOptions.data)
    parser.add_argument("--workers", type=int, default=16, help="simulated ones")
    parser.add_argument("--epochs", type=int, default=4, help="of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="of a simulated worker")
    parser.add_argument("--times", type=float, default=1.0, help="factor of the paper's rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--kind",
        choices=("simulated", "real", "clock"),
        default="simulated",
        help="simulated workers; real processes; or the times of the paper's run by a clock",
    )
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    parser.add_argument("--quick", action="store_true", help="4 workers, one seed, one epoch")
    options = parser.parse_args()
    names = chosen(parser, options.rows, ROWS)
    if options.kind == "real" and options.rows is None:
        names = [name for name in names if not ROWS[name].has_straggler]
    if options.quick:
        options.workers, options.epochs, options.seeds = 4, 1, 1
    measure(options, names)


def measure(options: argparse.Namespace, names: list[str]) -> None:
    """Make the runs, those that show most first, and write after each stage."""
    try:
        task = Task(
            options.data,
            workers=options.workers,
            epochs=options.epochs,
            batch_size=options.batch_size,
            times=options.times,
        )
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error  # a line, as of any mistake in the call
    runs = Runs(results_folder(options.quick) / f"{NAME}.jsonl")
    report = Report(NAME, "The paper's experiment on Fashion-MNIST", quick=options.quick)

    def write() -> None:
        report.tables = [*tables(runs), *clock_table(runs)]
        report.write({"runs": f"{NAME}.jsonl"})

    if options.no_runs:
        pass
    elif options.kind == "clock":
        for workers in CLOCKED[:1] if options.quick else CLOCKED:
            for name, has_straggler in product((ALL_REDUCE, ACCELERATED), (False, True)):
                runs.find_clock(name, workers, has_straggler=has_straggler)
    else:
        find = runs.find_real if options.kind == "real" else runs.find_simulated
        for seed in range(options.seeds):
            for name in names:
                find(name, task, seed)
            write()
    write()


if __name__ == "__main__":
    run_script(main)
