"""Repeat the paper's experiment on real images: all-reduce, gossip and A2CiD2 on Fashion-MNIST.

Simulated workers train the network of ``gossipdp train fashion-mnist`` by its recipe, the paper's
for CIFAR-10, on batches of 32: on a ring, with plain gossip at one and at two exchanges a step and
with A2CiD2 at one (figures 1 and 2 of the paper), and on a complete graph, where A2CiD2 is plain
gossip. Exchanges follow the real protocol over links of 100 Gbit/s. All rows train on equally many
samples. The learning rate is the paper's, in proportion to the samples of a step; then each row's
own best, on a grid of factors of two, by the training loss of the first seed.

The model that is judged is the mean of the workers. Exchanges average the running statistics of
BatchNorm too; they lag behind the parameters, so they are computed anew, of 2,000 training images,
before a model is judged. The accuracy by the averaged ones is in the table too.

``--real``: also a few runs of real processes, by the command. The data is that of Debian's package
dataset-fashion-mnist. A run of 16 workers takes 4 to 5 minutes of one core, everything about 30
runs. Each run that ends is appended to a file of JSON lines, and is not run again: the benchmark
can be stopped at any time. Writes benchmarks/results/paper_images.{jsonl,json,md,png}.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from quality_simulated import chosen, loss_of, tune
from reproduction.parts import COLOURS, Estimate, new_figure, save
from rich.console import Console
from support.finished_runs import FinishedRuns
from support.report import Report, Table, results_folder, run_script
from support.torch_rows import of_shapes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from gossipdp_lab.progress_bar import ProgressView
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
    simulate,
)
from gossipdp_lab.simulate.optimizers import MakeOptimizer
from gossipdp_lab.tasks.fashion_mnist import FashionMnist
from gossipdp_lab.tasks.images import CIFAR_RESNET18_PARAMETERS
from gossipdp_lab.tasks.options import FashionMnistOptions

NAME = "paper_images"
RULE_BATCH = 128
"""The batch of the recipe's learning rate."""
NUM_RECORDS = 10
JUDGED, CALIBRATED = 5_000, 2_000
"""Training images of which the loss is taken, and of which BatchNorm's statistics are computed."""
SLOW_FACTOR = 2.0
LINKS = LinkModel(Link(latency_s=50e-6, bytes_per_s=100e9 / 8))
MODEL_BYTES = 4.0 * CIFAR_RESNET18_PARAMETERS
REAL_WORKERS, REAL_BATCH = 4, 128


@dataclass(frozen=True)
class Row:
    """One way to agree. ``has_straggler``: one worker takes twice as long for its steps."""

    method: str
    graph: str = "ring"
    comm_rate: float = 1.0
    has_straggler: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Say if all workers take their steps together."""
        return self.method == "allreduce"

    def compute_time(self) -> SlowedTime:
        """Return step times of 0.1 s that vary by a tenth; the first worker may be slow."""
        return SlowedTime(LognormalTime(), {0: SLOW_FACTOR} if self.has_straggler else {})


ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED = (
    "AR-SGD",
    "gossip, ring",
    "gossip, ring, 2 exchanges a step",
    "A2CiD2, ring",
)
ROWS = {
    ALL_REDUCE: Row("allreduce"),
    GOSSIP: Row("gossip"),
    DOUBLED: Row("gossip", comm_rate=2.0),
    ACCELERATED: Row("a2cid2"),
    "gossip and A2CiD2, complete graph": Row("a2cid2", "complete"),
    "A2CiD2, ring, one worker 2 times slower": Row("a2cid2", has_straggler=True),
}


@dataclass(frozen=True)
class Setting:
    """The settings that all rows share; the samples are those of an epoch."""

    workers: int
    epochs: int
    batch_size: int
    num_samples: int

    @property
    def steps(self) -> float:
        """Return the gradient steps of each worker, if all take equally many."""
        return self.epochs * self.num_samples / self.batch_size / self.workers

    def __str__(self) -> str:
        return f"{self.workers} workers, batches of {self.batch_size}, {self.epochs} epochs"


class Task:
    """The recipe as simulated workers train it."""

    def __init__(self, data: Path, *, workers: int, epochs: int, batch_size: int) -> None:
        options = FashionMnistOptions(data=data, epochs=epochs, batch_size=batch_size)
        self.recipe = FashionMnist(options)
        self.setting = Setting(workers, epochs, batch_size, self.recipe.num_samples)
        self.as_averaged: list[float] = []
        """The accuracies by the averaged statistics of BatchNorm, of all models judged so far."""

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
        self.as_averaged.append(recipe.evaluate(model))
        images, labels = (each[:JUDGED] for each in recipe.train)
        torch.manual_seed(0)
        seen = [recipe.normalize(recipe.augment(each)) for each in images[:CALIBRATED].split(200)]
        update_bn(seen, model)
        loss = 0.0
        for some, theirs in zip(images.split(500), labels.split(500), strict=True):
            logits = model(recipe.normalize(some))
            loss += float(F.cross_entropy(logits, theirs, reduction="sum"))
        return Evaluation(loss / len(labels), recipe.evaluate(model))

    def optimizer(self, times: float) -> MakeOptimizer:
        """Return the recipe's, for workers of this batch, at ``times`` the paper's rate."""
        template = self.recipe.make_model()
        places = {id(each): place for place, each in enumerate(template.parameters())}
        groups = self.recipe.make_optimizer(template).param_groups
        rate = groups[0]["lr"] * self.setting.batch_size / RULE_BATCH * times

        def make(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
            mine = [
                group
                | {"lr": rate, "params": [parameters[places[id(each)]] for each in group["params"]]}
                for group in groups
            ]
            return [torch.optim.SGD(mine)]

        return of_shapes(make, [each.shape for each in template.parameters()])

    def scenario(self, row: Row, times: float, seed: int) -> Scenario:
        """Return a run of as many gradient steps, of all workers, as the setting asks for."""
        setting, n = self.setting, self.setting.workers
        speed = (n - 1 + 1 / SLOW_FACTOR) / n if row.has_straggler else 1.0
        # All-reduce makes as many rounds, whatever they take: :func:`clock` has their time.
        return Scenario(
            graph=row.graph,
            num_workers=n,
            objective=self.objective(),
            optimizer=self.optimizer(times),
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


class Runs(FinishedRuns[dict[str, Any]]):
    """The runs that have ended, simulated and real ones."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, dict[str, Any], self.key)

    @staticmethod
    def key(run: dict[str, Any]) -> str:
        """Return the key that tells a run from others."""
        names = ("kind", "row", *(each.name for each in fields(Setting)), "times", "seed")
        return json.dumps([run[name] for name in names])

    def of(self, kind: str, name: str, setting: Setting, times: float) -> list[dict[str, Any]]:
        """Return the runs of a row at one learning rate, by seed."""
        wanted = asdict(setting) | {"kind": kind, "row": name, "times": times}
        found = [run for run in self.known.values() if wanted.items() <= run.items()]
        return sorted(found, key=lambda run: int(run["seed"]))

    def tried(self, name: str, setting: Setting) -> dict[float, dict[str, Any]]:
        """Return the simulated runs of a row's first seed, by the learning rate."""
        rates = {float(run["times"]) for run in self.known.values()}
        found = {rate: self.of("simulated", name, setting, rate) for rate in sorted(rates)}
        return {rate: runs[0] for rate, runs in found.items() if runs and runs[0]["seed"] == 0}

    def best(self, name: str, setting: Setting) -> float:
        """Return the learning rate at which the first seed's training loss is least."""
        tried = self.tried(name, setting)
        return min(tried, key=lambda rate: loss_of(tried[rate]))

    def find(self, name: str, task: Task, times: float, seed: int) -> dict[str, Any]:
        """Return a simulated run, from the file or made now."""
        setting = task.setting
        run = {"kind": "simulated", "row": name, **asdict(setting), "times": times, "seed": seed}
        known = self.known.get(self.key(run))
        if known is not None:
            return known
        console = Console()
        label = f"{name}, {times:g} times the rate, seed {seed}"
        with ProgressView(label, console=console, line_every_s=60.0) as view:
            row = ROWS[name]
            trace = simulate(task.scenario(row, times, seed), row.method, view.advance)
        last = trace.records[-1]
        run |= {
            "loss": last.loss if math.isfinite(last.loss) else None,
            "accuracy": last.metric,
            "accuracy_as_averaged": task.as_averaged[-1],
            "consensus_distance": float(
                trace.column("consensus_distance")[NUM_RECORDS // 2 :].mean()
            ),
            "batch_losses": finite(trace.column("batch_loss")),
            "accuracies": finite(trace.column("metric")),
            "distances": finite(trace.column("consensus_distance")),
            "gradient_steps": last.gradient_steps,
            "exchanges_per_step": trace.achieved_comm_rate,
            "wall_s": trace.wall_s,
        }
        console.print(f"{label}: {last.metric:.4f}, {trace.wall_s:.0f} s", highlight=False)
        self.keep(run)
        return run

    def find_real(self, name: str, setting: Setting, data: Path, seed: int) -> dict[str, Any]:
        """Return a run of real processes by the command, from the file or made now."""
        row = ROWS[name]
        run = {"kind": "real", "row": name, **asdict(setting), "times": 1.0, "seed": seed}
        known = self.known.get(self.key(run))
        if known is not None:
            return known
        given = {
            "workers": setting.workers,
            "epochs": setting.epochs,
            "batch-size": setting.batch_size,
            "data": data,
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
        run |= {
            "accuracy": outcome["metric"],
            "consensus_distance": outcome["consensus_distance"],
            "exchanges_per_step": outcome["achieved_comm_rate"],
            "slowest_steps": outcome["slowest_steps"],
            "fastest_steps": outcome["fastest_steps"],
            "minutes": outcome["minutes"],
        }
        self.keep(run)
        return run


def finite(series: Sequence[float]) -> list[float | None]:
    """Return what can be written as JSON: None for what is no number."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in series]


def clock(setting: Setting) -> Table:
    """Return how long the rows take, by the simulator's clock; no network is trained for it."""
    rows = []
    names = (ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED)
    for has_straggler in (False, True):
        seconds: dict[str, float] = {}
        for name in names:
            row = replace(ROWS[name], has_straggler=has_straggler)
            scenario = Scenario(
                graph=row.graph,
                num_workers=setting.workers,
                objective=Quadratic(dimension=2),
                comm_rate=row.comm_rate,
                fidelity="links",
                compute_time=row.compute_time(),
                links=LINKS,
                model_bytes=MODEL_BYTES,
                num_steps=setting.steps,
                num_records=1,
            )
            trace = simulate(scenario, row.method)
            per_step = scenario.end_s / trace.records[-1].gradient_steps
            seconds[name] = per_step * setting.steps * setting.workers
            share = seconds[name] / scenario.end_s
            steps = share * min(trace.worker_steps), share * max(trace.worker_steps)
            rows.append(
                [
                    f"{name}, {'one worker 2 times slower' if has_straggler else 'alike'}",
                    f"{seconds[name]:.1f}",
                    f"{seconds[name] / seconds[ALL_REDUCE]:.2f}",
                    f"{steps[0]:.0f} / {steps[1]:.0f}",
                    f"{trace.achieved_comm_rate:.2f}",
                ]
            )
    return Table(
        f"Time: {setting}",
        ("", "seconds", "over AR-SGD", "steps, slowest / fastest", "exchanges a step"),
        rows,
        "By the simulator's clock, for equally many samples of all workers together: gradient "
        "steps of 0.1 s on average (standard deviation of their logarithm 0.1), links of 100 "
        "Gbit/s and 50 microseconds, models as large as the paper's ResNet-18 (44.7 MB). AR-SGD "
        "sends after the gradient, by a ring, and waits for the slowest worker in each step; the "
        "others send while they compute. No network was trained for this table.",
    )


def percent(values: Sequence[float]) -> str:
    """Return the mean of accuracies, in percent, and of several the standard deviation."""
    estimate = Estimate.of([100 * value for value in values])
    spread = f" ± {estimate.deviation:.2f}" if len(values) > 1 else ""
    return f"{estimate.mean:.2f}{spread}"


def cells(name: str, found: list[dict[str, Any]]) -> list[str]:
    """Return one row of a table of results."""
    distances = [run["consensus_distance"] for run in found]
    losses = [loss_of(run) for run in found]
    return [
        name,
        percent([run["accuracy"] for run in found]),
        percent([run["accuracy_as_averaged"] for run in found]),
        Estimate.of(losses).text if math.isfinite(sum(losses)) else "diverged",
        "" if ROWS[name].is_synchronous else Estimate.of(distances).text,
        f"{Estimate.of([run['exchanges_per_step'] for run in found]).mean:.2f}",
        f"{found[0]['times']:g}",
        str(len(found)),
    ]


HEAD = (
    "", "test accuracy, %", "by averaged BatchNorm", "training loss", "consensus distance",
    "exchanges a step", "times the rate", "seeds",
)  # fmt: skip
NOTE = (
    "Mean ± standard deviation over the seeds, at the end. Test accuracy and training loss (5,000 "
    "images, not augmented) are those of the mean of the workers, with BatchNorm's statistics "
    "computed anew of 2,000 augmented training images; by averaged BatchNorm: test accuracy with "
    "the mean of the workers' running statistics. Consensus distance: mean squared distance of "
    "the workers from their mean, over the second half of the run. On a complete graph A2CiD2 is "
    "plain gossip: one row for both. "
)


def tables(runs: Runs, setting: Setting) -> list[Table]:
    """Return the results of simulated workers, at the paper's rate and at each row's own."""
    by_rule, by_own, grid = [], [], []
    for name in ROWS:
        if found := runs.of("simulated", name, setting, 1.0):
            by_rule.append(cells(name, found))
        tried = runs.tried(name, setting)
        if len(tried) > 1:
            by_own.append(
                cells(name, runs.of("simulated", name, setting, runs.best(name, setting)))
            )
            text = [f"{rate:g}: {loss_of(run):.4f}, {100 * run['accuracy']:.2f}%"
                    for rate, run in tried.items()]  # fmt: skip
            grid.append([name, "; ".join(text)])
    found = []
    if by_rule:
        peak = 0.1 * setting.batch_size / RULE_BATCH * setting.workers
        note = f"{NOTE}The rule: 0.1 for each 128 samples of a step of all workers, {peak:g} here."
        found.append(Table(f"At the paper's learning rate: {setting}", HEAD, by_rule, note))
    if by_own:
        note = f"{NOTE}The rate is that of the first seed's least training loss."
        found.append(Table(f"At each row's own best rate: {setting}", HEAD, by_own, note))
        head = ("", "times the paper's rate: training loss, test accuracy")
        found.append(Table(f"Rates tried, first seed: {setting}", head, grid))
    return found


def real_table(runs: Runs, setting: Setting) -> list[Table]:
    """Return the results of real processes, if there are any."""
    rows = []
    for name, row in ROWS.items():
        found = runs.of("real", name, setting, 1.0)
        if not found:
            continue
        rates = [run["exchanges_per_step"] for run in found if run["exchanges_per_step"]]
        distances = [run["consensus_distance"] for run in found]
        rows.append(
            [
                name,
                percent([run["accuracy"] for run in found]),
                "" if row.is_synchronous else Estimate.of(distances).text,
                f"{Estimate.of(rates).mean:.2f}" if rates else "",
                f"{Estimate.of([run['minutes'] for run in found]).mean:.2f}",
                str(len(found)),
            ]
        )
    head = ("", "test accuracy, %", "consensus distance at the end", "exchanges a step", "minutes",
            "seeds")  # fmt: skip
    note = "Workers share this machine's cores, so their minutes compare no network."
    return [Table(f"Real processes: {setting}", head, rows, note)] if rows else []


def draw(path: Path, runs: Runs, setting: Setting) -> None:
    """Draw the training on the ring: loss, accuracy and consensus distance over the epochs."""
    panels = (
        ("batch_losses", "training loss", "linear"),
        ("accuracies", "test accuracy", "linear"),
        ("distances", "consensus distance", "log"),
    )
    figure, found = new_figure(3.4, 1, len(panels))
    for axes, (column, label, scale) in zip(found, panels, strict=True):
        for place, name in enumerate((ALL_REDUCE, GOSSIP, DOUBLED, ACCELERATED)):
            if column == "distances" and ROWS[name].is_synchronous:
                continue
            series = [run[column] for run in runs.of("simulated", name, setting, 1.0)]
            if not series:
                continue
            values = np.array(series, dtype=np.float64)[:, 1:]  # the first is before any step
            epochs = np.linspace(0, setting.epochs, NUM_RECORDS + 1)[1:]
            mean, look = values.mean(axis=0), {"color": COLOURS[place]}
            axes.plot(epochs, mean, lw=1.5, label=name, **look)
            axes.fill_between(epochs, values.min(axis=0), values.max(axis=0), alpha=0.2, **look)
        axes.set(xlabel="epochs", ylabel=label, yscale=scale)
    figure.legend(*found[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", help="only these, with semicolons between them")
    parser.add_argument("--data", type=Path, default=FashionMnistOptions.data)
    parser.add_argument("--workers", type=int, default=16, help="simulated ones")
    parser.add_argument("--epochs", type=int, default=4, help="of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="of a simulated worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-the-rule", action="store_true", help="try no other learning rates")
    parser.add_argument("--real", action="store_true", help="also 4 real processes, 3 seeds")
    parser.add_argument("--no-runs", action="store_true", help="only tabulate what has been run")
    parser.add_argument("--quick", action="store_true", help="4 workers, one seed, one epoch")
    options = parser.parse_args()
    names = chosen(parser, options.rows, ROWS)
    if options.quick:
        options.workers, options.epochs, options.seeds, options.at_the_rule = 4, 1, 1, True
    measure(options, names)


def measure(options: argparse.Namespace, names: list[str]) -> None:
    """Make the runs, those that show most first, and write after each stage."""
    sizes = {"workers": options.workers, "epochs": options.epochs, "batch_size": options.batch_size}
    try:
        task = Task(options.data, **sizes)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error  # a line, as of any mistake in the call
    setting = task.setting
    real = replace(setting, workers=REAL_WORKERS, batch_size=REAL_BATCH)
    folder = results_folder(options.quick)
    runs = Runs(folder / f"{NAME}.jsonl")
    report = Report(NAME, "The paper's experiment on Fashion-MNIST", quick=options.quick)
    times = clock(setting)

    def write() -> None:
        draw(folder / f"{NAME}.png", runs, setting)
        report.tables = [*tables(runs, setting), times, *real_table(runs, real)]
        report.write({"runs": f"{NAME}.jsonl"})

    if not options.no_runs:
        for seed in range(options.seeds):
            for name in names:
                runs.find(name, task, 1.0, seed)
            write()
        for name in names if options.real else ():
            if not ROWS[name].has_straggler:
                for seed in range(options.seeds):
                    runs.find_real(name, real, options.data, seed)
        for name in names if not options.at_the_rule else ():
            tune(lambda times: loss_of(runs.find(name, task, times, seed=0)), 1.0)  # noqa: B023
            for seed in range(options.seeds):
                runs.find(name, task, runs.best(name, setting), seed)
            write()
    write()


if __name__ == "__main__":
    run_script(main)
